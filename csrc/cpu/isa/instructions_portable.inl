// The operations for any instruction set with vectors of 16 bytes. On x86-64 this is SSE2.
#pragma once

#ifndef ATTN_ISA  // included by itself
#define ATTN_ISA baseline
#endif
#include "cpu/isa.h"

namespace attn::ATTN_ISA {

constexpr int kVectorBytes = 16;
constexpr int kRegisters = 16;
constexpr bool kHasExp2 = false;

}  // namespace attn::ATTN_ISA

#include "cpu/simd/vectors.inl"

namespace attn::ATTN_ISA {

// Convert IEEE half to float and back by integer arithmetic. Both functions move exponent and mantissa to their places
// in the other format, and change the exponent's bias, which is 15 in a half and 127 in a float.
ATTN_INLINE Vec<float> half_to_float(Shorts<float> h) {
  using U = Vec<uint32_t>;
  const U wide = __builtin_convertvector(h, U);
  const U magnitude = (wide & 0x7fffu) << 13;
  U bits = magnitude + (112u << 23);
  bits = magnitude >= (0x7c00u << 13) ? (magnitude | 0x7f800000u) : bits;  // infinity, NaN
  // A subnormal half is an integer times 2^-24. Computing this product needs no subnormal float, which
  // torch.set_flush_denormal would turn into 0.
  const Vec<float> subnormal = __builtin_convertvector(bit_cast<Vec<int32_t>>(wide & 0x3ffu), Vec<float>) * 0x1p-24f;
  bits = magnitude < (0x0400u << 13) ? bit_cast<U>(subnormal) : bits;
  return bit_cast<Vec<float>>(bits | ((wide & 0x8000u) << 16));
}

ATTN_INLINE Shorts<float> float_to_half(Vec<float> f) {
  using U = Vec<uint32_t>;
  const U all = bit_cast<U>(f);
  const U magnitude = all & 0x7fffffffu;
  // normal numbers: change the exponent's bias, and round to nearest even where 13 bits are dropped
  const U normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  // subnormal numbers: adding 0.5 aligns the mantissa so that the addition itself rounds
  const U subnormal = bit_cast<U>(bit_cast<Vec<float>>(magnitude) + 0.5f) - 0x3f000000u;
  U bits = magnitude < (113u << 23) ? subnormal : normal;
  bits = magnitude >= 0x477ff000u ? (magnitude > 0x7f800000u ? U{} + 0x7e00u : U{} + 0x7c00u) : bits;
  return __builtin_convertvector(bits | ((all >> 16) & 0x8000u), Shorts<float>);
}

// Widens each 16-bit number to 32 bits, with zeros in the high half.
ATTN_INLINE Vec<uint32_t> widened(Shorts<float> s) { return __builtin_convertvector(s, Vec<uint32_t>); }
ATTN_INLINE Vec<int32_t> widened(SignedBytes<float> b) { return __builtin_convertvector(b, Vec<int32_t>); }
ATTN_INLINE Shorts<float> widened(Bytes<float> b) { return __builtin_convertvector(b, Shorts<float>); }

// Returns a word whose bit i says whether byte i of the 64 bytes is not 0.
ATTN_INLINE uint64_t nonzero_bytes(const uint8_t* bytes) {
  uint64_t bits = 0;
#if defined(__SSE2__)
  for (int i = 0; i < 64; i += 16) {
    const __m128i v = _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes + i));
    const auto zeros = static_cast<uint32_t>(_mm_movemask_epi8(_mm_cmpeq_epi8(v, _mm_setzero_si128())));
    bits |= static_cast<uint64_t>(~zeros & 0xffffu) << i;
  }
#else
  for (int i = 0; i < 64; ++i) bits |= static_cast<uint64_t>(bytes[i] != 0) << i;
#endif
  return bits;
}

// Multiplies the low halves of the 64-bit lanes: 32 x 32 -> 64 bits.
ATTN_INLINE Vec<uint64_t> multiply_low_halves(Vec<uint64_t> a, Vec<uint64_t> b) {
#if defined(__SSE2__)
  return bit_cast<Vec<uint64_t>>(_mm_mul_epu32(bit_cast<__m128i>(a), bit_cast<__m128i>(b)));
#else
  return (a & 0xffffffffu) * (b & 0xffffffffu);
#endif
}

}  // namespace attn::ATTN_ISA
