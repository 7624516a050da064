// The tile instructions of AMX, as inline assembly. GCC's intrinsics do not tell the compiler that loading a tile reads
// memory, so the compiler might move earlier stores behind the load. A file of the same name in tests/stand_in/cpu
// emulates these instructions in software.
#pragma once

#include "cpu/simd/simd.inl"

namespace attn::ATTN_ISA {

// The least number of queries, and of keys, with which the tiles multiply numbers that must be split into two bfloat16.
// In shorter sequences, splitting takes longer than the tiles save. (Relative to FMAs, the speed is 0.8 with 128 keys,
// 1.05 with 197 keys and 1.45 with 512 keys.)
constexpr int64_t kLongInTwoParts = 192;

// Configures eight tiles of 16 rows of 16 slots. A thread releases its tiles after its last task, because the operating
// system saves and restores tiles in use whenever the thread waits.
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
// The rows are `ld` floats apart in memory.
template <int kTile>
ATTN_INLINE void tile_load(const float* rows, int64_t ld) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(rows), "r"(ld * 4), "i"(kTile) : "memory");
}
template <int kTile>
ATTN_INLINE void tile_store(float* rows, int64_t ld) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(rows), "r"(ld * 4), "i"(kTile) : "memory");
}
// C += A B. A slot holds two bfloat16.
template <int kC, int kA, int kB>
ATTN_INLINE void tile_multiply_add() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kC), "i"(kA), "i"(kB));
}

}  // namespace attn::ATTN_ISA
