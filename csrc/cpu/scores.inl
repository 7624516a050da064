// One tile of scores: which queries it holds, and the pipeline every score passes.
//
// Tiles are transposed: row j is a key, a lane is a query. Row maximum, sum and rescaling are then vertical, without
// a horizontal reduction.

namespace attn::ATTN_ISA {

// The logsumexp of the lanes, see params.h. +inf for a row that attends to no key and for a lane without a row: the
// weight is 0 there.
template <class T>
struct Logsumexp {
  T high[kRowTile];
  T low[kRowTile];

  // Of x in units of the score.
  template <class F>
  ATTN_INLINE Vec<T> weight(Vec<T> x, int64_t lane) const {
    return F::exp((x - load<T>(high + lane)) - load<T>(low + lane));
  }
};

// Writes maximum + log(sum) as a pair; -inf for a row without keys.
template <class T>
void store_logsumexp(T* pair, T maximum, T sum) {
  const T log = static_cast<T>(__builtin_log(sum));
  const T high = maximum + log;
  const T of_log = high - maximum;  // Knuth's two-sum: low is exactly what rounding took from high
  const T low = (maximum - (high - of_log)) + (log - of_log);
  const bool finite = high - high == 0;
  pair[0] = sum == 0 ? -kInfinity<T> : high;
  pair[1] = sum == 0 || !finite ? 0 : low;
}

// Up to kRowTile consecutive rows of a group of heads (Problem::group): the lanes of a tile.
struct RowTile {
  int64_t n;      // flat batch index
  int64_t count;  // rows
  int64_t min_position;
  int64_t max_position;
  int64_t head[kRowTile];
  int64_t position[kRowTile];

  // Rows [first, first + rows) of the list that begins with head `first_head`.
  void set(const Problem& p, int64_t batch_index, int64_t first_head, int64_t first, int64_t rows) {
    n = batch_index;
    count = rows;
    int64_t h = first_head + first / p.queries;
    int64_t l = first % p.queries;
    min_position = max_position = l;
    for (int64_t i = 0; i < rows; ++i) {
      head[i] = h;
      position[i] = l;
      min_position = smaller(min_position, l);
      max_position = larger(max_position, l);
      if (++l == p.queries) {
        l = 0;
        ++h;
      }
    }
  }

  // Calls f(head, position, lane, rows) for every run of rows of one head.
  template <class F>
  ATTN_INLINE void each_head(F f) const {
    for (int64_t lane = 0; lane < count;) {
      int64_t end = lane + 1;
      while (end < count && head[end] == head[lane]) ++end;
      f(head[lane], position[lane], lane, end - lane);
      lane = end;
    }
  }

  // Where a row's statistic stands in [batch, heads, L].
  int64_t statistic(const Problem& p, int64_t lane) const {
    return (n * p.heads + head[lane]) * p.queries + position[lane];
  }

  template <class T>
  int64_t lanes() const {
    return round_up(count, kLanes<T>);
  }

  // tile[d * kRowTile + lane] = x(lane, first_col + d)
  template <class T>
  void pack_transposed(const Problem& p, const Operand& x, int64_t cols, T* tile, int64_t first_col = 0) const {
    each_head([&](int64_t h, int64_t l, int64_t lane, int64_t rows) {
      const int64_t width = lane + rows == count ? lanes<T>() - lane : rows;
      ATTN_ISA::pack_transposed<T>(tile + lane, kRowTile, block_of(p, x, n, h, l, first_col), rows, cols, width);
    });
  }
  // The way back.
  template <class T>
  void unpack_transposed(const Problem& p, const Operand& x, int64_t cols, const T* tile, int64_t first_col = 0) const {
    each_head([&](int64_t h, int64_t l, int64_t lane, int64_t rows) {
      ATTN_ISA::unpack_transposed<T>(block_of(p, x, n, h, l, first_col), tile + lane, kRowTile, rows, cols);
    });
  }

