// Computes gradients, and their derivative along a direction, with plain multiply-adds, for what uses_mma() refuses,
// for every second derivative and for masks that scores share: the formulas of cpu/kernels/backward.inl, whose
// names are used here. Scores are computed anew from the saved logsumexp by every block that needs them; a block owns a
// part of one gradient and adds up what belongs there in a fixed order, so that equal calls give equal bits:
//
//   dQ  64 queries, over all keys                  dK, dV  64 keys, over all queries of all heads that read them
//   dM  64 x 64 of the mask, or 64 numbers of its only row, over all heads, batch entries and rows that share them
#pragma once

#include <type_traits>

#include "cuda/simt/scores.cuh"

namespace attn::cuda {

enum class Gradient { query, key, value, mask };

// Parts of a gradient that blocks own, for every kCols columns.
template <Gradient kOf, class Params>
ATTN_INLINE constexpr int64_t gradient_tasks(const Params& p) {
  if (kOf == Gradient::mask) return p.mask_tasks();
  if (kOf == Gradient::query) return p.batch * p.groups() * divide_up(p.rows(), kSimtTile);
  return p.batch * (kOf == Gradient::key ? p.key_heads : p.value_heads) * divide_up(p.keys, kSimtTile);
}
template <Gradient kOf, class Params>
ATTN_INLINE constexpr int64_t gradient_cols(const Params& p) {
  if (kOf == Gradient::mask) return 1;
  return kOf == Gradient::value ? p.value_dim : p.head_dim;
}

// delta = <G, O + residual>, of 64 rows, summed in the order in which these kernels sum <G, V>: where a row attends to
// one key only, O is that V, and dP - delta is then exactly 0. For SecondParams also its derivative, <G, tO>.
template <class T, class Params>
struct DeltaSimt {
  struct Shared {
    alignas(16) T grad_output[kSimtDepth<T> * kSimtStride<T>];  // [d][row]
    alignas(16) T output[2][kSimtDepth<T> * kSimtStride<T>];
    Task task;
    int64_t grad_output_base;
    RowTile<kSimtTile> rows;
  };

  const Params& p;
  Shared& shared;

  // <G, x> + <G, rest>, two sums of their own, for one reading of G.
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
        T chain = kShortChains<T> ? 0 : sums[i];  // as add_products()
        for (int k = 0; k < kSimtDepth<T>; ++k)
          chain = fma(shared.grad_output[k * kSimtStride<T> + threadIdx.x],
                      shared.output[i][k * kSimtStride<T> + threadIdx.x], chain);
        sums[i] = kShortChains<T> ? sums[i] + chain : chain;
      }
    }
    return sums[0] + sums[1];
  }

  ATTN_INLINE static constexpr int64_t blocks(const Params& p) { return gradient_tasks<Gradient::query>(p); }
  __device__ void run(int64_t number) {
    if (threadIdx.x == 0) {
      const int64_t row_tasks = divide_up(p.rows(), kSimtTile);
      const int64_t row = number % row_tasks * kSimtTile, group = number / row_tasks;
      const int64_t n = group / p.groups(), head = group % p.groups() * p.group;
      shared.task.set_rows(p, n, head, row, smaller(kSimtTile, p.rows() - row));
      shared.grad_output_base = batch_offset(p, p.grad_output, n);
    }
    __syncthreads();
    shared.rows.set(p, shared.task.row_at(p), shared.task.rows);
    write(p.delta, dot(p.output, p.residual));
    if constexpr (std::is_same_v<Params, SecondParams>)
      write(p.tangent_delta, dot(p.tangent_output, p.tangent_residual));
  }

  __device__ void write(void* to, T x) {
    const int i = threadIdx.x;
    if (i >= shared.task.rows) return;
    static_cast<T*>(to)[row_number(p, shared.task.n, shared.rows.head[i], shared.rows.position[i])] = x;
  }
};

