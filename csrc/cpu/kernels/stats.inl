// Computes the statistics of every row's scores (statistics.h), and the weight that every key receives, tile by tile.
// The first pass goes over the keys and finds each row's sum. The second pass goes over the rows and adds up each key's
// weights. The second pass computes the scores again, unless rows are so few that the first pass keeps their scores
// (FewStats).
#pragma once

#include "core/statistics.h"
#include "cpu/tiles/few_rows.inl"

namespace attn::ATTN_ISA {

// The RowStatistics of kRowTile lanes, while scores are added.
template <class T>
struct LanesOfStatistics {
  static constexpr int W = kLanes<T>;
  static constexpr int kVectors = kRegisters == 32 ? 4 : 2;  // added at once: each has four sums in registers

  T *largest, *ones, *rest, *moment;  // [kRowTile]

  explicit LanesOfStatistics(Arena& arena)
      : largest(arena.take<T>(kRowTile)),
        ones(arena.take<T>(kRowTile)),
        rest(arena.take<T>(kRowTile)),
        moment(arena.take<T>(kRowTile)) {}
  void clear(T reference = -kInfinity<T>) const {
    for (int64_t i = 0; i < kRowTile; ++i) largest[i] = reference;
    fill_zero(ones, kRowTile);
    fill_zero(rest, kRowTile);
    fill_zero(moment, kRowTile);
  }
  RowStatistics<T> operator[](int64_t lane) const { return {largest[lane], ones[lane], rest[lane], moment[lane]}; }

  // Adds the scores or products x[j * ld + i] with j < keys to each lane i < lanes.
  void add(const T* x, int64_t ld, int64_t keys, int64_t lanes, T slope) const {
    int64_t lane = 0;
    for (; lane + kVectors * W <= lanes; lane += kVectors * W) add_vectors<kVectors>(x + lane, ld, keys, lane, slope);
    for (; lane < lanes; lane += W) add_vectors<1>(x + lane, ld, keys, lane, slope);
  }

 private:
  template <int N>
  ATTN_INLINE void add_vectors(const T* x, int64_t ld, int64_t keys, int64_t lane, T slope) const {
    const Vec<T> zero{}, least = splat<T>(static_cast<T>(kLeastExponent));
    Vec<T> old[N], best[N], shift[N], new_rest[N], new_moment[N];
    Vec<Int<T>> new_ones[N];
    for (int v = 0; v < N; ++v) best[v] = old[v] = load<T>(largest + lane + v * W);
    for (int64_t j = 0; j < keys; ++j)
      for (int v = 0; v < N; ++v) best[v] = max_number(load<T>(x + j * ld + v * W), best[v]);
    for (int v = 0; v < N; ++v) {
      shift[v] = best[v] == -kInfinity<T> ? zero : best[v];  // a row without any key so far: weights exp(-inf - 0) = 0
      new_rest[v] = new_moment[v] = zero;
      new_ones[v] = Vec<Int<T>>{};
    }
    for (int64_t j = 0; j < keys; ++j)
      for (int v = 0; v < N; ++v) {
        Vec<T> exponent = (load<T>(x + j * ld + v * W) - shift[v]) * slope;
        exponent = exponent < least ? least : exponent;  // as exponent_of() does
        const auto is_one = exponent == zero;            // -1 where true
        const Vec<T> weight = is_one ? zero : exp2<T>(exponent);
        new_ones[v] -= is_one;
        new_rest[v] += weight;
        new_moment[v] += exponent * weight;
      }
    for (int v = 0; v < N; ++v) {
      const int64_t at = lane + v * W;
      // If the reference has moved, brings the sums to the new reference, as brought_to() does (statistics.h).
      const auto moved = best[v] != old[v];
      Vec<T> old_ones = load<T>(ones + at), old_rest = load<T>(rest + at), old_moment = load<T>(moment + at);
      if (any(moved)) {
        Vec<T> exponent = (old[v] - shift[v]) * slope;
        exponent = exponent < least ? least : exponent;
        const Vec<T> sum = old_ones + old_rest, correction = exp2<T>(exponent);
        old_rest = moved ? sum * correction : old_rest;
        old_moment = moved ? (old_moment + exponent * sum) * correction : old_moment;
        old_ones = moved ? zero : old_ones;
      }
      // A sum is NaN if a score is NaN or +inf. If a score is NaN, the row's largest score must be NaN, too, but
      // max_number() skips NaNs.
      if (any(new_rest[v] != new_rest[v]))
        for (int64_t j = 0; j < keys; ++j) {
          const Vec<T> score = load<T>(x + j * ld + v * W);
          best[v] = score != score ? score : best[v];
        }
      store<T>(largest + at, best[v]);
      store<T>(ones + at, old_ones + __builtin_convertvector(new_ones[v], Vec<T>));
      store<T>(rest + at, old_rest + new_rest[v]);
      store<T>(moment + at, old_moment + new_moment[v]);
    }
  }
};

// A task of the second pass. It adds up the weights of some keys of a head over a chunk of the head's rows.
struct KeyTask {
  int64_t n, head, chunk;
  Range keys, rows;

