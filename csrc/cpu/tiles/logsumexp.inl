// The logsumexp of rows of scores: a pair of numbers, see params.h.
#pragma once

#include "cpu/simd/simd.inl"

namespace attn::ATTN_ISA {

// The logsumexp of the lanes of a tile. A lane without a row, or whose row attends to no key, has the `reference` +inf
// and the `log2_sum` 0, so its weights are 0.
template <class T>
struct Logsumexp {
  T reference[kRowTile];
  T log2_sum[kRowTile];

  // Replaces scores of the same rows by weights, as accurate as the format F. `slope`: log2_slope(), see
  // scores.inl.
  template <class F, int N>
  ATTN_INLINE void weights(Vec<T> (&scores)[N], T slope, int64_t lane) const {
#pragma GCC unroll 8
    for (Vec<T>& score : scores) score = (score - load<T>(reference + lane)) * slope - load<T>(log2_sum + lane);
    F::exp2(scores);
  }
};

// Writes the pair of a row whose weights were powers of 2 above `reference`, with this sum.
template <class T>
void store_logsumexp(T* pair, T reference, T sum) {
  pair[0] = sum == 0 ? -kInfinity<T> : reference;
  pair[1] = sum == 0 ? 0 : static_cast<T>(__builtin_log2(sum));
}

}  // namespace attn::ATTN_ISA
