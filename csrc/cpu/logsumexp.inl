// The logsumexp of rows of scores: a pair of numbers, see params.h.
#pragma once

#include "cpu/simd.inl"

namespace attn::ATTN_ISA {

// That of the lanes of a tile. `high` is +inf and `low` 0 where there is no row and where a row attends to no key:
// weights are 0 there.
template <class T>
struct Logsumexp {
  T high[kRowTile];
  T low[kRowTile];

  // exp(score - logsumexp), as accurate as the format F.
  template <class F>
  ATTN_INLINE Vec<T> weight(Vec<T> score, int64_t lane) const {
    return F::exp((score - load<T>(high + lane)) - load<T>(low + lane));
  }
};

// Writes maximum + log(sum) as a pair; -inf for a row without keys.
template <class T>
void store_logsumexp(T* pair, T maximum, T sum) {
  const T log = static_cast<T>(__builtin_log(sum));
  const T high = maximum + log;
  const T of_log = high - maximum;  // Knuth's two-sum: low is exactly what rounding took from high
  const T low = (maximum - (high - of_log)) + (log - of_log);
  const bool finite = high - high == 0;
  pair[0] = sum == 0 ? -kInfinity<T> : high;
  pair[1] = sum == 0 || !finite ? 0 : low;
}

}  // namespace attn::ATTN_ISA
