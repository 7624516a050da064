// Computes gradients, and their derivative along a direction, with plain multiply-adds. Serves calls that uses_mma()
// refuses, every second derivative, and the gradients of slopes and of masks that are summed over rows. The header
// of cpu/kernels/backward.inl has the formulas and their names. Every block recomputes the scores that it needs. From
// these scores and the saved logsumexp it computes the weights. A block owns a part of one gradient. It sums this part
// in a fixed order, so that equal calls give equal bits. The part consists of:
//
//   dQ      64 queries, summed over all keys
//   dK, dV  64 keys, summed over all queries of all heads that read them
//   dM      64 x 64 numbers of the mask, or 64 numbers of its only row, summed over all heads, batch entries and rows
//           that share them
//   slopes  one number for each of 64 queries i, -sum_j dS_ij |p - j|, summed over all keys j (p: the query's position)
#pragma once

#include <type_traits>

#include "cuda/simt/scores.cuh"

namespace attn::cuda {

enum class Gradient { query, key, value, mask, slopes };

// gradient_tasks() returns how many blocks compute kCols columns of a gradient. gradient_cols() returns how many
// columns the gradient has.
template <Gradient kOf, class Params>
ATTN_INLINE constexpr int64_t gradient_tasks(const Params& p) {
  if (kOf == Gradient::mask) return p.mask_tasks();
  if (kOf == Gradient::query || kOf == Gradient::slopes) return blocks_of_rows(p, kSimtTile);
  return blocks_of_keys(p, kOf == Gradient::key ? p.key_heads : p.value_heads, kSimtTile);
}
template <Gradient kOf, class Params>
ATTN_INLINE constexpr int64_t gradient_cols(const Params& p) {
  if (kOf == Gradient::mask || kOf == Gradient::slopes) return 1;
  return kOf == Gradient::value ? p.value_dim : p.head_dim;
}

// Computes delta of 64 rows and writes it by write_delta(). Adds up <G, O + residual> in the same order as the kernels
// of the gradients add up dP = <G, V>. If a row attends to one key only, O + residual equals V of this key (without
// dropout). So dP - delta is then exactly 0, or exactly the gradient of the logsumexp.
template <class T, class Params>
struct DeltaSimt {
  static constexpr int kThreads = kSimtThreads, kBlocks = kSimtBlocks;
  struct Shared {
    alignas(16) T grad_output[kSimtDepth<T> * kSimtStride<T>];  // [d][row]
    alignas(16) T output[2][kSimtDepth<T> * kSimtStride<T>];
    Task task;
    int64_t grad_output_base;
    RowTile<kSimtTile> rows;
  };

  const Params& p;
  Shared& shared;

  // Returns <G, x> + <G, rest>, computed as two sums that read G once.
  __device__ T dot(const Operand& x, const Operand& rest) {
    const Operand* const terms[] = {&x, &rest};
    T sums[2] = {};
    for (int64_t d = 0; d < p.value_dim; d += kSimtDepth<T>) {
      __syncthreads();
      const auto load = [&](T* tile, const Operand& from, int64_t from_base) {
        load_transposed(tile, from, from_base, shared.task.rows, p.value_dim, d,
                        [&](int i) { return shared.rows.offset(from, i); });
      };
      load(shared.grad_output, p.grad_output, shared.grad_output_base);
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if (terms[i]->data) load(shared.output[i], *terms[i], batch_offset(p, *terms[i], shared.task.n));
      __syncthreads();
      if (threadIdx.x >= kSimtTile) continue;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (!terms[i]->data) continue;
        T chain = kShortChains<T> ? 0 : sums[i];  // as in add_products()
        for (int k = 0; k < kSimtDepth<T>; ++k)
          chain = fma(shared.grad_output[k * kSimtStride<T> + threadIdx.x],
                      shared.output[i][k * kSimtStride<T> + threadIdx.x], chain);
        sums[i] = kShortChains<T> ? sums[i] + chain : chain;
      }
    }
    return sums[0] + sums[1];
  }

