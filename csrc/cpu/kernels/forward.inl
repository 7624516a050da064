// O = softmax(scale Q K^T + mask) V, tile by tile with the online softmax (Milakov & Gimelshein, 2018; Rabe & Staats,
// 2021; Dao et al., FlashAttention, 2022). The kernel keeps a reference m of each row, and the sum l of the row's
// weights exp(x - m). m is the largest score so far or a little less. If a tile raises m, earlier sums are multiplied
// by exp(m_old - m_new). scores() (cpu/tiles/scores.inl) computes the scores, with a score_mod, too.
#pragma once

#include "cpu/kernels/prepacked.inl"
#include "cpu/kernels/splits.inl"
#include "cpu/tiles/dropout.inl"
#include "cpu/tiles/scores.inl"

namespace attn::ATTN_ISA {

// F: the format of the operands of the products.
template <Format F>
struct Forward {
  using T = typename F::Number;
  static constexpr int W = kLanes<T>;
  static constexpr T kLag = 8;  // see softmax()

  // Queries are the columns of a product, so few queries leave most of a register tile empty. With at most kFewRows
  // rows, the kernel computes O = P V instead of O^T = V^T P^T. Both give the same sums, bit for bit.
  static constexpr int64_t kFewRows = F::kTiles ? 0 : 3 * W;
  static bool has_few_rows(const ForwardParams& p) { return p.rows() <= kFewRows; }

  // The rows of a tile. If the format uses the tile instructions of the processor, there is only one panel of rows, for
  // two reasons: a product takes no more rows at once, and the data of two panels would not stay in the L1 cache.
  static constexpr int64_t kRows = F::kTiles ? kPanel<F> : kRowTile;

  // Whether a second product computes the rest of O. The rest is the part of O that is lost because weights are rounded
  // to one bfloat16. The kernel's output then has twice as many columns: first the columns of O, then the columns of
  // the rest.
  static bool has_rest(const ForwardParams& p) { return F::kNumbers > 1 && F::kSummands == 1 && p.exact_residual; }
  static int64_t columns(const ForwardParams& p) { return p.value_dim * (has_rest(p) ? 2 : 1); }

  // The state of a tile of rows, which the kernel keeps from one tile of keys to the next.
  struct RowState {
    RowTile rows;
    bool started;  // after the first keys: reference, sum and output_t hold values
    T* query_t;    // [slots of E][kRowTile]
    T* output_t;   // [columns][kRowTile]; if few rows, [kFewRows + 1][ld_output], the last row for finish()
    T* reference;  // [kRowTile]
    T* sum;
    T* largest;  // [kRowTile]: the largest of all scores; null unless max_score is wanted
  };
  struct Buffers {
    const ForwardParams& params;
    Arena arena;
    int64_t blocks = divide_up(params.rows_per_task, kRowTile);
    bool few_rows = has_few_rows(params);
    // Pads each row by one cache line, because a column would use only few sets of the cache if the length of a row
    // were a power of two.
    int64_t ld_key = row_of<F>(params.head_dim) + W, ld_value = row_of<F>(params.value_dim) + W;
    // If few rows: where the rest of a row begins, and the length of a row.
    int64_t rest_of_row = round_up(params.value_dim, W), ld_output = rest_of_row * (has_rest(params) ? 2 : 1);
    RowState* states = arena.take<RowState>(blocks * (kRowTile / kRows));
    T* key = arena.take<T>(kKeyTile * ld_key);                   // [kKeyTile][slots of E]
    T* value = arena.take<T>(slots_of<F>(kKeyTile) * ld_value);  // [slots of kKeyTile][Ev]
    T* x = arena.take<T>(kKeyTile * kRowTile);                   // [kKeyTile][kRowTile]: scores
    // [slots of kKeyTile][kRowTile], in x if the format can keep them there
    T* weights = F::kWeightsInPlace ? x : arena.take<T>(slots_of<F>(kKeyTile) * kRowTile);
    // As weights: what the weights lost when rounded.
    T* rest = has_rest(params) ? arena.take<T>(slots_of<F>(kKeyTile) * kRowTile) : nullptr;
    T* room = arena.take<T>(room_of_tile<T>(params));                         // of a ScoreTile
    T* factor = arena.take<T>(params.has_dropout ? kKeyTile * kRowTile : 0);  // as x
    T* key_scale = params.key_scale.data ? arena.take<T>(kKeyTile) : nullptr;
    T* value_scale = params.value_scale.data ? arena.take<T>(kKeyTile) : nullptr;
    char* key_copy = arena.take<char>(bytes_of_copy(params, params.head_dim));  // where key_block() copies keys
    char* value_copy = arena.take<char>(bytes_of_copy(params, params.value_dim));
    // Shared by all states: see columns().
    T* query_t = arena.take<T>(blocks * slots_of<F>(params.head_dim) * kRowTile);
    T* output_t = arena.take<T>(few_rows ? (kFewRows + 1) * ld_output : blocks * Forward::columns(params) * kRowTile);
    T* reference = arena.take<T>(blocks * kRowTile);
    T* sum = arena.take<T>(blocks * kRowTile);
    T* largest = arena.take<T>(params.max_score ? blocks * kRowTile : 0);
    T* tables = arena.take<T>(blocks * size_transposed(params));  // see RowTile
    int64_t size = arena.used();

