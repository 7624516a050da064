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

// A double for each lane of a Vec<T>.
template <class T>
struct DoublesOf {
  typedef double Vector __attribute__((vector_size(sizeof(double) * kLanes<T>)));
};
template <class T>
using Doubles = typename DoublesOf<T>::Vector;

// Finds the base-2 logarithms of positive normal numbers, and NaN for NaN. With x = 2^n m, where m lies between the
// square roots of 1/2 and 2, the logarithm is n + r p(r) with r = m - 1. The relative error of the minimax polynomial
// r p(r) is below 2^-27. The logarithm of 1 is exactly 0.
ATTN_INLINE void find_log2(Vec<float> x, Doubles<float>& to) {
  static constexpr double kPoly[] = {
      -0.10994943214998161, 0.18617491438884232,  -0.19106278163655915, 0.2046006298632775,  -0.23961740153906075,
      0.28856740771574974,  -0.36069664946751134, 0.4808982410714576,   -0.7213473515001194, 1.4426950408298924};
  constexpr int32_t kRootOfHalf = 0x3f3504f3;  // its bits
  const Vec<Int<float>> bits = bit_cast<Vec<Int<float>>>(x), n = (bits - kRootOfHalf) >> 23;
  const auto r = __builtin_convertvector(bit_cast<Vec<float>>(bits - (n << 23)) - 1.0f, Doubles<float>);
  Doubles<float> p = kPoly[0] - Doubles<float>{};
#pragma GCC unroll 16
  for (size_t i = 1; i < sizeof kPoly / sizeof *kPoly; ++i) p = p * r + kPoly[i];
  const Vec<float> nan = x - x;  // 0 for every other number
  to = __builtin_convertvector(n, Doubles<float>) + r * p + __builtin_convertvector(nan, Doubles<float>);
}
ATTN_INLINE void find_log2(Vec<double> x, Doubles<double>& to) {
  for (int i = 0; i < kLanes<double>; ++i) to[i] = __builtin_log2(x[i]);
}

}  // namespace attn::ATTN_ISA
