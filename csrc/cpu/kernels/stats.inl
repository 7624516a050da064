// Statistics of the scores of every row and the weight that every key receives, tile by tile: statistics.h. A pass over
// the keys finds each row's sum; a second one, over the rows, computes the scores again and adds up each key's weights.
#pragma once

#include "cpu/tiles/scores.inl"
#include "core/statistics.h"

namespace attn::ATTN_ISA {

// F: the format in which the forward multiplies queries and keys. Weights are computed in T, whatever the format.
template <class F>
struct Stats {
  using T = typename F::Number;
  static constexpr int W = kLanes<T>;
  static constexpr int kVectors = kRegisters == 32 ? 4 : 2;  // side by side, for each has four sums

  // Per tile of rows, kept while the keys pass: the fields of RowStatistics, a lane a row.
  struct RowState {
    RowTile rows;
    T* query_t;  // [slots of E][kRowTile]
    T *largest, *ones, *rest, *moment;
  };
  struct Buffers {
    RowState* states;
    T *reference, *inverse_sum;  // [kRowTile]
    T* key;                      // [keys of a task of the second pass][slots of E]
    T* x;                        // [kKeyTile][kRowTile]: scores
    T* bias;                     // as x
    T* received;                 // [keys of a task of the second pass][W]: sums of every W-th row
    int64_t ld_key;
    int64_t size;

    Buffers(const StatsParams& p, char* base) {
      Arena arena(base);
      const int64_t tiles = divide_up(p.rows_per_task, kRowTile);
      states = arena.take<RowState>(tiles);
      reference = arena.take<T>(kRowTile);
      inverse_sum = arena.take<T>(kRowTile);
      // One line of padding: a column of a power-of-two tile would fall into few sets of the cache.
      ld_key = row_of<F>(p.head_dim) + W;
      key = arena.take<T>(p.keys_per_task * ld_key);
      x = arena.take<T>(kKeyTile * kRowTile);
      bias = arena.take<T>(p.has_mask ? kKeyTile * kRowTile : 0);
      received = arena.take<T>(p.keys_per_task * W);
      arena.take_for_each(states, tiles, [&](RowState& state) {
        state.query_t = arena.take<T>(slots_of<F>(p.head_dim) * kRowTile);
        state.largest = arena.take<T>(kRowTile);
        state.ones = arena.take<T>(kRowTile);
        state.rest = arena.take<T>(kRowTile);
        state.moment = arena.take<T>(kRowTile);
      });
      size = arena.used();
    }
  };

  static int64_t workspace(const StatsParams& p) { return Buffers(p, nullptr).size; }

  static Rows<T> load_keys(const StatsParams& p, const Buffers& b, int64_t n, int64_t head, Range keys, T* tile) {
    const Block block = block_of(p, p.key, n, key_head_of(p, head), keys.first);
    return F::along_columns(block, keys.size(), p.head_dim, tile, b.ld_key);
  }

  // -------------------------------------------------------------------------------------------------------------
  // The first pass

  // Adds N vectors of lanes of the tile of scores to what is known of their rows.
  template <int N>
  static ATTN_INLINE void add_scores(const StatsParams& p, const Buffers& b, const RowState& state, int64_t keys,
                                     int64_t lane) {
    const T slope = log2_slope<T>(p);
    const T* const x = b.x + lane;
    const Vec<T> zero{}, least = splat<T>(static_cast<T>(kLeastExponent));
    Vec<T> old[N], best[N], shift[N], rest[N], moment[N];
    Vec<Int<T>> ones[N];
    for (int v = 0; v < N; ++v) best[v] = old[v] = load<T>(state.largest + lane + v * W);
    for (int64_t j = 0; j < keys; ++j)
      for (int v = 0; v < N; ++v) best[v] = max_number(load<T>(x + j * kRowTile + v * W), best[v]);
    for (int v = 0; v < N; ++v) {
      shift[v] = best[v] == -kInfinity<T> ? zero : best[v];  // a row without any key so far: weights exp(-inf - 0) = 0
      rest[v] = moment[v] = zero;
      ones[v] = Vec<Int<T>>{};
    }
    for (int64_t j = 0; j < keys; ++j)
      for (int v = 0; v < N; ++v) {
        Vec<T> exponent = (load<T>(x + j * kRowTile + v * W) - shift[v]) * slope;
        exponent = exponent < least ? least : exponent;  // as exponent_of()
        const auto is_one = exponent == zero;            // -1 where true
        const Vec<T> weight = is_one ? zero : exp2<T>(exponent);
        ones[v] -= is_one;
        rest[v] += weight;
        moment[v] += exponent * weight;
      }
    for (int v = 0; v < N; ++v) {
      const int64_t at = lane + v * W;
      // brought_to(), of a reference that has moved
      const auto moved = best[v] != old[v];
      Vec<T> old_ones = load<T>(state.ones + at), old_rest = load<T>(state.rest + at);
      Vec<T> old_moment = load<T>(state.moment + at);
      if (any(moved)) {
        Vec<T> exponent = (old[v] - shift[v]) * slope;
        exponent = exponent < least ? least : exponent;
        const Vec<T> sum = old_ones + old_rest, correction = exp2<T>(exponent);
        old_rest = moved ? sum * correction : old_rest;
        old_moment = moved ? (old_moment + exponent * sum) * correction : old_moment;
        old_ones = moved ? zero : old_ones;
      }
      // A sum that is NaN has met a NaN or +inf, and a row with a NaN must tell (max_number passes over it).
      if (any(rest[v] != rest[v]))
        for (int64_t j = 0; j < keys; ++j) {
          const Vec<T> score = load<T>(x + j * kRowTile + v * W);
          best[v] = score != score ? score : best[v];
        }
      store<T>(state.largest + at, best[v]);
      store<T>(state.ones + at, old_ones + __builtin_convertvector(ones[v], Vec<T>));
      store<T>(state.rest + at, old_rest + rest[v]);
      store<T>(state.moment + at, old_moment + moment[v]);
    }
  }