// kOf: the gradient that the block owns a part of, kCols columns of it.
template <class T, class Params, Gradient kOf, int kCols>
struct GradientSimt : ScoresSimt<T, Params, kOf == Gradient::key || kOf == Gradient::value, kCols> {
  static constexpr bool kOwnsKeys = kOf == Gradient::key || kOf == Gradient::value;
  static constexpr bool kSecond = std::is_same_v<Params, SecondParams>;
  using Base = ScoresSimt<T, Params, kOwnsKeys, kCols>;
  using Base::kN;
  using Base::p;
  using Base::task;
  using typename Base::Scores, typename Base::Sums;

  struct Statistics {
    T logsumexp, logsumexp_low;  // +inf for a row that attends to no key
    T delta;
  };
  struct TangentStatistics {
    T shift, shifted_sum;  // c is the sum of both, see cpu/kernels/tangent.inl
    T delta;
  };
  struct alignas(16) Tile {
    T at[kSimtTile * kSimtStride<T>];
  };
  struct MaskTask {
    int64_t slice, sharer;  // see sharer_of_mask()
    int64_t first_row, last_row, row;
  };
  struct Shared : Base::Shared {
    int64_t grad_output_base;
    Statistics row[kSimtTile];
    int64_t first_col;  // of the gradient
    int64_t own_head;   // of dK and dV
    [[no_unique_address]] std::conditional_t<kOf == Gradient::mask, MaskTask, Nothing> mask;
    [[no_unique_address]] std::conditional_t<kSecond, Tile, Nothing> rest;
    [[no_unique_address]] std::conditional_t<kSecond, TangentBases, Nothing> tangent_base;
    [[no_unique_address]] std::conditional_t<kSecond, TangentStatistics[kSimtTile], Nothing> tangent_row;
  };

  Shared& shared;

  __device__ GradientSimt(const Params& p, Shared& shared) : Base(p, shared), shared(shared) {}

  // The tile of rows that the next scores are of: from `first` on, of the list that begins with `head`.
  __device__ void set_rows(int64_t n, int64_t head, int64_t first, int64_t last) {
    __syncthreads();  // what is in shared memory has been read
    if (threadIdx.x == 0) {
      shared.task.set_rows(p, n, head, first, smaller(kSimtTile, last - first));
      Base::set_bases(p, shared);
      shared.grad_output_base = batch_offset(p, p.grad_output, n);
      if constexpr (kSecond) shared.tangent_base.set(p, task);
    }
    __syncthreads();
    Base::set_rows();
    for (int i = threadIdx.x; i < kSimtTile; i += kSimtThreads) {  // the rows that this thread has set
      const int64_t r = row_number(p, n, shared.rows.head[i], shared.rows.position[i]);
      const T* pair = static_cast<const T*>(p.logsumexp) + 2 * r;
      const bool empty = pair[0] == -infinity<T>();
      shared.row[i] = {empty ? infinity<T>() : pair[0], empty ? 0 : pair[1], static_cast<const T*>(p.delta)[r]};
      if constexpr (kSecond) {
        const T* tangent_pair = static_cast<const T*>(p.tangent_logsumexp) + 2 * r;
        shared.tangent_row[i] = {tangent_pair[0], tangent_pair[1], static_cast<const T*>(p.tangent_delta)[r]};
      }
    }
  }

  // Scores become weights P. Returns which of them are not 0: nothing of a masked key or its value may come through,
  // not even a NaN, so that whatever is multiplied with a weight of 0 is replaced by 0.
  __device__ __forceinline__ uint32_t recompute_weights(Scores& x) {
    uint32_t attended = 0;
    this->each(x, [&](T& score, int row, int, int bit) {
      const Statistics& s = shared.row[row];
      score = score == -infinity<T>() ? 0 : exp((score - s.logsumexp) - s.logsumexp_low);
      attended |= static_cast<uint32_t>(score != 0) << bit;
    });
    return attended;
  }

  __device__ __forceinline__ void dot_grad_output(Scores& x, const Operand& value, int64_t base, int64_t key) {
    this->add_dots(x, p.grad_output, shared.grad_output_base, value, base, key, p.value_dim);
  }

