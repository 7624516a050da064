// Finds accesses of memory that nothing orders, in whatever order the threads have run. The stand-in runs one at a
// time, and its shuffles wait like barriers; a GPU promises neither.
//
// g++ -fsanitize=thread calls a function before each load and store. Those at the end of fibers.cpp stand in for the
// sanitizer's. Two accesses of a byte by different threads, one of them a store, need an order: by barriers of the
// block, of some warps or of a warp, by an mbarrier, or by a release and an acquire. A copy of cp.async stores when it
// starts and when it is waited for. Products of a warp load as its lane 0, which arrives for it at barriers.
//
// As FastTrack (Flanagan and Freund, 2009): a thread counts its own steps and knows, of each other thread, up to which
// step it comes after that thread.
#pragma once

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <unordered_map>
#include <vector>

namespace stand_in {

[[noreturn]] void fail(const char* what);

// What a thread, or a barrier, comes after: a step of each thread.
using Clock = std::vector<uint32_t>;
inline void come_after(Clock& clock, const Clock& other) {
  if (clock.size() < other.size()) clock.resize(other.size());
  for (size_t i = 0; i < other.size(); ++i) clock[i] = std::max(clock[i], other[i]);
}

class Races {
 public:
  enum Kind { kLoad, kStore };
  static inline const bool wanted = std::getenv("ATTN_STAND_IN_RACES") != nullptr;
  static inline bool can_be_seen = false;

  void begin(size_t threads, const char* memory) {
    if (!wanted) return;
    if (!can_be_seen) fail("ATTN_STAND_IN_RACES is set, but this is not compiled with -fsanitize=thread");
    memory_ = memory;
    pages_.clear();
    page_ = nullptr;
    clocks_.assign(threads, Clock(threads));
    for (size_t i = 0; i < threads; ++i) clocks_[i][i] = 1;
  }
  // All that these threads have done so far comes before all that they do from here on.
  template <class Threads>
  void meet(const Threads& threads) {
    if (!wanted) return;
    Clock all;
    for (int t : threads) come_after(all, clocks_[t]);
    for (int t : threads) clocks_[t] = all, ++clocks_[t][t];
  }
  // What a thread has done so far comes before what others do after acquire() of the same clock.
  void release(int thread, Clock& to) {
    if (!wanted) return;
    come_after(to, clocks_[thread]);
    ++clocks_[thread][thread];
  }
  void acquire(int thread, const Clock& from) {
    if (wanted) come_after(clocks_[thread], from);
  }

  // `where`: the address of the code.
  void access(Kind kind, uintptr_t first, size_t bytes, int thread, const void* where) {
    if (!wanted) return;
    const Clock& mine = clocks_[thread];
    for (uintptr_t i = first & ~(kCellBytes - 1); i < first + bytes; i += kCellBytes) {
      Cell& cell = cell_of(i);
      const auto check = [&](Kind other, const Access& before) {
        if (before.thread != thread && before.step > mine[before.thread]) report(kind, where, other, before, i);
      };
      if (cell.store.step > 0) check(kStore, cell.store);
      const Access now{thread, mine[thread], where};
      if (kind == kLoad) {
        std::erase_if(cell.loads, [&](const Access& x) { return x.step <= mine[x.thread]; });
        cell.loads.push_back(now);
      } else {
        for (const Access& load : cell.loads) check(kLoad, load);
        cell.loads.clear();
        cell.store = now;
      }
    }
  }

 private:
  struct Access {
    int thread = 0;
    uint32_t step = 0;
    const void* where = nullptr;
  };
  struct Cell {
    Access store;
    std::vector<Access> loads;  // since the store, that no later load comes after
  };

  // Bytes of one number are stored together, but a number may have one byte: see LookAtMask.
  static constexpr uintptr_t kCellBytes = 1, kPageCells = 4096;
  using Page = std::array<Cell, kPageCells>;
  Cell& cell_of(uintptr_t byte) {
    const uintptr_t cell = byte / kCellBytes, number = cell / kPageCells;
    if (!page_ || number != page_number_) {
      std::unique_ptr<Page>& page = pages_[number];
      if (!page) page = std::make_unique<Page>();
      page_ = page.get();
      page_number_ = number;
    }
    return (*page_)[cell % kPageCells];
  }

  [[noreturn]] void report(Kind kind, const void* where, Kind other, const Access& before, uintptr_t byte) const {
    std::fprintf(stderr, "byte %zu of %s was %s, by %d, in\n", byte, memory_, name(other), before.thread);
    print(before.where);
    std::fprintf(stderr, "and, with no barrier between, is %s in\n", name(kind));
    print(where);
    fail("a race");
  }
  static const char* name(Kind kind) { return kind == kLoad ? "loaded" : "stored"; }
  // File and line, if binutils are there.
  static void print(const void* where) {
    Dl_info file{};
    dladdr(where, &file);
    const size_t offset = reinterpret_cast<size_t>(where) - reinterpret_cast<size_t>(file.dli_fbase) - 1;
    char command[1024];
    std::snprintf(command, sizeof command, "addr2line -Cipfe '%s' %#zx >&2", file.dli_fname, offset);
    if (std::system(command) != 0) std::fprintf(stderr, "%s + %#zx\n", file.dli_fname, offset);
  }

  const char* memory_ = "";
  std::vector<Clock> clocks_;
  std::unordered_map<uintptr_t, std::unique_ptr<Page>> pages_;
  Page* page_ = nullptr;  // the one used last
  uintptr_t page_number_ = 0;
};

}  // namespace stand_in
