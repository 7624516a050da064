// csrc/cpu/isa/instructions_amx.inl in software, for processors without AMX: the same functions with the same results,
// after the pseudocode of Intel's Software Developer's Manual, volume 2 (TDPBF16PS, TILELOADD, ...). Aborts on what
// would be an error there: tiles used while they are not configured, or configured twice.
#pragma once

#include "cpu/isa/instructions_avx512_bf16.inl"

namespace attn::ATTN_ISA {

constexpr int64_t kLongInTwoParts = 8;  // little, so that the tests' problems are on both sides of it

struct EmulatedTiles {
  bool configured;
  alignas(64) float row[8][16][16];
};
inline thread_local EmulatedTiles tiles;

inline void check_tiles(bool right) {
  if (!right) __builtin_trap();
}

// How often each instruction ran, on all threads: tests/test_amx.py reads it.
enum Counted { kConfigured, kZeroed, kLoaded, kStored, kMultiplied, kCounted };
extern "C" {
__attribute__((visibility("default"))) inline uint64_t attn_tile_counts[kCounted] = {};
}
inline void count_tiles(Counted what) { __atomic_fetch_add(&attn_tile_counts[what], 1, __ATOMIC_RELAXED); }

inline void configure_tiles() {
  check_tiles(!tiles.configured);
  count_tiles(kConfigured);
  __builtin_memset(&tiles, 0, sizeof tiles);
  tiles.configured = true;
}
inline void release_tiles() {
  check_tiles(tiles.configured);
  tiles.configured = false;
}

template <int kTile>
void tile_zero() {
  count_tiles(kZeroed);
  check_tiles(tiles.configured);
  __builtin_memset(tiles.row[kTile], 0, sizeof tiles.row[kTile]);
}
template <int kTile>
void tile_load(const float* rows, int64_t ld) {
  count_tiles(kLoaded);
  check_tiles(tiles.configured);
  for (int i = 0; i < 16; ++i) __builtin_memcpy(tiles.row[kTile][i], rows + i * ld, 64);
}
template <int kTile>
void tile_store(float* rows, int64_t ld) {
  count_tiles(kStored);
  check_tiles(tiles.configured);
  for (int i = 0; i < 16; ++i) __builtin_memcpy(rows + i * ld, tiles.row[kTile][i], 64);
}

template <int kC, int kA, int kB>
void tile_multiply_add() {
  count_tiles(kMultiplied);
  check_tiles(tiles.configured);
  for (int m = 0; m < 16; ++m) {
    Vec<float> sum[2] = {};
    for (int k = 0; k < 16; ++k) {
      const Vec<float> a = splat(tiles.row[kA][m][k]), b = load<float>(tiles.row[kB][k]);
      for (int second = 0; second < 2; ++second)
        sum[second] = fused_multiply_add(number_of_pair(a, second), number_of_pair(b, second), sum[second]);
    }
    const Vec<float> total = without_subnormals(sum[0] + sum[1]);
    store<float>(tiles.row[kC][m], without_subnormals(without_subnormals(load<float>(tiles.row[kC][m])) + total));
  }
}

}  // namespace attn::ATTN_ISA
