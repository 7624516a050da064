// Scores of few queries, where reading the keys takes most of the time. A vector holds neighbouring entries of one key.
// Rows of K (and of V, in decode.inl) are usually read without packing, whatever their type and length: see in_place().
// Each row is read once for all queries that share it.
//
// With a format of pairs (formats_bf16.inl), each lane multiplies two neighbouring numbers of one operand by two of the
// other, and adds both products. Operands of bfloat16 are then used as they are, numbers of 8 bits become bfloat16
// (words.inl), and half as many instructions suffice.
#pragma once

#include "cpu/tiles/scores.inl"

namespace attn::ATTN_ISA {

template <class F>
struct FewRows {
  using T = typename F::Number;
  static constexpr bool kPairs = F::kNumbers == 2;
  static constexpr int W = kLanes<T>;
  static constexpr int64_t kMost = 16;  // rows of a task
  static constexpr int kAtOnce = 4;     // rows that share a load

  // Here every score is a sum across the lanes of a vector. If keys are short, these sums take much of the time, so the
  // products of gemm.inl overtake this code at a smaller number of queries. `most` is the largest number of rows for
  // which this code is faster. It was measured for each kernel with keys in memory, not in the cache, because this code
  // prefetches keys.
  static bool takes(const Problem& p, int64_t most) {
    if (kPairs && (p.query.dtype != DType::bf16 || p.head_dim % (2 * W) != 0)) return false;
    return !p.program && p.rows() <= most && (p.head_dim >= 32 || p.rows() <= (p.head_dim < W ? 1 : 5));
  }

  const Problem& params;  // for the initialisers below, as `arena`
  Arena& arena;
  RowTile rows;
  Block masks[kMost];
  int64_t ld_key = round_up(params.head_dim, W);
  T* query = arena.take<T>(kMost * ld_key);                         // [kMost][E]
  T* key = arena.take<T>(kKeyTile * ld_key);                        // [kKeyTile][E], for rows that must be packed
  T* bias = arena.take<T>(params.has_mask ? kMost * kKeyTile : 0);  // [kMost][kKeyTile]
  T* sums = arena.take<T>(kAtOnce * W * W);                         // [kAtOnce][W][W]
  // Where key_block() copies keys, and then values.
  char* copy = arena.take<char>(bytes_of_copy(params, larger(params.head_dim, params.value_dim)));
  const Operand* key_scale;  // null: keys have none

  FewRows(const Problem& p, Arena& arena) : params(p), arena(arena) {}

  void set(const Problem& p, const RowTask& own, const Operand* scale = nullptr) {
    key_scale = scale;
    rows.set(p, own.n, own.first_head, own.rows);
    rows.each_run(p, p.query, 0, [&](const Block& block, int64_t row, int64_t count) {
      F::pack_along_columns(block, count, p.head_dim, query + row * ld_key, ld_key);
    });
    if (takes_turns(p.key.dtype))
      for (int64_t r = 0; r < rows.count; ++r) apart(query + r * ld_key, p.head_dim);
    if (p.has_mask)
      for (int64_t r = 0; r < rows.count; ++r) masks[r] = block_of(p, p.mask, own.n, rows.head[r], rows.position[r]);
  }

  // Writes x[r * ld + j], the scores of the tile of keys that begins with `first`, or products if leaves_products().
  // Writes -inf where a row does not see a key. If a mask hides the last keys of the tile from all rows, does not read
  // these keys and writes nothing for them. Returns the number of the tile's keys without these hidden keys. Does not
  // prefetch keys from `last` on.
  int64_t scores(const Problem& p, int64_t first, int64_t last, T* x, int64_t ld) const {
    const int64_t keys = read_mask(p, first, smaller(kKeyTile, last - first));
    if (keys == 0) return 0;
    const bool as_products = leaves_products<T>(p) || has_score_terms(p);
    const auto score = as_products ? ScoreFunction<T>::identity() : ScoreFunction<T>::of(p);
    const bool lie = in_place(p.key, p.head_dim);
    const Pieces tile =
        key_pieces<T>(p, p.key, rows.n, key_head_of(p, rows.head[0]), first, keys, p.head_dim, lie, copy);
    with_rows(tile, keys, p.head_dim, p.head_dim, key, ld_key, lie, [&]<class S>(const WholeVectors<S>& key_rows) {
      with_vectors<S>(p.head_dim, [&](auto vectors) {
        for (int64_t j = 0; j < keys; j += W)
          each_group<kAtOnce>(rows.count, [&](auto r, int64_t row) {
            with_prefetch(lie && row == 0 && asks_ahead(r, key_rows, p, first, last), [&](auto prefetch) {
              dot<r(), vectors(), prefetch()>(key_rows.piece(j / kPiece), j % kPiece, smaller(W, keys - j), p.head_dim,
                                              query + row * ld_key, ld_key, sums, score, x + row * ld + j, ld);
            });
          });
      });
    });
    if (key_scale) multiply_by_scales(p, first, keys, x, ld);
    if (has_score_terms(p)) add_score_terms(p, first, keys, x, ld);
    hide_keys(p, first, keys, x, ld);
    return keys;
  }

