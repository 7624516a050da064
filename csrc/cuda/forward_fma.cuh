// O = softmax(scale Q K^T + mask) V, tile by tile with the online softmax (Milakov & Gimelshein, 2018; Dao et al.,
// FlashAttention, 2022), for every dtype and any head_dim. Per row the running maximum m and sum l are kept; when a
// tile raises m, what was accumulated before is multiplied by exp(m_old - m_new).
#pragma once

#include "fma.cuh"
#include "softmax.cuh"

namespace attn::cuda {

// T: the type it computes in. kValueCols: the columns of the output that a block computes.
template <class T, int kValueCols>
struct ForwardFma {
  static constexpr int kN = kValueCols / kFmaTile * kFmaCols;  // of a thread
  static constexpr int kStride = kFmaStride<T>;
  static constexpr int kValueStride = kValueCols + kStride - kFmaTile;

  struct Shared {
    alignas(16) T weights[kFmaTile * kStride];  // [key][row]
    union {
      struct {
        alignas(16) T query[kFmaDepth * kStride];  // [d][row]
        alignas(16) T key[kFmaDepth * kStride];    // [d][key]
      };
      alignas(16) T value[kFmaDepth * kValueStride];  // [key][d]
    };
    Task task;
    Dropout dropout;
    int64_t query_base, key_base, value_base, mask_base;  // where the batch entry, and the head, begins
    RowTile<kFmaTile> rows;
    T maximum[kFmaTile], sum[kFmaTile];  // read and written once a tile of keys: registers need not keep them
    uint32_t head_number[kFmaTile];      // of dropout's counters
  };

  const ForwardParams& p;
  Shared& shared;
  const Task& task;
  const int64_t first_col;  // of the output
  T output[kFmaRows][kN] = {};

  // One thread fills what all need, before a barrier and the constructor.
  __device__ static void set(const ForwardParams& p, Shared& shared, int64_t task_number) {
    shared.task.set(p, task_number);
    const Task& task = shared.task;
    if (p.has_dropout) shared.dropout.set(p, task.n);
    shared.query_base = batch_offset(p, p.query, task.n);
    shared.key_base = batch_offset(p, p.key, task.n) + task.key_head * p.key.head;
    shared.value_base = batch_offset(p, p.value, task.n) + task.value_head * p.value.head;
    shared.mask_base = p.has_mask ? batch_offset(p, p.mask, task.n) : 0;
  }
  __device__ ForwardFma(const ForwardParams& p, Shared& shared, int64_t first_col)
      : p(p), shared(shared), task(shared.task), first_col(first_col) {}

  __device__ void run() {
    shared.rows.set(p, task.first_head, task.first_row, task.rows);
    for (int i = threadIdx.x; i < kFmaTile; i += kFmaThreads) {
      shared.maximum[i] = -infinity<T>();
      shared.sum[i] = 0;
    }
    if (p.has_dropout)
      for (int i = threadIdx.x; i < kFmaTile; i += kFmaThreads)  // the rows that this thread has set
        shared.head_number[i] = shared.dropout.head(p, task.n, shared.rows.head[i]);
    __syncthreads();
    for (int64_t key = task.first_key; key < task.last_key; key += kFmaTile) {
      T x[kFmaRows][kFmaCols] = {};
      add_scores(x, key);
      mask(x, key);
      soften(x);
      if (p.has_dropout) drop(x, key);
      store_weights(x);
      add_values(key);
    }
    write();
  }

  // x = scale <q, k>
  __device__ __forceinline__ void add_scores(T (&x)[kFmaRows][kFmaCols], int64_t key) {
    const FmaThread thread;
    int64_t d = 0;
    do {                // also for no columns at all: the barriers are needed
      __syncthreads();  // what is in shared memory has been read
      load_transposed(shared.query, p.query, shared.query_base, task.rows, p.head_dim, d,
                      [&](int i) { return shared.rows.offset(p.query, i); });
      load_transposed(shared.key, p.key, shared.key_base + key * p.key.row, task.last_key - key, p.head_dim, d,
                      [&](int j) { return j * p.key.row; });
      __syncthreads();
      add_products(x, thread, shared.query, kStride, shared.key, kStride, kFmaDepth);
      d += kFmaDepth;
    } while (d < p.head_dim);
    const T scale = static_cast<T>(p.scale);
#pragma unroll
    for (auto& row : x)
#pragma unroll
      for (T& score : row) score *= scale;
  }

  // + mask; -inf, by selection, where a key is masked or there is none.
  __device__ __forceinline__ void mask(T (&x)[kFmaRows][kFmaCols], int64_t key) {
    const FmaThread thread;
    if (p.has_mask)
      with_type<T>(p.mask.data, p.mask.dtype, [&](const auto* data) {
#pragma unroll
        for (int i = 0; i < kFmaRows; ++i) {
          const auto* row = data + shared.mask_base + shared.rows.offset(p.mask, thread.row(i)) + key * p.mask.col;
#pragma unroll
          for (int j = 0; j < kFmaCols; ++j) {
            if (key + thread.col(j) >= task.last_key) continue;
            const T bias = convert<T>(row[thread.col(j) * p.mask.col]);
            x[i][j] = bias == -infinity<T>() ? bias : x[i][j] + bias;
          }
        }
      });
    const bool diagonal = p.causal && key + kFmaTile - 1 > task.min_position;
    if (!diagonal && key + kFmaTile <= task.last_key) return;
#pragma unroll
    for (int i = 0; i < kFmaRows; ++i) {
      int64_t last = task.last_key - 1;
      if (diagonal) last = smaller(last, shared.rows.position[thread.row(i)]);
#pragma unroll
      for (int j = 0; j < kFmaCols; ++j)
        if (key + thread.col(j) > last) x[i][j] = -infinity<T>();
    }
  }

