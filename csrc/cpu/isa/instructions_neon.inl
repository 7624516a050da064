// NEON (every 64-bit ARM): operations that GNU vector types cannot express.
#pragma once

#ifndef ATTN_ISA  // included by itself
#define ATTN_ISA neon
#endif
#include "cpu/isa.h"

namespace attn::ATTN_ISA {

constexpr int kVectorBytes = 16;
constexpr int kRegisters = 32;
constexpr bool kHasExp2 = false;

}  // namespace attn::ATTN_ISA

#include "cpu/simd/vectors.inl"

namespace attn::ATTN_ISA {

// Convert IEEE half to float and back, rounding to nearest even.
ATTN_INLINE Vec<float> half_to_float(Shorts<float> h) {
  return bit_cast<Vec<float>>(vcvt_f32_f16(bit_cast<float16x4_t>(h)));
}

ATTN_INLINE Shorts<float> float_to_half(Vec<float> f) {
  return bit_cast<Shorts<float>>(vcvt_f16_f32(bit_cast<float32x4_t>(f)));
}

// Widens each 16-bit number to 32 bits, with zeros in the high half.
ATTN_INLINE Vec<uint32_t> widened(Shorts<float> s) { return __builtin_convertvector(s, Vec<uint32_t>); }
ATTN_INLINE Vec<int32_t> widened(SignedBytes<float> b) { return __builtin_convertvector(b, Vec<int32_t>); }
ATTN_INLINE Shorts<float> widened(Bytes<float> b) { return __builtin_convertvector(b, Shorts<float>); }

// Returns a word whose bit i says whether byte i of the 64 bytes is not 0.
ATTN_INLINE uint64_t nonzero_bytes(const uint8_t* bytes) {
  const VectorOf<uint8_t, 16>::type bit_of_byte = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
  uint64_t bits = 0;
  for (int i = 0; i < 64; i += 16) {
    const uint8x16_t v = vld1q_u8(bytes + i);
    const uint8x16_t of_these = vandq_u8(vtstq_u8(v, v), bit_cast<uint8x16_t>(bit_of_byte));
    const uint64_t low = vaddv_u8(vget_low_u8(of_these)), high = vaddv_u8(vget_high_u8(of_these));
    bits |= (low | high << 8) << i;
  }
  return bits;
}

// Multiplies the low halves of the 64-bit lanes: 32 x 32 -> 64 bits.
ATTN_INLINE Vec<uint64_t> multiply_low_halves(Vec<uint64_t> a, Vec<uint64_t> b) {
  return bit_cast<Vec<uint64_t>>(vmull_u32(vmovn_u64(bit_cast<uint64x2_t>(a)), vmovn_u64(bit_cast<uint64x2_t>(b))));
}

}  // namespace attn::ATTN_ISA
