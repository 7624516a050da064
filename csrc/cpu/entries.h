// Cuts a call into entries. Each entry is planned by itself and run by itself. A call without key_lengths and
// query_lengths is a single entry. A packed sequence is an entry like any other. Its results have the same bits as in a
// call with this sequence alone, because no kernel knows of other entries. About a thousand entries are planned and run
// at a time, because each entry takes 2 KB.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <span>
#include <utility>
#include <vector>

#include <c10/util/SmallVector.h>

#include "core/score.h"
#include "cpu/capability.h"
#include "cpu/parallel.h"

namespace attn {

// Turns p, a copy of a call, into the call's entry n: a batch of one entry.
template <class Params>
void become_entry(Params& p, const Params& call, int64_t n) {
  p.batch = 1;
  p.batch_dims = 0;
  p.sequences = 0;
  p.first_entry = call.first_entry + n;
  const int64_t number_size = call.query.dtype == DType::f64 ? 8 : 4;
  const Sequence sequence = sequence_of(call, n);
  p.queries = sequence.queries;
  p.keys = sequence.keys;
  p.visibility.key_lengths = p.visibility.query_lengths = nullptr;
  if (p.paging.table)
    p.paging.table = static_cast<const char*>(p.paging.table) + n * p.paging.per_entry * (p.paging.is_wide ? 8 : 4);
  if (p.visibility.offsets) p.visibility.offsets += n;
  const auto advance = [&]<class T>(T*& data, int64_t numbers) {
    using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
    if (data) data = static_cast<Byte*>(data) + numbers * number_size;
  };
  each_operand(p, [&](Operand& x) {
    if (x.data) x.data = static_cast<char*>(x.data) + batch_offset(call, x, n) * size_of(x.dtype);
  });
  p.query_starts = p.key_starts = nullptr;
  const int64_t first_row = row_number(call, n, 0, 0);
  each_of_rows(
      p, [&]<class T>(T*& data, int64_t count) { advance(data, count * first_row); },
      [&](const void*& of_heads) { advance(of_heads, n * call.heads); });
}

// Calls f(range of entries) for each group of entries that is planned together.
template <class Params>
void each_group_of_entries(const Params& call, const auto& f) {
  constexpr int64_t kAtOnce = 1024;
  const Visibility& v = call.visibility;
  const int64_t step = v.key_lengths || v.query_lengths ? kAtOnce : std::max<int64_t>(call.batch, 1);
  for (int64_t n = 0; n < call.batch; n += step) f(Range{n, std::min(n + step, call.batch)});
}

template <auto kKernel, class Params>
class Entries {
 public:
  using Kernels = std::remove_cvref_t<decltype(kernels_for<kKernel>(std::declval<Params&>()))>;
  struct Entry {
    Params* params;
    const Kernels* kernels;
  };

  Entries(Params& call, Range entries) {
    const Visibility& v = call.visibility;
    if (v.key_lengths || v.query_lengths) {
      copies_.reserve(entries.size());
      for (int64_t n = entries.first; n < entries.last; ++n) become_entry(copies_.emplace_back(call), call, n);
    }
    for (Params& p : copies_.empty() ? std::span(&call, 1) : std::span(copies_)) {
      entries_.push_back({&p, &kernels_for<kKernel>(p)});
    }
  }

  auto begin() const { return entries_.begin(); }
  auto end() const { return entries_.end(); }

  // Returns the size of a workspace that suffices for any task of any entry. The caller must plan all entries first.
  int64_t workspace() const {
    int64_t most = 0;
    for (const auto& [p, k] : entries_) most = std::max(most, k->workspace(*p));
    return most;
  }

  // Runs f(params, kernels, task, workspace) for every task of every entry. An entry has tasks(params) tasks, which
  // together take flops(params) operations.
  void run(const auto& tasks, const auto& flops, int64_t workspace, const auto& f, Take take = Take::neighbours) const {
    if (entries_.size() == 1) {
      const auto [p, k] = entries_[0];
      return run_tasks(
          tasks(*p), flops(*p), workspace, k->on_thread, [&](int64_t task, char* own) { f(*p, *k, task, own); }, take);
    }
    // A thread takes many tasks of a small entry at once, because taking a task takes time, too. The largest tasks come
    // first, so that threads need not wait for a large task at the end.
    constexpr double kAtOnce = 2e6;
    struct Item {
      const Entry* entry;
      int64_t first, last;
      double flops;  // of each task
    };
    std::vector<Item> items;
    double all_flops = 0;
    OnThread on_thread;
    for (const Entry& entry : entries_) {
      const int64_t count = tasks(*entry.params);
      if (count == 0) continue;
      const double own = flops(*entry.params), each = own / static_cast<double>(count);
      const auto step = static_cast<int64_t>(std::clamp(kAtOnce / each, 1.0, static_cast<double>(count)));
      for (int64_t first = 0; first < count; first += step)
        items.push_back({&entry, first, std::min(first + step, count), each});
      all_flops += own;
      if (entry.kernels->on_thread.begin) on_thread = entry.kernels->on_thread;
    }
    std::stable_sort(items.begin(), items.end(), [](const Item& a, const Item& b) { return a.flops > b.flops; });
    // A thread takes a run of neighbouring items at a time. A run is about a quarter of the thread's share of the
    // remaining work, or one item with Take::one. If threads took alternate items, a thread would wait for memory that
    // the cache of another thread holds.
    const double parts = take == Take::one ? HUGE_VAL : 4.0 * at::get_num_threads();
    std::vector<size_t> ends;
    double left = all_flops, taken = 0;
    for (size_t i = 0; i < items.size(); ++i) {
      taken += items[i].flops * static_cast<double>(items[i].last - items[i].first);
      if (taken < left / parts && i + 1 < items.size()) continue;
      ends.push_back(i + 1);
      left -= std::exchange(taken, 0);
    }
    run_tasks(
        static_cast<int64_t>(ends.size()), all_flops, workspace, on_thread,
        [&](int64_t n, char* own) {
          for (size_t i = n > 0 ? ends[n - 1] : 0; i < ends[n]; ++i) {
            const Item& item = items[i];
            if (i + 1 < ends[n]) prefetch(*items[i + 1].entry->params);
            for (int64_t task = item.first; task < item.last; ++task)
              f(*item.entry->params, *item.entry->kernels, task, own);
          }
        },
        Take::one);
  }

 private:
  // Prefetches the parameters of an entry. If the entry is a short sequence, computing it takes little longer than
  // reading its parameters from memory.
  static void prefetch(const Params& p) {
    for (size_t at = 0; at < sizeof(Params); at += 64) __builtin_prefetch(reinterpret_cast<const char*>(&p) + at);
  }

  std::vector<Params> copies_;
  c10::SmallVector<Entry, 1> entries_;
};

}  // namespace attn