  KeyTask(const StatsParams& p, int64_t task) {
    chunk = task % p.chunks;
    task /= p.chunks;
    const int64_t first = task % p.key_tasks_of_head() * p.keys_per_task;
    task /= p.key_tasks_of_head();
    head = task % p.heads;
    n = task / p.heads;
    keys = {first, smaller(first + p.keys_per_task, p.keys)};
    rows = {chunk * p.rows_per_chunk, smaller((chunk + 1) * p.rows_per_chunk, sequence_of(p, n).queries)};
  }
  // Where the task writes its sums.
  void* received(const StatsParams& p, int64_t size) const {
    const int64_t at = ((chunk * p.batch + n) * p.heads + head) * p.keys + keys.first;
    return static_cast<char*>(p.chunks > 1 ? p.partial_received : p.received_weight) + at * size;
  }
};

// F: the format in which the forward multiplies queries and keys. Weights are computed in T, whatever the format.
template <class F>
struct Stats {
  using T = typename F::Number;
  static constexpr int W = kLanes<T>;

  // The state of a tile of rows, which a pass keeps from one tile of keys to the next.
  struct RowState {
    RowTile rows;
    T* query_t;  // [slots of E][kRowTile]
    LanesOfStatistics<T> sums;

    RowState(const StatsParams& p, Arena& arena)
        : query_t(arena.take<T>(slots_of<F>(p.head_dim) * kRowTile)), sums(arena) {}
  };
  struct Buffers {
    const StatsParams& params;
    Arena arena;
    int64_t tiles = divide_up(params.rows_per_task, kRowTile);
    // Pads each row by one cache line, because a column would use only few sets of the cache if the length of a row
    // were a power of two.
    int64_t ld_key = row_of<F>(params.head_dim) + W;
    RowState* states = arena.make<RowState>(tiles, params);
    T* reference = arena.take<T>(kRowTile);  // [kRowTile]
    T* inverse_sum = arena.take<T>(kRowTile);
    T* key = arena.take<T>(params.keys_per_task * ld_key);  // [keys of a task of the second pass][slots of E]
    T* x = arena.take<T>(kKeyTile * kRowTile);              // [kKeyTile][kRowTile]: scores
    T* room = arena.take<T>(room_of_tile<T>(params));       // of a ScoreTile
    // [keys of a task of the second pass][W]: sums of every W-th row
    T* received = arena.take<T>(params.keys_per_task * W);
    int64_t size = arena.used();

    Buffers(const StatsParams& p, char* base) : params(p), arena(base) {}
  };

  static int64_t workspace(const StatsParams& p) { return Buffers(p, nullptr).size; }

  static Rows<T> load_keys(const StatsParams& p, const Buffers& b, int64_t n, int64_t head, Range keys, T* tile) {
    const Block block = block_of(p, p.key, n, key_head_of(p, head), keys.first);
    return F::along_columns(block, keys.size(), p.head_dim, tile, b.ld_key);
  }

  // -------------------------------------------------------------------------------------------------------------
  // The first pass