  // Z of a weight: 1 / (1 - dropout_p), or 0 if it is dropped.
  __device__ __forceinline__ T factor(uint32_t kept, int bit) const {
    return static_cast<T>(kept >> bit & 1) * static_cast<T>(p.keep_scale);
  }

  // Computes P * Z into x, or tP * Z for kSecond. x is 0 before.
  __device__ __forceinline__ void value_weights(Scores& x, int64_t key) {
    if constexpr (kSecond) {
      __syncthreads();  // the rows are there, and the last weights have been read
      this->tangent_scores(x, shared.tangent_base, key);
      this->store_weights(x);
      clear(x);
    }
    this->scores(x, key);
    recompute_weights(x);
    const uint32_t kept = this->kept(key);
    this->each(x, [&](T& weight, int row, int k, int bit) {
      T product = weight * factor(kept, bit);
      if constexpr (kSecond) {
        const TangentStatistics& s = shared.tangent_row[row];
        product *= (this->weight(row, k) - s.shift) - s.shifted_sum;
      }
      weight = weight == 0 ? 0 : product;
    });
  }

  // Computes dS into x; for kSecond t(dS), and dS into shared memory.
  __device__ __forceinline__ void compute_ds(Scores& x, int64_t key) {
    this->scores(x, key);
    const uint32_t attended = recompute_weights(x), kept = this->kept(key);
    this->store_weights(x);
    if constexpr (kSecond) {  // the rest of t(dS): P (t(dP) - t(delta))
      clear(x);
      if (p.t.value.data) dot_grad_output(x, p.t.value, shared.tangent_base.value, key);
      this->each(x, [&](T& slope, int row, int k, int bit) {
        const T product = this->weight(row, k) * (slope * factor(kept, bit) - shared.tangent_row[row].delta);
        slope = attended >> bit & 1 ? product : 0;
      });
      this->store_own(shared.rest.at, x);
    }
    clear(x);
    dot_grad_output(x, p.value, shared.value_base, key);
    this->each(x, [&](T& slope, int row, int k, int bit) {
      const T product = this->weight(row, k) * (slope * factor(kept, bit) - shared.row[row].delta);
      slope = attended >> bit & 1 ? product : 0;
    });
    if constexpr (kSecond) {
      this->store_weights(x);
      clear(x);
      this->tangent_scores(x, shared.tangent_base, key);
      this->each(x, [&](T& tangent, int row, int k, int bit) {
        const TangentStatistics& s = shared.tangent_row[row];
        const T product = this->weight(row, k) * ((tangent - s.shift) - s.shifted_sum);
        tangent = attended >> bit & 1 ? product + this->own(shared.rest.at, row, k) : 0;
      });
    }
  }

  static __device__ __forceinline__ void clear(Scores& x) {
#pragma unroll
    for (auto& row : x)
#pragma unroll
      for (T& score : row) score = 0;
  }

  // Adds what the tile of rows and the keys from `key` on contribute. A NaN reaches dQ and dK through dS, and only
  // where a row attends to the key: the other factor is made finite.
  __device__ __forceinline__ void add_tile(Sums& sum, int64_t key) {
    Scores x = {};
    if constexpr (kOf == Gradient::value) {
      value_weights(x, key);
      this->store_weights(x);
      this->template add_to<AsItIs>(sum, p.grad_output, shared.grad_output_base, key, p.value_dim, shared.first_col);
    } else {
      compute_ds(x, key);
      const auto add = [&](const Operand& factor_of, int64_t base) {
        this->template add_to<Finite>(sum, factor_of, base, key, p.head_dim, shared.first_col);
      };
      if constexpr (kSecond) {
        if (kOwnsKeys ? p.t.query.data : p.t.key.data) {
          add(kOwnsKeys ? p.t.query : p.t.key, kOwnsKeys ? shared.tangent_base.query : shared.tangent_base.key);
          __syncthreads();  // the weights have been read
        }
      }
      this->store_weights(x);
      add(kOwnsKeys ? p.query : p.key, kOwnsKeys ? shared.query_base : shared.key_base);
    }
  }

