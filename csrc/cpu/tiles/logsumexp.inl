// The logsumexp of rows of scores. It is a pair of numbers for each row (params.h).
#pragma once

#include "cpu/simd/simd.inl"

namespace attn::ATTN_ISA {

// The logsumexp of the lanes of a tile. A lane that has no row, or whose row attends to no key, has the `reference`
// +inf and the `log2_sum` 0, so its weights are 0.
template <class T>
struct Logsumexp {
  T reference[kRowTile];
  T log2_sum[kRowTile];

  // Replaces scores of these rows by weights, with as much accuracy as a number of format F has. `slope` is
  // log2_slope() of scores.inl.
  template <class F, int N>
  ATTN_INLINE void weights(Vec<T> (&scores)[N], T slope, int64_t lane) const {
#pragma GCC unroll 8
    for (Vec<T>& score : scores) score = (score - load<T>(reference + lane)) * slope - load<T>(log2_sum + lane);
    F::exp2(scores);
  }
};

// Returns the base-2 logarithm of a positive normal number, and NaN for NaN. Has no branches, so that compilers turn
// loops into vectors. With x = 2^n m, where m lies between the square roots of 1/2 and 2, the logarithm is n + r p(r)
// with r = m - 1. The relative error of the minimax polynomial r p(r) is below 2^-27. The logarithm of 1 is exactly 0.
ATTN_INLINE double log2_of(float x) {
  constexpr double kPoly[] = {-0.10994943214998161, 0.18617491438884232, -0.19106278163655915, 0.2046006298632775,
                              -0.23961740153906075, 0.28856740771574974, -0.36069664946751134, 0.4808982410714576,
                              -0.7213473515001194,  1.4426950408298924};
  constexpr int32_t kRootOfHalf = 0x3f3504f3;  // its bits
  const int32_t bits = bit_cast<int32_t>(x), n = (bits - kRootOfHalf) >> 23;
  const double r = bit_cast<float>(bits - (n << 23)) - 1.0f;
  double p = kPoly[0];
#pragma GCC unroll 16
  for (size_t i = 1; i < sizeof kPoly / sizeof *kPoly; ++i) p = p * r + kPoly[i];
  const float nan = x - x;  // 0 for every other number
  return n + r * p + nan;
}
ATTN_INLINE double log2_of(double x) { return __builtin_log2(x); }

}  // namespace attn::ATTN_ISA
