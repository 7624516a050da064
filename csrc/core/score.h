// The definition of a score. Every kernel follows it, on every device, in the forward and in all derivatives.
//
//   x_ij = cap(scale * <q_i, k_j>) - slope * |position of i - j| + mask_ij   where query i sees key j, else -inf
//
// Here cap(z) is c tanh(z / c), or z without a cap, and `slope` is the slope of the query's head (ALiBi: Press et al.,
// 2022). The weights of row i are exp(x_ij) / (exp(sink) + sum_j exp(x_ij)). `sink` is the sink of the row's head.
// Without sinks, exp(sink) is 0.
//
// With a score_mod, x_ij is what its list of steps computes from the product (program.h), where query i sees key j.
//
// A boolean mask adds 0 or -inf. Kernels set -inf by selection, not by addition, so that a NaN in a hidden key does not
// get through.
#pragma once

#include "core/geometry.h"
#include "core/program.h"

namespace attn {

constexpr double kLog2E = 1.4426950408889634074, kLn2 = 0.69314718055994530942;

// The integers first, ..., last - 1. The range is empty if last <= first.
struct Range {
  int64_t first, last;

  ATTN_INLINE constexpr int64_t size() const { return last - first; }
  ATTN_INLINE constexpr bool empty() const { return first >= last; }
  ATTN_INLINE constexpr bool contains(int64_t i) const { return first <= i && i < last; }
};
// common() returns the intersection of two ranges, and hull() returns the smallest range that contains both.
ATTN_INLINE constexpr Range common(Range a, Range b) { return {larger(a.first, b.first), smaller(a.last, b.last)}; }
ATTN_INLINE constexpr Range hull(Range a, Range b) {
  if (a.empty() || b.empty()) return a.empty() ? b : a;
  return {smaller(a.first, b.first), larger(a.last, b.last)};
}
// Returns the range with `first` rounded down to a multiple of `tile`.
ATTN_INLINE constexpr Range in_tiles(Range r, int64_t tile) {
  return {r.empty() ? r.last : r.first / tile * tile, r.last};
}

// The linear part of a score, scale * product. T is the compute dtype. V is T or a vector of T.
template <class T>
struct ScoreFunction {
  T scale;

  ATTN_INLINE static constexpr ScoreFunction of(const Problem& p) { return {static_cast<T>(p.scale)}; }
  // Returns the function that changes nothing, for products that are scores already.
  ATTN_INLINE static constexpr ScoreFunction identity() { return {1}; }

  template <class V>
  ATTN_INLINE constexpr V operator()(V product) const {
    return product * scale;
  }
  // Returns d score / d product. This slope is the same for every product, so kernels multiply a sum by the slope, not
  // each summand: dQ_i = slope * sum_j dS_ij k_j. Likewise, a tangent of scores is slope * (the tangent of the
  // products). The cap is not linear, so kernels first multiply dS_ij by the cap's derivative.
  ATTN_INLINE constexpr T slope() const { return scale; }

  // Whether a larger product has a larger score.
  ATTN_INLINE constexpr bool keeps_order() const { return scale > 0; }
};

// The soft cap and its derivatives, from y = tanh(z / c): cap(z) = c y, cap'(z) = 1 - y^2 and cap''(z) = (-2 y / c)
// cap'(z). The derivatives are 0 where y is +-1, for example if the product is +-inf. They are computed from y, not
// from the score c y, because the score is rounded once more than y. Near the cap, 1 - y^2 is as small as the error of
// this rounding. The tangent of a score is cap'(z) times the tangent of z. Vectors of the CPU compute c y in one
// function, tanh_of_exponent(product * exponent, c), tensor cores in Tanh (cuda/mma/scores.cuh).
template <class T>
struct SoftCap {
  T most, inverse;  // c, 1 / c
  T exponent;       // tanh(product * scale / c) is a function of 2^(product * exponent); finite, as 0 must stay 0

  ATTN_INLINE static constexpr SoftCap of(const Problem& p) {
    constexpr double kMost = sizeof(T) == 4 ? 3e38 : 1e308;
    const double exponent = 2 * kLog2E * p.scale / p.softcap;
    const double finite = exponent > kMost ? kMost : exponent < -kMost ? -kMost : exponent;
    return {static_cast<T>(p.softcap), static_cast<T>(1 / p.softcap), static_cast<T>(finite)};
  }
  template <class V>
  ATTN_INLINE constexpr V value(V y) const {
    return most * y;
  }
  template <class V>
  ATTN_INLINE static constexpr V slope(V y) {
    return (1 - y) * (1 + y);
  }
  template <class V>
  ATTN_INLINE constexpr V bend(V y) const {
    return y * (-2 * inverse) * slope(y);
  }
};

// ALiBi adds slope * by_slope(distance) to a score, where `distance` is |position of i - j|. This is linear in the
// slope. So the tangent of a score is (the tangent of the slope) * by_slope(distance), and the gradient of the slope is
// the sum of dS_ij * by_slope(distance). It is linear in the distance, too, so by_slope(slope) * distance is the same.
template <class T>
struct Alibi {
  ATTN_INLINE static constexpr T by_slope(T distance) { return -distance; }
};

ATTN_INLINE constexpr bool has_score_mod(const Problem& p) { return p.program && p.program->score; }
// Whether a cap, slopes or a score_mod change the scaled product before a mask is added.
ATTN_INLINE constexpr bool has_score_terms(const Problem& p) {
  return p.softcap > 0 || p.alibi_slopes || has_score_mod(p);
}
// Whether the CPU leaves products in a tile instead of scores, which saves a pass over the tile. The CPU may do so if
// the largest product has the largest score and nothing is added to scores.
template <class T>
ATTN_INLINE constexpr bool leaves_products(const Problem& p) {
  const bool adds = has_score_terms(p) || (p.has_mask && p.mask.dtype != DType::boolean);
  const bool divides = !p.sinks || p.scale > 1e-20;  // sinks are turned into products
  return !adds && divides && ScoreFunction<T>::of(p).keeps_order();
}

// The functions below say which keys the queries of a Sequence see. They ignore the mask. Queries and keys are numbered
// within their sequence.

// Returns the keys that some query of the range sees. The range must not be empty.
ATTN_INLINE constexpr Range visible_keys(const Sequence& s, Range queries) {
  return {larger(0, queries.first + s.first), smaller(s.keys, queries.last - 1 + s.last)};
}
// Returns the queries that see some key of the range. The range must not be empty.
ATTN_INLINE constexpr Range visible_rows(const Sequence& s, Range keys) {
  return {larger(0, keys.first - s.last + 1), smaller(s.queries, keys.last - s.first)};
}
// Says whether all of `queries` see all of `keys`, so that no score of their tile is hidden.
ATTN_INLINE constexpr bool all_visible(const Sequence& s, Range queries, Range keys) {
  return keys.last <= s.keys && keys.last <= queries.first + s.last && keys.first >= queries.last - 1 + s.first;
}
// Says whether some query of `queries` sees some key of `keys`, so that their tile must be computed.
ATTN_INLINE constexpr bool any_visible(const Sequence& s, Range queries, Range keys) {
  return !common(visible_keys(s, queries), keys).empty();
}

}  // namespace attn
