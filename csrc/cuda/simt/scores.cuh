// Tiles of scores (score.h) by plain multiply-adds, and their products with keys, values, queries or gradients: what
// the forward and every derivative have in common.
//
// A block owns 64 queries and passes over keys, or, for what is summed over queries, owns 64 keys and passes over
// queries (kOwnsKeys). Its scores lie as [own][other], so that both are the same products.
#pragma once

#include "cuda/simt/simt.cuh"
#include "cuda/shared/softmax.cuh"

namespace attn::cuda {

// Where the tangents of a batch entry, and of the heads of key and value, begin.
struct TangentBases {
  int64_t query, key, value, mask;

  template <class Params>
  __device__ void set(const Params& p, const Task& task) {
    const auto base_of = [&](const Operand& x, int64_t head) {
      return x.data ? batch_offset(p, x, task.n) + head * x.head : 0;
    };
    query = base_of(p.t.query, 0);
    key = base_of(p.t.key, task.key_head);
    value = base_of(p.t.value, task.value_head);
    mask = base_of(p.t.mask, 0);
  }
};

// T: the type it computes in. kCols: the columns that a block computes of its result.
template <class T, class Params, bool kOwnsKeys, int kCols>
struct ScoresSimt {
  static constexpr int kN = kCols / kSimtTile * kSimtCols;  // columns of a thread
  static constexpr int kStride = kSimtStride<T>;
  static constexpr int kFactorStride = kCols + kStride - kSimtTile;
  // Of the scores of a thread.
  static constexpr int kRows = kOwnsKeys ? kSimtCols : kSimtRows;
  static constexpr int kKeys = kOwnsKeys ? kSimtRows : kSimtCols;

  using Scores = T[kSimtRows][kSimtCols];
  using Sums = T[kSimtRows][kN];

  struct Shared {
    alignas(16) T weights[kSimtTile * kStride];  // [other][own]
    union {
      struct {
        alignas(16) T own[kSimtDepth<T> * kStride];    // [d][own]
        alignas(16) T other[kSimtDepth<T> * kStride];  // [d][other]
      };
      alignas(16) T factor[kSimtDepth<T> * kFactorStride];  // [other][d]
    };
    Task task;
    Dropout dropout;
    int64_t query_base, key_base, value_base, mask_base;  // where the batch entry, and the head, begins
    RowTile<kSimtTile> rows;
    uint32_t head_number[kSimtTile];  // of dropout's counters
  };

  const Params& p;
  Shared& shared_scores;
  const Task& task;

  __device__ ScoresSimt(const Params& p, Shared& shared) : p(p), shared_scores(shared), task(shared.task) {}

  // Called by one thread once the task is set, followed by a barrier.
  __device__ static void set_bases(const Params& p, Shared& shared) {
    const Task& task = shared.task;
    if (p.has_dropout) shared.dropout.set(p, task.n);
    shared.query_base = batch_offset(p, p.query, task.n);
    shared.key_base = batch_offset(p, p.key, task.n) + task.key_head * p.key.head;
    shared.value_base = batch_offset(p, p.value, task.n) + task.value_head * p.value.head;
    shared.mask_base = p.has_mask ? batch_offset(p, p.mask, task.n) : 0;
  }
  // Sets all of task `number` of a kernel that passes over keys. Called by all threads, followed by a barrier.
  __device__ void set_task(int64_t number) {
    if (threadIdx.x == 0) {
      shared_scores.task.set(p, number, kSimtTile);
      set_bases(p, shared_scores);
    }
    __syncthreads();
    set_rows();
  }
  // Called by all threads after that barrier, followed by another.
  __device__ void set_rows() {
    shared_scores.rows.set(p, task.row_at(p), task.rows);
    if (!p.has_dropout) return;
    for (int i = threadIdx.x; i < kSimtTile; i += kSimtThreads)  // the rows that this thread has set
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
  static __device__ __forceinline__ int row_of(const SimtThread& t, int a) { return kOwnsKeys ? t.col(a) : t.row(a); }
  static __device__ __forceinline__ int key_of(const SimtThread& t, int b) { return kOwnsKeys ? t.row(b) : t.col(b); }

  // Calls f(score, row of the tile, key of the tile, number among the thread's scores).
  template <class F>
  __device__ __forceinline__ void each(Scores& x, F f) const {
    const SimtThread thread;
#pragma unroll
    for (int a = 0; a < kRows; ++a)
#pragma unroll
      for (int b = 0; b < kKeys; ++b) f(of(x, a, b), row_of(thread, a), key_of(thread, b), a * kKeys + b);
  }

  // x += <row, key>, rows of `of_rows` and, from `key` on, of `of_keys`.
  __device__ __forceinline__ void add_dots(Scores& x, const Operand& of_rows, int64_t rows_base, const Operand& of_keys,
                                           int64_t keys_base, int64_t key, int64_t cols) {
    const SimtThread thread;
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
      d += kSimtDepth<T>;
    } while (d < cols);
  }

