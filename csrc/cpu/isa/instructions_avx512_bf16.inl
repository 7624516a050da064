// AVX512_BF16: operations on bfloat16, two in a lane, that GNU vector types cannot express.
#pragma once

#ifndef ATTN_ISA  // included by itself
#define ATTN_ISA avx512_bf16
#define ATTN_INSTRUCTIONS "cpu/isa/instructions_avx512.inl"
#endif
#include "cpu/simd/simd.inl"

namespace attn::ATTN_ISA {

// sum + a b, of both bfloat16 of every lane.
ATTN_INLINE Vec<float> add_products_of_pairs(Vec<float> sum, Vec<float> a, Vec<float> b) {
  return bit_cast<Vec<float>>(_mm512_dpbf16_ps(bit_cast<__m512>(sum), bit_cast<__m512bh>(a), bit_cast<__m512bh>(b)));
}

// Rounds to bfloat16, to nearest even.
ATTN_INLINE Shorts<float> round_to_bfloat16(Vec<float> x) {
  return bit_cast<Shorts<float>>(_mm512_cvtneps_pbh(bit_cast<__m512>(x)));
}
// Rounds two vectors to bfloat16: the first one in the low half.
ATTN_INLINE Vec<float> joined_bfloat16(Vec<float> first, Vec<float> second) {
  return bit_cast<Vec<float>>(_mm512_cvtne2ps_pbh(bit_cast<__m512>(second), bit_cast<__m512>(first)));
}
// The same, number by number: first[0], second[0], first[1], ...
ATTN_INLINE Vec<float> interleaved_bfloat16(Vec<float> first, Vec<float> second) {
  const VectorOf<uint16_t, 32>::type order = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                              8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return bit_cast<Vec<float>>(
      _mm512_permutexvar_epi16(bit_cast<__m512i>(order), bit_cast<__m512i>(joined_bfloat16(first, second))));
}

}  // namespace attn::ATTN_ISA