  __device__ void run_query(int64_t task_number) {
    const int64_t row_tasks = divide_up(p.rows(), kSimtTile);
    const int64_t row = (row_tasks - 1 - task_number % row_tasks) * kSimtTile;
    const int64_t group = task_number / row_tasks;
    set_rows(group / p.groups(), group % p.groups() * p.group, row, p.rows());
    if (threadIdx.x == 0) shared.task.set_keys(p, 0, p.keys, kSimtTile);
    __syncthreads();
    Sums sum = {};
    for (int64_t key = task.first_key; key < task.last_key; key += kSimtTile)
      if (this->shows_some(key)) add_tile(sum, key);

    const SimtThread thread;
    const int64_t base = batch_offset(p, p.grad_query, task.n);
#pragma unroll
    for (int i = 0; i < kSimtRows; ++i) {
      if (thread.row(i) >= task.rows) break;
      write(p.grad_query, base + shared.rows.offset(p.grad_query, thread.row(i)), p.head_dim, sum[i],
            ScoreFunction<T>::of(p).slope());
    }
  }

  __device__ void run_keys(int64_t task_number) {
    const Operand& to = kOf == Gradient::key ? p.grad_key : p.grad_value;
    const int64_t heads = kOf == Gradient::key ? p.key_heads : p.value_heads;
    if (threadIdx.x == 0) {
      const int64_t key_tasks = divide_up(p.keys, kSimtTile);
      shared.own_head = task_number / key_tasks % heads;
      shared.task.n = task_number / key_tasks / heads;
      shared.task.first_key = task_number % key_tasks * kSimtTile;
      shared.task.last_key = smaller(task.first_key + kSimtTile, sequence_of(p, task.n).keys);
      shared.task.first_head = shared.own_head * (p.heads / heads);
      shared.task.first_row = 0;
    }
    __syncthreads();
    Sums sum = {};
    do {
      set_rows(task.n, task.first_head, task.first_row, p.rows());
      if (this->shows_some(task.first_key)) add_tile(sum, task.first_key);
    } while (next_rows((shared.own_head + 1) * (p.heads / heads)));

    const int64_t n = task.n, head = shared.own_head, key = task.first_key;
    const SimtThread thread;
    const int64_t base = batch_offset(p, to, n) + head * to.head + key * to.row;
    const T scale = kOf == Gradient::key ? ScoreFunction<T>::of(p).slope() : 1;
#pragma unroll
    for (int i = 0; i < kSimtRows; ++i) {
      if (key + thread.row(i) >= p.keys) break;
      write(to, base + thread.row(i) * to.row, kOf == Gradient::key ? p.head_dim : p.value_dim, sum[i], scale);
    }
  }

  // Moves on to the next rows of the group, or to the next group below `last_head`; false after the last.
  __device__ bool next_rows(int64_t last_head) {
    const bool same_group = task.first_row + kSimtTile < p.rows();
    const int64_t head = same_group ? task.first_head : task.first_head + p.group;
    const int64_t row = same_group ? task.first_row + kSimtTile : 0;
    if (head >= last_head) return false;
    __syncthreads();  // all have read
    if (threadIdx.x == 0) shared.task.first_head = head, shared.task.first_row = row;
    __syncthreads();
    return true;
  }

  __device__ __forceinline__ void write(const Operand& to, int64_t base, int64_t cols, const T (&sum)[kN], T scale) {
    const SimtThread thread;
#pragma unroll
    for (int j = 0; j < kN; ++j) {
      const int64_t d = shared.first_col + thread.col(j);
      if (d < cols) store_rounded(to.data, to.dtype, base + d * to.col, sum[j] * scale);
    }
  }