  static void rows(const StatsParams& p, int64_t task, char* workspace) {
    const Buffers b(p, workspace);
    const RowTask own(p, task);
    const RowTiles<RowState> rows(p, own, b.states, [&](RowState& state) {
      state.rows.template pack_columns<F>(p, p.query, p.head_dim, state.query_t);
      state.sums.clear();
    });
    Rows<T> key_rows;
    const auto load = [&](Range keys) { key_rows = load_keys(p, b, own.n, own.first_head, keys, b.key); };
    each_visible_tile(p, rows, own.keys_seen(p, rows.positions), b.room, load,
                      [&](const RowState& state, const ScoreTile<T>& tile) {
                        scores<F>(p, tile, state.query_t, key_rows, b.x);
                        state.sums.add(b.x, kRowTile, tile.keys.size(), tile.lanes(), log2_slope<T>(p));
                      });

    auto* partial = static_cast<RowStatistics<T>*>(p.partial) + own.split * number_of_rows(p);
    for (const RowState& state : rows)
      for (int64_t i = 0; i < state.rows.count; ++i) partial[state.rows.number(p, i)] = state.sums[i];
  }

  // Merges the splits of the rows numbered [first, last), and writes the results.
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
      const T largest = row.largest, sink = sink_of<T>(p, r / p.queries);
      double sink_weight = 0;
      if (sink != -kInfinity<T> && !has_nan(row)) {
        const T found = as_in_tiles<T>(p, splat<T>(sink))[0], reference = found > row.largest ? found : row.largest;
        const T exponent = exponent_of(row.largest, reference, slope);
        row = brought_to(reference, row, exponent, power_of_2(exponent));
        sink_weight = __builtin_exp2((static_cast<double>(found) - reference) * slope);
      }
      const double log_sum = __builtin_log1p(sum_without_one(row, sink_weight));
      const FinishedRow<T> results = finished(row, largest, scale, sink_weight, log_sum, kInfinity<T>);
      static_cast<T*>(p.largest_score)[r] = results.largest_score;
      static_cast<T*>(p.entropy)[r] = results.entropy;
      static_cast<T*>(p.logsumexp)[r] = largest == -kInfinity<T> || sink > results.logsumexp ? sink : results.logsumexp;
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
    const KeyTask own(p, task);

    fill_zero(b.received, own.keys.size() * W);
    Rows<T> tiles[kStatsKeyTiles] = {};  // a tile is packed when a row first sees it
    const Sequence sequence = sequence_of(p, own.n);
    const Range seeing = common(visible_rows(sequence, own.keys), own.rows);
    const int64_t first = own.rows.first + (seeing.first - own.rows.first) / kRowTile * kRowTile;
    for (int64_t r = first; r < seeing.last; r += kRowTile) {
      state.rows.set(p, own.n, own.head, {r, smaller(r + kRowTile, own.rows.last)});
      bool has_queries = false;
      each_tile_of_keys(common(own.keys, {0, sequence.keys}), [&](Range keys) {
        ScoreTile<T> tile;
        if (!tile.set(p, state.rows, keys, b.room)) return;
        const int64_t at = keys.first - own.keys.first;
        Rows<T>& key_rows = tiles[at / kKeyTile];
        if (!key_rows.data) key_rows = load_keys(p, b, own.n, own.head, keys, b.key + at * b.ld_key);
        if (!has_queries) {
          state.rows.template pack_columns<F>(p, p.query, p.head_dim, state.query_t);
          state.rows.load_two_per_row(p, p.pairs, b.reference, b.inverse_sum);
          has_queries = true;
        }
        scores<F>(p, tile, state.query_t, key_rows, b.x);
        add_weights(p, b, state.rows, keys.size(), b.received + at * W);
      });
    }

    T* to = static_cast<T*>(own.received(p, sizeof(T)));
    for (int64_t j = 0; j < own.keys.size(); ++j) to[j] = sum_of_lanes(b.received + j * W);
  }

  // Adds in pairs, because each number then goes through fewer roundings than if up to 16 numbers were added one by
  // one.
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
        // Selects 0, because a row whose sum is NaN must not give a NaN to a key that the row does not see.
        sum += score == hidden ? Vec<T>{} : weight;
      }
      store<T>(received + j * W, load<T>(received + j * W) + sum);
    }
  }

  // Adds up the chunks' shares, in order, for numbers [first, last) of received_weight.
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

// The two passes over few rows. few_rows.inl computes the scores, and the first pass keeps them in p.scores. All rows
// are one chunk.
template <class T>
struct FewStats {
  using Few = FewRows<Singles<T>>;
  static constexpr int W = kLanes<T>;

