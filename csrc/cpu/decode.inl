// The forward for few queries (decoding), which is bound by reading K and V. A vector holds neighbouring entries of one
// key: rows of K and V are read as they lie, whatever their type and length, once for all queries that share them.
#pragma once

#include "cpu/forward.inl"

namespace attn::ATTN_ISA {

template <class T>
struct Decode {
  static constexpr int W = kLanes<T>;
  static constexpr int64_t kRows = 8;  // at most so many queries share a pass over the keys
  static constexpr int kAtOnce = 4;    // queries that share a load

  // Where derivatives follow the other kernel serves: they compute the scores in its order, and a weight that was 1 in
  // the forward (a row with one key) is then exactly 1 again.
  static bool takes(const ForwardParams& p) { return p.rows() <= kRows && !p.logsumexp; }

  // Vectors of a value that R queries keep a sum for: as many as there are registers, so that a row is read once.
  static constexpr int vectors_for(int R) { return smaller(8, kRegisters / 2 / R); }

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

  static int64_t workspace(const ForwardParams& p) {
    return larger(Buffers(p, nullptr).size, Forward<Singles<T>>::merge_workspace(p));
  }

  // Rows that are read in whole vectors, past their end where they end within one: there follows the next row, and
  // the last one is a copy.
  template <class S>
  struct WholeVectors {
    const S* data;
    int64_t ld;
    int64_t copied;  // the number of the row that was copied; -1 if none was
    const S* copy;

    ATTN_INLINE const S* row(int64_t j) const { return j == copied ? copy : data + j * ld; }
  };