    Buffers(const ForwardParams& p, char* base) : params(p), arena(base) {}
    // All states share one array of blocks [depth][kRowTile]. Returns the columns of one state in this array. If a tile
    // has fewer than kRowTile rows, several tiles are side by side in a block.
    T* columns(T* blocks, int64_t depth, const RowState& state) const {
      const int64_t row = (&state - states) * kRows;
      return blocks + row / kRowTile * depth * kRowTile + row % kRowTile;
    }
  };

  // Finds the largest score of each lane. Uses several chains of operations, because an operation waits for the
  // previous operation of its chain.
  template <int N>
  static ATTN_INLINE void find_best(const T* x, int64_t keys, Vec<T> (&best)[N]) {
    constexpr int64_t kChains = N < 4 ? 4 : 1;
    Vec<T> chains[kChains][N];
    const auto take = [&](int64_t chain, int64_t j) __attribute__((always_inline)) {
#pragma GCC unroll 4
      for (int v = 0; v < N; ++v) chains[chain][v] = max_number(load<T>(x + j * kRowTile + v * W), chains[chain][v]);
    };
    for (auto& chain : chains)
      for (Vec<T>& largest : chain) largest = splat<T>(-kInfinity<T>);
    int64_t j = 0;
    for (; j + kChains <= keys; j += kChains)
#pragma GCC unroll 4
      for (int64_t chain = 0; chain < kChains; ++chain) take(chain, j + chain);
    for (; j < keys; ++j) take(0, j);
    for (int v = 0; v < N; ++v) {
      best[v] = chains[0][v];
      for (int64_t chain = 1; chain < kChains; ++chain) best[v] = max_number(chains[chain][v], best[v]);
    }
  }