  __device__ void run_mask(int64_t task_number) {
    if (threadIdx.x == 0) {
      MaskTask& m = shared.mask;
      shared.task.first_key = task_number % p.mask_key_tasks * kSimtTile;
      shared.task.last_key = smaller(task.first_key + kSimtTile, p.keys);
      task_number /= p.mask_key_tasks;
      m.first_row = task_number % p.mask_row_tasks * kSimtTile;
      m.last_row = p.grad_mask.row == 0 ? p.queries : smaller(m.first_row + kSimtTile, p.queries);
      m.slice = task_number / p.mask_row_tasks;
      m.sharer = 0;
      m.row = m.first_row;
    }
    __syncthreads();
    Scores sum = {};
    do {
      const Row at = sharer_of_mask(p, p.grad_mask, shared.mask.slice, shared.mask.sharer);
      set_rows(at.n, at.head, shared.mask.row, shared.mask.last_row);
      if (!this->shows_some(task.first_key)) continue;
      Scores x = {};
      compute_ds(x, task.first_key);
#pragma unroll
      for (int i = 0; i < kSimtRows; ++i)
#pragma unroll
        for (int j = 0; j < kSimtCols; ++j) sum[i][j] += x[i][j];
    } while (next_sharer());

    const bool one_row = p.grad_mask.row == 0;
    const int64_t key = task.first_key, first_row = shared.mask.first_row;
    const Row at = sharer_of_mask(p, p.grad_mask, shared.mask.slice, 0);
    const int64_t base = batch_offset(p, p.grad_mask, at.n) + at.head * p.grad_mask.head + key * p.grad_mask.col;
    const auto store = [&](int row, int col, T x) {
      if (first_row + row < p.queries && key + col < p.keys)
        store_rounded(p.grad_mask.data, p.grad_mask.dtype,
                      base + (first_row + row) * p.grad_mask.row + col * p.grad_mask.col, x);
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

  // Moves on to the next rows that share the block's part of the mask; false after the last.
  __device__ bool next_sharer() {
    const MaskTask& m = shared.mask;
    const bool same_head = m.row + kSimtTile < m.last_row;
    const int64_t sharer = same_head ? m.sharer : m.sharer + 1;
    const int64_t row = same_head ? m.row + kSimtTile : m.first_row;
    if (sharer >= p.batch * p.heads / p.mask_slices) return false;
    __syncthreads();  // all have read
    if (threadIdx.x == 0) shared.mask.sharer = sharer, shared.mask.row = row;
    __syncthreads();
    return true;
  }

  ATTN_INLINE static constexpr int64_t blocks(const Params& p) {
    return gradient_tasks<kOf>(p) * divide_up(gradient_cols<kOf>(p), kCols);
  }
  __device__ void run(int64_t number) {
    const int64_t tasks = gradient_tasks<kOf>(p), task_number = number % tasks;
    if (threadIdx.x == 0) shared.first_col = number / tasks * kCols;
    if constexpr (kOf == Gradient::query)
      run_query(task_number);
    else if constexpr (kOf == Gradient::mask)
      run_mask(task_number);
    else
      run_keys(task_number);
  }
};

template <class T, Gradient kOf, class Params>
Error launch_gradient_simt(const Operand& to, const Params& p, Stream stream) {
  if (!to.data || gradient_cols<kOf>(p) == 0) return nullptr;
  return with_cols<T>(gradient_cols<kOf>(p),
                      [&]<int kCols>() { return launch_simt<GradientSimt<T, Params, kOf, kCols>>(p, stream); });
}

template <class T, class Params>
Error launch_delta_simt(const Params& p, Stream stream) {
  return launch_simt<DeltaSimt<T, Params>>(p, stream);
}

template <class T, class Params>
Error launch_gradients_simt(const Params& p, Stream stream) {
  if (Error error = launch_gradient_simt<T, Gradient::query>(p.grad_query, p, stream)) return error;
  if (Error error = launch_gradient_simt<T, Gradient::key>(p.grad_key, p, stream)) return error;
  if (Error error = launch_gradient_simt<T, Gradient::value>(p.grad_value, p, stream)) return error;
  return launch_gradient_simt<T, Gradient::mask>(p.grad_mask, p, stream);
}

}  // namespace attn::cuda
