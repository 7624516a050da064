// The forward for few queries (decoding). Reading K and V limits its speed: see few_rows.inl.
#pragma once

#include "cpu/kernels/splits.inl"
#include "cpu/tiles/dropout.inl"
#include "cpu/tiles/few_rows.inl"

namespace attn::ATTN_ISA {

template <class F>
struct Decode {
  using T = typename F::Number;
  using Few = FewRows<F>;
  template <class S>
  using Piece = typename Few::template Piece<S>;
  static constexpr int W = kLanes<T>;

  // The kernel takes at most kRows rows. It takes at most kRowsBesidePairs rows if the problem is also supported by
  // another instruction set, in which a lane multiplies two numbers at once. With more rows, the forward of that set is
  // faster than this kernel.
  static constexpr int64_t kRows = 8, kRowsBesidePairs = 4;

  // If derivatives will be computed, forward.inl computes the output, because derivatives compute scores in the same
  // order as forward.inl. So a weight that was 1 in the forward (in a row with one key) is exactly 1 again.
  static bool takes(const ForwardParams& p, bool beside_pairs) {
    if (Few::kPairs && p.value_dim % (2 * W) != 0) return false;
    return !p.logsumexp && !p.invariant && Few::takes(p, beside_pairs ? kRowsBesidePairs : kRows);
  }

  // How many vectors of columns R queries sum at once. The number is as large as the registers allow, so that a value
  // is read once. It is even, because load_two() loads two vectors.
  static constexpr int vectors_for(int R) { return smaller(8, kRegisters / 4 / R * 2); }

  struct Buffers {
    const ForwardParams& params;
    Arena arena;
    int64_t ld_value = round_up(params.value_dim, W);
    Few* few = arena.make<Few>(1, params);
    T* output = arena.take<T>(kRows * ld_value);    // [kRows][Ev]
    T* value = arena.take<T>(kKeyTile * ld_value);  // [kKeyTile][Ev], for rows that cannot be read as they lie
    T* x = arena.take<T>(kRows * kKeyTile);         // [kRows][kKeyTile]: scores, then weights
    T* factor = arena.take<T>(params.has_dropout ? kKeyTile * kRowTile : 0);  // [kKeyTile][kRowTile]
    T* value_scale = arena.take<T>(kKeyTile);
    int64_t size = arena.used();

    Buffers(const ForwardParams& p, char* base) : params(p), arena(base) {}
  };

  static int64_t workspace(const ForwardParams& p) {
    return larger(Buffers(p, nullptr).size, merge_workspace<T>(p.value_dim));
  }

  // Loads N vectors of columns of value j, or of the pair of values j and j + 1.
  template <bool kPrefetch, class S, int N>
  static ATTN_INLINE void load_values(const Piece<S>& rows, int64_t col, int64_t j, int64_t count, Vec<T> (&v)[N]) {
    const S* const value = rows.row(j) + col;
    if constexpr (kPrefetch) rows.prefetch(j, col, N * W);
    if constexpr (Few::kPairs) {
      static constexpr S kNone[N * W] = {};
      const S* const next = j + 1 < count ? rows.row(j + 1) + col : kNone;
      if constexpr (kPrefetch) rows.prefetch(j + 1, col, N * W);
#pragma GCC unroll 2
      for (int n = 0; n + 4 <= N; n += 4) {
        Vec<T> a[2], b[2];
        F::load_words(value + n * W, a);
        F::load_words(next + n * W, b);
        for (int half = 0; half < 2; ++half) F::pairs_of_rows(a[half], b[half], v + n + 2 * half);
      }
      if constexpr (N % 4 == 2) {
        const int64_t d = (N - 2) * W;
        F::pairs_of_rows(F::load_words(value + d), F::load_words(next + d), v + N - 2);
      }
    } else {
#pragma GCC unroll 8
      for (int n = 0; n + 1 < N; n += 2) load_two<T>(value + n * W, v[n], v[n + 1]);
      if constexpr (N % 2 == 1) v[N - 1] = load_as<T>(value + (N - 1) * W);
    }
  }