  // x[r * kKeyTile + j] = score(<q_r, k_j>) for R queries and the keys [first, first + keys), at most W.
  template <int R, class S>
  static void dot(const WholeVectors<S>& rows, int64_t first, int64_t keys, int64_t cols, const T* query,
                  int64_t ld_query, T* sums, ScoreFunction<T> score, T* x) {
    const int64_t whole = cols / W * W;
    const auto ends_here = lane_numbers<T>() < static_cast<Int<T>>(cols - whole);
    for (int64_t j = 0; j < keys; ++j) {
      const S* const key = rows.row(first + j);
      Vec<T> sum[R] = {};
      for (int64_t d = 0; d < whole; d += W) {
        const Vec<T> k = load_as<T>(key + d);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) sum[r] += load<T>(query + r * ld_query + d) * k;
      }
      if (whole < cols) {  // by selection: what lies behind the row may be NaN
        const Vec<T> k = ends_here ? load_as<T>(key + whole) : Vec<T>{};
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) sum[r] += load<T>(query + r * ld_query + whole) * k;
      }
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) store<T>(sums + (r * W + j) * W, sum[r]);
    }
    for (int r = 0; r < R; ++r) {
      Vec<T> lanes[W];
#pragma GCC unroll 16
      for (int j = 0; j < W; ++j) lanes[j] = j < keys ? load<T>(sums + (r * W + j) * W) : Vec<T>{};
      transpose<T>(lanes);
#pragma GCC unroll 4
      for (int step = W / 2; step > 0; step /= 2)
#pragma GCC unroll 8
        for (int j = 0; j < step; ++j) lanes[j] += lanes[j + step];
      store<T>(x + r * kKeyTile, score(lanes[0]));
    }
  }

  // output[r] = correction[r] output[r] + sum_j x[r][j] v_j for R queries and N vectors of columns from `col` on.
  template <int R, int N, class S>
  static void average(const WholeVectors<S>& rows, int64_t col, int64_t keys, const T* x, const T* correction,
                      T* output, int64_t ld_output) {
    Vec<T> sum[R][N] = {};
    for (int64_t j = 0; j < keys; ++j) {
      const S* const value = rows.row(j) + col;
      Vec<T> v[N];
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) v[n] = load_as<T>(value + n * W);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) sum[r][n] += x[r * kKeyTile + j] * v[n];
    }
    for (int r = 0; r < R; ++r)
      for (int n = 0; n < N; ++n) {
        T* at = output + r * ld_output + n * W;
        store<T>(at, load<T>(at) * correction[r] + sum[r][n]);
      }
  }

  // Calls f(std::integral_constant<int, N>, first) for groups of N = kMost, kMost / 2, ... 1 of `count`.
  template <int kMost, class F>
  static ATTN_INLINE void each_group(int64_t count, F f, int64_t first = 0) {
    for (; first + kMost <= count; first += kMost) f(std::integral_constant<int, kMost>(), first);
    if constexpr (kMost > 1) each_group<kMost / 2>(count, f, first);
  }

  // Calls f(WholeVectors) with the rows of a block as they lie, or packed if they cannot be read so.
  template <class F>
  static ATTN_INLINE void with_rows(const Block& block, int64_t rows, int64_t cols, T* tile, int64_t ld, F f) {
    const bool ends_within = cols % W != 0;
    const auto in_place = [&](auto storage) {
      using S = decltype(storage);
      const S* data = reinterpret_cast<const S*>(block.data);
      if (!ends_within) return f(WholeVectors<S>{data, block.row, -1, nullptr});
      S* const copy = reinterpret_cast<S*>(tile);
      __builtin_memcpy(copy, data + (rows - 1) * block.row, static_cast<size_t>(cols) * sizeof(S));
      f(WholeVectors<S>{data, block.row, rows - 1, copy});
    };
    if (block.col == 1 && (!ends_within || block.row >= W)) {
      if constexpr (sizeof(T) == 8) {
        return in_place(double());
      } else {
        if (block.dtype == DType::f32) return in_place(float());
        if (block.dtype == DType::bf16) return in_place(BFloat16());
        return in_place(Half());
      }
    }
    pack_rows<T>(tile, ld, block, rows, cols);
    f(WholeVectors<T>{tile, ld, -1, nullptr});
  }

  static void run(const ForwardParams& p, int64_t task, char* workspace) {
    const Buffers b(p, workspace);
    RowTile& rows = *b.rows;
    const RowTask own(p, task, p.splits);
    const int64_t n = own.n, key_head = key_head_of(p, own.first_head), value_head = value_head_of(p, own.first_head);
    rows.set(p, n, own.first_head, 0, p.rows());
    rows.template pack_lanes<Singles<T>>(p, p.query, p.head_dim, b.query, b.ld_key);
    fill_zero(b.output, kRows * b.ld_value);
    T maximum[kRows], sum[kRows] = {}, correction[kRows];
    for (T& m : maximum) m = -kInfinity<T>;

    const Range all_keys = Forward<Singles<T>>::keys_of_split(p, own, rows.positions);
    for (int64_t key = all_keys.first; key < all_keys.last; key += kKeyTile) {
      const int64_t keys = smaller(kKeyTile, all_keys.last - key);
      if (!read_mask(p, b, key, keys)) continue;
      with_rows(block_of(p, p.key, n, key_head, key), keys, p.head_dim, b.key, b.ld_key, [&](const auto& key_rows) {
        for (int64_t j = 0; j < keys; j += W)
          each_group<kAtOnce>(rows.count, [&](auto r, int64_t row) {
            dot<r()>(key_rows, j, smaller(W, keys - j), p.head_dim, b.query + row * b.ld_key, b.ld_key, b.sums,
                     ScoreFunction<T>::of(p), b.x + row * kKeyTile + j);
          });
      });
      hide_keys(p, b, key, keys);
      if (p.has_dropout) dropout_factors<T>(p, rows, key, keys, static_cast<T>(p.keep_scale), b.factor);
      for (int64_t r = 0; r < rows.count; ++r) softmax(p, b, r, keys, maximum[r], sum[r], correction[r]);
      with_rows(block_of(p, p.value, n, value_head, key), keys, p.value_dim, b.value, b.ld_value,
                [&](const auto& value_rows) {
                  each_group<kAtOnce>(rows.count, [&](auto r, int64_t row) {
                    each_group<vectors_for(r())>(b.ld_value / W, [&](auto vectors, int64_t first) {
                      average<r(), vectors()>(value_rows, first * W, keys, b.x + row * kKeyTile, correction + row,
                                              b.output + row * b.ld_value + first * W, b.ld_value);
                    });
                  });
                });
    }

    T* logsumexp = nullptr;
    Operand output = p.output;
    if (p.splits > 1) {
      output = Forward<Singles<T>>::partial_output(p, own.split);
      logsumexp = static_cast<T*>(p.partial_logsumexp) + 2 * own.split * number_of_rows(p);
    }
    for (int64_t r = 0; r < rows.count; ++r)
      Forward<Singles<T>>::write_row(p, {n, rows.head[r], rows.position[r]}, b.output + r * b.ld_value, maximum[r],
                                     sum[r], output, {}, logsumexp, nullptr);
  }

  // Reads the rows' masks. Returns whether some row sees some key; where none does, nothing else is read.
  static bool read_mask(const ForwardParams& p, const Buffers& b, int64_t key, int64_t keys) {
    if (!p.has_mask) return true;
    const RowTile& rows = *b.rows;
    const auto mask_of = [&](int64_t r) { return block_of(p, p.mask, rows.n, rows.head[r], rows.position[r], key); };
    if (mask_in_bits(p.mask)) {
      uint64_t some = 0;
      for (int64_t r = 0; r < rows.count; ++r)
        some |= visible_bits(reinterpret_cast<const uint8_t*>(mask_of(r).data), keys);
      if (some == 0) return false;
    }
    bool visible = false;
    for (int64_t r = 0; r < rows.count; ++r) {
      T* bias = b.bias + r * kKeyTile;
      pack_rows<T>(bias, kKeyTile, mask_of(r), 1, keys);
      for (int64_t j = keys; j < round_up(keys, W); ++j) bias[j] = -kInfinity<T>;
      for (int64_t j = 0; j < keys && !visible; j += W) visible = any(load<T>(bias + j) != splat<T>(-kInfinity<T>));
    }
    return visible;
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
    if (all_visible(p, rows.positions, {key, key + keys})) return;
    for (int64_t r = 0; r < rows.count; ++r) {
      const Range seen = visible_keys(p, {rows.position[r], rows.position[r] + 1}, key + keys);
      for (int64_t j = 0; j < keys; ++j)
        if (!seen.contains(key + j)) b.x[r * kKeyTile + j] = -kInfinity<T>;
    }
  }

  // Scores of row r become weights exp(x - maximum), after dropout; `correction` is what earlier sums are multiplied
  // by.
  static void softmax(const ForwardParams& p, const Buffers& b, int64_t r, int64_t keys, T& maximum, T& sum,
                      T& correction) {
    T* x = b.x + r * kKeyTile;
    for (int64_t j = keys; j < round_up(keys, W); ++j) x[j] = -kInfinity<T>;
    Vec<T> best = splat<T>(maximum);
    for (int64_t j = 0; j < keys; j += W) best = max_number(load<T>(x + j), best);
    T top = best[0];
    for (int i = 1; i < W; ++i) top = best[i] > top ? best[i] : top;
    const T shift = top == -kInfinity<T> ? 0 : top;
    correction = exp<T>(splat<T>(maximum - shift))[0];
    maximum = top;
    Vec<T> total{};
    for (int64_t j = 0; j < keys; j += W) {
      const Vec<T> weight = exp<T>(load<T>(x + j) - shift);
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
