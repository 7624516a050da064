// csrc/cpu/isa/instructions_avx512_bf16.inl in software, as instructions_avx512.inl beside it. Subnormal numbers count
// as zeros, as for the instructions.
#pragma once

#ifndef ATTN_ISA  // included by itself
#define ATTN_ISA avx512_bf16
#define ATTN_INSTRUCTIONS "cpu/isa/instructions_avx512.inl"
#endif
#include "cpu/simd/storage.inl"

namespace attn::ATTN_ISA {

ATTN_INLINE Vec<float> without_subnormals(Vec<float> x) {
  const Vec<uint32_t> magnitude = bit_cast<Vec<uint32_t>>(x) & 0x7fffffffu;
  return magnitude < 0x00800000u ? Vec<float>{} : x;
}
ATTN_INLINE Vec<float> fused_multiply_add(Vec<float> a, Vec<float> b, Vec<float> c) {
  const auto of_halves = [](auto x, auto y, auto z) {
    return _mm256_fmadd_ps(bit_cast<__m256>(x), bit_cast<__m256>(y), bit_cast<__m256>(z));
  };
  return without_subnormals(by_halves<Vec<float>>(of_halves, a, b, c));
}
// The first or the second bfloat16 of every lane.
ATTN_INLINE Vec<float> number_of_pair(Vec<float> slots, int second) {
  const Vec<uint32_t> bits = bit_cast<Vec<uint32_t>>(slots);
  return without_subnormals(bit_cast<Vec<float>>(second ? bits & 0xffff0000u : bits << 16));
}

ATTN_INLINE Vec<float> add_products_of_pairs(Vec<float> sum, Vec<float> a, Vec<float> b) {
  for (int second = 1; second >= 0; --second)
    sum = fused_multiply_add(number_of_pair(a, second), number_of_pair(b, second), sum);
  return sum;
}

ATTN_INLINE Shorts<float> round_to_bfloat16(Vec<float> x) { return float_to_bfloat16(without_subnormals(x)); }
ATTN_INLINE Vec<float> joined_bfloat16(Vec<float> first, Vec<float> second) {
  const Shorts<float> parts[] = {round_to_bfloat16(first), round_to_bfloat16(second)};
  Vec<float> slots;
  __builtin_memcpy(&slots, parts, sizeof slots);
  return slots;
}
ATTN_INLINE Vec<float> interleaved_bfloat16(Vec<float> first, Vec<float> second) {
  return bit_cast<Vec<float>>(widened(round_to_bfloat16(first)) | widened(round_to_bfloat16(second)) << 16);
}

ATTN_INLINE void interleave(Vec<float> first, Vec<float> second, Vec<float> (&by_turns)[2]) {
  uint16_t a[32], b[32], all[64];
  __builtin_memcpy(a, &first, sizeof a);
  __builtin_memcpy(b, &second, sizeof b);
  for (int i = 0; i < 32; ++i) {
    all[2 * i] = a[i];
    all[2 * i + 1] = b[i];
  }
  __builtin_memcpy(by_turns, all, sizeof all);
}

}  // namespace attn::ATTN_ISA