  static void rows(const StatsParams& p, int64_t task, char* workspace) {
    const Buffers b(p, workspace);
    const RowTask own(p, task);
    const RowTiles<RowState> rows(p, own, b.states, [&](RowState& state) {
      state.rows.template pack_columns<F>(p, p.query, p.head_dim, state.query_t);
      for (int64_t i = 0; i < kRowTile; ++i) state.largest[i] = -kInfinity<T>;
      fill_zero(state.ones, kRowTile);
      fill_zero(state.rest, kRowTile);
      fill_zero(state.moment, kRowTile);
    });
    Rows<T> key_rows;
    const auto load = [&](Range keys) { key_rows = load_keys(p, b, own.n, own.first_head, keys, b.key); };
    each_visible_tile(p, rows, own.keys_seen(p, rows.positions), b.bias, load,
                      [&](const RowState& state, const ScoreTile<T>& tile) {
                        scores<F>(p, tile, state.query_t, key_rows, b.x);
                        const int64_t keys = tile.keys.size(), lanes = tile.lanes();
                        int64_t lane = 0;
                        for (; lane + kVectors * W <= lanes; lane += kVectors * W)
                          add_scores<kVectors>(p, b, state, keys, lane);
                        for (; lane < lanes; lane += W) add_scores<1>(p, b, state, keys, lane);
                      });

    auto* partial = static_cast<RowStatistics<T>*>(p.partial) + own.split * number_of_rows(p);
    for (const RowState& state : rows)
      for (int64_t i = 0; i < state.rows.count; ++i)
        partial[state.rows.number(p, i)] = {state.largest[i], state.ones[i], state.rest[i], state.moment[i]};
  }

  // Puts the splits of the rows numbered [first, last) together, and writes what comes out.
  static void finish(const StatsParams& p, int64_t first, int64_t last) {
    const T slope = log2_slope<T>(p), scale = leaves_products<T>(p) ? ScoreFunction<T>::of(p).slope() : 1;
    const int64_t all_rows = number_of_rows(p);
    const auto* partial = static_cast<const RowStatistics<T>*>(p.partial);
    for (int64_t r = first; r < last; ++r) {
      RowStatistics<T> row = partial[r];
      for (int64_t s = 1; s < p.splits; ++s) {
        const RowStatistics<T> next = partial[s * all_rows + r];
        if (has_nan(row)) break;
        if (has_nan(next) || row.largest == -kInfinity<T>) {
          row = next;
        } else if (next.largest != -kInfinity<T>) {
          const T reference = common_reference(row, next);
          const T of_row = exponent_of(row.largest, reference, slope);
          const T of_next = exponent_of(next.largest, reference, slope);
          row = added(reference, brought_to(reference, row, of_row, power_of_2(of_row)),
                      brought_to(reference, next, of_next, power_of_2(of_next)));
        }
      }
      const FinishedRow<T> results = finished(row, scale, __builtin_log1p(sum_without_one(row)), kInfinity<T>);
      static_cast<T*>(p.largest_score)[r] = results.largest_score;
      static_cast<T*>(p.entropy)[r] = results.entropy;
      static_cast<T*>(p.logsumexp)[r] = results.logsumexp;
      T* pair = static_cast<T*>(p.pairs) + 2 * r;
      pair[0] = results.reference;
      pair[1] = results.inverse_sum;
    }
  }
  static ATTN_INLINE T power_of_2(T x) { return exp2<T>(splat<T>(x))[0]; }