  // Calls f(std::bool_constant<prefetch>). Only the first group of queries prefetches, because later groups find the
  // keys in the cache.
  template <class Function>
  static ATTN_INLINE void with_prefetch(bool prefetch, Function f) {
    prefetch ? f(std::true_type()) : f(std::false_type());
  }
  // Rows that are read in whole vectors. A row that ends within a vector is read past its end, into the next row. The
  // last row is then read from a copy.
  template <class S>
  struct Piece {
    const S* data;
    const S* ahead;  // the piece that is kAhead rows later
    int64_t ld;
    int64_t copied;  // the number of the row that has a copy; outside the rows if none has
    const S* copy;

    ATTN_INLINE const S* row(int64_t j) const { return j == copied ? copy : data + j * ld; }

    // Prefetches columns [col, col + count) of the row that is kAhead rows after row j.
    ATTN_INLINE void prefetch(int64_t j, int64_t col, int64_t count) const {
      constexpr int64_t kLine = 64 / sizeof(S);
      const S* const row = ahead + j * ld + col;
      for (int64_t d = 0; d < count; d += kLine) __builtin_prefetch(row + d, 0, 2);
    }
  };
  template <class S>
  struct WholeVectors {
    const Pieces& pieces;
    int64_t ld, copied;
    const S* copy;

    ATTN_INLINE Piece<S> piece(int64_t i) const {
      const auto at = [&](int64_t n) { return reinterpret_cast<const S*>(pieces.at[n]); };
      return {at(i), at(i + kAhead / kPiece), ld, copied - i * kPiece, copy};
    }
  };
  static_assert(kPiece % W == 0);

  // Whether R queries prefetch the rows that follow a tile. A single query that reads contiguous numbers without
  // conversion does not prefetch, because the processor itself then reads far enough ahead.
  template <int R, class S>
  static bool asks_ahead(std::integral_constant<int, R>, const WholeVectors<S>&, const Problem& p, int64_t first,
                         int64_t last) {
    return last - first >= kKeyTile + kAhead && (R > 1 || sizeof(S) < sizeof(T) || p.paging.table);
  }

  // Cuts `count` items into groups of N = kGroup items, and a smaller group for the rest. For each group it calls
  // f(std::integral_constant<int, N>, first).
  template <int kGroup, class Function>
  static ATTN_INLINE void each_group(int64_t count, Function f) {
    int64_t first = 0;
    for (; first + kGroup <= count; first += kGroup) f(std::integral_constant<int, kGroup>(), first);
    if constexpr (kGroup > 1) rest<kGroup - 1>(count - first, first, f);
  }
  template <int N, class Function>
  static ATTN_INLINE void rest(int64_t count, int64_t first, Function f) {
    if (count == N) return f(std::integral_constant<int, N>(), first);
    if constexpr (N > 1) rest<N - 1>(count, first, f);
  }

  // Calls f(std::integral_constant<int, V>). V is the number of vectors of a short row, and 0 for any other row. (In a
  // short row, a loop over the vectors would take as long as their arithmetic.) A row is short if it has 2, 3 or 4
  // vectors of W columns and needs no conversion. With a format of pairs, a row is short if it has 4 or 8 vectors of W
  // columns, with or without a conversion.
  template <class S, class Function>
  static ATTN_INLINE void with_vectors(int64_t cols, Function f) {
    const int64_t vectors = (cols + W - 1) / W;
    if constexpr (kPairs) {
      if (vectors == 4) return f(std::integral_constant<int, 4>());
      if (vectors == 8) return f(std::integral_constant<int, 8>());
    } else if constexpr (std::is_same_v<S, T>) {
      if (vectors == 2) return f(std::integral_constant<int, 2>());
      if (vectors == 3) return f(std::integral_constant<int, 3>());
      if (vectors == 4) return f(std::integral_constant<int, 4>());
    }
    f(std::integral_constant<int, 0>());
  }

