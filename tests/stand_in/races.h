// Finds accesses of shared memory that no barrier orders, in whatever order the threads have run. The stand-in runs one
// at a time, and its shuffles wait like barriers; a GPU promises neither.
//
// g++ -fsanitize=thread calls a function before each load and store. Those at the end of fibers.cpp stand in for the
// sanitizer's. Two accesses of a byte by different threads, one of them a store, need __syncthreads between them, or
// __syncwarp if both threads are of one warp. A copy of cp.async stores when it starts and when it is waited for.
#pragma once

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace stand_in {

[[noreturn]] void fail(const char* what);

class Races {
 public:
  enum Kind { kLoad, kStore };
  static inline const bool wanted = std::getenv("ATTN_STAND_IN_RACES") != nullptr;
  static inline bool can_be_seen = false;

  void begin_block(const void* shared, size_t bytes) {
    if (!wanted) return;
    if (!can_be_seen) fail("ATTN_STAND_IN_RACES is set, but this is not compiled with -fsanitize=thread");
    begin_ = reinterpret_cast<uintptr_t>(shared);
    size_ = bytes;
    bytes_.resize(bytes);
    units_.assign(bytes / kMostBytes, kMostBytes);
    block_barrier();
  }
  void block_barrier() { ++barriers_; }
  void warp_barrier(int warp) { ++warp_barriers_[warp]; }

  // Whether it is in shared memory, if races are looked for.
  static bool concerns(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) - begin_ < size_; }

  // `where`: the address of the code.
  void access(Kind kind, const void* pointer, size_t bytes, int thread, const void* where) {
    const int warp = thread / 32;
    if (warp >= kWarps) fail("races are looked for in blocks of up to four warps");
    const uintptr_t first = reinterpret_cast<uintptr_t>(pointer) - begin_;
    const uintptr_t aligned = std::min<uintptr_t>(kMostBytes, (first | bytes) & -(first | bytes));
    const uint32_t lane = 1u << thread % 32;
    for (uintptr_t i = first, unit; i < first + bytes; i += unit) {
      unit = unit_at(i, aligned);
      Byte& byte = bytes_[i];
      const bool can_race = kind == kStore || byte.stored_after == barriers_;
      for (int w = 0; can_race && w < kWarps; ++w) {
        const Accesses& before = byte.of_warp[w];
        if (before.barriers != barriers_ || (w == warp && before.warp_barriers != warp_barriers_[w])) continue;
        for (const Kind other : {kStore, kLoad}) {
          if (kind == kLoad && other == kLoad) continue;
          const uint32_t lanes = w == warp ? before.recent[other] & ~lane : before.all[other];
          if (lanes) report(kind, where, other, before.where[other], 32 * w + std::countr_zero(lanes), i);
        }
      }
      if (kind == kStore) byte.stored_after = barriers_;
      Accesses& mine = byte.of_warp[warp];
      if (mine.barriers != barriers_) mine = {.barriers = barriers_};
      if (mine.warp_barriers != warp_barriers_[warp]) mine.warp_barriers = warp_barriers_[warp], mine.recent = {};
      mine.all[kind] |= lane;
      mine.recent[kind] |= lane;
      mine.where[kind] = where;
    }
  }

 private:
  static constexpr int kWarps = 4;
  static constexpr uintptr_t kMostBytes = 16;  // of an access

  // Accesses to a byte by a warp, since the last barrier of the block.
  struct Accesses {
    unsigned barriers = 0, warp_barriers = 0;  // how many there had been, of the block and of the warp
    std::array<uint32_t, 2> all{}, recent{};   // the lanes; and those since the last barrier of the warp
    std::array<const void*, 2> where{};        // of the last one
  };
  struct Byte {
    unsigned stored_after = 0;  // this many barriers of the block
    std::array<Accesses, kWarps> of_warp;
  };

  // How many bytes, from i on, all accesses have in common: those before, and one that is aligned like that.
  uintptr_t unit_at(uintptr_t i, uintptr_t aligned) {
    uintptr_t& unit = units_[i / kMostBytes];
    if (aligned >= unit) return unit;
    const uintptr_t first = i / kMostBytes * kMostBytes;
    for (uintptr_t j = first; j < first + kMostBytes; j += aligned) bytes_[j] = bytes_[j / unit * unit];
    return unit = aligned;
  }

  [[noreturn]] static void report(Kind kind, const void* where, Kind other, const void* other_where, int thread,
                                  size_t byte) {
    std::fprintf(stderr, "byte %zu of shared memory was %s, by thread %d, in\n", byte, name(other), thread);
    print(other_where);
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

  static inline thread_local uintptr_t begin_ = 0, size_ = 0;
  unsigned barriers_ = 0, warp_barriers_[kWarps] = {};
  std::vector<Byte> bytes_;       // the first one of each unit counts
  std::vector<uintptr_t> units_;  // of every kMostBytes
};

}  // namespace stand_in