  // Turns the scores of N vectors of lanes, from `lane` on, into unnormalised weights exp(x - reference). A slot of
  // weights holds neighbouring keys of one lane. Multiplies the weights by the factors of dropout, if there are any. A
  // reference moves to the largest score once this score is more than kLag powers of 2 above the reference. So no
  // weight is larger than 2^kLag, and sums are seldom corrected.
  template <int N>
  static ATTN_INLINE void softmax(const ForwardParams& p, const Buffers& b, RowState& state, const Rows<T>& values,
                                  int64_t keys, int64_t lane) {
    const T slope = log2_slope<T>(p);
    const T* const x = b.x + lane;
    const T* const factor = p.has_dropout ? b.factor + lane : nullptr;
    T *const weights = b.weights + lane, *const reference = state.reference + lane, *const sum = state.sum + lane;
    Vec<T> old[N], best[N], shift[N], total[N];
    find_best(x, keys, best);
    if (state.largest)
      for (int v = 0; v < N; ++v) {
        T* at = state.largest + lane + v * W;
        store<T>(at, max_number(best[v], load<T>(at)));
      }
    for (int v = 0; v < N; ++v) {
      old[v] = state.started ? load<T>(reference + v * W) : splat<T>(-kInfinity<T>);
      best[v] = (best[v] - old[v]) * slope > kLag ? best[v] : old[v];
      store<T>(reference + v * W, best[v]);
      shift[v] = best[v] == -kInfinity<T> ? Vec<T>{} : best[v];  // a row without any key so far: exp(-inf - 0) = 0
      total[v] = Vec<T>{};
    }
    const auto weigh = [&]<int kKeys>(int64_t j, std::integral_constant<int, kKeys>) __attribute__((always_inline)) {
      constexpr int kVectors = kKeys * N;
      if constexpr (F::kTiles)  // prefetches what the product with V will read: processors do not foresee tile loads
        for (int64_t d = j; d < smaller(j + kKeys, p.value_dim); ++d)
          for (int v = 0; v < N; ++v) {
            __builtin_prefetch(state.output_t + d * kRowTile + lane + v * W);
            __builtin_prefetch(values.data + d * values.ld + v * W);
          }
      Vec<T> weight[kVectors];
#pragma GCC unroll 8
      for (int i = 0; i < kVectors; ++i)
        weight[i] = (load<T>(x + (j + i / N) * kRowTile + i % N * W) - shift[i % N]) * slope;
      F::exp2(weight);
#pragma GCC unroll 8
      for (int i = 0; i < kVectors; ++i) {
        total[i % N] += weight[i];
        if (factor) weight[i] *= load<T>(factor + (j + i / N) * kRowTile + i % N * W);
        if (b.value_scale) weight[i] *= b.value_scale[j + i / N];
      }
      for (int v = 0; v < N; ++v) {
        Vec<T> slot[F::kNumbers] = {};
        for (int k = 0; k < kKeys; ++k) slot[k] = weight[k * N + v];
        F::store_along_keys(weights + v * W, j, slot);  // leaves the rounding error in `slot`
        if (F::kNumbers > 1 && b.rest) F::store_along_keys(b.rest + lane + v * W, j, slot);
      }
    };
    int64_t j = 0;
    for (; j + F::kNumbers <= keys; j += F::kNumbers) weigh(j, std::integral_constant<int, F::kNumbers>());
    if (j < keys) weigh(j, std::integral_constant<int, 1>());  // part of a slot
    if (!state.started) {
      for (int v = 0; v < N; ++v) store<T>(sum + v * W, total[v]);
      return;
    }
    bool moved = false;  // a reference of -inf does not count: such a row had no key so far, and its sums are 0
    for (int v = 0; v < N; ++v) moved |= any((best[v] != old[v]) & (old[v] != splat<T>(-kInfinity<T>)));
    if (!moved) {
      for (int v = 0; v < N; ++v) store<T>(sum + v * W, load<T>(sum + v * W) + total[v]);
      return;
    }
    Vec<T> correction[N];
    for (int v = 0; v < N; ++v) correction[v] = (old[v] - shift[v]) * slope;
    F::exp2(correction);
    for (int v = 0; v < N; ++v) store<T>(sum + v * W, load<T>(sum + v * W) * correction[v] + total[v]);
    if (b.few_rows) {
      for (int64_t i = lane; i < smaller(lane + N * W, state.rows.count); ++i)
        scale_tile<T>(state.output_t + i * b.ld_output, b.ld_output, correction[(i - lane) / W][(i - lane) % W]);
      return;
    }
    for (int64_t d = 0; d < columns(p); ++d)
      for (int v = 0; v < N; ++v) {
        T* at = state.output_t + d * kRowTile + lane + v * W;
        store<T>(at, load<T>(at) * correction[v]);
      }
  }

  // The keys and values of a tile: the blocks of their tensors, and the operands of products.
  struct Tile {
    Block key, value;
    Rows<T> key_rows, value_rows;
  };
  static void visit(const ForwardParams& p, const Buffers& b, RowState& state, const ScoreTile<T>& tile,
                    const Tile& from) {
    RowsAhead next_keys(p, from.key, tile.keys, p.head_dim, state.rows.count);
    scores<F>(p, tile, state.query_t, from.key_rows, b.x, nullptr, next_keys, b.key_scale);
    const int64_t keys = tile.keys.size(), lanes = tile.lanes();
    if (p.has_dropout) dropout_factors<T>(p, state.rows, tile.keys, 1, b.factor);
    int64_t lane = 0;
    constexpr int kVectors = kRows / W < 4 ? kRows / W : 4;
    for (; lane + kVectors * W <= lanes; lane += kVectors * W)
      softmax<kVectors>(p, b, state, from.value_rows, keys, lane);
    for (; lane < lanes; lane += W) softmax<1>(p, b, state, from.value_rows, keys, lane);
    // O += P V, or O^T += V^T P^T
    const Store store = state.started ? Store::add : Store::set;
    const auto add_average = [&](T* of_keys, int64_t rest_of_row, int64_t rest_of_tile) __attribute__((always_inline)) {
      F::end_along_keys(of_keys, keys, lanes);
      each_panel_of_lanes<F>(tile, [&](int64_t at, int64_t count, Range seen) {
        const int64_t slot = F::slot(seen.first, 0);
        const Rows<T> weights = {of_keys + slot * kRowTile + at, kRowTile};
        const Rows<T> values = rows_from(from.value_rows, slot);
        const int64_t slots = slots_of<F>(seen.size()), rows = smaller(count, state.rows.count - at);
        RowsAhead next_values(p, from.value, tile.keys, p.value_dim, rows);
        if (b.few_rows)
          multiply_transposed<F>({rows, b.rest_of_row, slots}, weights, values,
                                 state.output_t + at * b.ld_output + rest_of_row, b.ld_output, store, next_values);
        else
          multiply_transposed<F>({p.value_dim, count, slots}, values, weights,
                                 state.output_t + rest_of_tile * kRowTile + at, kRowTile, store, next_values);
      });
    };
    add_average(b.weights, 0, 0);
    if (F::kNumbers > 1 && b.rest) add_average(b.rest, b.rest_of_row, p.value_dim);
    state.started = true;
  }

