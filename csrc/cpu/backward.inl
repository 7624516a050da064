// Gradients, recomputed tile by tile from the saved logsumexp. With s the scale, G the gradient of the output O,
// Z the dropout factors (0 or 1/(1-p)) and P_ij = exp(x_ij - logsumexp_i) the weights,
//
//   x = s Q K^T + M              O = (P * Z) V
//   dV = (P * Z)^T G
//   d(P)_ij  = Z_ij <G_i, V_j>
//   dS_ij    = P_ij (dP_ij - delta_i),   delta_i = sum_j dP_ij P_ij = <G_i, O_i>
//   dM = dS       dQ = s dS K       dK = s dS^T Q
//
// dS is the gradient of x, the scaled score, so the scale enters once in dQ and once in dK, by the chain rule
// x = s q.k. The sum over j of dS_ij is 0, and |dS| <= P (1 - P) * range of dP: it vanishes where the softmax saturates
// (one weight near 1, the others near 0). Without scaling, q.k of independent unit-variance entries has variance d_k, the
// softmax saturates as d_k grows, and every gradient above dies; s = 1/sqrt(d_k) brings the variance of x back to 1
// and so keeps dS at a size that does not depend on d_k (Vaswani et al., 2017, section 3.2.1).

namespace attn::ATTN_ISA {

template <class T>
struct Backward {
  static constexpr int W = kLanes<T>;

  struct RowState {
    RowTile rows;
    T* query_t;        // [E][kRowTile], times the scale
    T* query;          // [kRowTile][E], finite: a NaN query reaches dK through dS, and only at keys it attends to
    T* grad_output_t;  // [Ev][kRowTile]
    T* grad_output;    // [kRowTile][Ev]
    T* grad_query;     // [kRowTile][E]
    T* logsumexp;      // [kRowTile], +inf for a row without keys, so that P = 0 there
    T* delta;          // [kRowTile]
  };
  struct Buffers {
    RowState* states;
    T* key;         // [kKeyTile][E]
    T* key_finite;  // the same for dQ, where a NaN in a masked key must not meet dS = 0
    T* value;       // [kKeyTile][Ev]
    T* x;           // [kKeyTile][kRowTile]: scores, weights, weights after dropout
    T* dx;          // [kKeyTile][kRowTile]: dP, then dS
    T* bias;
    T* factor;
    T* grad_key;    // [keys of a task][E]
    T* grad_value;  // [keys of a task][Ev]
    int64_t ld_key, ld_value;
    int64_t size;

    Buffers(const BackwardParams& p, char* base, int64_t row_tiles, int64_t accumulated_keys) {
      Arena arena(base);
      ld_key = round_up(p.head_dim, W);
      ld_value = round_up(p.value_dim, W);
      states = arena.take<RowState>(row_tiles);
      key = arena.take<T>(kKeyTile * ld_key);
      key_finite = arena.take<T>(kKeyTile * ld_key);
      value = arena.take<T>(kKeyTile * ld_value);
      x = arena.take<T>(kKeyTile * kRowTile);
      dx = arena.take<T>(kKeyTile * kRowTile);
      bias = arena.take<T>(p.has_mask ? kKeyTile * kRowTile : 0);
      factor = arena.take<T>(p.has_dropout ? kKeyTile * kRowTile : 0);
      grad_key = arena.take<T>(p.grad_key.data ? accumulated_keys * ld_key : 0);
      grad_value = arena.take<T>(p.grad_value.data ? accumulated_keys * ld_value : 0);
      for (int64_t t = 0; t < row_tiles; ++t) {
        RowState state;
        state.query_t = arena.take<T>(p.head_dim * kRowTile);
        state.query = arena.take<T>(kRowTile * ld_key);
        state.grad_output_t = arena.take<T>(p.value_dim * kRowTile);
        state.grad_output = arena.take<T>(kRowTile * ld_value);
        state.grad_query = arena.take<T>(kRowTile * ld_key);
        state.logsumexp = arena.take<T>(kRowTile);
        state.delta = arena.take<T>(kRowTile);
        if (base) states[t] = state;
      }
      size = arena.used();
    }
  };