  // Another instruction set, in which a lane multiplies two numbers at once, may support the problem, too. FewStats
  // then takes at most kRowsBesidePairs rows. This number was measured. See Decode.
  static constexpr int64_t kRowsBesidePairs = 12;
  static bool takes(const StatsParams& p, bool beside_pairs) {
    return Few::takes(p, beside_pairs ? kRowsBesidePairs : Few::kMost);
  }

  struct Buffers {
    const StatsParams& params;
    Arena arena;
    Few* few = arena.make<Few>(1, params);
    LanesOfStatistics<T> sums{arena};
    int64_t size = arena.used();

    Buffers(const StatsParams& p, char* base) : params(p), arena(base) {}
  };

  static int64_t workspace(const StatsParams& p) { return Buffers(p, nullptr).size; }

  static void rows(const StatsParams& p, int64_t task, char* workspace) {
    const Buffers b(p, workspace);
    const RowTask own(p, task);
    b.few->set(p, own);
    const RowTile& rows = b.few->rows;
    const Range seen = own.keys_seen(p, rows.positions);
    const int64_t ld = round_up(p.keys, kKeyTile), first_row = rows.number(p, 0);  // the other rows follow
    T* const x = static_cast<T*>(p.scores) + first_row * ld;
    Range visible{};  // holds the tiles of all keys that a mask does not hide
    for (int64_t key = seen.first; key < seen.last; key += kKeyTile) {
      const int64_t keys = b.few->scores(p, key, seen.last, x + key, ld);
      if (keys > 0) visible = hull(visible, {key, key + kKeyTile});
      for (int64_t r = 0; r < rows.count; ++r)
        for (int64_t j = keys; j < kKeyTile; ++j) x[r * ld + key + j] = -kInfinity<T>;
    }
    auto* partial = static_cast<RowStatistics<T>*>(p.partial) + own.split * number_of_rows(p) + first_row;
    for (int64_t r = 0; r < rows.count; ++r) partial[r] = of_row(p, b.sums, x + r * ld, visible);
  }

  // Each of kRowTile lanes adds up every kRowTile-th score, relative to the row's largest score.
  static RowStatistics<T> of_row(const StatsParams& p, const LanesOfStatistics<T>& sums, const T* x, Range keys) {
    Vec<T> best = splat<T>(-kInfinity<T>);
    for (int64_t j = keys.first; j < keys.last; j += W) best = max_number(load<T>(x + j), best);
    RowStatistics<T> all = {largest_of(best), 0, 0, 0};
    sums.clear(all.largest);
    sums.add(x + keys.first, kRowTile, keys.size() / kRowTile, kRowTile, log2_slope<T>(p));
    for (int64_t i = 0; i < kRowTile && !has_nan(all); ++i)
      all = has_nan(sums[i]) ? sums[i] : added(all.largest, all, sums[i]);
    return all;
  }

  static void keys(const StatsParams& p, int64_t task, char*) {
    const KeyTask own(p, task);
    const T slope = log2_slope<T>(p);
    const Vec<T> hidden = splat<T>(-kInfinity<T>);
    T* const to = static_cast<T*>(own.received(p, sizeof(T)));
    const int64_t first_row = row_number(p, own.n, own.head, own.rows.first), ld = round_up(p.keys, kKeyTile);
    const T* const x = static_cast<const T*>(p.scores) + first_row * ld + own.keys.first;
    const T* const pairs = static_cast<const T*>(p.pairs) + 2 * first_row;
    fill_zero(to, own.keys.size());
    const Range seen = in_tiles(common(visible_keys(sequence_of(p, own.n), own.rows), own.keys), kKeyTile);
    for (int64_t j = seen.first - own.keys.first; j < seen.last - own.keys.first; j += W) {
      Vec<T> sum{};
      for (int64_t r = 0; r < own.rows.size(); ++r) {
        const Vec<T> score = load<T>(x + r * ld + j);
        if (!any(score != hidden)) continue;
        const Vec<T> weight = exp2<T>((score - pairs[2 * r]) * slope) * pairs[2 * r + 1];
        sum += score == hidden ? Vec<T>{} : weight;
      }
      if (j + W <= own.keys.size())
        store<T>(to + j, sum);
      else
        store_some<T>(to + j, sum, own.keys.size() - j);
    }
  }
};

}  // namespace attn::ATTN_ISA
