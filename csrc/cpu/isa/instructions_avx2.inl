// AVX2 with FMA and F16C: operations that GNU vector types cannot express.
#pragma once

#ifndef ATTN_ISA  // included by itself
#define ATTN_ISA avx2
#endif
#include "cpu/isa.h"

namespace attn::ATTN_ISA {

constexpr int kVectorBytes = 32;
constexpr int kRegisters = 16;
constexpr bool kHasExp2 = false;

}  // namespace attn::ATTN_ISA

#include "cpu/simd/vectors.inl"

namespace attn::ATTN_ISA {

// Convert IEEE half to float and back, rounding to nearest even.
ATTN_INLINE Vec<float> half_to_float(Shorts<float> h) {
  return bit_cast<Vec<float>>(_mm256_cvtph_ps(bit_cast<__m128i>(h)));
}

ATTN_INLINE Shorts<float> float_to_half(Vec<float> f) {
  return bit_cast<Shorts<float>>(_mm256_cvtps_ph(bit_cast<__m256>(f), _MM_FROUND_TO_NEAREST_INT));
}

// Widens each 16-bit number to 32 bits, with zeros in the high half. (GCC 12 compiles __builtin_convertvector to three
// instructions where one suffices.)
ATTN_INLINE Vec<uint32_t> widened(Shorts<float> s) {
  return bit_cast<Vec<uint32_t>>(_mm256_cvtepu16_epi32(bit_cast<__m128i>(s)));
}
ATTN_INLINE Vec<int32_t> widened(SignedBytes<float> b) {
  return bit_cast<Vec<int32_t>>(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(bit_cast<long long>(b))));
}
ATTN_INLINE Shorts<float> widened(Bytes<float> b) {
  return bit_cast<Shorts<float>>(_mm_cvtepu8_epi16(_mm_cvtsi64_si128(bit_cast<long long>(b))));
}

// Like any() of simd/vectors.inl, but a single instruction sets the flag that a branch tests.
template <class M>
  requires(sizeof(M) == kVectorBytes)
ATTN_INLINE bool any(M mask) {
  const __m256i m = bit_cast<__m256i>(mask);
  return !_mm256_testz_si256(m, m);
}

template <class M>
  requires(sizeof(M) == kVectorBytes)
ATTN_INLINE uint64_t bits_of(M mask) {
  if constexpr (sizeof mask[0] == 4)
    return static_cast<uint64_t>(_mm256_movemask_ps(bit_cast<__m256>(mask)));
  else
    return static_cast<uint64_t>(_mm256_movemask_pd(bit_cast<__m256d>(mask)));
}

// Returns a word whose bit i says whether byte i of the 64 bytes is not 0.
ATTN_INLINE uint64_t nonzero_bytes(const uint8_t* bytes) {
  uint64_t zeros = 0;
  for (int i = 0; i < 64; i += 32) {
    const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes + i));
    const int mask = _mm256_movemask_epi8(_mm256_cmpeq_epi8(v, _mm256_setzero_si256()));
    zeros |= static_cast<uint64_t>(static_cast<uint32_t>(mask)) << i;
  }
  return ~zeros;
}

// Multiplies the low halves of the 64-bit lanes: 32 x 32 -> 64 bits.
ATTN_INLINE Vec<uint64_t> multiply_low_halves(Vec<uint64_t> a, Vec<uint64_t> b) {
  return bit_cast<Vec<uint64_t>>(_mm256_mul_epu32(bit_cast<__m256i>(a), bit_cast<__m256i>(b)));
}

}  // namespace attn::ATTN_ISA
