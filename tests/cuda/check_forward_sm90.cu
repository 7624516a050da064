// The forward on Hopper's tensor cores against a plain loop, without torch. Blocks have several tasks each, as on a GPU
// with more of them than multiprocessors.
#include <bit>
#include <cmath>
#include <type_traits>
#include <vector>

#include "check.h"
#include "cuda/wgmma/forward.cuh"

namespace attn::cuda {
namespace {

// Whole numbers / 8 below 2, which both dtypes hold.
template <class S>
S draw(std::mt19937& random) {
  const float x = static_cast<float>(static_cast<int>(random() % 31) - 15) / 8;
  const auto bits = std::bit_cast<uint32_t>(x);
  if constexpr (std::is_same_v<S, BFloat16>) return {static_cast<uint16_t>(bits >> 16)};
  const uint32_t half = (bits >> 31 << 15) | (((bits >> 23 & 255) - 112) << 10) | (bits >> 13 & 1023);
  return {static_cast<uint16_t>(x == 0 ? 0 : half)};
}

struct Case {
  const char* name;
  int heads = 2, group = 1, queries = 150, keys = 150, dim = 128, value_dim = 128;
  int left = -1, right = -1;  // of the window; -1: unlimited
  int in_use = -1;            // keys; behind them lie NaNs. -1: all
  int page = 0;               // keys of a page; 0: no pages
  int splits = 1;
  bool has_sinks = false;
  int lists = 0;  // at once; 0: blocks know their tasks from the start
};

// Query i sees the keys in use from i - left to i + right.
template <class S, int kDim>
void check(const Case& c) {
  constexpr bool kIsHalf = std::is_same_v<S, Half>;
  const int key_heads = c.heads / c.group, in_use = c.in_use < 0 ? c.keys : c.in_use;
  std::mt19937 random(5);
  Array<S> query(c.heads * c.queries * c.dim), key(key_heads * c.keys * c.dim), value(key_heads * c.keys * c.value_dim),
      output(c.heads * c.queries * c.value_dim);
  Array<float> logsumexp(2 * c.heads * c.queries), row_logsumexp(c.heads * c.queries), sinks(c.heads),
      partial(c.splits * output.size()), partial_logsumexp(c.splits * logsumexp.size());
  for (auto* x : {&query, &key, &value})
    for (int64_t i = 0; i < x->size(); ++i) (*x)[i] = draw<S>(random);
  for (int h = 0; h < c.heads; ++h) sinks[h] = static_cast<float>(h) - 1;
  constexpr S kNan{0x7fff};
  for (int h = 0; h < key_heads; ++h)
    for (int j = in_use; j < c.keys; ++j) {
      for (int d = 0; d < c.dim; ++d) key[(h * c.keys + j) * c.dim + d] = kNan;
      for (int d = 0; d < c.value_dim; ++d) value[(h * c.keys + j) * c.value_dim + d] = kNan;
    }

  ForwardParams p;
  p.heads = c.heads;
  p.group = c.group;
  p.key_heads = p.value_heads = key_heads;
  p.queries = c.queries;
  p.keys = c.keys;
  p.head_dim = c.dim;
  p.value_dim = c.value_dim;
  p.scale = 0.125;
  if (c.left >= 0) p.visibility.left = c.left;
  if (c.right >= 0) p.visibility.right = c.right;
  Array<int64_t> lengths(1);
  lengths[0] = in_use;
  if (c.in_use >= 0) p.visibility.key_lengths = lengths.data();
  const auto operand = [](auto& array, int rows, int cols) {
    Operand x;
    x.data = array.data();
    x.dtype = kIsHalf ? DType::f16 : DType::bf16;
    x.head = int64_t{rows} * cols;
    x.row = cols;
    x.col = 1;
    return x;
  };
  p.query = operand(query, c.queries, c.dim);
  p.key = operand(key, c.keys, c.dim);
  p.value = operand(value, c.keys, c.value_dim);
  p.output = operand(output, c.queries, c.value_dim);
  p.logsumexp = logsumexp.data();
  p.row_logsumexp = row_logsumexp.data();
  if (c.has_sinks) p.sinks = sinks.data();
  // A pool [pages, heads, page, dim]: no sequence has the first page, and the others are in disorder.
  const int pages = c.page ? (c.keys + c.page - 1) / c.page : 1, per_page = c.page ? c.page : 1;
  Array<S> key_pool((pages + 1) * key_heads * per_page * c.dim),
      value_pool((pages + 1) * key_heads * per_page * c.value_dim);
  Array<int32_t> table(pages);
  if (c.page) {
    for (auto* x : {&key_pool, &value_pool})
      for (int64_t i = 0; i < x->size(); ++i) (*x)[i] = kNan;
    for (int i = 0; i < pages; ++i) table[i] = 1 + i * 7 % pages;
    const auto put = [&](Array<S>& pool, Array<S>& from, int dim) {
      for (int64_t i = 0; i < from.size(); ++i) {
        const int64_t head = i / dim / c.keys, row = i / dim % c.keys;
        pool[((table[row / c.page] * key_heads + head) * c.page + row % c.page) * dim + i % dim] = from[i];
      }
    };
    put(key_pool, key, c.dim);
    put(value_pool, value, c.value_dim);
    p.paging = {.table = table.data(), .per_entry = pages, .per_page = 1, .page_size = c.page, .pages = pages + 1};
    p.key = operand(key_pool, c.page, c.dim);
    p.value = operand(value_pool, c.page, c.value_dim);
    p.key.page = int64_t{key_heads} * c.page * c.dim;
    p.value.page = int64_t{key_heads} * c.page * c.value_dim;
  }
  p.rows_per_task = forward_wgmma_rows(kDim);
  p.splits = c.splits;
  p.keys_per_split = round_up(divide_up(c.keys, c.splits), forward_wgmma_keys(kDim));
  p.partial_output = partial.data();
  p.partial_logsumexp = partial_logsumexp.data();
  const Gpu gpu{3, 90, nullptr};
  Array<int> next_task(1);
  next_task[0] = 77;  // what another call has left there
  if (c.lists) {
    p.next_task = next_task.data();
    p.order = order_of(p);
    p.order.at_once = c.lists;
  }
  run([&] {
    return c.page ? launch_forward_wgmma<S, kDim, true>(p, gpu) : launch_forward_wgmma<S, kDim, false>(p, gpu);
  });

  const auto number = [](S x) { return static_cast<double>(host_float(x.bits, kIsHalf)); };
  for (int h = 0; h < c.heads; ++h)
    for (int i = 0; i < c.queries; ++i) {
      double sum = c.has_sinks ? std::exp(static_cast<double>(sinks[h])) : 0;
      std::vector<double> expected(c.value_dim);
      for (int j = 0; j < in_use; ++j) {
        if ((c.right >= 0 && j > i + c.right) || (c.left >= 0 && j < i - c.left)) continue;
        double score = 0;
        for (int d = 0; d < c.dim; ++d)
          score += number(query[(h * c.queries + i) * c.dim + d]) * number(key[(h / c.group * c.keys + j) * c.dim + d]);
        const double weight = std::exp(score * p.scale);
        sum += weight;
        for (int d = 0; d < c.value_dim; ++d)
          expected[d] += weight * number(value[(h / c.group * c.keys + j) * c.value_dim + d]);
      }
      const int row = h * c.queries + i;
      if (c.splits == 1)
        require(sum == 0 ? row_logsumexp[row] == -INFINITY : std::fabs(row_logsumexp[row] - std::log(sum)) <= 2e-5,
                c.name);
      for (int d = 0; d < c.value_dim; ++d) {
        double found = number(output[row * c.value_dim + d]);
        if (c.splits > 1) {  // what merge_splits() adds
          found = 0;
          double weights = 0;
          for (int s = 0; s < c.splits; ++s) {
            const int64_t at_split = int64_t{s} * c.heads * c.queries + row;
            const double weight = std::exp(static_cast<double>(partial_logsumexp[2 * at_split]));
            weights += weight;
            found += weight * partial[at_split * c.value_dim + d];
          }
          found = weights == 0 ? 0 : found / weights;
        }
        // Weights are rounded to S, and so is the output. All values are below 2.
        require(std::fabs(found - (sum == 0 ? 0 : expected[d] / sum)) <= (kIsHalf ? 0x1p-9 : 0x1p-6), c.name);
      }
    }
}

// Every task has one turn, and those with the most keys come first: all lists of a section before the next section.
void check_order() {
  for (int64_t tasks = 1; tasks < 12; ++tasks)
    for (int64_t number = 1; number < 12; ++number)
      for (int64_t lists = 1; lists < 14; ++lists) {
        const TaskOrder order{tasks, number, lists};
        std::vector<bool> seen(tasks * number);
        for (int64_t turn = 0, before = 0; turn < tasks * number; ++turn) {
          const int64_t task = order[turn], place = task / tasks / lists * tasks + task % tasks;
          require(task >= 0 && task < tasks * number && !seen[task] && before <= place, "the order of tasks");
          seen[task] = true;
          before = place;
        }
      }
}

}  // namespace
}  // namespace attn::cuda

