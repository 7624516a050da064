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

// Writes the pair of a row. `sum` is the sum of the row's weights 2^((x - reference) * log2_slope).
template <class T>
void store_logsumexp(T* pair, T reference, T sum) {
  pair[0] = sum == 0 ? -kInfinity<T> : reference;
  pair[1] = sum == 0 ? 0 : static_cast<T>(__builtin_log2(sum));
}

}  // namespace attn::ATTN_ISA
