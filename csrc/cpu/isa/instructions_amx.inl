// AMX: the tile instructions, as inline assembly, because GCC's intrinsics do not say that a load reads memory: the
// compiler may move earlier stores after it. tests/stand_in/cpu has a file of the same name, in software.
#pragma once

#include "cpu/simd/simd.inl"

namespace attn::ATTN_ISA {

// From this many queries and keys on, tiles multiply numbers split in two. In shorter sequences the splitting takes
// longer than the tiles save (128 keys: 0.8 of the speed of FMAs; 197: 1.05; 512: 1.45).
constexpr int64_t kLongInTwoParts = 192;

// Eight tiles of 16 rows of 16 slots. A thread releases them after its last task, because the system saves and restores
// used tiles whenever the thread waits.
inline void configure_tiles() {
  struct alignas(64) Configuration {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes_of_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  };
  static constexpr Configuration kConfiguration;
  asm volatile("ldtilecfg %0" : : "m"(kConfiguration));
}
inline void release_tiles() { asm volatile("tilerelease"); }

template <int kTile>
ATTN_INLINE void tile_zero() {
  asm volatile("tilezero %%tmm%c0" : : "i"(kTile));
}
// Rows `ld` floats apart.
template <int kTile>
ATTN_INLINE void tile_load(const float* rows, int64_t ld) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(rows), "r"(ld * 4), "i"(kTile) : "memory");
}
template <int kTile>
ATTN_INLINE void tile_store(float* rows, int64_t ld) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(rows), "r"(ld * 4), "i"(kTile) : "memory");
}
// C += A B; a slot is two bfloat16.
template <int kC, int kA, int kB>
ATTN_INLINE void tile_multiply_add() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kC), "i"(kA), "i"(kB));
}

}  // namespace attn::ATTN_ISA