  // The same, with what rounding took away in `residual` (data may be null). `tile` is overwritten; `scratch` has
  // kKeyTile * kRowTile elements.
  template <class T>
  void unpack_rounded(const Problem& p, const Operand& x, const Operand& residual, int64_t cols, T* tile,
                      T* scratch) const {
    unpack_transposed(p, x, cols, tile);
    if (!residual.data) return;
    for (int64_t d = 0; d < cols; d += kKeyTile) {
      const int64_t depth = smaller(kKeyTile, cols - d);
      T* exact = tile + d * kRowTile;
      pack_transposed(p, x, depth, scratch, d);
      for (int64_t i = 0; i < depth * kRowTile; i += kLanes<T>)
        store<T>(exact + i, load<T>(exact + i) - load<T>(scratch + i));
      unpack_transposed(p, residual, depth, exact, d);
    }
  }

  template <class T>
  void load_logsumexp(const Problem& p, const void* logsumexp, Logsumexp<T>& lanes_of) const {
    for (int64_t i = 0; i < kRowTile; ++i) {
      const T* pair = static_cast<const T*>(logsumexp) + 2 * (i < count ? statistic(p, i) : 0);
      const bool empty = i >= count || pair[0] == -kInfinity<T>;
      lanes_of.high[i] = empty ? kInfinity<T> : pair[0];
      lanes_of.low[i] = empty ? 0 : pair[1];
    }
  }
  template <class T>
  void load_pairs(const Problem& p, const void* pairs, T* high, T* low) const {
    for (int64_t i = 0; i < kRowTile; ++i) {
      const T* pair = static_cast<const T*>(pairs) + 2 * (i < count ? statistic(p, i) : 0);
      high[i] = i < count ? pair[0] : 0;
      low[i] = i < count ? pair[1] : 0;
    }
  }

  // Operands of format F: tile[slot of columns * kRowTile + lane],
  template <class F>
  void pack_columns(const Problem& p, const Operand& x, int64_t cols, typename F::Number* tile,
                    int64_t first_col = 0) const {
    each_head([&](int64_t h, int64_t l, int64_t lane, int64_t rows) {
      const int64_t width = lane + rows == count ? lanes<typename F::Number>() - lane : rows;
      F::pack_transposed(block_of(p, x, n, h, l, first_col), rows, cols, tile + lane, width);
    });
  }
  // and tile[slot of lanes * ld + column].
  template <class F>
  void pack_lanes(const Problem& p, const Operand& x, int64_t cols, typename F::Number* tile, int64_t ld) const {
    each_head([&](int64_t h, int64_t l, int64_t lane, int64_t rows) {
      F::pack_along_rows(block_of(p, x, n, h, l), lane, rows, cols, tile, ld);
    });
  }
};

// Philox4x32-10 (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011), one counter per 64-bit lane.
ATTN_INLINE void philox(Vec<uint64_t> (&c)[4], uint64_t seed) {
  uint32_t key0 = static_cast<uint32_t>(seed);
  uint32_t key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const Vec<uint64_t> a = multiply_low_halves(c[0], splat<uint64_t>(0xd2511f53u));
    const Vec<uint64_t> b = multiply_low_halves(c[2], splat<uint64_t>(0xcd9e8d57u));
    c[0] = (b >> 32) ^ c[1] ^ static_cast<uint64_t>(key0);
    c[1] = b & 0xffffffffu;
    c[2] = (a >> 32) ^ c[3] ^ static_cast<uint64_t>(key1);
    c[3] = a & 0xffffffffu;
    key0 += 0x9e3779b9u;
    key1 += 0xbb67ae85u;
  }
}