  ATTN_INLINE static constexpr int64_t blocks(const Params& p) { return blocks_of_rows(p, kSimtTile); }
  __device__ void run(int64_t number) {
    const int i = threadIdx.x;
    if (i == 0) {
      shared.task.set(p, number, kSimtTile, kSimtTile);
      shared.grad_output_base = batch_offset(p, p.grad_output, shared.task.n);
    }
    __syncthreads();
    if (i < shared.task.rows) shared.rows.set(i, shared.task.sequence, shared.task.row_at(), shared.task.rows);
    const T of_output = dot(p.output, p.residual);
    T of_tangent = 0;
    if constexpr (std::is_same_v<Params, SecondParams>) of_tangent = dot(p.tangent_output, p.tangent_residual);
    if (i < shared.task.rows) write_delta(p, shared.rows.at(shared.task.n, i), of_output, of_tangent);
  }
};

// kOf: the gradient of which the block owns a part. kCols: the number of columns of that part.
template <class T, class Params, Gradient kOf, int kCols>
struct GradientSimt : ScoresSimt<T, Params, kOf == Gradient::key || kOf == Gradient::value, kCols> {
  static constexpr bool kOwnsKeys = kOf == Gradient::key || kOf == Gradient::value;
  static constexpr bool kSecond = std::is_same_v<Params, SecondParams>;
  // The mask and ALiBi are added after the cap, so the gradients of masks and slopes need dS. dQ and dK need dZ = dS
  // cap', where z is the scaled product before the cap.
  static constexpr bool kBehindCap = kOf == Gradient::mask || kOf == Gradient::slopes;
  using Base = ScoresSimt<T, Params, kOwnsKeys, kCols>;
  using Base::kN;
  using Base::p;
  using Base::task;
  using typename Base::Scores, typename Base::Sums;

  struct Statistics : SavedRow<T> {
    T delta, delta_low;

    __device__ __forceinline__ T less_delta(T dp) const { return (dp - delta) - delta_low; }
  };
  struct TangentStatistics {
    Pair<T> logsumexp;  // r and c - r, see cpu/kernels/tangent.inl
    T delta;

    // Returns the derivative of a score minus the derivative of the logsumexp.
    __device__ __forceinline__ T centred(T tangent) const { return (tangent - logsumexp.high) - logsumexp.low; }
  };
  // Further shared memory, which second derivatives need.
  struct Tangent {
    alignas(16) T rest[kSimtTile * kSimtStride<T>];
    TangentStatistics row[kSimtTile];
  };
  // The progress of a block that sums over rows. In each of `turns` turns the block passes over the rows from first_row
  // to last_row - 1. `turn` is the index of the block's current turn, and `row` is the first row of its current tile.
  // For dK and dV there is one turn for each group of heads that reads the keys. For dM there is one turn for each
  // batch entry and head that share this part of the mask. Shared memory holds this struct, because no registers are
  // left.
  struct RowLoop {
    int64_t turns, first_row, last_row;
    int64_t turn, row;
  };
  struct Shared : Base::Shared {
    Statistics row[kSimtTile];
    int64_t first_col;   // of the gradient
    int64_t own_head;    // of dK and dV
    int64_t first_head;  // of the heads that read these keys
    int64_t slice;       // of dM, see sharer_of_mask()
    RowLoop loop;
    std::conditional_t<kSecond, Tangent, Nothing> tangent;
  };

  Shared& shared;

  __device__ GradientSimt(const Params& p, Shared& shared) : Base(p, shared), shared(shared) {}