  // Scores become weights exp(x - maximum).
  __device__ __forceinline__ void soften(T (&x)[kFmaRows][kFmaCols]) {
    const FmaThread thread;
#pragma unroll
    for (int i = 0; i < kFmaRows; ++i) {
      const int row = thread.row(i);
      const T old = shared.maximum[row], old_sum = shared.sum[row];
      T best = old;
#pragma unroll
      for (T score : x[i]) best = max_number(score, best);
#pragma unroll
      for (int lanes = 1; lanes < 16; lanes *= 2) best = max_number(__shfl_xor_sync(~0u, best, lanes), best);
      const T shift = shift_of(best);
      T total = 0;
#pragma unroll
      for (T& score : x[i]) total += score = exp(score - shift);
#pragma unroll
      for (int lanes = 1; lanes < 16; lanes *= 2) total += __shfl_xor_sync(~0u, total, lanes);
      const T correction = exp(old - shift);
      if (thread.x == 0) {  // all of the row have read: the shuffles have brought them together
        shared.maximum[row] = best;
        shared.sum[row] = old_sum * correction + total;
      }
#pragma unroll
      for (T& o : output[i]) o *= correction;
    }
  }

  __device__ __forceinline__ void drop(T (&x)[kFmaRows][kFmaCols], int64_t key) {
    const FmaThread thread;
#pragma unroll
    for (int i = 0; i < kFmaRows; ++i) {
      const int row = thread.row(i);
      const unsigned kept =
          shared.dropout.kept((key + thread.col(0)) / 4, shared.rows.position[row], shared.head_number[row]);
#pragma unroll
      for (int j = 0; j < kFmaCols; ++j) x[i][j] *= static_cast<T>(kept >> j & 1);
    }
  }

  __device__ __forceinline__ void store_weights(const T (&x)[kFmaRows][kFmaCols]) {
    const FmaThread thread;
#pragma unroll
    for (int j = 0; j < kFmaCols; ++j)
#pragma unroll
      for (int i = 0; i < kFmaRows; i += Quad<T>::kSize) {
        Quad<T> q;
#pragma unroll
        for (int k = 0; k < Quad<T>::kSize; ++k) q.at[k] = x[i + k][j];
        *reinterpret_cast<Quad<T>*>(shared.weights + thread.col(j) * kStride + thread.row(i)) = q;
      }
  }

  __device__ __forceinline__ void add_values(int64_t key) {
    const FmaThread thread;
    for (int first = 0; first < kFmaTile && key + first < task.last_key; first += kFmaDepth) {
      __syncthreads();
      load_rows<kValueCols>(shared.value, p.value, shared.value_base, key + first, task.last_key, p.value_dim,
                            first_col);
      __syncthreads();
      add_products(output, thread, shared.weights + first * kStride, kStride, shared.value, kValueStride, kFmaDepth);
    }
  }

  // Divides by the sum; a row that saw no key is 0, its logsumexp -inf.
  __device__ __forceinline__ void write() {
    const FmaThread thread;
    const int64_t output_base = batch_offset(p, p.output, task.n);
    const int64_t residual_base = p.residual.data ? batch_offset(p, p.residual, task.n) : 0;
#pragma unroll
    for (int i = 0; i < kFmaRows; ++i) {
      const int row = thread.row(i);
      if (row >= task.rows) break;
      const T sum = shared.sum[row];
      const bool empty = sum == 0;
      const T inverse = static_cast<T>(p.keep_scale) / (empty ? 1 : sum);
      const OutputRow<T> to(p, task.n, output_base, residual_base, shared.rows.head[row], shared.rows.position[row],
                            task.split);
#pragma unroll
      for (int j = 0; j < kN; ++j) {
        const int64_t d = first_col + thread.col(j);
        if (d < p.value_dim) to.write(d, empty ? 0 : output[i][j] * inverse);
      }
      if (thread.x == 0 && first_col == 0) to.write_logsumexp(task.split, shared.maximum[row], sum);
    }
  }
};

template <class T, int kValueCols>
__global__ void __launch_bounds__(kFmaThreads, 2) forward_fma(const __grid_constant__ ForwardParams p) {
  using Kernel = ForwardFma<T, kValueCols>;
  const int64_t number = block_number(), tasks = p.tasks();
  const int64_t passes = larger(1, divide_up(p.value_dim, kValueCols));
  if (number >= tasks * passes) return;
  auto& shared = *reinterpret_cast<typename Kernel::Shared*>(shared_memory());
  if (threadIdx.x == 0) Kernel::set(p, shared, number % tasks);
  __syncthreads();
  Kernel(p, shared, number / tasks * kValueCols).run();
}

}  // namespace attn::cuda