  // Whether rows are read without packing.
  static bool in_place(const Operand& x, int64_t cols) { return x.col == 1 && (cols % W == 0 || x.row >= W); }

  // Whether load_two() de-interleaves a row, so that even columns come first, then odd columns. apart() puts queries
  // and packed rows in this order. together() puts the columns of the output back in their own order. With a format of
  // pairs, the output has the order of pairs_of_rows(), and together() undoes this order. If a row ends with a single
  // vector, this vector stays as it is.
  static bool takes_turns(DType dtype) { return (dtype == DType::bf16 || dtype == DType::e4m3) && !kPairs; }
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
      for (int i = 0; i < 2 * W; ++i)
        row[d + i] = halves[kPairs ? i / 4 % 2 * W + i / 8 * 4 + i % 4 : i % 2 * W + i / 2];
    }
  }

  // Calls f(WholeVectors) with the rows of a block. f reads the rows in place if `in_place`, else from packed copies in
  // `tile`. f reads the first `paired` columns of a row by load_two().
  template <class Function>
  static ATTN_INLINE void with_rows(const Pieces& pieces, int64_t rows, int64_t cols, int64_t paired, T* tile,
                                    int64_t ld, bool in_place, Function f) {
    const bool ends_within = cols % W != 0;
    const Block& block = pieces.block;
    const auto as_they_lie = [&](auto storage) {
      using S = decltype(storage);
      if (!ends_within) return f(WholeVectors<S>{pieces, block.row, -1, nullptr});
      const int64_t last = rows - 1;
      const S* const end = reinterpret_cast<const S*>(pieces.at[last / kPiece]) + last % kPiece * block.row;
      S* const copy = reinterpret_cast<S*>(tile);
      __builtin_memcpy(copy, end, static_cast<size_t>(cols) * sizeof(S));
      f(WholeVectors<S>{pieces, block.row, last, copy});
    };
    if (in_place) {
      if constexpr (sizeof(T) == 8) {
        return as_they_lie(double());
      } else if constexpr (kPairs) {
        if (block.dtype == DType::i8) return as_they_lie(Int8());
        if (block.dtype == DType::e4m3) return as_they_lie(Float8());
        return as_they_lie(BFloat16());
      } else {
        if (block.dtype == DType::f32) return as_they_lie(float());
        if (block.dtype == DType::bf16) return as_they_lie(BFloat16());
        if (block.dtype == DType::i8) return as_they_lie(Int8());
        if (block.dtype == DType::e4m3) return as_they_lie(Float8());
        return as_they_lie(Half());
      }
    }
    F::pack_along_columns(block, rows, cols, tile, ld);
    for (int64_t j = 0; j < rows && takes_turns(block.dtype); ++j) apart(tile + j * ld, paired);
    Pieces packed;
    for (int64_t i = 0; const char*& at : packed.at) at = reinterpret_cast<const char*>(tile + i++ * kPiece * ld);
    f(WholeVectors<std::conditional_t<kPairs, BFloat16, T>>{packed, ld * F::kNumbers, -1, nullptr});
  }

 private:
  // How many vectors of products multiply() adds in registers. Compilers keep sums in registers only if V is known.
  template <int kKeys, int V>
  static constexpr int kAdded = V > 0 ? kKeys : 1;
  // Multiplies R queries with the kKeys keys from `first` on. Key `last` takes the place of any key after `last`. For
  // query r, sums_of_rows() adds kAdded vectors of products at a time. The results are stored from sums + r * W * W on.
  // Each vector of a query is loaded once for all kKeys keys. V: the number of vectors of a row, or 0 for any number.
  template <int R, int kKeys, int V, bool kPrefetch, class S>
  static ATTN_INLINE void multiply(const Piece<S>& rows, int64_t first, int64_t last, int64_t cols, const T* query,
                                   int64_t ld_query, T* sums) {
    const S* key[kKeys];
#pragma GCC unroll 4
    for (int i = 0; i < kKeys; ++i) {
      const int64_t j = smaller(first + i, last);
      key[i] = rows.row(j);
      if constexpr (kPrefetch) rows.prefetch(j, 0, V == 0 ? cols : V * W);
    }
    Vec<T> sum[kKeys][R] = {};
    if constexpr (kPairs) {
      multiply_pairs<R, kKeys, V>(key, cols, query, ld_query, sum);
    } else {
      multiply_singles<R, kKeys, V>(key, cols, query, ld_query, sum);
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int i = 0; i < kKeys; i += kAdded<kKeys, V>)
        store<T>(sums + (r * W + i / kAdded<kKeys, V>)*W,
                 sums_of_rows<T, kAdded<kKeys, V>>([&](int j) { return sum[i + j][r]; }));
  }
  template <int R, int kKeys, int V, class S>
  static ATTN_INLINE void multiply_pairs(const S* const (&key)[kKeys], int64_t cols, const T* query, int64_t ld_query,
                                         Vec<T> (&sum)[kKeys][R]) {
    // Key by key, because converting numbers of 8 bits needs many registers.
    const auto add = [&](int64_t d, int i, Vec<T> k) {
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) sum[i][r] = F::multiply_add(sum[i][r], load<T>(query + r * ld_query + d / 2), k);
    };
    const auto add_two = [&](int64_t d) {
#pragma GCC unroll 4
      for (int i = 0; i < kKeys; ++i) {
        Vec<T> k[2];
        F::load_words(key[i] + d, k);
        add(d, i, k[0]);
        add(d + 2 * W, i, k[1]);
      }
    };
    if constexpr (V > 0) {
#pragma GCC unroll 2
      for (int v = 0; v < V; v += 4) add_two(v * W);
      return;
    }
    int64_t d = 0;
    for (; d + 4 * W <= cols; d += 4 * W) add_two(d);
    if (d < cols)
