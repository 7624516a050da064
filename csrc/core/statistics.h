// The statistics of a row of scores, the same on every device: the sums over the keys read so far, and the results.
//
// Let m be the largest score of the row, w_j = exp(x_j - m) the weights and l = sum_j w_j. Then w_j / l are the
// probabilities, and
//
//   logsumexp = m + log(l)        entropy = -sum_j w_j / l log(w_j / l) = log(l) - sum_j (x_j - m) w_j / l
//
// Neither term of the entropy is negative, so nothing cancels. If one key has nearly all of the weight, both terms are
// small and l is nearly 1. Therefore the weights that are exactly 1 are counted apart from the sum of the other
// weights, and log(l) is computed as log1p(l - 1). An entropy near 0 (attention to one key) is then as accurate as any
// other.
#pragma once

#include "core/score.h"

namespace attn {

// Sums over some keys of a row. The numbers x of a tile are scores or, on the CPU, possibly products. `slope` turns
// their differences into exponents of 2: exp(score_i - score_j) = 2^((x_i - x_j) slope).
template <class T>
struct RowStatistics {
  T largest;  // m; -inf without a key, NaN once a score was NaN
  T ones;     // the number of weights that are 1: keys with the largest score
  T rest;     // the sum of the other weights
  T moment;   // sum_j (x_j - m) slope w_j, not positive
};

// The least exponent of a weight. exponent_of() clamps exponents to it, because -inf times a weight of 0 would be NaN.
// 2^-1100 is 0 in every type. exponent_of() keeps NaN.
constexpr double kLeastExponent = -1100;
template <class T>
ATTN_INLINE constexpr T exponent_of(T x, T reference, T slope) {
  const T exponent = (x - reference) * slope;
  return exponent < static_cast<T>(kLeastExponent) ? static_cast<T>(kLeastExponent) : exponent;
}

// Returns the larger of the largest numbers of two parts. Neither may be NaN. To merge the parts, rescale both to this
// reference.
template <class T>
ATTN_INLINE constexpr T common_reference(const RowStatistics<T>& a, const RowStatistics<T>& b) {
  return a.largest > b.largest ? a.largest : b.largest;
}
// Rescales a part to `reference`. `exponent` is exponent_of(part.largest, reference, slope), and `weight` is
// 2^exponent.
template <class T>
ATTN_INLINE constexpr RowStatistics<T> brought_to(T reference, const RowStatistics<T>& part, T exponent, T weight) {
  if (part.largest == reference) return part;
  const T sum = part.ones + part.rest;
  return {reference, 0, sum == 0 ? 0 : sum * weight, sum == 0 ? 0 : (part.moment + exponent * sum) * weight};
}
// Returns the sum of two parts with the same reference. No score of either part may be NaN.
template <class T>
ATTN_INLINE constexpr RowStatistics<T> added(T reference, const RowStatistics<T>& a, const RowStatistics<T>& b) {
  return {reference, a.ones + b.ones, a.rest + b.rest, a.moment + b.moment};
}
template <class T>
ATTN_INLINE constexpr bool has_nan(const RowStatistics<T>& part) {
  return part.largest != part.largest;
}

// The results of a row.
template <class T>
struct FinishedRow {
  T largest_score, entropy, logsumexp;
  // A weight p is 2^((x - reference) slope) inverse_sum. The formula 2^((x - reference) slope - log2(l)) is less
  // accurate: log2(l) may be 20, and its rounding error would change all weights of the row by about 20 ulps.
  T reference, inverse_sum;
};

// Returns l - 1, where l is the sum of the weights of the row's keys and of its sink. If the row has neither keys nor a
// sink, l is 0. The argument `log_sum` of finished() is log1p(l - 1). `sink` is the weight of the sink relative to the
// row's reference, or 0 without a sink. This weight is at most 1, because the reference is at least as large as the
// sink's score.
template <class T>
ATTN_INLINE constexpr double sum_without_one(const RowStatistics<T>& s, double sink) {
  return (static_cast<double>(s.ones) - 1) + static_cast<double>(s.rest) + sink;
}
// Returns the results of a row. `largest` is the maximum over all keys. `scale` turns `largest` and the reference into
// scores. A score of +inf makes the sum NaN (inf - inf), though no score is NaN. The entropy omits the sink, so log(l)
// is multiplied by the keys' share of the sum.
template <class T>
ATTN_INLINE constexpr FinishedRow<T> finished(const RowStatistics<T>& s, T largest, T scale, double sink,
                                              double log_sum, T infinity) {
  const double sum = 1 + sum_without_one(s, sink);
  if (sum == 0) return {-infinity, 0, -infinity, 0, 0};
  largest *= scale;
  const T nan = infinity - infinity;
  if (has_nan(s) || sum != sum) {
    const T score = largest == infinity && !has_nan(s) ? infinity : nan;
    return {score, nan, score, nan, nan};
  }
  const double of_keys = sink == 0 ? 1 : (static_cast<double>(s.ones) + static_cast<double>(s.rest)) / sum;
  return {largest, static_cast<T>(of_keys * log_sum - kLn2 * static_cast<double>(s.moment) / sum),
          static_cast<T>(static_cast<double>(s.largest) * scale + log_sum), s.largest, static_cast<T>(1 / sum)};
}

}  // namespace attn
