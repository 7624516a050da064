// J t: how the output changes when query, key, value and mask move along t = (tQ, tK, tV, tM). With the weights P
// recomputed from logsumexp, Z the dropout factors and s the scale,
//
//   tx = s (tQ K^T + Q tK^T) + tM
//   tP_ij = P_ij (tx_ij - c_i),   c_i = sum_j P_ij tx_ij    (the derivative of logsumexp_i)
//   tO = (tP * Z) V + (P * Z) tV = (P * tx * Z) V + (P * Z) tV - c O
//
// So one pass over the keys is enough, because c and the products are summed together. A number common to all tx of a
// row cancels in tP, but would make the sums less accurate. So r is subtracted from tx before tx is summed. r is the
// weighted mean of tx over the first tile of keys that the row attends to, and over the row's sink, because the sink
// may have nearly all of the weight. Then
//
//   tO = (P (tx - r) Z) V + (P Z) tV - (c - r) O,   c - r = sum_j P_ij (tx_ij - r_i)
//
// A sink counts in c as one more score, but has no value. The weights are divided by their own sum, because the
// rounding of the logsumexp changes all weights, and c, by the same factor.
#pragma once

#include "cpu/tiles/dropout.inl"
#include "cpu/tiles/scores.inl"

namespace attn::ATTN_ISA {

// F: the format in which the forward multiplied queries and keys. The scores are recomputed in F, because the weights
// exp(x - logsumexp) of scores with other roundings would not sum to 1. Everything else is computed in T.
template <class T, class F = Singles<T>>
struct Tangent {
  static constexpr int W = kLanes<T>;
  static constexpr bool kRoundsScores = !std::is_same_v<F, Singles<T>>;

  struct Buffers {
    const TangentParams& params;
    Arena arena;
    int64_t ld_key = round_up(params.head_dim, W) + W, ld_value = round_up(params.value_dim, W) + W;
    int64_t ld_score_key = row_of<F>(params.head_dim);
    RowTile* rows = arena.take<RowTile>(1);
    T* query_t = arena.take<T>(params.head_dim * kRowTile);            // [E][kRowTile]
    T* tangent_query_t = arena.take<T>(params.head_dim * kRowTile);    // tQ
    T* output_t = arena.take<T>(params.value_dim * kRowTile);          // [Ev][kRowTile]
    T* tangent_output_t = arena.take<T>(params.value_dim * kRowTile);  // [Ev][kRowTile]
    Logsumexp<T>* logsumexp = arena.take<Logsumexp<T>>(1);
    T* shift = arena.take<T>(kRowTile);        // [kRowTile]: r
    T* has_shift = arena.take<T>(kRowTile);    // [kRowTile]: 1 once the row has a shift, else 0
    T* shifted_sum = arena.take<T>(kRowTile);  // [kRowTile]: c - r
    T* total = arena.take<T>(kRowTile);        // [kRowTile]: the sum of P
    T* sink_weight = arena.take<T>(kRowTile);  // [kRowTile]: 0 if the row has no sink
    T* sink_tangent = arena.take<T>(kRowTile);
    T* key = arena.take<T>(kKeyTile * ld_key);  // [kKeyTile][E], and so on
    T* tangent_key = arena.take<T>(kKeyTile * ld_key);
    T* value = arena.take<T>(kKeyTile * ld_value);
    T* tangent_value = arena.take<T>(kKeyTile * ld_value);
    // For kRoundsScores: [slots of E][kRowTile] and [kKeyTile][slots of E].
    T* score_query_t = arena.take<T>(kRoundsScores ? slots_of<F>(params.head_dim) * kRowTile : 0);
    T* score_key = arena.take<T>(kRoundsScores ? kKeyTile * ld_score_key : 0);
    T* x = arena.take<T>(kKeyTile * kRowTile);  // [kKeyTile][kRowTile]
    T* tx = arena.take<T>(kKeyTile * kRowTile);
    T* room = arena.take<T>(room_of_tile<T>(params));  // of a ScoreTile
    T* factor = arena.take<T>(params.has_dropout ? kKeyTile * kRowTile : 0);
    // For a soft cap or a score_mod, as x: see scores().
    T* kept = needs_kept(params) ? arena.take<T>(kKeyTile * kRowTile) : nullptr;
    int64_t size = arena.used();

    Buffers(const TangentParams& p, char* base) : params(p), arena(base) {}
  };