#pragma GCC unroll 4
      for (int i = 0; i < kKeys; ++i) add(d, i, F::load_words(key[i] + d));
  }
  template <int R, int kKeys, int V, class S>
  static ATTN_INLINE void multiply_singles(const S* const (&key)[kKeys], int64_t cols, const T* query, int64_t ld_query,
                                           Vec<T> (&sum)[kKeys][R]) {
    const auto add = [&](int64_t d, const Vec<T>(&k)[kKeys]) {
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const Vec<T> q = load<T>(query + r * ld_query + d);
#pragma GCC unroll 4
        for (int i = 0; i < kKeys; ++i) sum[i][r] += q * k[i];
      }
    };
    const auto add_vector = [&](int64_t d) {
      Vec<T> k[kKeys];
#pragma GCC unroll 4
      for (int i = 0; i < kKeys; ++i) k[i] = load_as<T>(key[i] + d);
      add(d, k);
    };
    const auto add_end = [&](int64_t d) {  // selects zeros, because numbers past the row may be NaN
      const auto ends_here = lane_numbers<T>() < static_cast<Int<T>>(cols - d);
      Vec<T> k[kKeys];
#pragma GCC unroll 4
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
#pragma GCC unroll 4
        for (int i = 0; i < kKeys; ++i) load_two<T>(key[i] + d, k0[i], k1[i]);
        add(d, k0);
        add(d + W, k1);
      }
      if (d < whole) add_vector(d);
      if (whole < cols) add_end(whole);
    }
  }

  // x[r * ld + j] = score(<q_r, k_(first + j)>) for R queries r and the keys j < keys. `keys` is at most W.
  template <int R, int V, bool kPrefetch, class S>
  static void dot(const Piece<S>& rows, int64_t first, int64_t keys, int64_t cols, const T* query, int64_t ld_query,
                  T* sums, ScoreFunction<T> score, T* x, int64_t ld) {
    constexpr int kTogether = smaller(W, V > 0 && !kPairs ? 2 : R == 1 ? 1 : R < 4 || kRegisters < 32 ? 2 : 4);
    for (int64_t j = 0; j < keys; j += kTogether)
      multiply<R, kTogether, V, kPrefetch>(rows, first + j, first + keys - 1, cols, query, ld_query,
                                           sums + j / kAdded<kTogether, V> * W);
    for (int r = 0; r < R; ++r) {  // lanes past the last key are ignored
      const T* const of_row = sums + r * W * W;
      store<T>(x + r * ld,
               score(sums_of_rows<T, W, kAdded<kTogether, V>>([&](int i) { return load<T>(of_row + i * W); })));
    }
  }

  // Reads the rows' masks at the keys [first, first + keys). Returns the number of keys up to the last key that some
  // row sees. The caller need not read later keys.
  int64_t read_mask(const Problem& p, int64_t first, int64_t keys) const {
    if (!p.has_mask) return keys;
    Block tile[kMost];
    bool visible = false;
    for (int64_t r = 0; r < rows.count; ++r) {
      tile[r] = masks[r];
      tile[r].data += first * p.mask.col * size_of(p.mask.dtype);
      visible |= mask_in_bits(p.mask) ? visible_bits(reinterpret_cast<const uint8_t*>(tile[r].data), keys) != 0
                                      : any_visible_number<T>(tile[r], keys);
    }
    if (!visible) return 0;
    int64_t seen = 0;
    for (int64_t r = 0; r < rows.count; ++r) {
      T* add = bias + r * kKeyTile;
      pack_rows<T>(add, kKeyTile, tile[r], 1, keys);
      for (int64_t j = keys; j < round_up(keys, W); ++j) add[j] = -kInfinity<T>;
      int64_t last = keys;
      while (last > seen && add[last - 1] == -kInfinity<T>) --last;
      seen = last;
    }
    return seen;
  }

  void multiply_by_scales(const Problem& p, int64_t first, int64_t keys, T* x, int64_t ld) const {
    T scales[kKeyTile];
    read_scales<T>(p, *key_scale, p.key.dtype, rows.n, key_head_of(p, rows.head[0]), first, keys, scales);
    for (int64_t r = 0; r < rows.count; ++r)
      for (int64_t j = 0; j < keys; j += W) store<T>(x + r * ld + j, load<T>(x + r * ld + j) * load<T>(scales + j));
  }

  // Does what add_score_terms() of scores.inl does, but a vector holds neighbouring keys.
  void add_score_terms(const Problem& p, int64_t first, int64_t keys, T* x, int64_t ld) const {
    const auto cap = SoftCap<T>::of(p);
    const auto score = ScoreFunction<T>::of(p);
    const Vec<T> lanes = __builtin_convertvector(lane_numbers<T>(), Vec<T>);
    for (int64_t r = 0; r < rows.count; ++r) {
      const T slope = p.alibi_slopes ? static_cast<const T*>(p.alibi_slopes)[rows.n * p.heads + rows.head[r]] : 0;
      const T by_slope = Alibi<T>::by_slope(slope);
      const T ahead = static_cast<T>(rows.position[r] + rows.sequence.offset - first);
      for (int64_t j = 0; j < keys; j += W) {
        T* const at = x + r * ld + j;
        Vec<T> y = load<T>(at);
        y = p.softcap > 0 ? tanh_of_exponent<T>(y * cap.exponent, cap.most) : score(y);
        if (p.alibi_slopes) y += by_slope * absolute<T>(ahead - static_cast<T>(j) - lanes);
        store<T>(at, y);
      }
    }
  }

  void hide_keys(const Problem& p, int64_t first, int64_t keys, T* x, int64_t ld) const {
    if (p.has_mask)
      for (int64_t r = 0; r < rows.count; ++r)
        for (int64_t j = 0; j < keys; j += W) {
          const Vec<T> add = load<T>(bias + r * kKeyTile + j);
          T* at = x + r * ld + j;
          store<T>(at, add == -kInfinity<T> ? add : load<T>(at) + add);
        }
    if (all_visible(rows.sequence, rows.positions, {first, first + keys})) return;
    for (int64_t r = 0; r < rows.count; ++r) {
      const Range seen = visible_keys(rows.sequence, {rows.position[r], rows.position[r] + 1});
      for (int64_t j = 0; j < keys; ++j)
        if (!seen.contains(first + j)) x[r * ld + j] = -kInfinity<T>;
    }
  }
};

}  // namespace attn::ATTN_ISA