  // -------------------------------------------------------------------------------------------------------------
  // The second pass

  static void keys(const StatsParams& p, int64_t task, char* workspace) {
    const Buffers b(p, workspace);
    RowState& state = b.states[0];
    const int64_t chunk = task % p.chunks;
    task /= p.chunks;
    const int64_t first_key = task % p.key_tasks_of_head() * p.keys_per_task;
    task /= p.key_tasks_of_head();
    const int64_t head = task % p.heads, n = task / p.heads;
    const Range own = {first_key, smaller(first_key + p.keys_per_task, p.keys)};
    const int64_t first_row = chunk * p.rows_per_chunk;
    const int64_t last_row = smaller(first_row + p.rows_per_chunk, sequence_of(p, n).queries);

    fill_zero(b.received, own.size() * W);
    Rows<T> tiles[kStatsKeyTiles] = {};  // once some row sees them
    for (int64_t r = first_row; r < last_row; r += kRowTile) {
      state.rows.set(p, n, head, {r, smaller(r + kRowTile, last_row)});
      bool has_queries = false;
      each_tile_of_keys(own, [&](Range keys) {
        ScoreTile<T> tile;
        if (!tile.set(p, state.rows, keys, b.bias)) return;
        const int64_t at = keys.first - own.first;
        Rows<T>& key_rows = tiles[at / kKeyTile];
        if (!key_rows.data) key_rows = load_keys(p, b, n, head, keys, b.key + at * b.ld_key);
        if (!has_queries) {
          state.rows.template pack_columns<F>(p, p.query, p.head_dim, state.query_t);
          state.rows.load_pairs(p, p.pairs, b.reference, b.inverse_sum);
          has_queries = true;
        }
        scores<F>(p, tile, state.query_t, key_rows, b.x);
        add_weights(p, b, state.rows, keys.size(), b.received + at * W);
      });
    }

    T* to = static_cast<T*>(p.chunks > 1 ? p.partial_received : p.received_weight);
    to += ((chunk * p.batch + n) * p.heads + head) * p.keys + own.first;
    for (int64_t j = 0; j < own.size(); ++j) to[j] = sum_of_lanes(b.received + j * W);
  }

  // In pairs: one after the other, up to 16 numbers would be rounded as often.
  static T sum_of_lanes(const T* lanes) {
    double sums[W];
    for (int i = 0; i < W; ++i) sums[i] = lanes[i];
    for (int half = W / 2; half > 0; half /= 2)
      for (int i = 0; i < half; ++i) sums[i] += sums[i + half];
    return static_cast<T>(sums[0]);
  }

  // received[j * W + i] += the weights of key j in the lanes i, i + W, ... of the tile.
  static void add_weights(const StatsParams& p, const Buffers& b, const RowTile& rows, int64_t keys, T* received) {
    const T slope = log2_slope<T>(p);
    const int64_t lanes = rows.template lanes<T>();
    const Vec<T> hidden = splat<T>(-kInfinity<T>);
    rows.fill_empty_lanes(b.x, keys, -kInfinity<T>);
    for (int64_t j = 0; j < keys; ++j) {
      Vec<T> sum{};
      for (int64_t i = 0; i < lanes; i += W) {
        const Vec<T> score = load<T>(b.x + j * kRowTile + i);
        const Vec<T> weight = exp2<T>((score - load<T>(b.reference + i)) * slope) * load<T>(b.inverse_sum + i);
        // by selection: a row whose sum is NaN gives no NaN to a key that it does not see
        sum += score == hidden ? Vec<T>{} : weight;
      }
      store<T>(received + j * W, load<T>(received + j * W) + sum);
    }
  }

  // Adds the chunks' shares of received_weight, in order, for numbers [first, last) of it.
  static void add_chunks(const StatsParams& p, int64_t first, int64_t last) {
    const T* partial = static_cast<const T*>(p.partial_received);
    const int64_t numbers = p.batch * p.heads * p.keys;
    for (int64_t i = first; i < last; ++i) {
      double sum = 0;
      for (int64_t c = 0; c < p.chunks; ++c) sum += partial[c * numbers + i];
      static_cast<T*>(p.received_weight)[i] = static_cast<T>(sum);
    }
  }
};

}  // namespace attn::ATTN_ISA
