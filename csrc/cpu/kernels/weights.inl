// Computes the weights, or their mean over the heads, and the output, for sdpa_with_weights. A thread keeps the scores
// of a tile of rows until it knows the sums of their weights, so each score is computed once. The scores take kRowTile
// numbers per key, and a mean takes another kRowTile numbers per key.
#pragma once

#include "cpu/kernels/splits.inl"

namespace attn::ATTN_ISA {

// F: the format in which the forward multiplies. Weights are computed in T, whatever the format.
template <class F>
struct Weights {
  using T = typename F::Number;
  static constexpr int W = kLanes<T>;

  struct Buffers {
    const WeightsParams& params;
    Arena arena;
    int64_t ld_key = row_of<F>(params.head_dim) + W, ld_value = row_of<F>(params.value_dim) + W;  // see forward.inl
    RowTile* rows = arena.take<RowTile>(1);
    T* query_t = arena.take<T>(slots_of<F>(params.head_dim) * kRowTile);        // [slots of E][kRowTile]
    T* key = arena.take<T>(kKeyTile * ld_key);                                  // [kKeyTile][slots of E]
    T* x = arena.take<T>(round_up(params.keys, kKeyTile) * kRowTile);           // [S][kRowTile]: scores, then weights
    T* mean = arena.take<T>(params.of_all_heads ? params.keys * kRowTile : 0);  // as x
    T* tile = arena.take<T>(kKeyTile * kRowTile);  // numbers of a mask, then scores to be written
    T* best = arena.take<T>(kRowTile);             // [kRowTile]
    T* sum = arena.take<T>(kRowTile);
    T* value = arena.take<T>(params.output.data ? slots_of<F>(kKeyTile) * ld_value : 0);  // [slots of kKeyTile][Ev]
    T* output_t = arena.take<T>(params.output.data ? params.value_dim * kRowTile : 0);    // [Ev][kRowTile]
    // [slots of kKeyTile][kRowTile]: weights, if the format cannot keep them in x
    T* slots = arena.take<T>(F::kWeightsInPlace ? 0 : slots_of<F>(kKeyTile) * kRowTile);
    int64_t size = arena.used();

    Buffers(const WeightsParams& p, char* base) : params(p), arena(base) {}
  };
  static int64_t workspace(const WeightsParams& p) { return Buffers(p, nullptr).size; }

  static void run(const WeightsParams& p, int64_t task, char* workspace) {
    const Buffers b(p, workspace);
    const int64_t row = task % p.row_tiles() * kRowTile;
    task /= p.row_tiles();
    const int64_t n = task / p.head_tasks(), head = task % p.head_tasks();
    const Range heads = p.of_all_heads ? Range{0, p.heads} : Range{head, head + 1};
    if (p.of_all_heads) fill_zero(b.mean, p.keys * kRowTile);
    for (int64_t h = heads.first; h < heads.last; ++h) {
      b.rows->set(p, n, h, {row, smaller(row + kRowTile, sequence_of(p, n).queries)});
      b.rows->template pack_columns<F>(p, p.query, p.head_dim, b.query_t);
      find_scores(p, b, h);
      find_weights(p, b);
      if (p.of_all_heads)
        each_vector(b.mean, p.keys, b.rows->template lanes<T>(), [&](Vec<T> sum, int64_t j, int64_t i) {
          return sum + load<T>(b.x + j * kRowTile + i) / static_cast<T>(p.heads);
        });
      else
        write(p, b, b.x);
      if (p.output.data) find_output(p, b, h);
    }
    if (p.of_all_heads) write(p, b, b.mean);
  }

  static void write(const WeightsParams& p, const Buffers& b, const T* weights) {
    each_tile_of_keys({0, p.keys}, [&](Range keys) {
      b.rows->unpack_transposed(p, p.weights, keys.size(), weights + keys.first * kRowTile, keys.first);
    });
  }