  // Reads the saved numbers of row r, which is row i of the tile.
  __device__ __forceinline__ void read_row(int i, int64_t r) {
    const T* const delta = static_cast<const T*>(p.delta) + r;
    shared.row[i] = {SavedRow<T>::read(p.logsumexp, r), *delta, p.grad_logsumexp ? delta[number_of_rows(p)] : 0};
    if constexpr (kSecond)
      shared.tangent.row[i] = {static_cast<const Pair<T>*>(p.tangent_logsumexp)[r],
                               static_cast<const T*>(p.tangent_delta)[r]};
  }
  // Sets the rows of the loop's current tile, in the list of rows that begins with `head`.
  __device__ __forceinline__ void go_to_rows(int64_t n, int64_t head) {
    Base::go_to_rows(n, head, shared.loop.row, shared.loop.last_row, [&](int i, int64_t r) { read_row(i, r); });
  }
  __device__ __forceinline__ bool more_rows() const { return shared.loop.turn < shared.loop.turns; }
  // Goes to the first rows that may see some of the block's keys. Called by one thread.
  __device__ __forceinline__ void begin_rows(int64_t turns, int64_t first, int64_t last) {
    shared.loop = {first < last ? turns : 0, first, last, 0, first};
    skip_rows();
  }
  // Goes on to the next rows that may see some of the block's keys. Needs no barrier before it changes shared.loop,
  // because all threads read shared.loop before a barrier of go_to_rows().
  __device__ __forceinline__ void next_rows() {
    if (threadIdx.x == 0) {
      shared.loop.row += kSimtTile;
      skip_rows();
    }
    __syncthreads();  // the next place is there
  }
  __device__ void skip_rows() {
    RowLoop& loop = shared.loop;
    for (; more_rows(); loop.row = loop.first_row, ++loop.turn) {
      const int64_t n = kOwnsKeys ? task.n : sharer_of_mask(p, p.grad_mask, shared.slice, loop.turn).n;
      const Sequence s = sequence_of(p, n);
      const Range keys{task.first_key, smaller(task.first_key + kSimtTile, s.keys)};
      const Range seen = keys.empty() ? Range{0, 0} : visible_rows(s, keys);
      if (seen.empty()) continue;
      loop.row += rows_until(seen, loop.row % s.queries, s.queries, loop.last_row - loop.row, kSimtTile);
      if (loop.row < loop.last_row) return;
    }
  }

  // Turns the scores in x into weights P. Returns bits that say which weights are not 0. Where a weight is 0, callers
  // set its products to 0, because a NaN in a masked key or in its value must not reach a gradient.
  __device__ __forceinline__ uint32_t make_weights(Scores& x) {
    uint32_t attended = 0;
    this->each(x, [&](T& score, int row, int, int bit) {
      score = shared.row[row].weight(score);
      attended |= static_cast<uint32_t>(score != 0) << bit;
    });
    return attended;
  }

  // Sets x to P * Z, or to tP * Z with kSecond.
  __device__ __forceinline__ void value_weights(Scores& x, int64_t key) {
    if constexpr (kSecond)
      this->scores_and_tangents(x, key);
    else
      this->scores(x, key);
    make_weights(x);
    const uint32_t kept = this->kept(key);
    this->each(x, [&](T& weight, int row, int k, int bit) {
      T product = weight * this->factor(kept, bit);
      if constexpr (kSecond) product *= shared.tangent.row[row].centred(this->weight(row, k));
      weight = weight == 0 ? 0 : product;
    });
  }