int main() {
  using namespace attn::cuda;
  need_hopper();
  check_order();
  check<BFloat16, 128>({.name = "full", .keys = 391});
  check<Half, 128>({.name = "causal", .queries = 300, .keys = 300, .right = 0});
  check<BFloat16, 128>({.name = "tasks in order", .heads = 3, .queries = 300, .keys = 300, .right = 0, .lists = 2});
  check<Half, 64>({.name = "64, tasks in order",
                   .heads = 4,
                   .group = 2,
                   .queries = 391,
                   .keys = 391,
                   .dim = 64,
                   .value_dim = 64,
                   .right = 0,
                   .lists = 1});
  check<BFloat16, 64>({.name = "64, causal", .queries = 391, .keys = 391, .dim = 64, .value_dim = 64, .right = 0});
  check<Half, 64>({.name = "64, grouped", .heads = 4, .group = 4, .keys = 270, .dim = 64, .value_dim = 64});
  check<BFloat16, 256>({.name = "256, causal", .queries = 170, .keys = 170, .dim = 256, .value_dim = 256, .right = 0});
  check<Half, 256>({.name = "256, padded", .keys = 200, .dim = 136, .value_dim = 200});
  check<BFloat16, 128>({.name = "padded, values of another size", .keys = 200, .dim = 72, .value_dim = 104});
  check<BFloat16, 128>({.name = "window", .heads = 4, .group = 2, .queries = 300, .keys = 300, .left = 40, .right = 3});
  check<BFloat16, 64>({.name = "keys in use", .keys = 300, .dim = 64, .value_dim = 64, .right = 0, .in_use = 141});
  check<BFloat16, 128>({.name = "no keys in use", .keys = 300, .in_use = 0});
  check<Half, 128>({.name = "sinks", .queries = 70, .keys = 130, .right = 0, .has_sinks = true});
  check<BFloat16, 128>({.name = "splits", .queries = 130, .keys = 400, .splits = 2});
  check<BFloat16, 64>({.name = "pages, 64", .keys = 300, .dim = 64, .value_dim = 64, .in_use = 250, .page = 16});
  check<BFloat16, 128>({.name = "pages, 128", .keys = 300, .in_use = 290, .page = 16});
  check<Half, 256>({.name = "pages, 256", .keys = 200, .dim = 256, .value_dim = 256, .in_use = 190, .page = 8});
  std::printf("right\n");
}