  // output[r] = correction[r] output[r] + sum_j x[r][j] v_j for R queries and N vectors of columns from `col` on.
  template <int R, int N, bool kPrefetch, class Values>
  static void average(const Values& rows, int64_t col, int64_t keys, const T* x, const T* correction, T* output,
                      int64_t ld_output) {
    // An addition to a sum waits for the previous addition to the same sum. If there are few sums, this function keeps
    // kChains copies of each sum and adds keys to the copies in turn, so that fewer additions wait. (With pairs, a row
    // usually has 4 or 8 vectors, and so enough sums.)
    constexpr int kChains = R * N <= 2 && !Few::kPairs ? 4 : 1;
    Vec<T> sum[kChains][R][N] = {};
    const auto add = [&](const Vec<T>(&v)[N], const T* weights, int chain) {
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) sum[chain][r][n] = F::multiply_add(sum[chain][r][n], weights + r * kKeyTile, v[n]);
    };
    for (int64_t first = 0; first < keys; first += kPiece) {
      const auto piece = rows.piece(first / kPiece);
      const int64_t count = smaller(kPiece, keys - first);
      int64_t j = 0;
      const auto add_key = [&](int chain) {
        Vec<T> v[N];
        load_values<kPrefetch>(piece, col, j, count, v);
        add(v, x + (first + j) / F::kNumbers, chain);
        j += F::kNumbers;
      };
      while (j + kChains <= count)
#pragma GCC unroll 4
        for (int chain = 0; chain < kChains; ++chain) add_key(chain);
      while (j < count) add_key(0);
    }
    for (int r = 0; r < R; ++r)
      for (int n = 0; n < N; ++n) {
        for (int chain = 1; chain < kChains; ++chain) sum[0][r][n] += sum[chain][r][n];
        T* at = output + r * ld_output + n * W;
        store<T>(at, load<T>(at) * correction[r] + sum[0][r][n]);
      }
  }

  static void run(const ForwardParams& p, int64_t task, char* workspace) {
    const Buffers b(p, workspace);
    const RowTask own(p, task);
    Few& few = *b.few;
    few.set(p, own, p.key_scale.data ? &p.key_scale : nullptr);
    const RowTile& rows = few.rows;
    fill_zero(b.output, kRows * b.ld_value);
    T maximum[kRows], sum[kRows] = {}, correction[kRows];
    for (T& m : maximum) m = -kInfinity<T>;

    const int64_t value_head = value_head_of(p, own.first_head);
    const bool in_place = Few::in_place(p.value, p.value_dim);
    const Range all_keys = own.keys_seen(p, rows.positions);
    for (int64_t key = all_keys.first; key < all_keys.last; key += kKeyTile) {
      const int64_t keys = few.scores(p, key, all_keys.last, b.x, kKeyTile);
      if (keys == 0) continue;
      if (p.has_dropout) dropout_factors<T>(p, rows, {key, key + keys}, static_cast<T>(p.keep_scale), b.factor);
      if (p.value_scale.data)
        read_scales<T>(p, p.value_scale, p.value.dtype, own.n, value_head, key, keys, b.value_scale);
      for (int64_t r = 0; r < rows.count; ++r) softmax(p, b, r, keys, maximum[r], sum[r], correction[r]);
      const Pieces tile = key_pieces<T>(p, p.value, own.n, value_head, key, keys, p.value_dim, in_place, few.copy);
      Few::with_rows(tile, keys, p.value_dim, b.ld_value, b.value, b.ld_value, in_place, [&](const auto& value_rows) {
        Few::template each_group<Few::kAtOnce>(rows.count, [&](auto r, int64_t row) {
          const bool asks = in_place && row == 0 && Few::asks_ahead(r, value_rows, p, key, all_keys.last);
          Few::template each_group<vectors_for(r())>(b.ld_value / W, [&](auto vectors, int64_t first) {
            Few::with_prefetch(asks, [&](auto prefetch) {
              average<r(), vectors(), prefetch()>(value_rows, first * W, keys, b.x + row * kKeyTile, correction + row,
                                                  b.output + row * b.ld_value + first * W, b.ld_value);
            });
          });
        });
      });
    }

    Results<T> to(p, own.split, p.value_dim);
    to.residual = {};  // only derivatives read it
    if (Few::kPairs || Few::takes_turns(p.value.dtype))
      for (int64_t r = 0; r < rows.count; ++r) Few::together(b.output + r * b.ld_value, b.ld_value);
    for (int64_t r = 0; r < rows.count; ++r)
      write_row<T>(p, {own.n, rows.head[r], rows.position[r]}, b.output + r * b.ld_value, nullptr, maximum[r], sum[r],
                   maximum[r], to, nullptr);
  }

  // Turns scores of row r into weights exp(x - maximum), or into pairs of weights, and applies dropout. The caller must
  // multiply earlier sums of values by `correction`.
  static void softmax(const ForwardParams& p, const Buffers& b, int64_t r, int64_t keys, T& maximum, T& sum,
                      T& correction) {
    const T slope = log2_slope<T>(p);
    T* x = b.x + r * kKeyTile;
    for (int64_t j = keys; j < round_up(keys, W); ++j) x[j] = -kInfinity<T>;
    Vec<T> best = splat<T>(maximum);
    for (int64_t j = 0; j < keys; j += W) best = max_number(load<T>(x + j), best);
    const T top = largest_of(best);
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
    if (p.value_scale.data)
      for (int64_t j = 0; j < keys; j += W) store<T>(x + j, load<T>(x + j) * load<T>(b.value_scale + j));
    if constexpr (Few::kPairs)
      for (int64_t j = 0; j < keys; j += 2 * W)
        store<T>(x + j / 2, F::rounded(load<T>(x + j), j + W < keys ? load<T>(x + j + W) : Vec<T>{}));
  }
};

}  // namespace attn::ATTN_ISA
