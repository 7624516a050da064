// AVX512_BF16: operations that GNU vector types cannot express. A lane holds a pair of bfloat16.
#pragma once

#ifndef ATTN_ISA  // included by itself
#define ATTN_ISA avx512_bf16
#define ATTN_INSTRUCTIONS "cpu/isa/instructions_avx512.inl"
#endif
#include "cpu/simd/simd.inl"

namespace attn::ATTN_ISA {

// Returns sum + a[0] b[0] + a[1] b[1] in every lane.
ATTN_INLINE Vec<float> add_products_of_pairs(Vec<float> sum, Vec<float> a, Vec<float> b) {
  return bit_cast<Vec<float>>(_mm512_dpbf16_ps(bit_cast<__m512>(sum), bit_cast<__m512bh>(a), bit_cast<__m512bh>(b)));
}

// Rounds to bfloat16, to nearest even.
ATTN_INLINE Shorts<float> round_to_bfloat16(Vec<float> x) {
  return bit_cast<Shorts<float>>(_mm512_cvtneps_pbh(bit_cast<__m512>(x)));
}
// Rounds two vectors to bfloat16. The low half of the result holds `first`, and the high half holds `second`.
ATTN_INLINE Vec<float> joined_bfloat16(Vec<float> first, Vec<float> second) {
  return bit_cast<Vec<float>>(_mm512_cvtne2ps_pbh(bit_cast<__m512>(second), bit_cast<__m512>(first)));
}
// Rounds two vectors to bfloat16 and interleaves them: first[0], second[0], first[1], ...
ATTN_INLINE Vec<float> interleaved_bfloat16(Vec<float> first, Vec<float> second) {
  const VectorOf<uint16_t, 32>::type order = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                              8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return bit_cast<Vec<float>>(
      _mm512_permutexvar_epi16(bit_cast<__m512i>(order), bit_cast<__m512i>(joined_bfloat16(first, second))));
}

// Interleaves the 16-bit numbers of two vectors into two vectors: first[0], second[0], first[1], ...
ATTN_INLINE void interleave(Vec<float> first, Vec<float> second, Vec<float> (&by_turns)[2]) {
  using Words = VectorOf<uint16_t, 32>::type;
  const Words low = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                     8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  const __m512i a = bit_cast<__m512i>(first), b = bit_cast<__m512i>(second);
  by_turns[0] = bit_cast<Vec<float>>(_mm512_permutex2var_epi16(a, bit_cast<__m512i>(low), b));
  by_turns[1] = bit_cast<Vec<float>>(_mm512_permutex2var_epi16(a, bit_cast<__m512i>(low + uint16_t{16}), b));
}

}  // namespace attn::ATTN_ISA