// factor[j * kRowTile + lane] = `kept` where the weight is kept, 0 where dropped. `key` is a multiple of 4.
template <class T>
void dropout_factors(const Problem& p, const RowTile& rows, int64_t key, int64_t keys, T kept, T* factor) {
  constexpr int W = kLanes<uint64_t>;
  using Narrow = typename VectorOf<typename Float<T>::UInt, W>::type;
  const Block rng = block_of(p, p.rng, rows.n, 0, 0);
  const auto* state = reinterpret_cast<const int64_t*>(rng.data);
  const auto seed = static_cast<uint64_t>(state[0]);
  const auto offset = static_cast<uint64_t>(state[rng.col]);
  const auto period = static_cast<uint64_t>(larger(1, state[2 * rng.col]));
  const uint64_t bits_if_kept = bit_cast<typename Float<T>::UInt>(kept);
  for (int64_t lane = 0; lane < rows.count; lane += W) {
    Vec<uint64_t> position{}, head{};
    for (int64_t i = 0; i < smaller(W, rows.count - lane); ++i) {
      position[i] = static_cast<uint64_t>(rows.position[lane + i]);
      head[i] = static_cast<uint64_t>(rows.n * p.heads + rows.head[lane + i]) % period;
    }
    for (int64_t j = 0; j < keys; j += 4) {
      Vec<uint64_t> words[4] = {splat<uint64_t>(static_cast<uint64_t>(key + j) / 4), position, head,
                                splat<uint64_t>(offset)};
      philox(words, seed);
      for (int64_t w = 0; w < smaller(4, keys - j); ++w) {
        const Vec<uint64_t> bits =
            words[w] < splat<uint64_t>(p.keep_below) ? splat<uint64_t>(bits_if_kept) : Vec<uint64_t>{};
        const Narrow narrow = __builtin_convertvector(bits, Narrow);
        __builtin_memcpy(factor + (j + w) * kRowTile + lane, &narrow, sizeof narrow);
      }
    }
  }
}

// tile[j * kRowTile + lane] = mask(lane, key + j)
template <class T>
void pack_mask(const Problem& p, const Operand& mask, const RowTile& rows, int64_t key, int64_t keys, T* tile) {
  rows.each_head([&](int64_t h, int64_t l, int64_t lane, int64_t count) {
    const int64_t width = lane + count == rows.count ? kRowTile - lane : count;
    pack_transposed<T>(tile + lane, kRowTile, block_of(p, mask, rows.n, h, l, key), count, keys, width);
  });
}

// The same of a boolean mask whose keys are neighbours, in bits: bit `lane` of row j. A byte a score would have to be
// transposed as a float.
struct MaskBits {
  static_assert(kRowTile == 64 && kKeyTile == 64);
  uint64_t row[kKeyTile];

  static bool holds(const Operand& mask) { return mask.dtype == DType::boolean && mask.col == 1; }

  MaskBits(const Problem& p, const RowTile& rows, int64_t key, int64_t keys) {
    for (uint64_t& bits : row) bits = ~uint64_t{};
    rows.each_head([&](int64_t h, int64_t l, int64_t lane, int64_t count) {
      const Block block = block_of(p, p.mask, rows.n, h, l, key);
      for (int64_t i = 0; i < count; ++i) {
        const auto* from = reinterpret_cast<const uint8_t*>(block.data) + i * block.row;
        uint8_t some[kKeyTile] = {};
        if (keys < kKeyTile) __builtin_memcpy(some, from, static_cast<size_t>(keys));
        row[lane + i] = nonzero_bytes(keys < kKeyTile ? some : from);
      }
    });
    transpose_bits(row);
  }
};

// What a tile of scores() must yet be multiplied by, by scaled(): the scale if that changes neither which score of a row
// is the largest nor what a mask adds.
template <class T>
ATTN_INLINE T unit_of_scores(const Problem& p) {
  const bool adds = p.has_mask && p.mask.dtype != DType::boolean;
  const T scale = static_cast<T>(p.scale);
  return !adds && scale > 0 ? scale : 1;
}

// The scores, rounded alike in every kernel: what the forward makes of them and what the gradients do must agree.
template <class T>
ATTN_INLINE Vec<T> scaled(const T* x, T unit) {
  return uncontracted(load<T>(x) * unit);
}