  // Divides the rows by their sums, multiplies them by 1 / (1 - dropout_p), and writes them. (Weights do not include
  // this factor, because bfloat16 would round it.) A row that saw no key has the output 0, and the logsumexp -inf or
  // its sink.
  static void finish(const ForwardParams& p, const Buffers& b, RowState& state, const Results<T>& to) {
    const RowTile& rows = state.rows;
    const int64_t lanes = rows.template lanes<T>();
    const bool has_sinks = p.sinks && to.final, wants_numbers = to.logsumexp || to.max_score;
    T sinks[kRowTile];
    for (int64_t i = 0; i < lanes && has_sinks; ++i)
      sinks[i] = sink_of<T>(p, rows.n * p.heads + rows.head[smaller(i, rows.count - 1)]);
    RowNumbers<T> numbers;
    for (int64_t i = 0; i < lanes; i += W) {
      Vec<T> sum = state.started ? load<T>(state.sum + i) : Vec<T>{}, reference = load<T>(state.reference + i);
      const auto empty = sum == Vec<T>{};
      Vec<T> factor = splat(static_cast<T>(p.keep_scale));
      if (has_sinks) factor *= add_sinks<T>(p, load<T>(sinks + i), reference, sum);
      const Vec<T> of_empty = sum == sum ? Vec<T>{} : sum;  // 0, or NaN if the sink is NaN
      const Vec<T> inverse = factor / (sum == Vec<T>{} ? splat<T>(1) : sum);
      for (int64_t d = 0; d < columns(p) && !b.few_rows; ++d) {
        T* at = state.output_t + d * kRowTile + i;
        store<T>(at, empty ? of_empty : load<T>(at) * inverse);
      }
      for (int64_t r = 0; r < smaller(W, rows.count - i) && b.few_rows; ++r)
        for (int64_t d = 0; d < b.ld_output; d += W) {
          T* at = state.output_t + (i + r) * b.ld_output + d;
          store<T>(at, empty[r] ? splat<T>(of_empty[r]) : load<T>(at) * inverse[r]);
        }
      if (wants_numbers)
        numbers.set(p, to, i, empty, reference, sum, state.largest ? load<T>(state.largest + i) : Vec<T>{},
                    has_sinks ? load<T>(sinks + i) : splat<T>(-kInfinity<T>));
    }
    if (b.few_rows) {
      T *const tile = state.output_t, *const rest = b.rest ? tile + b.rest_of_row : nullptr;
      rows.unpack_rows(p, to.output, p.value_dim, tile, b.ld_output);
      if (rest && !to.final) rows.unpack_rows(p, to.output, p.value_dim, rest, b.ld_output, p.value_dim);
      for (int64_t i = 0; i < rows.count && to.residual.data; ++i)
        write_residual<T>(p, {rows.n, rows.head[i], rows.position[i]}, tile + i * b.ld_output,
                          rest ? rest + i * b.ld_output : nullptr, to, tile + kFewRows * b.ld_output);
    } else {
      rows.unpack_rounded(p, to.output, to.residual, to.final ? p.value_dim : columns(p), state.output_t, b.x,
                          b.rest ? state.output_t + p.value_dim * kRowTile : nullptr);
    }
    if (!wants_numbers) return;
    rows.each_head([&](int64_t head, int64_t position, int64_t lane, int64_t count) {
      numbers.write(p, to, {rows.n, head, position}, lane, count);
    });
  }