  static int64_t workspace(const TangentParams& p) { return Buffers(p, nullptr).size; }

  // Turns x into P * Z, and tx into P * (tx - r) * Z. Adds up c - r.
  static void weights(const TangentParams& p, const Buffers& b, const ScoreTile<T>& tile) {
    const int64_t keys = tile.keys.size(), lanes = tile.lanes();
    const Vec<T> zero{}, one = splat<T>(1);
    const T slope = log2_slope<T>(p);
    if (p.has_dropout) dropout_factors<T>(p, *b.rows, tile.keys, static_cast<T>(p.keep_scale), b.factor);
    for (int64_t lane = 0; lane < lanes; lane += W) {
      Vec<T> total{}, mean{};
      for (int64_t j = 0; j < keys; ++j) {
        const int64_t at = j * kRowTile + lane;
        Vec<T> weights[] = {load<T>(b.x + at)};
        b.logsumexp->template weights<Singles<T>>(weights, slope, lane);
        const Vec<T> weight = weights[0];
        total += weight;
        mean += weight == zero ? zero : weight * load<T>(b.tx + at);
        store<T>(b.x + at, weight);
      }
      const Vec<T> had = load<T>(b.has_shift + lane);
      const auto begins = (had == zero) & (total > zero);
      const Vec<T> sink = load<T>(b.sink_weight + lane), of_sink = sink * load<T>(b.sink_tangent + lane);
      const Vec<T> shift = begins ? (mean + of_sink) / (total + sink) : load<T>(b.shift + lane);
      store<T>(b.shift + lane, shift);
      store<T>(b.has_shift + lane, begins ? one : had);

      Vec<T> shifted_sum{};  // of this tile alone: adding each key to the sum of all keys would round more
      for (int64_t j = 0; j < keys; ++j) {
        const int64_t at = j * kRowTile + lane;
        const Vec<T> weight = load<T>(b.x + at);
        // Where the weight is 0, selects 0 instead of multiplying, because a masked key may be NaN and would make the
        // sum NaN.
        const Vec<T> product = weight == zero ? zero : weight * (load<T>(b.tx + at) - shift);
        const Vec<T> factor = p.has_dropout ? load<T>(b.factor + at) : one;
        shifted_sum += product;
        store<T>(b.x + at, weight * factor);
        store<T>(b.tx + at, product * factor);
      }
      store<T>(b.shifted_sum + lane, load<T>(b.shifted_sum + lane) + shifted_sum);
      store<T>(b.total + lane, load<T>(b.total + lane) + total);
    }
  }

  static void load_sinks(const TangentParams& p, const Buffers& b) {
    fill_zero(b.sink_weight, kRowTile);
    fill_zero(b.sink_tangent, kRowTile);
    for (int64_t i = 0; i < b.rows->count && p.sinks; ++i) {
      const int64_t of_head = b.rows->n * p.heads + b.rows->head[i];
      b.sink_weight[i] = static_cast<T>(weight_of_sink(p, sink_of<T>(p, of_head), *b.logsumexp, i));
      if (p.t.sinks && b.sink_weight[i] != 0) b.sink_tangent[i] = static_cast<const T*>(p.t.sinks)[of_head];
    }
  }