  // Writes scores to b.x, and the largest score of each row to b.best.
  static void find_scores(const WeightsParams& p, const Buffers& b, int64_t head) {
    const int64_t lanes = b.rows->template lanes<T>();
    const auto score = leaves_products<T>(p) ? ScoreFunction<T>::of(p) : ScoreFunction<T>::identity();
    for (int64_t i = 0; i < kRowTile; ++i) b.best[i] = -kInfinity<T>;
    each_tile_of_keys({0, p.keys}, [&](Range keys) {
      T* const x = b.x + keys.first * kRowTile;
      ScoreTile<T> tile;
      Range own = common(keys, {0, b.rows->sequence.keys});
      if (!own.empty() && tile.set(p, *b.rows, own, b.tile)) {
        const Block block = block_of(p, p.key, b.rows->n, key_head_of(p, head), keys.first);
        scores<F>(p, tile, b.query_t, F::along_columns(block, own.size(), p.head_dim, b.key, b.ld_key), x);
      } else {
        own = {};
      }
      for (int64_t i = own.size() * kRowTile; i < keys.size() * kRowTile; i += W)
        store<T>(x + i, splat<T>(-kInfinity<T>));
      each_vector(x, keys.size(), lanes, [&](Vec<T> score, int64_t, int64_t i) {
        store<T>(b.best + i, max_number(score, load<T>(b.best + i)));
        return score;
      });
      if (!p.scores.data) return;
      for (int64_t i = 0; i < keys.size() * kRowTile; i += W) store<T>(b.tile + i, score(load<T>(x + i)));
      b.rows->unpack_transposed(p, p.scores, keys.size(), b.tile, keys.first);
    });
  }

  // Turns scores into weights. A row whose sum is NaN has NaN weights for hidden keys too, because 0 * NaN is NaN.
  static void find_weights(const WeightsParams& p, const Buffers& b) {
    const T slope = log2_slope<T>(p);
    const int64_t lanes = b.rows->template lanes<T>();
    for (int64_t i = 0; i < kRowTile; ++i) {
      if (b.best[i] == -kInfinity<T>) b.best[i] = 0;  // a row without keys: exp(-inf - 0) = 0
      b.sum[i] = 0;
    }
    each_tile_of_keys({0, p.keys}, [&](Range keys) {
      T of_tile[kRowTile] = {};
      each_vector(b.x + keys.first * kRowTile, keys.size(), lanes, [&](Vec<T> x, int64_t, int64_t i) {
        const Vec<T> weight = exp2<T>((x - load<T>(b.best + i)) * slope);
        store<T>(of_tile + i, load<T>(of_tile + i) + weight);
        return weight;
      });
      for (int64_t i = 0; i < lanes; ++i) b.sum[i] += of_tile[i];
    });
    for (int64_t i = 0; i < lanes; i += W) {
      Vec<T> reference = load<T>(b.best + i), sum = load<T>(b.sum + i), factor = splat<T>(1);
      if (p.sinks) factor = add_sinks<T>(p, sinks_of(p, *b.rows, i), reference, sum);
      store<T>(b.sum + i, factor / (sum == Vec<T>{} ? splat<T>(1) : sum));
    }
    each_vector(b.x, p.keys, lanes, [&](Vec<T> x, int64_t, int64_t i) { return x * load<T>(b.sum + i); });
  }

  static Vec<T> sinks_of(const WeightsParams& p, const RowTile& rows, int64_t lane) {
    Vec<T> sinks{};
    for (int64_t i = 0; i < W; ++i)
      sinks[i] = sink_of<T>(p, rows.n * p.heads + rows.head[smaller(lane + i, rows.count - 1)]);
    return sinks;
  }

  // O^T = V^T P^T. Skips hidden tiles, as the forward does. Overwrites the weights.
  static void find_output(const WeightsParams& p, const Buffers& b, int64_t head) {
    const int64_t lanes = b.rows->template lanes<T>();
    fill_zero(b.output_t, p.value_dim * kRowTile);
    each_tile_of_keys({0, b.rows->sequence.keys}, [&](Range keys) {
      ScoreTile<T> tile;
      if (!tile.set(p, *b.rows, keys, b.tile)) return;
      const Block block = block_of(p, p.value, b.rows->n, value_head_of(p, head), keys.first);
      const Rows<T> value = F::along_rows(block, keys.size(), p.value_dim, b.value, b.ld_value);
      const T* const weights = F::along_keys(b.x + keys.first * kRowTile, keys.size(), lanes, b.slots);
      each_panel_of_lanes<F>(tile, [&](int64_t at, int64_t count, Range seen) {
        const int64_t slot = F::slot(seen.first, 0);
        multiply_transposed<F>({p.value_dim, count, slots_of<F>(seen.size())}, rows_from(value, slot),
                               {weights + slot * kRowTile + at, kRowTile}, b.output_t + at, kRowTile, Store::add);
      });
    });
    b.rows->unpack_transposed(p, p.output, p.value_dim, b.output_t);
  }
};

}  // namespace attn::ATTN_ISA