  // Prefetches the memory of the numbers of rows (RowNumbers), because a short sequence would wait for this memory. The
  // numbers lie far apart, so processors by themselves do not foresee the stores.
  static void prefetch_numbers(const ForwardParams& p, const RowTile& rows, const Results<T>& to) {
    const auto ask = [](const T* data, int64_t count) {
      for (int64_t i = 0; data && i < count; i += 64 / int64_t{sizeof(T)}) __builtin_prefetch(data + i, 1, 3);
    };
    rows.each_head([&](int64_t head, int64_t position, int64_t, int64_t count) {
      const int64_t number = to.number(p, {rows.n, head, position});
      ask(to.logsumexp ? to.logsumexp + 2 * number : nullptr, 2 * count);
      ask(to.row_logsumexp ? to.row_logsumexp + number : nullptr, count);
      ask(to.max_score ? to.max_score + number : nullptr, count);
    });
  }

  static void run(const ForwardParams& p, int64_t task, char* workspace) {
    const Buffers b(p, workspace);
    const RowTask own(p, task);
    const RowTiles<RowState> rows(
        p, own, b.states,
        [&](RowState& state) {
          state.started = false;
          state.query_t = b.columns(b.query_t, slots_of<F>(p.head_dim), state);
          state.output_t = b.columns(b.output_t, columns(p), state);
          state.reference = b.columns(b.reference, 1, state);
          state.sum = b.columns(b.sum, 1, state);
          state.largest = p.max_score ? b.columns(b.largest, 1, state) : nullptr;
          for (int64_t i = 0; i < kRows && state.largest; ++i) state.largest[i] = -kInfinity<T>;
          state.rows.template pack_columns<F>(p, p.query, p.head_dim, state.query_t);
          load_tables<T>(p, state.rows, b.columns(b.tables, size_transposed(p) / kRowTile, state));
        },
        kRows);
    const Results<T> to(p, own.split, columns(p));
    for (const RowState& state : rows) prefetch_numbers(p, state.rows, to);
    Tile from;
    const auto load = [&](Range keys) {
      const int64_t key_head = key_head_of(p, own.first_head), value_head = value_head_of(p, own.first_head);
      from.key = key_block(p, p.key, own.n, key_head, keys.first, keys.size(), p.head_dim, b.key_copy);
      from.value = key_block(p, p.value, own.n, value_head, keys.first, keys.size(), p.value_dim, b.value_copy);
      if (b.key_scale)
        read_scales<T>(p, p.key_scale, p.key.dtype, own.n, key_head, keys.first, keys.size(), b.key_scale);
      if (b.value_scale)
        read_scales<T>(p, p.value_scale, p.value.dtype, own.n, value_head, keys.first, keys.size(), b.value_scale);
      if (p.prepacked) {
        from.key_rows = Prepacked<F>::keys(p, own.n, key_head, keys.first);
        from.value_rows = Prepacked<F>::values(p, own.n, value_head, keys.first);
        return;
      }
      const bool once = p.rows() <= Gemm<Singles<T>>::kMaxColumns * W;  // all rows are columns of one register tile
      from.key_rows = F::along_columns(from.key, keys.size(), p.head_dim, b.key, b.ld_key, once);
      const auto load_values = b.few_rows ? F::vectors_along_rows : F::along_rows;
      from.value_rows = load_values(from.value, keys.size(), p.value_dim, b.value, b.ld_value);
    };
    each_visible_tile(p, rows, own.keys_seen(p, rows.positions), b.room, load,
                      [&](RowState& state, const ScoreTile<T>& tile) { visit(p, b, state, tile, from); });
    for (RowState& state : rows) finish(p, b, state, to);
  }

  static void merge(const ForwardParams& p, int64_t first, int64_t last, char* workspace) {
    merge_splits<T>(p, columns(p), first, last, workspace);
  }

  // The size of a workspace for run() and for merge().
  static int64_t workspace(const ForwardParams& p) {
    return larger(Buffers(p, nullptr).size, merge_workspace<T>(columns(p)));
  }
};

}  // namespace attn::ATTN_ISA
