// What a score is: the one rule that every kernel follows, on every device, in the forward and in all derivatives.
//
//   x_ij = score(<q_i, k_j>) + mask_ij   where query i sees key j, else -inf
//
// A boolean mask adds 0 or -inf. Whatever is -inf becomes so by selection, not by addition: a NaN in a key that is
// hidden does not get through.
#pragma once

#include "core/geometry.h"

namespace attn {

// The numbers from `first` up to, and without, `last`; none if last <= first.
struct Range {
  int64_t first, last;

  ATTN_INLINE constexpr int64_t size() const { return last - first; }
  ATTN_INLINE constexpr bool empty() const { return first >= last; }
  ATTN_INLINE constexpr bool contains(int64_t i) const { return first <= i && i < last; }
};
// What two ranges have in common, and the smallest range that holds both.
ATTN_INLINE constexpr Range common(Range a, Range b) { return {larger(a.first, b.first), smaller(a.last, b.last)}; }
ATTN_INLINE constexpr Range hull(Range a, Range b) {
  if (a.empty() || b.empty()) return a.empty() ? b : a;
  return {smaller(a.first, b.first), larger(a.last, b.last)};
}
// The range, begun earlier so that `first` is a multiple of `tile`.
ATTN_INLINE constexpr Range in_tiles(Range r, int64_t tile) {
  return {r.empty() ? r.last : r.first / tile * tile, r.last};
}

// How a product <q_i, k_j> becomes a score: score = scale * product. T: the type computed in; V: T, or a vector of T.
template <class T>
struct ScoreFunction {
  T scale;

  ATTN_INLINE static constexpr ScoreFunction of(const Problem& p) { return {static_cast<T>(p.scale)}; }
  // Leaves products that are scores already as they are.
  ATTN_INLINE static constexpr ScoreFunction identity() { return {1}; }

  template <class V>
  ATTN_INLINE constexpr V operator()(V product) const {
    return product * scale;
  }
  // d score / d product. It is the same for every product, so that a sum is multiplied by it, and not what is summed:
  // dQ_i = slope * sum_j dS_ij k_j, and a tangent of scores is slope * (the tangent of the products). The second
  // derivative is 0 and appears nowhere.
  //
  // A rule that is not linear would take the product here. The compiler then names every place where that matters.
  ATTN_INLINE constexpr T slope() const { return scale; }

  // Whether of two products the larger one has the larger score.
  ATTN_INLINE constexpr bool keeps_order() const { return scale > 0; }
};

// Which keys a query sees, apart from the mask (Visibility). Queries and keys are counted within their sequence; a
// range of queries stands for all that are in it. Only here is the offset between a query's number and its position
// known.

// Returns the keys that some query of the range, which is not empty, sees.
ATTN_INLINE constexpr Range visible_keys(const Problem& p, const Sequence& s, Range queries) {
  const auto [left, right] = p.visibility;
  return {left < 0 ? 0 : larger(0, queries.first + s.offset - left),
          right < 0 ? s.keys : smaller(s.keys, queries.last + s.offset + right)};
}
// Returns the queries that see some key of the range, which is not empty.
ATTN_INLINE constexpr Range visible_rows(const Problem& p, const Sequence& s, Range keys) {
  const auto [left, right] = p.visibility;
  return {right < 0 ? 0 : larger(0, keys.first - s.offset - right),
          left < 0 ? s.queries : smaller(s.queries, keys.last - s.offset + left)};
}
// Says whether every query of the one range sees every key of the other, so that no score of their tile is hidden.
ATTN_INLINE constexpr bool all_visible(const Problem& p, const Sequence& s, Range queries, Range keys) {
  const auto [left, right] = p.visibility;
  return keys.last <= s.keys && (right < 0 || keys.last <= queries.first + s.offset + right + 1) &&
         (left < 0 || keys.first >= queries.last - 1 + s.offset - left);
}
// Says whether any query of the one range sees any key of the other, so that their tile counts at all.
ATTN_INLINE constexpr bool any_visible(const Problem& p, const Sequence& s, Range queries, Range keys) {
  return !common(visible_keys(p, s, queries), keys).empty();
}

}  // namespace attn
