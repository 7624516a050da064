// A tile of scores: the products of queries and keys, the rule that turns products into scores (score.h), and the mask.
#pragma once

#include "cpu/tiles/gemm.inl"
#include "cpu/tiles/mask.inl"
#include "cpu/tiles/program.inl"

namespace attn::ATTN_ISA {

// The factor that turns the difference of two numbers of a tile into an exponent of 2. The numbers are scores or
// products. For numbers x and y of a row, exp(score_x - score_y) = 2^((x - y) * log2_slope). The difference is computed
// before it is multiplied, because it is exact if x and y are close, and 0 if they are equal.
template <class T>
ATTN_INLINE T log2_slope(const Problem& p) {
  return static_cast<T>(kLog2E * (leaves_products<T>(p) ? p.scale : 1));
}

// Returns the sink of a head, which is numbered as in Problem::sinks. If there are no sinks, returns -inf, which
// changes nothing.
template <class T>
ATTN_INLINE T sink_of(const Problem& p, int64_t head) {
  return p.sinks ? static_cast<const T*>(p.sinks)[head] : -kInfinity<T>;
}
// Converts sinks to scores or products, whichever the tiles hold, so that a sink above all scores weighs exactly 1. If
// a finite sink would overflow, clamps it, because its weight is 1 or 0 anyway.
template <class T>
ATTN_INLINE Vec<T> as_in_tiles(const Problem& p, Vec<T> sinks) {
  constexpr T kMost = sizeof(T) == 4 ? static_cast<T>(__FLT_MAX__) : static_cast<T>(__DBL_MAX__);
  const Vec<T> found = sinks / (leaves_products<T>(p) ? static_cast<T>(p.scale) : 1);
  const Vec<T> within = found > kMost ? splat<T>(kMost) : found < -kMost ? splat<T>(-kMost) : found;
  return absolute<T>(sinks) < kInfinity<T> ? within : sinks;
}
// The weight of a sink in a lane of a tile, exp(sink - logsumexp). The sink of a row without keys has the weight 1.
// Such a row has the reference +inf (load_logsumexp).
template <class T>
double weight_of_sink(const Problem& p, T sink, const Logsumexp<T>& logsumexp, int64_t lane) {
  if (sink == -kInfinity<T>) return 0;
  if (logsumexp.reference[lane] == kInfinity<T>) return sink == sink ? 1 : sink;
  const double above = as_in_tiles<T>(p, splat<T>(sink))[0] - static_cast<double>(logsumexp.reference[lane]);
  return __builtin_exp2(above * log2_slope<T>(p) - logsumexp.log2_sum[lane]);
}

// Replaces every vector of a tile, v = x[j * kRowTile + lane ...], by f(v, j, lane).
template <class T, class F>
ATTN_INLINE void each_vector(T* x, int64_t keys, int64_t lanes, F f) {
  for (int64_t j = 0; j < keys; ++j)
    for (int64_t i = 0; i < lanes; i += kLanes<T>) {
      T* at = x + j * kRowTile + i;
      store<T>(at, f(load<T>(at), j, i));
    }
}

// The room of a ScoreTile. First comes a mask in numbers, or the pair terms of a program and their tangents. The data
// of the program's lists follows.
ATTN_INLINE int64_t room_of_pairs(const Problem& p) { return p.program && p.mask.data ? 2 * kKeyTile * kRowTile : 0; }
template <class T>
int64_t room_of_tile(const Problem& p) {
  return (p.has_mask ? kKeyTile * kRowTile : 0) + room_of_pairs(p) + room_of_program<T>(p);
}
template <class T>
T* room_of_lists(const Problem& p, const ScoreTile<T>& tile) {
  return tile.workspace + room_of_pairs(p);
}
// If the list reads pair terms, adds a tile of pair terms to `tiles` and, unless `tangent` is null, a tile of their
// tangents.
template <class T>
PairTiles<T> with_pairs(const Problem& p, const List& list, const ScoreTile<T>& tile, PairTiles<T> tiles,
                        const Operand* tangent) {
  if (!list.reads_pairs) return tiles;
  T *const pair = tile.workspace, *const moved = pair + kKeyTile * kRowTile;
  pack_mask<T>(p, p.mask, *tile.rows, tile.keys, pair);
  tiles.pair = pair;
  if (!tangent) return tiles;
  if (tangent->data)
    pack_mask<T>(p, *tangent, *tile.rows, tile.keys, moved);
  else
    fill_zero(moved, kKeyTile * kRowTile);
  tiles.pair_tangent = moved;
  return tiles;
}

// Calls f(first, count) for each strip of the keys of a tile.
template <class F>
ATTN_INLINE void each_strip(int64_t keys, F f) {
  for (int64_t first = 0; first < keys; first += kStrip) f(first, smaller(kStrip, keys - first));
}
// Evaluates a list over `keys` keys of a tile. Writes the first result to `to` and, unless `kept` is null, the second
// result to `kept`. The list may also read `to`.
template <class T>
void evaluate(const List& list, Evaluation<T>& pairs, int64_t keys, T* to, T* kept = nullptr) {
  const int16_t result = list.results[0].from;
  const bool is_last = list.step_count > list.uniform_slots && list.steps[list.step_count - 1].to == result &&
                       !(kept && result == list.results[1].from);
  each_strip(keys, [&](int64_t first, int64_t count) {
    T *const at = to + first * kRowTile, *const kept_at = kept ? kept + first * kRowTile : nullptr;
    pairs.run(first, count, is_last ? at : nullptr, kept_at);
    if (!is_last) pairs.copy(result, count, at);
    if (kept) pairs.copy(list.results[1].from, count, kept_at);
  });
}

// Writes -inf where causality, a window or a length hides a key from a row.
template <class T>
void hide_keys(const ScoreTile<T>& tile, T* x) {
  if (tile.all_visible()) return;
  // The keys that each lane sees, counted from the tile's first key.
  Int<T> first[kRowTile] = {};
  UInt<T> count[kRowTile] = {};
  for (int64_t i = 0; i < tile.rows->count; ++i) {
    const int64_t l = tile.rows->position[i];
    const Range seen = tile.keys_seen({l, l + 1});
    first[i] = static_cast<Int<T>>(seen.first - tile.keys.first);
    count[i] = static_cast<UInt<T>>(larger(0, seen.size()));
  }
  each_vector(x, tile.keys.size(), tile.lanes(), [&](Vec<T> score, int64_t j, int64_t i) {
    const auto from_first = bit_cast<Vec<UInt<T>>>(static_cast<Int<T>>(j) - load<Int<T>>(first + i));
    return from_first < load<UInt<T>>(count + i) ? score : splat<T>(-kInfinity<T>);
  });
}

// If positions hide some keys of a tile from some rows, as causality does on the diagonal, products are cut into
// panels, which leave out hidden scores. A panel of lanes is multiplied with keys up to the last key that it sees. A
// panel of keys is multiplied with the first lane that sees a key of the panel, and with all later lanes.
template <class F>
constexpr int64_t kPanel =
    2 * kLanes<typename F::Number> > F::kNumbers* F::kStep ? 2 * kLanes<typename F::Number> : F::kNumbers* F::kStep;

// Calls f(lane, lanes, keys) for each panel of lanes. `keys` is the range of keys that the panel sees, counted from the
// tile's first key.
template <class F, class Function, class T = typename F::Number>
ATTN_INLINE void each_panel_of_lanes(const ScoreTile<T>& tile, Function f) {
  const int64_t lanes = tile.lanes();
  // A slot may hold several keys, so the range begins at the first key of a slot. With tiles of the processor, or if
  // the problem is invariant (Problem::invariant), the range begins at the tile's first key, so that the sums of all
  // rows are cut at the same keys.
  const auto cut = [&](Range seen) {
    const int64_t first = F::kTiles || tile.invariant ? 0 : seen.first / F::kNumbers * F::kNumbers;
    return Range{first, larger(first, smaller(seen.last, tile.shown))};
  };
  // Returns the keys from the first to the last that the bits of a mask show to a panel.
  const auto shown_to = [&](int64_t lane) {
    Range shown = {0, tile.shown};
    const auto hides = [&](int64_t key) { return (tile.bits[key] >> lane & all_lanes(kPanel<F>)) == 0; };
    while (!shown.empty() && hides(shown.last - 1)) --shown.last;
    while (!shown.empty() && hides(shown.first)) ++shown.first;
    return shown;
  };
  if (tile.all_visible()) {
    int64_t hidden = 0;  // scores
    for (int64_t lane = 0; lane < lanes && tile.mask == ScoreTile<T>::Mask::bits; lane += kPanel<F>)
      hidden += (tile.shown - shown_to(lane).size()) * kPanel<F>;
    // A product of all lanes takes less time for each score than the products of panels.
    if (8 * hidden <= tile.shown * lanes) return f(0, lanes, cut({0, tile.shown}));
    for (int64_t lane = 0; lane < lanes; lane += kPanel<F>)
      f(lane, smaller(kPanel<F>, lanes - lane), cut(shown_to(lane)));
    return;
  }
  for (int64_t lane = 0; lane < lanes; lane += kPanel<F>) {
    Range positions{};
    for (int64_t i = lane; i < smaller(lane + kPanel<F>, tile.rows->count); ++i)
      positions = hull(positions, {tile.rows->position[i], tile.rows->position[i] + 1});
    const Range seen = tile.keys_seen(positions);
    f(lane, smaller(kPanel<F>, lanes - lane), cut({seen.first - tile.keys.first, seen.last - tile.keys.first}));
  }
}
// Returns `rows` without the rows before `first`. A row belongs to a key or to a slot of keys.
template <class T>
ATTN_INLINE Rows<T> rows_from(const Rows<T>& rows, int64_t first) {
  return {rows.data + first * rows.ld, rows.ld};
}

// Calls f(j, keys, lane) for each panel of keys. The panel's lanes begin at `lane`.
template <class F, class Function>
ATTN_INLINE void each_panel_of_keys(const ScoreTile<typename F::Number>& tile, Function f) {
  const RowTile& rows = *tile.rows;
  const bool one_head = rows.head[0] == rows.head[rows.count - 1];
  if (!one_head || tile.all_visible()) return f(0, tile.shown, 0);
  for (int64_t j = 0; j < tile.keys.size(); j += kPanel<F>) {
    const int64_t count = smaller(kPanel<F>, tile.keys.size() - j), key = tile.keys.first + j;
    const Range seeing = common(visible_rows(rows.sequence, {key, key + count}), rows.positions);
    if (!seeing.empty()) f(j, count, (seeing.first - rows.positions.first) / kPanel<F> * kPanel<F>);
  }
}

// What ALiBi adds to the scores of a tile (score.h), or to their tangents.
template <class T>
struct AlibiTile {
  T by_slope[kRowTile];  // of the row's slope
  T ahead[kRowTile];     // how far the row is ahead of the tile's first key