  static void load_rows(const BackwardParams& p, const Buffers& b, RowState& state) {
    const RowTile& rows = state.rows;
    rows.pack_transposed(p, p.query, p.head_dim, state.query_t);
    scale_tile<T>(state.query_t, p.head_dim * kRowTile, static_cast<T>(p.scale));
    rows.pack_transposed(p, p.grad_output, p.value_dim, state.grad_output_t);
    if (p.grad_key.data) {
      rows.pack_rows(p, p.query, p.head_dim, state.query, b.ld_key);
      make_finite(state.query, state.query, rows.count * b.ld_key);
    }
    if (p.grad_value.data) rows.pack_rows(p, p.grad_output, p.value_dim, state.grad_output, b.ld_value);
    for (int64_t i = 0; i < kRowTile; ++i) {
      const bool valid = i < rows.count;
      const T logsumexp = valid ? static_cast<const T*>(p.logsumexp)[rows.statistic(p, i)] : -kInfinity<T>;
      state.logsumexp[i] = logsumexp == -kInfinity<T> ? kInfinity<T> : logsumexp;
      state.delta[i] = valid ? static_cast<const T*>(p.delta)[rows.statistic(p, i)] : 0;
    }
  }

  // Fills x with P * Z and, if `want_dx`, dx with dS.
  static void weights(const BackwardParams& p, const Buffers& b, const RowState& state, int64_t key, int64_t keys,
                      bool want_dx) {
    const RowTile& rows = state.rows;
    const int64_t lanes = rows.template lanes<T>();
    scores<T>(p, rows, state.query_t, b.key, b.ld_key, key, keys, b.bias, b.x);
    if (p.has_dropout) dropout_factors<T>(p, rows, key, keys, b.factor);
    if (want_dx)
      Gemm<T>::template run<false>(keys, lanes, p.value_dim, b.value, b.ld_value, state.grad_output_t, kRowTile, b.dx,
                                   kRowTile, false);
    for (int64_t lane = 0; lane < lanes; lane += W) {
      const Vec<T> logsumexp = load<T>(state.logsumexp + lane);
      const Vec<T> delta = load<T>(state.delta + lane);
      for (int64_t j = 0; j < keys; ++j) {
        const int64_t at = j * kRowTile + lane;
        const Vec<T> weight = exp<T>(load<T>(b.x + at) - logsumexp);
        const Vec<T> factor = p.has_dropout ? load<T>(b.factor + at) : splat<T>(1);
        store<T>(b.x + at, weight * factor);
        if (!want_dx) continue;
        // by selection: nothing of a masked key or its value may come through, not even a NaN
        const Vec<T> ds = weight * (load<T>(b.dx + at) * factor - delta);
        store<T>(b.dx + at, weight == Vec<T>{} ? Vec<T>{} : ds);
      }
    }
  }

  static const T* load_keys(const BackwardParams& p, const Buffers& b, int64_t n, int64_t head, int64_t key,
                            int64_t keys) {
    const int64_t key_head = head / (p.heads / p.key_heads);
    const int64_t value_head = head / (p.heads / p.value_heads);
    pack_rows<T>(b.key, b.ld_key, block_of(p, p.key, n, key_head, key), keys, p.head_dim);
    pack_rows<T>(b.value, b.ld_value, block_of(p, p.value, n, value_head, key), keys, p.value_dim);
    return make_finite(b.key_finite, b.key, keys * b.ld_key) ? b.key_finite : b.key;
  }

  static void run(const BackwardParams& p, int64_t task, char* workspace) {
    const Buffers b(p, workspace, tiles_per_pass(p), p.keys_per_chunk);
    const int64_t chunk = task % p.chunks;
    task /= p.chunks;
    const int64_t spans = p.heads / p.span;
    const int64_t n = task / spans;
    const int64_t first_head = task % spans * p.span;
    const int64_t first_key = chunk * p.keys_per_chunk;
    const int64_t last_key = smaller(first_key + p.keys_per_chunk, p.keys);
    const int64_t per_key_head = p.heads / p.key_heads;
    const int64_t per_value_head = p.heads / p.value_heads;

    for (int64_t head = first_head; head < first_head + p.span; head += p.group) {
      if (p.grad_key.data && head % per_key_head == 0) zero(b.grad_key, (last_key - first_key) * b.ld_key);
      if (p.grad_value.data && head % per_value_head == 0) zero(b.grad_value, (last_key - first_key) * b.ld_value);
      for (int64_t row = 0; row < p.rows(); row += p.rows_per_pass)
        pass(p, b, n, head, row, smaller(row + p.rows_per_pass, p.rows()), chunk, first_key, last_key);
      const int64_t next = head + p.group;
      if (p.grad_key.data && next % per_key_head == 0) {
        scale_tile<T>(b.grad_key, (last_key - first_key) * b.ld_key, static_cast<T>(p.scale));
        unpack_rows<T>(block_of(p, p.grad_key, n, head / per_key_head, first_key), b.grad_key, b.ld_key,
                       last_key - first_key, p.head_dim);
      }
      if (p.grad_value.data && next % per_value_head == 0)
        unpack_rows<T>(block_of(p, p.grad_value, n, head / per_value_head, first_key), b.grad_value, b.ld_value,
                       last_key - first_key, p.value_dim);
    }
  }