  static void run(const TangentParams& p, int64_t task, char* workspace) {
    const Buffers b(p, workspace);
    const RowTask own(p, task);  // one tile of rows
    RowTile& rows = *b.rows;
    rows.set(p, own.n, own.first_head, own.rows);
    const int64_t key_head = key_head_of(p, own.first_head), value_head = value_head_of(p, own.first_head);
    const int64_t lanes = rows.template lanes<T>();
    rows.pack_transposed(p, p.query, p.head_dim, b.query_t);
    if constexpr (kRoundsScores) rows.template pack_columns<F>(p, p.query, p.head_dim, b.score_query_t);
    if (p.t.query.data) rows.pack_transposed(p, p.t.query, p.head_dim, b.tangent_query_t);
    rows.load_logsumexp(p, p.logsumexp, *b.logsumexp);
    load_sinks(p, b);
    fill_zero(b.shift, kRowTile);
    fill_zero(b.has_shift, kRowTile);
    fill_zero(b.shifted_sum, kRowTile);
    fill_zero(b.total, kRowTile);
    fill_zero(b.tangent_output_t, p.value_dim * kRowTile);

    const auto visit = [&](Range keys) {
      ScoreTile<T> tile;
      if (!tile.set(p, rows, keys, b.room)) return;
      const auto load_tile = [&](const Operand& x, int64_t head, T* to, int64_t ld, int64_t cols) {
        if (x.data) pack_rows<T>(to, ld, block_of(p, x, rows.n, head, keys.first), keys.size(), cols);
      };
      load_tile(p.key, key_head, b.key, b.ld_key, p.head_dim);
      load_tile(p.value, value_head, b.value, b.ld_value, p.value_dim);
      load_tile(p.t.key, key_head, b.tangent_key, b.ld_key, p.head_dim);
      load_tile(p.t.value, value_head, b.tangent_value, b.ld_value, p.value_dim);
      if constexpr (kRoundsScores) {
        const Block block = block_of(p, p.key, rows.n, key_head, keys.first);
        const Rows<T> score_key = F::along_columns(block, keys.size(), p.head_dim, b.score_key, b.ld_score_key);
        scores<F>(p, tile, b.score_query_t, score_key, b.x, b.kept);
      } else {
        scores<F>(p, tile, b.query_t, {b.key, b.ld_key}, b.x, b.kept);
      }
      tangent_scores<Singles<T>>(p, p.t, tile, b.query_t, b.tangent_query_t, {b.key, b.ld_key},
                                 {b.tangent_key, b.ld_key}, b.room, b.kept, nullptr, b.tx);
      weights(p, b, tile);
      const auto add_average = [&](const T* value, const T* weights) {
        multiply_transposed<Singles<T>>({p.value_dim, lanes, keys.size()}, {value, b.ld_value}, {weights, kRowTile},
                                        b.tangent_output_t, kRowTile, Store::add);
      };
      add_average(b.value, b.tx);
      if (p.t.value.data) add_average(b.tangent_value, b.x);
    };
    // With ALiBi, which a score_mod may compute too, the keys nearest to the rows weigh most. These keys come first, so
    // that r, the mean over the first tile, is close to the mean over all keys.
    const Range keys = own.keys_seen(p, rows.positions);
    const int64_t nearest = rows.positions.first + rows.sequence.offset;
    const int64_t first = (p.alibi_slopes || has_score_mod(p)) && keys.contains(nearest)
                              ? in_tiles({nearest, keys.last}, kKeyTile).first
                              : keys.first;
    each_tile_of_keys({first, keys.last}, visit);
    each_tile_of_keys({keys.first, first}, visit);

    for (int64_t i = 0; i < lanes; i += W) {
      const Vec<T> sink = load<T>(b.sink_weight + i), total = load<T>(b.total + i) + sink;
      const Vec<T> inverse = splat<T>(1) / (total == Vec<T>{} ? splat<T>(1) : total);
      const Vec<T> of_sink = sink * (load<T>(b.sink_tangent + i) - load<T>(b.shift + i));
      store<T>(b.shifted_sum + i, (load<T>(b.shifted_sum + i) + of_sink) * inverse);
      for (int64_t d = 0; d < p.value_dim; ++d) {
        T* at = b.tangent_output_t + d * kRowTile + i;
        store<T>(at, load<T>(at) * inverse);
      }
    }
    const auto subtract = [&](const Operand& output) {  // (c - r) O
      if (!output.data) return;
      rows.pack_transposed(p, output, p.value_dim, b.output_t);
      for (int64_t i = 0; i < lanes; i += W) {
        const Vec<T> shifted_sum = load<T>(b.shifted_sum + i);
        for (int64_t d = 0; d < p.value_dim; ++d) {
          T* at = b.tangent_output_t + d * kRowTile + i;
          store<T>(at, load<T>(at) - shifted_sum * load<T>(b.output_t + d * kRowTile + i));
        }
      }
    };
    subtract(p.output);
    subtract(p.residual);
    rows.template unpack_rounded<T>(p, p.tangent_output, p.tangent_residual, p.value_dim, b.tangent_output_t, b.x);
    for (int64_t i = 0; i < rows.count; ++i) {
      T* pair = static_cast<T*>(p.tangent_logsumexp) + 2 * rows.number(p, i);
      pair[0] = b.shift[i];
      pair[1] = b.shifted_sum[i];
    }
  }
};

}  // namespace attn::ATTN_ISA
