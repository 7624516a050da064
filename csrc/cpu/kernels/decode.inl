// The forward for few queries (decoding), which is bound by reading K and V. A vector holds neighbouring entries of one
// key: rows of K and V are read as they lie, whatever their type and length, once for all queries that share them.
#pragma once

#include "cpu/kernels/splits.inl"
#include "cpu/tiles/dropout.inl"

namespace attn::ATTN_ISA {

template <class T>
struct Decode {
  static constexpr int W = kLanes<T>;
  static constexpr int64_t kRows = 8;  // the most queries that share a pass over the keys
  static constexpr int kAtOnce = 4;    // queries that share a load

  // The most where products take several numbers at once, which pays earlier.
  static constexpr int64_t kRowsBesidePairs = 4;

  // The limits are measured, most of them with keys and values in memory: here they are prefetched. Short rows leave
  // sooner: here every score is a sum across a vector.
  //
  // Where derivatives follow the other kernel serves: they compute the scores in its order, and a weight that was 1 in
  // the forward (a row with one key) is then exactly 1 again.
  static bool takes(const ForwardParams& p, int64_t most = kRows) {
    if (p.logsumexp || p.rows() > most) return false;
    return p.head_dim >= 32 || p.rows() <= (p.head_dim < W ? 1 : 5);
  }

  // Vectors of a value that R queries keep a sum for: as many as there are registers, so that a row is read once. An
  // even number, for load_two.
  static constexpr int vectors_for(int R) { return smaller(8, kRegisters / 4 / R * 2); }

  struct Buffers {
    RowTile* rows;
    T* query;   // [kRows][E]
    T* output;  // [kRows][Ev]
    T* key;     // [kKeyTile][E], for rows that cannot be read as they lie
    T* value;   // [kKeyTile][Ev]
    T* x;       // [kRows][kKeyTile]: scores, then weights
    T* bias;    // [kRows][kKeyTile]
    T* factor;  // [kKeyTile][kRowTile]
    T* sums;    // [kAtOnce][W][W]
    int64_t ld_key, ld_value;
    int64_t size;

    Buffers(const ForwardParams& p, char* base) {
      Arena arena(base);
      ld_key = round_up(p.head_dim, W);
      ld_value = round_up(p.value_dim, W);
      rows = arena.take<RowTile>(1);
      query = arena.take<T>(kRows * ld_key);
      output = arena.take<T>(kRows * ld_value);
      key = arena.take<T>(kKeyTile * ld_key);
      value = arena.take<T>(kKeyTile * ld_value);
      x = arena.take<T>(kRows * kKeyTile);
      bias = arena.take<T>(p.has_mask ? kRows * kKeyTile : 0);
      factor = arena.take<T>(p.has_dropout ? kKeyTile * kRowTile : 0);
      sums = arena.take<T>(kAtOnce * W * W);
      size = arena.used();
    }
  };

  static int64_t workspace(const ForwardParams& p) { return larger(Buffers(p, nullptr).size, merge_workspace<T>(p)); }

  // Rows that are read in whole vectors, past their end where they end within one: there follows the next row, and
  // the last one is a copy.
  template <class S>
  struct WholeVectors {
    const S* data;
    int64_t ld;
    int64_t copied;  // the number of the row that was copied; -1 if none was
    const S* copy;

    ATTN_INLINE const S* row(int64_t j) const { return j == copied ? copy : data + j * ld; }

    // Asks for the columns [col, col + count) of a row that is read later, while row j is.
    ATTN_INLINE void prefetch(int64_t j, int64_t col, int64_t count) const {
      constexpr int64_t kLine = 64 / sizeof(S);
      for (int64_t d = 0; d < count; d += kLine) __builtin_prefetch(data + (j + kAhead) * ld + col + d, 0, 2);
    }
  };

  // How many rows before they are read the rows of K and V are prefetched.
  static constexpr int64_t kAhead = 32;
  // Not where one query reads numbers that need no conversion: there the processor itself reads far enough ahead.
  template <int R, class S>
  static constexpr bool kPrefetches = R > 1 || sizeof(S) < sizeof(T);

