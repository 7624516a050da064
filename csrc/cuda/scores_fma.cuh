// The way of a score, for plain multiply-adds, shared by the forward and every derivative: scale * q.k, + mask, -inf
// where masked; and what is made of scores multiplied with keys, values, queries or gradients.
//
// A block owns 64 queries and passes over keys, or, for what is summed over queries, owns 64 keys and passes over queries
// (kOwnsKeys). Its scores lie as [own][other], so that both are the same products.
#pragma once

#include "fma.cuh"
#include "softmax.cuh"

namespace attn::cuda {

// T: the type it computes in. kCols: the columns that a block computes of its result.
template <class T, class Params, bool kOwnsKeys, int kCols>
struct ScoresFma {
  static constexpr int kN = kCols / kFmaTile * kFmaCols;  // columns of a thread
  static constexpr int kStride = kFmaStride<T>;
  static constexpr int kFactorStride = kCols + kStride - kFmaTile;
  // Of the scores of a thread.
  static constexpr int kRows = kOwnsKeys ? kFmaCols : kFmaRows;
  static constexpr int kKeys = kOwnsKeys ? kFmaRows : kFmaCols;

  using Scores = T[kFmaRows][kFmaCols];
  using Sums = T[kFmaRows][kN];

  struct Shared {
    alignas(16) T weights[kFmaTile * kStride];  // [other][own]
    union {
      struct {
        alignas(16) T own[kFmaDepth<T> * kStride];    // [d][own]
        alignas(16) T other[kFmaDepth<T> * kStride];  // [d][other]
      };
      alignas(16) T factor[kFmaDepth<T> * kFactorStride];  // [other][d]
    };
    Task task;
    Dropout dropout;
    int64_t query_base, key_base, value_base, mask_base;  // where the batch entry, and the head, begins
    RowTile<kFmaTile> rows;
    uint32_t head_number[kFmaTile];  // of dropout's counters
  };

  const Params& p;
  Shared& shared_scores;
  const Task& task;

  __device__ ScoresFma(const Params& p, Shared& shared) : p(p), shared_scores(shared), task(shared.task) {}

  // Called by one thread once the task is set, followed by a barrier.
  __device__ static void set_bases(const Params& p, Shared& shared) {
    const Task& task = shared.task;
    if (p.has_dropout) shared.dropout.set(p, task.n);
    shared.query_base = batch_offset(p, p.query, task.n);
    shared.key_base = batch_offset(p, p.key, task.n) + task.key_head * p.key.head;
    shared.value_base = batch_offset(p, p.value, task.n) + task.value_head * p.value.head;
    shared.mask_base = p.has_mask ? batch_offset(p, p.mask, task.n) : 0;
  }
  // Called by all threads after that barrier, followed by another.
  __device__ void set_rows() {
    shared_scores.rows.set(p, task.first_head, task.first_row, task.rows);
    if (!p.has_dropout) return;
    for (int i = threadIdx.x; i < kFmaTile; i += kFmaThreads)  // the rows that this thread has set
      shared_scores.head_number[i] = shared_scores.dropout.head(p, task.n, shared_scores.rows.head[i]);
  }

  // Of scores [own][other], that of the thread's row a and key b; which row and which key of the tile they are.
  template <class X>
  static __device__ __forceinline__ auto& of(X& x, int a, int b) {
    if constexpr (kOwnsKeys)
      return x[b][a];
    else
      return x[a][b];
  }
  static __device__ __forceinline__ int row_of(const FmaThread& t, int a) { return kOwnsKeys ? t.col(a) : t.row(a); }
  static __device__ __forceinline__ int key_of(const FmaThread& t, int b) { return kOwnsKeys ? t.row(b) : t.col(b); }

  // Calls f(score, row of the tile, key of the tile, number among the thread's scores).
  template <class F>
  __device__ __forceinline__ void each(Scores& x, F f) const {
    const FmaThread thread;
#pragma unroll
    for (int a = 0; a < kRows; ++a)
#pragma unroll
      for (int b = 0; b < kKeys; ++b) f(of(x, a, b), row_of(thread, a), key_of(thread, b), a * kKeys + b);
  }

  // x += <row, key>, rows of `of_rows` and, from `key` on, of `of_keys`.
  __device__ __forceinline__ void add_dots(Scores& x, const Operand& of_rows, int64_t rows_base, const Operand& of_keys,
                                           int64_t keys_base, int64_t key, int64_t cols) {
    const FmaThread thread;
    Shared& shared = shared_scores;
    int64_t d = 0;
    do {                // also for no columns at all: the barriers are needed
      __syncthreads();  // what is in shared memory has been read
      load_transposed(kOwnsKeys ? shared.other : shared.own, of_rows, rows_base, task.rows, cols, d,
                      [&](int i) { return shared.rows.offset(of_rows, i); });
      load_transposed(kOwnsKeys ? shared.own : shared.other, of_keys, keys_base + key * of_keys.row,
                      task.last_key - key, cols, d, [&](int j) { return j * of_keys.row; });
      __syncthreads();
      add_products(x, thread, shared.own, kStride, shared.other, kStride);
      d += kFmaDepth<T>;
    } while (d < cols);
  }