  // Sets x to the gradient of z, dZ = P u (Z dP - delta), where Z is the dropout factor and u is cap'. With kBehindCap,
  // u is 1, and x becomes dS.
  __device__ __forceinline__ void compute_first_ds(Scores& x, int64_t key) {
    const bool capped = !kBehindCap && p.softcap > 0;
    this->scores(x, key, [&](T y, int row, int k) { this->weight(row, k) = SoftCap<T>::slope(y); });
    const uint32_t attended = make_weights(x), kept = this->kept(key);
    if (capped) this->each(x, [&](T& weight, int row, int k, int) { weight *= this->weight(row, k); });
    this->store_weights(x);
    add_value_dots(x, p.value, shared.base.value, key);
    this->each(x, [&](T& dp, int row, int k, int bit) {
      const T product = this->weight(row, k) * shared.row[row].less_delta(dp * this->factor(kept, bit));
      dp = attended >> bit & 1 ? product : 0;
    });
  }
  // Sets x to t(dZ), where t() and a prefix t mean the derivative along the direction p.t:
  //
  //   t(dZ) = P (u (tx - c) + tu) (Z dP - delta) + P u (Z t(dP) - t(delta))
  //
  // Here c is t(logsumexp), and tu is cap'' tz. With kBehindCap, u is 1 and tu is 0. Calls on_ds() when dZ is in shared
  // memory.
  template <class F>
  __device__ __forceinline__ void compute_second_ds(Scores& x, int64_t key, F on_ds) {
    __syncthreads();  // the rows are there, and the last weights have been read
    this->tangent_products(x, key);
    this->store_weights(x);
    const auto rest = [&](int row, int k) -> T& { return this->own(shared.tangent.rest, row, k); };
    const auto differentiate = [&](int row, int k, T slope, T bend) {
      T& tile = this->weight(row, k);
      const T tz = tile;
      tile = shared.tangent.row[row].centred(slope * tz + this->tangent_terms(row, key + k));
      rest(row, k) = kBehindCap ? 1 : slope;
      if (!kBehindCap && p.softcap > 0) tile = slope * tile + bend * tz;
    };
    const auto cap = SoftCap<T>::of(p);
    this->scores(x, key, [&](T y, int row, int k) { differentiate(row, k, cap.slope(y), cap.bend(y)); });
    const uint32_t attended = make_weights(x), kept = this->kept(key);
    this->each(x, [&](T& weight, int row, int k, int) {
      if (p.softcap == 0) differentiate(row, k, 1, 0);
      this->weight(row, k) *= weight;
      rest(row, k) *= weight;
    });
    add_value_dots(x, p.value, shared.base.value, key);
    this->each(x, [&](T& dp, int row, int k, int bit) {
      T& tile = this->weight(row, k);
      const bool attends = attended >> bit & 1;
      const T ds = shared.row[row].less_delta(dp * this->factor(kept, bit));
      dp = attends ? tile * ds : 0;
      tile = attends ? rest(row, k) * ds : 0;
    });
    on_ds();
    this->store_weights(x);
    add_value_dots(x, p.t.value, shared.tangent_base.value, key);
    this->each(x, [&](T& dp, int row, int k, int bit) {
      const T product = rest(row, k) * (dp * this->factor(kept, bit) - shared.tangent.row[row].delta);
      dp = attended >> bit & 1 ? this->weight(row, k) + product : 0;
    });
  }
  template <class F>
  __device__ __forceinline__ void compute_ds(Scores& x, int64_t key, F on_ds) {
    if constexpr (kSecond)
      compute_second_ds(x, key, on_ds);
    else
      compute_first_ds(x, key);
  }
  // x = <G, value>, or 0 if there is no value.
  __device__ __forceinline__ void add_value_dots(Scores& x, const Operand& value, int64_t base, int64_t key) {
    this->clear(x);
    if (value.data) this->add_dots(x, p.grad_output, shared.grad_output_base, value, base, key, p.value_dim);
  }

  // Adds to `sum` the contribution of the tile of rows and the keys from `key` on. To compute dQ or dK, multiplies dS
  // by keys or queries, and reads a NaN or infinity of a key or query as 0. So a NaN reaches dQ and dK only through dS,
  // and only where a row attends to the key.
  __device__ __forceinline__ void add_tile(Sums& sum, int64_t key) {
    Scores x;
    if constexpr (kOf == Gradient::value) {
      value_weights(x, key);
      this->store_weights(x);
      this->template add_to<Factor::as_it_is>(sum, p.grad_output, shared.grad_output_base, key, p.value_dim,
                                              shared.first_col);
    } else {
      const auto add = [&](const Operand& factor_of, int64_t base) {
        this->template add_to<Factor::finite>(sum, factor_of, base, key, p.head_dim, shared.first_col);
      };
      compute_ds(x, key, [&] {
        if constexpr (kSecond) {
          if (!(kOwnsKeys ? p.t.query.data : p.t.key.data)) return;
          add(kOwnsKeys ? p.t.query : p.t.key, kOwnsKeys ? shared.tangent_base.query : shared.tangent_base.key);
          __syncthreads();  // the weights have been read
        }
      });
      this->store_weights(x);
      add(kOwnsKeys ? p.query : p.key, kOwnsKeys ? shared.base.query : shared.base.key);
    }
  }