  // Rows [first_row, last_row) of the group that begins with `head`, against the keys of the task.
  static void pass(const BackwardParams& p, const Buffers& b, int64_t n, int64_t head, int64_t first_row,
                   int64_t last_row, int64_t chunk, int64_t first_key, int64_t last_key) {
    const bool direct_mask = p.grad_mask.data && !p.mask_is_shared;
    const bool want_dx = p.grad_query.data || p.grad_key.data || direct_mask;
    int64_t tiles = 0, last_position = 0;
    for (int64_t r = first_row; r < last_row; r += kRowTile, ++tiles) {
      RowState& state = b.states[tiles];
      state.rows.set(p, n, head, r, smaller(kRowTile, last_row - r));
      load_rows(p, b, state);
      if (p.grad_query.data) zero(state.grad_query, kRowTile * b.ld_key);
      last_position = larger(last_position, state.rows.max_position);
    }
    if (p.causal) last_key = smaller(last_key, last_position + 1);
    for (int64_t key = first_key; key < last_key; key += kKeyTile) {
      const int64_t keys = smaller(kKeyTile, last_key - key);
      const T* key_finite = load_keys(p, b, n, head, key, keys);
      for (int64_t t = 0; t < tiles; ++t) {
        RowState& state = b.states[t];
        const RowTile& rows = state.rows;
        if (p.causal && key > rows.max_position) continue;
        weights(p, b, state, key, keys, want_dx);
        if (p.grad_value.data)
          Gemm<T>::template run<false>(keys, b.ld_value, rows.count, b.x, kRowTile, state.grad_output, b.ld_value,
                                       b.grad_value + (key - first_key) * b.ld_value, b.ld_value, true);
        if (p.grad_key.data)
          Gemm<T>::template run<false>(keys, b.ld_key, rows.count, b.dx, kRowTile, state.query, b.ld_key,
                                       b.grad_key + (key - first_key) * b.ld_key, b.ld_key, true);
        if (p.grad_query.data)
          Gemm<T>::template run<true>(rows.count, b.ld_key, keys, b.dx, kRowTile, key_finite, b.ld_key,
                                      state.grad_query, b.ld_key, true);
        if (direct_mask)
          rows.each_head([&](int64_t h, int64_t l, int64_t lane, int64_t count) {
            unpack_transposed<T>(block_of(p, p.grad_mask, n, h, l, key), b.dx + lane, kRowTile, count, keys);
          });
      }
    }
    if (!p.grad_query.data) return;
    for (int64_t t = 0; t < tiles; ++t) {
      RowState& state = b.states[t];
      scale_tile<T>(state.grad_query, kRowTile * b.ld_key, static_cast<T>(p.scale));
      state.rows.each_head([&](int64_t h, int64_t l, int64_t lane, int64_t count) {
        const T* from = state.grad_query + lane * b.ld_key;
        if (p.chunks == 1) {
          unpack_rows<T>(block_of(p, p.grad_query, n, h, l), from, b.ld_key, count, p.head_dim);
        } else {
          T* to = static_cast<T*>(p.partial_grad_query) +
                  (((chunk * p.batch + n) * p.heads + h) * p.queries + l) * p.head_dim;
          const Block block{reinterpret_cast<char*>(to), sizeof(T) == 8 ? DType::f64 : DType::f32, p.head_dim, 1};
          unpack_rows<T>(block, from, b.ld_key, count, p.head_dim);
        }
      });
    }
  }

  // Adds the chunks' shares of grad_query, in order, for rows [first, last) of the flat list [batch, heads, L].
  static void merge(const BackwardParams& p, int64_t first, int64_t last, char* workspace) {
    T* row = reinterpret_cast<T*>(workspace);
    const int64_t all_rows = p.batch * p.heads * p.queries;
    for (int64_t r = first; r < last; ++r) {
      for (int64_t d = 0; d < p.head_dim; ++d) row[d] = 0;
      for (int64_t c = 0; c < p.chunks; ++c) {
        const T* part = static_cast<const T*>(p.partial_grad_query) + (c * all_rows + r) * p.head_dim;
        for (int64_t d = 0; d < p.head_dim; ++d) row[d] += part[d];
      }
      const int64_t l = r % p.queries, h = r / p.queries % p.heads, n = r / p.queries / p.heads;
      unpack_rows<T>(block_of(p, p.grad_query, n, h, l), row, p.head_dim, 1, p.head_dim);
    }
  }