  // sums[(r * W + i) * W ...]: a vector whose elements add up to <q_r, k_i>, for R queries and the keys number
  // first + i, i < kKeys, which share the loads of the queries. V: the vectors of a row, or 0 for any number of them.
  template <int R, int kKeys, int V, bool kPrefetch, class S>
  static ATTN_INLINE void multiply(const WholeVectors<S>& rows, int64_t first, int64_t cols, const T* query,
                                   int64_t ld_query, T* sums) {
    const S* key[kKeys];
#pragma GCC unroll 2
    for (int i = 0; i < kKeys; ++i) {
      key[i] = rows.row(first + i);
      if constexpr (kPrefetch && kPrefetches<R, S>) rows.prefetch(first + i, 0, V == 0 ? cols : V * W);
    }
    Vec<T> sum[kKeys][R] = {};
    const auto add = [&](int64_t d, const Vec<T>(&k)[kKeys]) {
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const Vec<T> q = load<T>(query + r * ld_query + d);
#pragma GCC unroll 2
        for (int i = 0; i < kKeys; ++i) sum[i][r] += q * k[i];
      }
    };
    const auto add_vector = [&](int64_t d) {
      Vec<T> k[kKeys];
#pragma GCC unroll 2
      for (int i = 0; i < kKeys; ++i) k[i] = load_as<T>(key[i] + d);
      add(d, k);
    };
    const auto add_end = [&](int64_t d) {  // by selection: what lies behind the row may be NaN
      const auto ends_here = lane_numbers<T>() < static_cast<Int<T>>(cols - d);
      Vec<T> k[kKeys];
#pragma GCC unroll 2
      for (int i = 0; i < kKeys; ++i) k[i] = ends_here ? load_as<T>(key[i] + d) : Vec<T>{};
      add(d, k);
    };
    if constexpr (V > 0) {
#pragma GCC unroll 4
      for (int v = 0; v + 1 < V; ++v) add_vector(v * W);
      add_end((V - 1) * W);
    } else {
      const int64_t whole = cols / W * W;
      int64_t d = 0;
      for (; d + 2 * W <= whole; d += 2 * W) {
        Vec<T> k0[kKeys], k1[kKeys];
#pragma GCC unroll 2
        for (int i = 0; i < kKeys; ++i) load_two<T>(key[i] + d, k0[i], k1[i]);
        add(d, k0);
        add(d + W, k1);
      }
      if (d < whole) add_vector(d);
      if (whole < cols) add_end(whole);
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int i = 0; i < kKeys; ++i) store<T>(sums + (r * W + i) * W, sum[i][r]);
  }

  // x[r * kKeyTile + j] = score(<q_r, k_j>) for R queries and the keys [first, first + keys), at most W.
  template <int R, int V, bool kPrefetch, class S>
  static void dot(const WholeVectors<S>& rows, int64_t first, int64_t keys, int64_t cols, const T* query,
                  int64_t ld_query, T* sums, ScoreFunction<T> score, T* x) {
    int64_t j = 0;
    constexpr int kTogether = V > 0 ? 2 : 1;  // two long rows at once are read from memory more slowly
    for (; j + kTogether <= keys; j += kTogether)
      multiply<R, kTogether, V, kPrefetch>(rows, first + j, cols, query, ld_query, sums + j * W);
    for (; j < keys; ++j) multiply<R, 1, V, kPrefetch>(rows, first + j, cols, query, ld_query, sums + j * W);
    for (int r = 0; r < R; ++r)  // lanes past the keys mean nothing: softmax() hides them
      store<T>(x + r * kKeyTile, score(sums_of_rows<T>(sums + r * W * W)));
  }