// x[j * kRowTile + lane], keys [key, key + keys): scale q.k -> + mask -> masked by mask and causality; in units of
// unit_of_scores().
// `query_t` is the tile of queries, transposed; `bias` is workspace.
// What is masked becomes -inf by selection, not by addition: a NaN in a masked key does not get through.
template <class F, class T = typename F::Number>
void scores(const Problem& p, const RowTile& rows, const T* query_t, const Rows<T>& key_rows, int64_t key, int64_t keys,
            T* bias, T* x) {
  constexpr int W = kLanes<T>;
  const int64_t lanes = rows.lanes<T>();
  const T scale = unit_of_scores<T>(p) == 1 ? static_cast<T>(p.scale) : 1;  // what is applied here
  Gemm<F>::template run<false>(keys, lanes, slots_of<F>(p.head_dim), key_rows.data, key_rows.ld, query_t, kRowTile, x,
                               kRowTile, false);
  const Vec<T> masked = splat<T>(-kInfinity<T>);
  if (p.has_mask && MaskBits::holds(p.mask)) {
    const MaskBits mask(p, rows, key, keys);
    for (int64_t j = 0; j < keys; ++j)
      for (int64_t i = 0; i < lanes; i += W) {
        T* at = x + j * kRowTile + i;
        store<T>(at, lanes_of_bits<T>(mask.row[j] >> i) ? load<T>(at) * scale : masked);
      }
  } else if (p.has_mask) {
    pack_mask<T>(p, p.mask, rows, key, keys, bias);
    for (int64_t j = 0; j < keys; ++j)
      for (int64_t i = j * kRowTile; i < j * kRowTile + lanes; i += W) {
        const Vec<T> b = load<T>(bias + i);
        store<T>(x + i, b == masked ? masked : load<T>(x + i) * scale + b);
      }
  } else {
    scale_tile<T>(x, keys * kRowTile, scale);
  }
  if (p.causal && key + keys - 1 > rows.min_position) {
    T limit[kRowTile] = {};  // lane's last visible key, counted from `key`
    for (int64_t i = 0; i < rows.count; ++i)
      limit[i] = static_cast<T>(larger(-1, smaller(rows.position[i] - key, keys)));
    for (int64_t j = 0; j < keys; ++j)
      for (int64_t i = 0; i < lanes; i += W) {
        T* at = x + j * kRowTile + i;
        store<T>(at, load<T>(limit + i) < static_cast<T>(j) ? masked : load<T>(at));
      }
  }
}

// tx, the derivative of the scores along t: s (tQ K^T + Q tK^T) + tM. Meaningless where the score is masked.
template <class F, class T = typename F::Number>
void tangent_scores(const Problem& p, const Tangents& t, const RowTile& rows, const T* query_t,
                    const T* tangent_query_t, const Rows<T>& key_rows, const Rows<T>& tangent_key_rows, int64_t key,
                    int64_t keys, T* bias, T* tx) {
  const int64_t lanes = rows.lanes<T>();
  bool started = false;
  const auto add = [&](const Rows<T>& keys_of, const T* queries) {
    Gemm<F>::template run<false>(keys, lanes, slots_of<F>(p.head_dim), keys_of.data, keys_of.ld, queries, kRowTile, tx,
                                 kRowTile, started);
    started = true;
  };
  if (t.query.data) add(key_rows, tangent_query_t);
  if (t.key.data) add(tangent_key_rows, query_t);
  if (!started) fill_zero(tx, keys * kRowTile);
  scale_tile<T>(tx, keys * kRowTile, static_cast<T>(p.scale));
  if (!t.mask.data) return;
  pack_mask<T>(p, t.mask, rows, key, keys, bias);
  for (int64_t i = 0; i < keys * kRowTile; i += kLanes<T>) store<T>(tx + i, load<T>(tx + i) + load<T>(bias + i));
}

}  // namespace attn::ATTN_ISA