  // Calls add(key) for the tiles of keys of block `number`, which owns rows.
  template <class Add>
  __device__ __forceinline__ void go_over_keys(int64_t number, Add add) {
    Base::go_over_keys(number, [&](int i, int64_t r) { read_row(i, r); }, add);
  }

  __device__ void run_query(int64_t number) {
    Sums sum = {};
    go_over_keys(number, [&](int64_t key) { add_tile(sum, key); });

    const SimtThread thread;
    const int64_t base = batch_offset(p, p.grad_query, task.n);
#pragma unroll
    for (int i = 0; i < kSimtRows; ++i) {
      if (thread.row(i) >= task.rows) break;
      write(p.grad_query, base + shared.rows.offset(p.grad_query, thread.row(i)), p.head_dim, sum[i],
            ScoreFunction<T>::of(p).slope());
    }
  }

  __device__ void run_slopes(int64_t number) {
    T sum[kSimtRows] = {};
    go_over_keys(number, [&](int64_t key) {
      Scores x;
      compute_ds(x, key, [] {});
      this->each(x, [&](T& ds, int row, int k, int bit) {
        sum[bit / kSimtCols] += ds * Alibi<T>::by_slope(this->distance(row, key + k));
      });
    });
    const SimtThread thread;
#pragma unroll
    for (int i = 0; i < kSimtRows; ++i) {
      const T total = sum_over_x(sum[i]);
      if (thread.x == 0 && thread.row(i) < task.rows)
        static_cast<T*>(p.grad_slopes)[shared.rows.number(p, task.n, thread.row(i))] = total;
    }
  }

  __device__ void run_keys(int64_t number) {
    const Operand& to = kOf == Gradient::key ? p.grad_key : p.grad_value;
    const int64_t heads = kOf == Gradient::key ? p.key_heads : p.value_heads;
    if (threadIdx.x == 0) {
      shared.own_head = shared.task.set_own_keys(p, number, heads, kSimtTile);
      const int64_t readers = p.heads / heads;
      shared.first_head = shared.own_head * readers;
      begin_rows(readers / p.group, 0, task.rows_of_group(p));
    }
    __syncthreads();
    Sums sum = {};
    for (; more_rows(); next_rows()) {
      go_to_rows(task.n, shared.first_head + shared.loop.turn * p.group);
      if (this->shows_some(task.first_key)) add_tile(sum, task.first_key);
    }

    const int64_t key = task.first_key;
    const SimtThread thread;
    const int64_t base = batch_offset(p, to, task.n) + shared.own_head * to.head + key * to.row;
    const T scale = kOf == Gradient::key ? ScoreFunction<T>::of(p).slope() : 1;
#pragma unroll
    for (int i = 0; i < kSimtRows; ++i) {
      if (key + thread.row(i) >= task.last_key) break;  // past the length: operators/run.cpp has written 0
      write(to, base + thread.row(i) * to.row, kOf == Gradient::key ? p.head_dim : p.value_dim, sum[i], scale);
    }
  }

  __device__ __forceinline__ void write(const Operand& to, int64_t base, int64_t cols, const T (&sum)[kN], T scale) {
    const SimtThread thread;
#pragma unroll
    for (int j = 0; j < kN; ++j) {
      const int64_t d = shared.first_col + thread.col(j);
      if (d < cols) store_rounded(to, base + d * to.col, sum[j] * scale);
    }
  }

