// AVX-512 (F, BW, DQ, VL): what vector types do not say.
#pragma once

#ifndef ATTN_ISA  // included by itself
#define ATTN_ISA avx512
#endif
#include "cpu/isa.h"

#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // false ones in the intrinsics of GCC 12 (bug 105593)
#endif

namespace attn::ATTN_ISA {

constexpr int kVectorBytes = 64;
constexpr int kRegisters = 32;
constexpr bool kHasExp2 = true;

}  // namespace attn::ATTN_ISA

#include "cpu/simd/vectors.inl"

namespace attn::ATTN_ISA {

// IEEE half <-> float, to nearest even.
ATTN_INLINE Vec<float> half_to_float(Shorts<float> h) {
  return bit_cast<Vec<float>>(_mm512_cvtph_ps(bit_cast<__m256i>(h)));
}

ATTN_INLINE Shorts<float> float_to_half(Vec<float> f) {
  return bit_cast<Shorts<float>>(_mm512_cvtps_ph(bit_cast<__m512>(f), _MM_FROUND_TO_NEAREST_INT));
}

// With zeros in the high halves. (GCC 12 makes three instructions of __builtin_convertvector where there is one.)
ATTN_INLINE Vec<uint32_t> widened(Shorts<float> s) {
  return bit_cast<Vec<uint32_t>>(_mm512_cvtepu16_epi32(bit_cast<__m256i>(s)));
}

// Bit i: whether byte i of 64 is not 0.
ATTN_INLINE uint64_t nonzero_bytes(const uint8_t* bytes) {
  const __m512i v = _mm512_loadu_si512(bytes);
  return _mm512_test_epi8_mask(v, v);
}

// 32 x 32 -> 64 bit products of the low halves of 64-bit lanes.
ATTN_INLINE Vec<uint64_t> multiply_low_halves(Vec<uint64_t> a, Vec<uint64_t> b) {
  return bit_cast<Vec<uint64_t>>(_mm512_mul_epu32(bit_cast<__m512i>(a), bit_cast<__m512i>(b)));
}

// 2^x in place of every x <= 0, by a polynomial in x - floor(x) whose relative error is at most 3e-6 (degree 4), 1e-7
// (5) or 2e-8 (6). 2^0 is 1 exactly. Coefficients: minimax for the relative error on [0, 1), the lowest held at 1.
template <int kDegree, int N>
ATTN_INLINE void exp2_of_degree(Vec<float> (&x)[N]) {
  static constexpr float kFour[] = {0.013426683843135834f, 0.052242472767829895f, 0.241280198097229f,
                                    0.6930448412895203f, 1};
  static constexpr float kFive[] = {0.0018671300495043397f, 0.009017030708491802f, 0.05579991266131401f,
                                    0.24016444385051727f,   0.6931512951850891f,   1};
  static constexpr float kSix[] = {0.00021612914861179888f,
                                   0.0012467846972867846f,
                                   0.009675451554358006f,
                                   0.055485282093286514f,
                                   0.2402293086051941f,
                                   0.6931470632553101f,
                                   1};
  const float* c = kDegree == 4 ? kFour : kDegree == 5 ? kFive : kSix;
  Vec<float> r[N], p[N];
#pragma GCC unroll 8
  for (int v = 0; v < N; ++v)
    r[v] = bit_cast<Vec<float>>(_mm512_reduce_ps(bit_cast<__m512>(x[v]), _MM_FROUND_TO_NEG_INF));
#pragma GCC unroll 8
  for (int v = 0; v < N; ++v) p[v] = splat(c[0]);
#pragma GCC unroll 8
  for (int i = 1; i <= kDegree; ++i)
#pragma GCC unroll 8
    for (int v = 0; v < N; ++v) p[v] = p[v] * r[v] + c[i];
#pragma GCC unroll 8
  for (int v = 0; v < N; ++v)
    x[v] = bit_cast<Vec<float>>(_mm512_scalef_ps(bit_cast<__m512>(p[v]), bit_cast<__m512>(x[v])));
}

}  // namespace attn::ATTN_ISA