  // delta_i = <G_i, O_i> for rows [first, last) of the flat list [batch, heads, L].
  static void delta(const BackwardParams& p, int64_t first, int64_t last, char* workspace) {
    const int64_t width = round_up(p.value_dim, W);
    T* output = reinterpret_cast<T*>(workspace);
    T* grad = output + width;
    for (int64_t r = first; r < last; ++r) {
      const int64_t l = r % p.queries, h = r / p.queries % p.heads, n = r / p.queries / p.heads;
      pack_rows<T>(output, width, block_of(p, p.output, n, h, l), 1, p.value_dim);
      pack_rows<T>(grad, width, block_of(p, p.grad_output, n, h, l), 1, p.value_dim);
      Vec<T> sums{};
      for (int64_t d = 0; d < width; d += W) sums += load<T>(output + d) * load<T>(grad + d);
      T sum = 0;
      for (int i = 0; i < W; ++i) sum += sums[i];
      static_cast<T*>(p.delta)[r] = sum;
    }
  }

  // The gradient of a mask that several scores share. A task owns a block of the mask and sums dS over all heads,
  // rows and keys that read it.
  static void mask(const BackwardParams& p, int64_t task, char* workspace) {
    const Buffers b(p, workspace, 1, 0);
    RowState& state = b.states[0];
    Arena after(workspace + b.size);
    T* sum = after.take<T>(kKeyTile * kRowTile);
    const bool one_row = p.mask_row_tasks == 1 && p.grad_mask.row == 0;
    const bool one_key = p.mask_key_tasks == 1 && p.grad_mask.col == 0;
    const int64_t key_task = task % p.mask_key_tasks;
    task /= p.mask_key_tasks;
    const int64_t row_task = task % p.mask_row_tasks;
    const int64_t slice = task / p.mask_row_tasks;
    const int64_t first_row = one_row ? 0 : row_task * kRowTile;
    const int64_t last_row = one_row ? p.queries : smaller(first_row + kRowTile, p.queries);
    const int64_t first_key = one_key ? 0 : key_task * kKeyTile;
    const int64_t last_key = one_key ? p.keys : smaller(first_key + kKeyTile, p.keys);

    zero(sum, kKeyTile * kRowTile);
    int64_t target_n = 0, target_head = 0;
    const int64_t sharers = p.batch * p.heads / p.mask_slices;
    for (int64_t sharer = 0; sharer < sharers; ++sharer) {
      int64_t n, head;
      locate(p, slice, sharer, n, head);
      if (sharer == 0) target_n = n, target_head = head;
      for (int64_t row = first_row; row < last_row; row += kRowTile) {
        state.rows.set(p, n, head, row, smaller(kRowTile, last_row - row));
        load_rows(p, b, state);
        const int64_t end = p.causal ? smaller(last_key, state.rows.max_position + 1) : last_key;
        for (int64_t key = first_key; key < end; key += kKeyTile) {
          const int64_t keys = smaller(kKeyTile, end - key);
          load_keys(p, b, n, head, key, keys);
          weights(p, b, state, key, keys, true);
          const int64_t lanes = state.rows.template lanes<T>();
          for (int64_t j = 0; j < keys; ++j)
            for (int64_t i = 0; i < lanes; i += W) {
              T* to = sum + (one_key ? 0 : j * kRowTile) + i;
              store<T>(to, load<T>(to) + load<T>(b.dx + j * kRowTile + i));
            }
        }
      }
    }
    const int64_t keys = one_key ? 1 : last_key - first_key;
    int64_t rows = smaller(kRowTile, last_row - first_row);
    if (one_row) {
      for (int64_t j = 0; j < keys; ++j)
        for (int64_t i = 1; i < rows; ++i) sum[j * kRowTile] += sum[j * kRowTile + i];
      rows = 1;
    }
    unpack_transposed<T>(block_of(p, p.grad_mask, target_n, target_head, first_row, first_key), sum, kRowTile, rows,
                         keys);
  }

  // The `sharer`-th (batch, head) pair that reads mask slice `slice`.
  static void locate(const BackwardParams& p, int64_t slice, int64_t sharer, int64_t& n, int64_t& head) {
    const auto coordinate = [&](int64_t extent, int64_t stride) {
      int64_t& from = stride == 0 ? sharer : slice;
      const int64_t c = from % extent;
      from /= extent;
      return c;
    };
    head = coordinate(p.heads, p.grad_mask.head);
    n = 0;
    int64_t weight = 1;
    for (int d = p.batch_dims - 1; d >= 0; --d) {
      n += coordinate(p.batch_size[d], p.grad_mask.batch[d]) * weight;
      weight *= p.batch_size[d];
    }
  }

  static int64_t tiles_per_pass(const BackwardParams& p) { return (p.rows_per_pass + kRowTile - 1) / kRowTile; }

  static void zero(T* p, int64_t count) { __builtin_memset(p, 0, static_cast<size_t>(count) * sizeof(T)); }
};

}  // namespace attn::ATTN_ISA
