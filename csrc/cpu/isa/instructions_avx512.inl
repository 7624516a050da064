// AVX-512 (F, BW, DQ, VL): operations that GNU vector types cannot express.
#pragma once

#ifndef ATTN_ISA  // included by itself
#define ATTN_ISA avx512
#endif
#include "cpu/isa.h"

#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // false ones in the intrinsics of GCC 12 (bug 105593)
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

namespace attn::ATTN_ISA {

constexpr int kVectorBytes = 64;
constexpr int kRegisters = 32;
constexpr bool kHasExp2 = true;

}  // namespace attn::ATTN_ISA

#include "cpu/simd/vectors.inl"

namespace attn::ATTN_ISA {

// Convert IEEE half to float and back, rounding to nearest even.
ATTN_INLINE Vec<float> half_to_float(Shorts<float> h) {
  return bit_cast<Vec<float>>(_mm512_cvtph_ps(bit_cast<__m256i>(h)));
}

ATTN_INLINE Shorts<float> float_to_half(Vec<float> f) {
  return bit_cast<Shorts<float>>(_mm512_cvtps_ph(bit_cast<__m512>(f), _MM_FROUND_TO_NEAREST_INT));
}

// Widens each 16-bit number to 32 bits, with zeros in the high half. (GCC 12 compiles __builtin_convertvector to three
// instructions where one suffices.)
ATTN_INLINE Vec<uint32_t> widened(Shorts<float> s) {
  return bit_cast<Vec<uint32_t>>(_mm512_cvtepu16_epi32(bit_cast<__m256i>(s)));
}
ATTN_INLINE Vec<int32_t> widened(SignedBytes<float> b) {
  return bit_cast<Vec<int32_t>>(_mm512_cvtepi8_epi32(bit_cast<__m128i>(b)));
}
ATTN_INLINE Shorts<float> widened(Bytes<float> b) {
  return bit_cast<Shorts<float>>(_mm256_cvtepu8_epi16(bit_cast<__m128i>(b)));
}

// Like any() of simd/vectors.inl, but a single instruction sets the flag that a branch tests.
template <class M>
  requires(sizeof(M) == kVectorBytes)
ATTN_INLINE bool any(M mask) {
  const __m512i m = bit_cast<__m512i>(mask);
  return _mm512_test_epi32_mask(m, m) != 0;
}

template <class M>
  requires(sizeof(M) == kVectorBytes)
ATTN_INLINE uint64_t bits_of(M mask) {
  if constexpr (sizeof mask[0] == 4)
    return static_cast<uint64_t>(_mm512_movepi32_mask(bit_cast<__m512i>(mask)));
  else
    return static_cast<uint64_t>(_mm512_movepi64_mask(bit_cast<__m512i>(mask)));
}

// Returns a word whose bit i says whether byte i of the 64 bytes is not 0.
ATTN_INLINE uint64_t nonzero_bytes(const uint8_t* bytes) {
  const __m512i v = _mm512_loadu_si512(bytes);
  return _mm512_test_epi8_mask(v, v);
}

// Multiplies the low halves of the 64-bit lanes: 32 x 32 -> 64 bits.
ATTN_INLINE Vec<uint64_t> multiply_low_halves(Vec<uint64_t> a, Vec<uint64_t> b) {
  return bit_cast<Vec<uint64_t>>(_mm512_mul_epu32(bit_cast<__m512i>(a), bit_cast<__m512i>(b)));
}

// Returns x - floor(x), or 0 for an infinity.
ATTN_INLINE Vec<float> fraction(Vec<float> x) {
  return bit_cast<Vec<float>>(_mm512_reduce_ps(bit_cast<__m512>(x), _MM_FROUND_TO_NEG_INF));
}

// Returns x minus the nearest integer, or 0 for an infinity.
ATTN_INLINE Vec<float> from_nearest(Vec<float> x) {
  return bit_cast<Vec<float>>(_mm512_reduce_ps(bit_cast<__m512>(x), _MM_FROUND_TO_NEAREST_INT));
}

// Returns p * 2^floor(x).
ATTN_INLINE Vec<float> scaled(Vec<float> p, Vec<float> x) {
  return bit_cast<Vec<float>>(_mm512_scalef_ps(bit_cast<__m512>(p), bit_cast<__m512>(x)));
}

}  // namespace attn::ATTN_ISA