  // `slopes` has a slope for each head. If it is null, every slope is 1.
  AlibiTile(const Problem& p, const ScoreTile<T>& tile, const void* slopes) {
    const RowTile& rows = *tile.rows;
    for (int64_t i = 0; i < tile.lanes(); ++i) {
      const int64_t row = smaller(i, rows.count - 1);
      by_slope[i] = Alibi<T>::by_slope(slopes ? static_cast<const T*>(slopes)[rows.n * p.heads + rows.head[row]] : 1);
      ahead[i] = static_cast<T>(rows.position[row] + rows.sequence.offset - tile.keys.first);
    }
  }
  ATTN_INLINE Vec<T> operator()(int64_t j, int64_t lane) const {
    return load<T>(by_slope + lane) * absolute<T>(load<T>(ahead + lane) - static_cast<T>(j));
  }
};

// Whether derivatives read what scores() writes to `kept`.
ATTN_INLINE bool needs_kept(const Problem& p) { return p.softcap > 0 || has_score_mod(p); }

// Turns the products of a tile into the scores of a score_mod. Writes what derivatives read to `kept`, unless `kept` is
// null: the second result of PairProgram::keeping, or the products if `keeping` is null.
template <class T>
void scores_of_program(const Problem& p, const ScoreTile<T>& tile, T* x, T* kept) {
  const PairProgram& program = *p.program;
  const bool keeps = kept && program.keeping;
  const List* const derivatives[] = {program.gradient, program.tangent, program.tangent_gradient};
  bool keeps_product = false;
  for (const List* list : derivatives) keeps_product |= kept && !keeps && list && list->reads_product;
  const List& list = keeps ? *program.keeping : *program.score;
  Evaluation<T> pairs(p, list, tile, with_pairs<T>(p, list, tile, {.product = x}, nullptr), room_of_lists(p, tile));
  if (keeps_product) __builtin_memcpy(kept, x, static_cast<size_t>(tile.keys.size() * kRowTile) * sizeof(T));
  evaluate<T>(list, pairs, tile.keys.size(), x, keeps ? kept : nullptr);
}

// Turns products into scores by the cap or ALiBi. With a cap, also writes the tanh (SoftCap) to `kept`, unless `kept`
// is null.
template <class T>
void add_score_terms(const Problem& p, const ScoreTile<T>& tile, T* x, T* kept) {
  const int64_t keys = tile.keys.size(), lanes = tile.lanes();
  auto score = ScoreFunction<T>::of(p);
  if (p.softcap > 0) {
    const auto cap = SoftCap<T>::of(p);
    each_vector(x, keys, lanes, [&](Vec<T> product, int64_t j, int64_t i) __attribute__((always_inline)) {
      if (kept) store<T>(kept + j * kRowTile + i, tanh_of_exponent<T>(product * cap.exponent, 1));
      return tanh_of_exponent<T>(product * cap.exponent, cap.most);
    });
    score = ScoreFunction<T>::identity();
  }
  if (!p.alibi_slopes) return;
  const AlibiTile<T> alibi(p, tile, p.alibi_slopes);
  each_vector(x, keys, lanes, [&](Vec<T> y, int64_t j, int64_t i) { return score(y) + alibi(j, i); });
}

// Turns the products of a tile into scores, unless leaves_products() or has_score_terms(). Adds the mask, and always
// writes -inf for hidden keys.
template <class T>
void products_to_scores(const Problem& p, const ScoreTile<T>& tile, T* x) {
  const int64_t keys = tile.keys.size(), lanes = tile.lanes();
  const bool is_done = has_score_terms(p) || leaves_products<T>(p);
  const auto score = is_done ? ScoreFunction<T>::identity() : ScoreFunction<T>::of(p);
  const Vec<T> hidden = splat<T>(-kInfinity<T>);
  if (tile.mask == ScoreTile<T>::Mask::bits) {
    each_vector(x, keys, lanes, [&](Vec<T> product, int64_t j, int64_t i) {
      return lanes_of_bits<T>(tile.bits[j] >> i) ? score(product) : hidden;
    });
  } else if (tile.mask == ScoreTile<T>::Mask::numbers) {
    const T* numbers = tile.numbers(p);
    each_vector(x, keys, lanes, [&](Vec<T> product, int64_t j, int64_t i) {
      const Vec<T> b = load<T>(numbers + j * kRowTile + i);
      return b == hidden ? hidden : score(product) + b;
    });
  } else if (!is_done) {
    each_vector(x, keys, lanes, [&](Vec<T> product, int64_t, int64_t) { return score(product); });
  }
  hide_keys<T>(tile, x);
}

// Writes the scores of a tile (score.h) to x[j * kRowTile + lane], or products if leaves_products(). `query_t`: the
// tile of queries, transposed. `kept`: see add_score_terms() and scores_of_program(). `key_scale`: the scales of the
// tile's keys, or null. No call has both key_scale and a score_mod.
template <class F, class T = typename F::Number, class Between = const decltype(kNothingBetween)>
void scores(const Problem& p, const ScoreTile<T>& tile, const T* query_t, const Rows<T>& key_rows, T* x,
            typename F::Number* kept = nullptr, Between& between = kNothingBetween,
            const typename F::Number* key_scale = nullptr) {
  TablesAhead<T> tables(p, has_score_mod(p) ? p.program->score : nullptr, *tile.rows, tile.keys, nullptr, 0);
  const auto ask = [&]() __attribute__((always_inline)) {
    between();
    tables();
  };
  each_panel_of_lanes<F>(tile, [&](int64_t lane, int64_t count, Range seen) {
    multiply<F>({seen.size(), count, slots_of<F>(p.head_dim)}, rows_from(key_rows, seen.first),
                {query_t + lane, kRowTile}, x + seen.first * kRowTile + lane, kRowTile, Store::set, ask);
  });
  if (has_score_mod(p)) {
    scores_of_program<T>(p, tile, x, kept);
  } else {
    if (key_scale)
      each_vector(x, tile.keys.size(), tile.lanes(),
                  [&](Vec<T> product, int64_t j, int64_t) { return product * key_scale[j]; });
    if (has_score_terms(p)) add_score_terms<T>(p, tile, x, kept);
  }
  products_to_scores<T>(p, tile, x);
}

// Writes tx, the derivative of the scores along t: cap' * tz - tslope * |p - j| + tM with
// tz = slope * (tQ K^T + Q tK^T). For hidden keys, tx is any number. With a cap or a score_mod, the caller passes in
// `kept` the tile that scores() wrote through its argument of this name. tz is then also written to `tz`, unless `tz`
// is null.
template <class F, class T = typename F::Number>
void tangent_scores(const Problem& p, const Tangents& t, const ScoreTile<T>& tile, const T* query_t,
                    const T* tangent_query_t, const Rows<T>& key_rows, const Rows<T>& tangent_key_rows, T* room,
                    const typename F::Number* kept, typename F::Number* tz, T* tx) {
  const int64_t keys = tile.keys.size(), lanes = tile.lanes();
  Store store = Store::set;
  const auto put = [&](const Rows<T>& keys_of, const T* queries) {
    multiply<F>({keys, lanes, slots_of<F>(p.head_dim)}, keys_of, {queries, kRowTile}, tx, kRowTile, store);
    store = Store::add;
  };
  if (t.query.data) put(key_rows, tangent_query_t);
  if (t.key.data) put(tangent_key_rows, query_t);
  if (store == Store::set) fill_zero(tx, keys * kRowTile);
  scale_tile<T>(tx, keys * kRowTile, ScoreFunction<T>::of(p).slope());
  if (has_score_mod(p)) {
    if (tz) __builtin_memcpy(tz, tx, static_cast<size_t>(keys * kRowTile) * sizeof(T));
    const List& list = *p.program->tangent;
    const PairTiles<T> tiles = {.product = kept, .tangent = tx};
    Evaluation<T> pairs(p, list, tile, with_pairs(p, list, tile, tiles, &t.mask), room_of_lists(p, tile));
    return evaluate<T>(list, pairs, keys, tx);
  }
  if (p.softcap > 0) {
    each_vector(tx, keys, lanes, [&](Vec<T> x, int64_t j, int64_t i) {
      if (tz) ATTN_ISA::store<T>(tz + j * kRowTile + i, x);
      return x * SoftCap<T>::slope(load<T>(kept + j * kRowTile + i));
    });
  }
  if (t.alibi_slopes) {
    const AlibiTile<T> alibi(p, tile, t.alibi_slopes);
    each_vector(tx, keys, lanes, [&](Vec<T> x, int64_t j, int64_t i) { return x + alibi(j, i); });
  }
  if (!t.mask.data) return;
  pack_mask<T>(p, t.mask, *tile.rows, tile.keys, room);
  each_vector(tx, keys, kRowTile, [&](Vec<T> x, int64_t j, int64_t i) { return x + load<T>(room + j * kRowTile + i); });
}

}  // namespace attn::ATTN_ISA