  __device__ void run_mask(int64_t number) {
    const bool one_row = p.grad_mask.row == 0;
    if (threadIdx.x == 0) {
      shared.task.first_key = number % p.mask_key_tasks * kSimtTile;
      number /= p.mask_key_tasks;
      shared.slice = number / p.mask_row_tasks;
      const int64_t first_row = number % p.mask_row_tasks * kSimtTile;
      // All batch entries that share this part of the mask have the same number of queries. Packed sequences may have
      // different numbers of queries, but each of them has its own part of the mask.
      const int64_t queries = sequence_of(p, sharer_of_mask(p, p.grad_mask, shared.slice, 0).n).queries;
      const int64_t last_row = one_row ? queries : smaller(first_row + kSimtTile, queries);
      begin_rows(p.batch * p.heads / p.mask_slices, first_row, last_row);
    }
    __syncthreads();
    Scores sum = {};
    for (; more_rows(); next_rows()) {
      const Row at = sharer_of_mask(p, p.grad_mask, shared.slice, shared.loop.turn);
      go_to_rows(at.n, at.head);
      if (!this->shows_some(task.first_key)) continue;
      Scores x;
      compute_ds(x, task.first_key, [] {});
#pragma unroll
      for (int i = 0; i < kSimtRows; ++i)
#pragma unroll
        for (int j = 0; j < kSimtCols; ++j) sum[i][j] += x[i][j];
    }

    const int64_t key = task.first_key, first_row = shared.loop.first_row;
    const Row at = sharer_of_mask(p, p.grad_mask, shared.slice, 0);
    const int64_t base = batch_offset(p, p.grad_mask, at.n) + at.head * p.grad_mask.head + key * p.grad_mask.col;
    const auto store = [&](int row, int col, T x) {
      if (first_row + row < shared.loop.last_row && key + col < p.keys)
        store_rounded(p.grad_mask, base + (first_row + row) * p.grad_mask.row + col * p.grad_mask.col, x);
    };
    if (!one_row) {
      this->each(sum, [&](T& x, int row, int col, int) { store(row, col, x); });
      return;
    }
    __syncthreads();
    this->store_weights(sum);
    __syncthreads();
    if (threadIdx.x >= kSimtTile) return;
    T total = 0;
    for (int row = 0; row < kSimtTile; ++row) total += this->weight(row, threadIdx.x);
    store(0, threadIdx.x, total);
  }

  ATTN_INLINE static constexpr int64_t blocks(const Params& p) {
    return gradient_tasks<kOf>(p) * divide_up(gradient_cols<kOf>(p), kCols);
  }
  __device__ void run(int64_t number) {
    const int64_t tasks = gradient_tasks<kOf>(p);
    if (threadIdx.x == 0) shared.first_col = number / tasks * kCols;
    if constexpr (kOf == Gradient::query)
      run_query(number % tasks);
    else if constexpr (kOf == Gradient::mask)
      run_mask(number % tasks);
    else if constexpr (kOf == Gradient::slopes)
      run_slopes(number % tasks);
    else
      run_keys(number % tasks);
  }
};

template <class T, Gradient kOf, class Params>
Error launch_gradient_simt(const Operand& to, const Params& p, Stream stream) {
  if (!to.data || gradient_cols<kOf>(p) == 0) return nullptr;
  return with_cols<T>(gradient_cols<kOf>(p),
                      [&]<int kCols>() { return launch_blocks<GradientSimt<T, Params, kOf, kCols>>(p, stream); });
}

template <class T, class Params>
Error launch_delta_simt(const Params& p, Stream stream) {
  return launch_blocks<DeltaSimt<T, Params>>(p, stream);
}

template <class T, class Params>
Error launch_gradients_simt(const Params& p, Stream stream) {
  if (Error error = launch_gradient_simt<T, Gradient::query>(p.grad_query, p, stream)) return error;
  if (Error error = launch_gradient_simt<T, Gradient::key>(p.grad_key, p, stream)) return error;
  if (Error error = launch_gradient_simt<T, Gradient::value>(p.grad_value, p, stream)) return error;
  if (Error error = launch_gradient_simt<T, Gradient::mask>(p.grad_mask, p, stream)) return error;
  return p.grad_slopes ? launch_blocks<GradientSimt<T, Params, Gradient::slopes, kSimtTile>>(p, stream) : nullptr;
}

}  // namespace attn::cuda