  // x = scale <q, k> + mask; -inf, by selection, where a key is masked or there is none. x is 0 before.
  __device__ __forceinline__ void scores(Scores& x, int64_t key) {
    Shared& shared = shared_scores;
    add_dots(x, p.query, shared.query_base, p.key, shared.key_base, key, p.head_dim);
    const T scale = static_cast<T>(p.scale);
#pragma unroll
    for (auto& row : x)
#pragma unroll
      for (T& score : row) score *= scale;
    if (p.has_mask)
      each_of_mask(x, p.mask, shared.mask_base, key,
                   [](T& score, T bias) { score = bias == -infinity<T>() ? bias : score + bias; });
    hide(x, key);
  }

  // Calls f(score, number of the mask).
  template <class F>
  __device__ __forceinline__ void each_of_mask(Scores& x, const Operand& mask, int64_t base, int64_t key, F f) {
    const FmaThread thread;
#pragma unroll
    for (int a = 0; a < kRows; ++a) {
      const int64_t row = base + shared_scores.rows.offset(mask, row_of(thread, a)) + key * mask.col;
#pragma unroll
      for (int b = 0; b < kKeys; ++b) {
        if (key + key_of(thread, b) >= task.last_key) continue;
        f(of(x, a, b), read_mask<T>(mask, row + key_of(thread, b) * mask.col));
      }
    }
  }

  __device__ __forceinline__ void hide(Scores& x, int64_t key) {
    const FmaThread thread;
    const bool diagonal = p.causal && key + kFmaTile - 1 > task.min_position;
    if (!diagonal && key + kFmaTile <= task.last_key && task.rows == kFmaTile) return;
#pragma unroll
    for (int a = 0; a < kRows; ++a) {
      const int row = row_of(thread, a);
      int64_t last = row < task.rows ? task.last_key - 1 : -1;
      if (diagonal) last = smaller(last, shared_scores.rows.position[row]);
#pragma unroll
      for (int b = 0; b < kKeys; ++b)
        if (key + key_of(thread, b) > last) of(x, a, b) = -infinity<T>();
    }
  }

  // Bit i: dropout keeps the thread's score i, in the order of each().
  __device__ __forceinline__ uint32_t kept(int64_t key) const {
    if (!p.has_dropout) return ~0u;
    const FmaThread thread;
    uint32_t bits = 0;
#pragma unroll
    for (int a = 0; a < kRows; ++a)
#pragma unroll
      for (int b = 0; b < kKeys; b += 4) {
        const int row = row_of(thread, a);
        const uint32_t four = shared_scores.dropout.kept(
            (key + key_of(thread, b)) / 4, shared_scores.rows.position[row], shared_scores.head_number[row]);
        bits |= four << (a * kKeys + b);
      }
    return bits;
  }

  // The tile in shared memory, which every thread reads and writes its own part of without barriers.
  __device__ __forceinline__ void store_weights(const Scores& x) { store_own(shared_scores.weights, x); }
  __device__ __forceinline__ T& weight(int row, int key) const { return own(shared_scores.weights, row, key); }

  // The same of another tile.
  static __device__ __forceinline__ void store_own(T* tile, const Scores& x) {
    const FmaThread thread;
#pragma unroll
    for (int j = 0; j < kFmaCols; ++j)
#pragma unroll
      for (int i = 0; i < kFmaRows; i += Quad<T>::kSize) {
        Quad<T> q;
#pragma unroll
        for (int k = 0; k < Quad<T>::kSize; ++k) q.at[k] = x[i + k][j];
        *reinterpret_cast<Quad<T>*>(tile + thread.col(j) * kStride + thread.row(i)) = q;
      }
  }
  static __device__ __forceinline__ T& own(T* tile, int row, int key) {
    return tile[kOwnsKeys ? row * kStride + key : key * kStride + row];
  }

  // sum[own][d] += sum_other weights[other][own] as(x[other][first_col + d]), where others are keys from `key` on, or rows.
  template <class As>
  __device__ __forceinline__ void add_to(Sums& sum, const Operand& x, int64_t base, int64_t key, int64_t cols,
                                         int64_t first_col) {
    const FmaThread thread;
    Shared& shared = shared_scores;
    const int64_t count = kOwnsKeys ? task.rows : task.last_key - key;
    if constexpr (!kOwnsKeys) base += key * x.row;
    for (int first = 0; first < kFmaTile && first < count; first += kFmaDepth<T>) {
      __syncthreads();
      load_rows<kCols, As>(shared.factor, x, base, count - first, cols, first_col, [&](int i) {
        if constexpr (kOwnsKeys)
          return shared.rows.offset(x, first + i);
        else
          return (first + i) * x.row;
      });
      __syncthreads();
      add_products(sum, thread, shared.weights + first * kStride, kStride, shared.factor, kFactorStride);
    }
  }
};

}  // namespace attn::cuda