  // The scores (score.h) of the keys from `key` on; -inf also where there is no row or no key. x is 0 before.
  __device__ __forceinline__ void scores(Scores& x, int64_t key) {
    Shared& shared = shared_scores;
    add_dots(x, p.query, shared.query_base, p.key, shared.key_base, key, p.head_dim);
    const T slope = ScoreFunction<T>::of(p).slope();
    if (p.has_mask)
      each_of_mask(x, p.mask, shared.mask_base, key,
                   [&](T& score, T bias) { score = masked_score(score, slope, bias); });
    else
      each(x, [&](T& score, int, int, int) { score *= slope; });
    hide_keys(x, key);
  }

  // Calls f(score, number of the mask).
  template <class F>
  __device__ __forceinline__ void each_of_mask(Scores& x, const Operand& mask, int64_t base, int64_t key, F f) {
    const SimtThread thread;
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

  // Says whether some row sees some key of the tile from `key` on, the mask included, which alone is read of others.
  // Called by all threads.
  __device__ __forceinline__ bool shows_some(int64_t key) {
    if (!any_visible(p, task.sequence, task.positions, {key, task.last_key})) return false;
    if (!p.has_mask) return true;
    __syncthreads();  // it is known where the rows lie
    bool some = false;
    Scores none;
    each_of_mask(none, p.mask, shared_scores.mask_base, key, [&](T&, T bias) { some |= bias != -infinity<T>(); });
    return __syncthreads_or(some);
  }

  // The derivative of the scores along p.t, for kernels whose params have one: slope * (tQ K^T + Q tK^T) + tM, where
  // the tangents begin at `bases`. Meaningless where a key is hidden. x is 0 before.
  __device__ __forceinline__ void tangent_scores(Scores& x, const TangentBases& bases, int64_t key) {
    Shared& shared = shared_scores;
    if (p.t.query.data) add_dots(x, p.t.query, bases.query, p.key, shared.key_base, key, p.head_dim);
    if (p.t.key.data) add_dots(x, p.query, shared.query_base, p.t.key, bases.key, key, p.head_dim);
    const T slope = ScoreFunction<T>::of(p).slope();
    each(x, [&](T& tangent, int, int, int) { tangent *= slope; });
    if (p.t.mask.data) each_of_mask(x, p.t.mask, bases.mask, key, [](T& tangent, T of_mask) { tangent += of_mask; });
  }

  __device__ __forceinline__ void hide_keys(Scores& x, int64_t key) {
    const SimtThread thread;
    if (task.rows == kSimtTile && task.all_visible(key, kSimtTile)) return;
#pragma unroll
    for (int a = 0; a < kRows; ++a) {
      const int row = row_of(thread, a);
      const int64_t position = shared_scores.rows.position[row];
      const Range seen = row < task.rows ? visible_keys(p, task.sequence, {position, position + 1}) : Range{0, 0};
      const TileRange in_tile(seen, key);
#pragma unroll
      for (int b = 0; b < kKeys; ++b)
        if (!in_tile.contains(key_of(thread, b))) of(x, a, b) = -infinity<T>();
    }
  }

  // Bit i: dropout keeps the thread's score i, in the order of each().
  __device__ __forceinline__ uint32_t kept(int64_t key) const {
    if (!p.has_dropout) return ~0u;
    const SimtThread thread;
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
    const SimtThread thread;
#pragma unroll
    for (int j = 0; j < kSimtCols; ++j)
#pragma unroll
      for (int i = 0; i < kSimtRows; i += Vec16<T>::kSize) {
        Vec16<T> q;
#pragma unroll
        for (int k = 0; k < Vec16<T>::kSize; ++k) q.at[k] = x[i + k][j];
        *reinterpret_cast<Vec16<T>*>(tile + thread.col(j) * kStride + thread.row(i)) = q;
      }
  }
  static __device__ __forceinline__ T& own(T* tile, int row, int key) {
    return tile[kOwnsKeys ? row * kStride + key : key * kStride + row];
  }

  // sum[own][d] += sum_other weights[other][own] as(x[other][first_col + d]), where others are keys from `key` on, or
  // rows.
  template <class As>
  __device__ __forceinline__ void add_to(Sums& sum, const Operand& x, int64_t base, int64_t key, int64_t cols,
                                         int64_t first_col) {
    const SimtThread thread;
    Shared& shared = shared_scores;
    const int64_t count = kOwnsKeys ? task.rows : task.last_key - key;
    if constexpr (!kOwnsKeys) base += key * x.row;
    for (int first = 0; first < kSimtTile && first < count; first += kSimtDepth<T>) {
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