  // output[r] = correction[r] output[r] + sum_j x[r][j] v_j for R queries and N vectors of columns from `col` on.
  template <int R, int N, bool kPrefetch, class S>
  static void average(const WholeVectors<S>& rows, int64_t col, int64_t keys, const T* x, const T* correction,
                      T* output, int64_t ld_output) {
    constexpr int kChains = R * N <= 2 ? 4 : 1;  // sums side by side: one has to wait for its last step
    Vec<T> sum[kChains][R][N] = {};
    const auto add = [&](int64_t j, int chain) {
      const S* const value = rows.row(j) + col;
      if constexpr (kPrefetch && kPrefetches<R, S>) rows.prefetch(j, col, N * W);
      Vec<T> v[N];
#pragma GCC unroll 8
      for (int n = 0; n + 1 < N; n += 2) load_two<T>(value + n * W, v[n], v[n + 1]);
      if constexpr (N % 2 == 1) v[N - 1] = load_as<T>(value + (N - 1) * W);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) sum[chain][r][n] += x[r * kKeyTile + j] * v[n];
    };
    int64_t j = 0;
    for (; j + kChains <= keys; j += kChains)
#pragma GCC unroll 4
      for (int chain = 0; chain < kChains; ++chain) add(j + chain, chain);
    for (; j < keys; ++j) add(j, 0);
    for (int r = 0; r < R; ++r)
      for (int n = 0; n < N; ++n) {
        for (int chain = 1; chain < kChains; ++chain) sum[0][r][n] += sum[chain][r][n];
        T* at = output + r * ld_output + n * W;
        store<T>(at, load<T>(at) * correction[r] + sum[0][r][n]);
      }
  }

  // Calls f(std::integral_constant<int, N>, first) for groups of N = kMost of `count`, and for the rest of them.
  template <int kMost, class F>
  static ATTN_INLINE void each_group(int64_t count, F f) {
    int64_t first = 0;
    for (; first + kMost <= count; first += kMost) f(std::integral_constant<int, kMost>(), first);
    if constexpr (kMost > 1) rest<kMost - 1>(count - first, first, f);
  }
  template <int N, class F>
  static ATTN_INLINE void rest(int64_t count, int64_t first, F f) {
    if (count == N) return f(std::integral_constant<int, N>(), first);
    if constexpr (N > 1) rest<N - 1>(count, first, f);
  }

  // Calls f(std::integral_constant<int, V>) with the number of vectors of a short row that needs no conversion: there a
  // loop over them would take as long as the arithmetic. V is 0 for all others.
  template <class S, class F>
  static ATTN_INLINE void with_vectors(int64_t cols, F f) {
    const int64_t vectors = (cols + W - 1) / W;
    if constexpr (std::is_same_v<S, T>) {
      if (vectors == 2) return f(std::integral_constant<int, 2>());
      if (vectors == 3) return f(std::integral_constant<int, 3>());
      if (vectors == 4) return f(std::integral_constant<int, 4>());
    }
    f(std::integral_constant<int, 0>());
  }

  // Whether rows are read as they lie.
  static bool in_place(const Operand& x, int64_t cols) { return x.col == 1 && (cols % W == 0 || x.row >= W); }

  // Whether load_two takes even and odd numbers of the rows apart. Then what they are multiplied with, or added to, is
  // in the same order, but for a last vector without a second one: apart() makes it so, and together() the way back.
  static bool takes_turns(const Operand& x, int64_t cols) { return x.dtype == DType::bf16 && in_place(x, cols); }
  static void apart(T* row, int64_t cols) {
    for (int64_t d = 0; d + 2 * W <= cols; d += 2 * W) {
      T turns[2 * W];
      __builtin_memcpy(turns, row + d, sizeof turns);
      for (int i = 0; i < 2 * W; ++i) row[d + i % 2 * W + i / 2] = turns[i];
    }
  }
  static void together(T* row, int64_t cols) {
    for (int64_t d = 0; d + 2 * W <= cols; d += 2 * W) {
      T halves[2 * W];
      __builtin_memcpy(halves, row + d, sizeof halves);
      for (int i = 0; i < 2 * W; ++i) row[d + i] = halves[i % 2 * W + i / 2];
    }
  }

  // Calls f(WholeVectors) with the rows of a block as they lie, or packed if they cannot be read so.
  template <class F>
  static ATTN_INLINE void with_rows(const Block& block, int64_t rows, int64_t cols, T* tile, int64_t ld, bool in_place,
                                    F f) {
    const bool ends_within = cols % W != 0;
    const auto as_they_lie = [&](auto storage) {
      using S = decltype(storage);
      const S* data = reinterpret_cast<const S*>(block.data);
      if (!ends_within) return f(WholeVectors<S>{data, block.row, -1, nullptr});
      S* const copy = reinterpret_cast<S*>(tile);
      __builtin_memcpy(copy, data + (rows - 1) * block.row, static_cast<size_t>(cols) * sizeof(S));
      f(WholeVectors<S>{data, block.row, rows - 1, copy});
    };
    if (in_place) {
      if constexpr (sizeof(T) == 8) {
        return as_they_lie(double());
      } else {
        if (block.dtype == DType::f32) return as_they_lie(float());
        if (block.dtype == DType::bf16) return as_they_lie(BFloat16());
        return as_they_lie(Half());
      }
    }
    pack_rows<T>(tile, ld, block, rows, cols);
    f(WholeVectors<T>{tile, ld, -1, nullptr});
  }

  static void run(const ForwardParams& p, int64_t task, char* workspace) {
    const Buffers b(p, workspace);
    RowTile& rows = *b.rows;
    const RowTask own(p, task);
    const int64_t n = own.n, key_head = key_head_of(p, own.first_head), value_head = value_head_of(p, own.first_head);
    rows.set(p, n, own.first_head, own.rows);
    rows.template pack_lanes<Singles<T>>(p, p.query, p.head_dim, b.query, b.ld_key);
    if (takes_turns(p.key, p.head_dim))
      for (int64_t r = 0; r < rows.count; ++r) apart(b.query + r * b.ld_key, p.head_dim / W * W);
    fill_zero(b.output, kRows * b.ld_value);
    T maximum[kRows], sum[kRows] = {}, correction[kRows];
    for (T& m : maximum) m = -kInfinity<T>;

    Block masks[kRows];
    if (p.has_mask)
      for (int64_t r = 0; r < rows.count; ++r) masks[r] = block_of(p, p.mask, n, rows.head[r], rows.position[r]);

    const auto score = leaves_products<T>(p) ? ScoreFunction<T>::identity() : ScoreFunction<T>::of(p);
    const bool key_in_place = in_place(p.key, p.head_dim), value_in_place = in_place(p.value, p.value_dim);
    const Range all_keys = own.keys_seen(p, rows.positions);
    for (int64_t key = all_keys.first; key < all_keys.last; key += kKeyTile) {
      const int64_t keys = read_mask(p, b, masks, key, smaller(kKeyTile, all_keys.last - key));
      if (keys == 0) continue;
      // The first queries that read a row where it lies prefetch; the others find it in the cache.
      const bool goes_on = all_keys.last - key >= kKeyTile + kAhead;
      const auto with_prefetch = [&](bool in_place, int64_t row, auto f) {
        return goes_on && in_place && row == 0 ? f(std::true_type()) : f(std::false_type());
      };
      with_rows(block_of(p, p.key, n, key_head, key), keys, p.head_dim, b.key, b.ld_key, key_in_place,
                [&]<class S>(const WholeVectors<S>& key_rows) {
                  with_vectors<S>(p.head_dim, [&](auto vectors) {
                    for (int64_t j = 0; j < keys; j += W)
                      each_group<kAtOnce>(rows.count, [&](auto r, int64_t row) {
                        with_prefetch(key_in_place, row, [&](auto prefetch) {
                          dot<r(), vectors(), prefetch()>(key_rows, j, smaller(W, keys - j), p.head_dim,
                                                          b.query + row * b.ld_key, b.ld_key, b.sums, score,
                                                          b.x + row * kKeyTile + j);
                        });
                      });
                  });
                });
      hide_keys(p, b, key, keys);
      if (p.has_dropout) dropout_factors<T>(p, rows, {key, key + keys}, static_cast<T>(p.keep_scale), b.factor);
      for (int64_t r = 0; r < rows.count; ++r) softmax(p, b, r, keys, maximum[r], sum[r], correction[r]);
      with_rows(block_of(p, p.value, n, value_head, key), keys, p.value_dim, b.value, b.ld_value, value_in_place,
                [&](const auto& value_rows) {
                  each_group<kAtOnce>(rows.count, [&](auto r, int64_t row) {
                    each_group<vectors_for(r())>(b.ld_value / W, [&](auto vectors, int64_t first) {
                      with_prefetch(value_in_place, row, [&](auto prefetch) {
                        average<r(), vectors(), prefetch()>(value_rows, first * W, keys, b.x + row * kKeyTile,
                                                            correction + row, b.output + row * b.ld_value + first * W,
                                                            b.ld_value);
                      });
                    });
                  });
                });
    }

    Results<T> to(p, own.split);
    to.residual = {};  // wanted for derivatives alone
    if (takes_turns(p.value, p.value_dim))
      for (int64_t r = 0; r < rows.count; ++r) together(b.output + r * b.ld_value, b.ld_value);
    for (int64_t r = 0; r < rows.count; ++r)
      write_row<T>(p, {n, rows.head[r], rows.position[r]}, b.output + r * b.ld_value, maximum[r], sum[r], 1, to,
                   nullptr);
  }

  // Reads the rows' masks at the keys [key, key + keys). Returns how many of the keys are left without those at the end
  // that no row sees; of these nothing else is read.
  static int64_t read_mask(const ForwardParams& p, const Buffers& b, const Block* masks, int64_t key, int64_t keys) {
    if (!p.has_mask) return keys;
    Block tile[kRows];
    bool visible = false;
    for (int64_t r = 0; r < b.rows->count; ++r) {
      tile[r] = masks[r];
      tile[r].data += key * p.mask.col * size_of(p.mask.dtype);
      visible |= mask_in_bits(p.mask) ? visible_bits(reinterpret_cast<const uint8_t*>(tile[r].data), keys) != 0
                                      : any_visible_number<T>(tile[r], keys);
    }
    if (!visible) return 0;
    int64_t seen = 0;
    for (int64_t r = 0; r < b.rows->count; ++r) {
      T* bias = b.bias + r * kKeyTile;
      pack_rows<T>(bias, kKeyTile, tile[r], 1, keys);
      for (int64_t j = keys; j < round_up(keys, W); ++j) bias[j] = -kInfinity<T>;
      int64_t last = keys;
      while (last > seen && bias[last - 1] == -kInfinity<T>) --last;
      seen = last;
    }
    return seen;
  }

  static void hide_keys(const ForwardParams& p, const Buffers& b, int64_t key, int64_t keys) {
    const RowTile& rows = *b.rows;
    if (p.has_mask)
      for (int64_t r = 0; r < rows.count; ++r)
        for (int64_t j = 0; j < keys; j += W) {
          const Vec<T> add = load<T>(b.bias + r * kKeyTile + j);
          T* at = b.x + r * kKeyTile + j;
          store<T>(at, add == -kInfinity<T> ? add : load<T>(at) + add);
        }
    if (all_visible(p, rows.sequence, rows.positions, {key, key + keys})) return;
    for (int64_t r = 0; r < rows.count; ++r) {
      const Range seen = visible_keys(p, rows.sequence, {rows.position[r], rows.position[r] + 1});
      for (int64_t j = 0; j < keys; ++j)
        if (!seen.contains(key + j)) b.x[r * kKeyTile + j] = -kInfinity<T>;
    }
  }

  // Scores of row r become weights exp(x - maximum), after dropout; `correction` is what earlier sums are multiplied
  // by.
  static void softmax(const ForwardParams& p, const Buffers& b, int64_t r, int64_t keys, T& maximum, T& sum,
                      T& correction) {
    const T slope = log2_slope<T>(p);
    T* x = b.x + r * kKeyTile;
    for (int64_t j = keys; j < round_up(keys, W); ++j) x[j] = -kInfinity<T>;
    Vec<T> best = splat<T>(maximum);
    for (int64_t j = 0; j < keys; j += W) best = max_number(load<T>(x + j), best);
    T top = best[0];
    for (int i = 1; i < W; ++i) top = best[i] > top ? best[i] : top;
    const T shift = top == -kInfinity<T> ? 0 : top;
    correction = exp2<T>(splat<T>(maximum - shift) * slope)[0];
    maximum = top;
    Vec<T> total{};
    for (int64_t j = 0; j < keys; j += W) {
      const Vec<T> weight = exp2<T>((load<T>(x + j) - shift) * slope);
      total += weight;
      store<T>(x + j, weight);
    }
    sum *= correction;
    for (int i = 0; i < W; ++i) sum += total[i];
    if (p.has_dropout)
      for (int64_t j = 0; j < keys; ++j) x[j] *= b.factor[j * kRowTile + r];
  }
};

}  // namespace attn::ATTN_ISA
