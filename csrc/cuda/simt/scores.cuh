// By plain multiply-adds, computes tiles of scores (score.h) and the products of these tiles with keys, values, queries
// or gradients. The forward and every derivative share this code.
//
// A block owns 64 queries and passes over keys. If its result is summed over queries, it owns 64 keys and passes over
// queries instead (kOwnsKeys). Scores are stored as [own][other], so that both cases compute the same products.
#pragma once

#include "cuda/simt/simt.cuh"
#include "cuda/shared/softmax.cuh"

namespace attn::cuda {

// Where the data of a task begin in the inputs, or in the tangents of the inputs. In query and mask, the data begin
// with the task's batch entry. In key and value, they begin with the task's head. The number for an absent tensor is 0.
struct Bases {
  int64_t query, key, value, mask;

  template <class Inputs>
  __device__ void set(const Problem& p, const Inputs& x, const Task& task) {
    query = batch_offset(p, x.query, task.n);
    key = batch_offset(p, x.key, task.n) + task.key_head * x.key.head;
    value = batch_offset(p, x.value, task.n) + task.value_head * x.value.head;
    mask = batch_offset(p, x.mask, task.n);
  }
};

// Where the rows of a tile of keys, and of their values, begin in pages. Offsets count from the start of the head.
struct RowsInPages {
  int64_t key[kSimtTile], value[kSimtTile];
};
// The scales of a tile of keys, and of their values.
struct ScalesSimt {
  Scales all;
  float key[kSimtTile], value[kSimtTile];
};

// T: the type that the kernel computes in. kCols: how many columns of its result a block computes. kPaged: whether keys
// and values are stored in pages. Kernels that own keys do not read pages.
template <class T, class Params, bool kOwnsKeys, int kCols, bool kPaged = false>
struct ScoresSimt {
  static constexpr int kThreads = kSimtThreads, kBlocks = kSimtBlocks;
  static constexpr int kN = kCols / kSimtTile * kSimtCols;  // columns of a thread
  static constexpr int kStride = kSimtStride<T>;
  static constexpr int kFactorStride = kCols + kStride - kSimtTile;
  static constexpr bool kMayBeEight = std::is_same_v<Params, ForwardParams> && sizeof(T) == 4;  // the bits of keys
  // How many rows and how many keys a thread's scores have.
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
    Bases base, tangent_base;  // tangent_base: for kernels whose params have a direction
    int64_t grad_output_base;  // for kernels whose params have grad_output
    RowTile<kSimtTile> rows;
    uint32_t head_number[kSimtTile];  // of dropout's counters
    std::conditional_t<kPaged, RowsInPages, Nothing> in_pages;
    std::conditional_t<kMayBeEight, ScalesSimt, Nothing> scales;
  };

  const Params& p;
  Shared& shared_scores;
  const Task& task;

  __device__ ScoresSimt(const Params& p, Shared& shared) : p(p), shared_scores(shared), task(shared.task) {}

  // Sets the rows of the next scores and the offsets at which the operands begin. All threads call set_rows(), and a
  // barrier must follow. Within set_rows(), one thread calls set_task(task). Then one thread per row calls set_row(row
  // of the tile, number of the row).
  template <class SetTask, class SetRow>
  __device__ __forceinline__ void set_rows(SetTask set_task, SetRow set_row) {
    Shared& shared = shared_scores;
    const int i = threadIdx.x;
    __syncthreads();  // the data of the previous rows have been read
    if (i == 0) {
      set_task(shared.task);
      if (p.has_dropout) shared.dropout.set(p, task.n);
      shared.base.set(p, p, task);
      if constexpr (kMayBeEight)
        if (task.rows > 0) shared.scales.all.set(p, task);
      if constexpr (requires { p.t; }) shared.tangent_base.set(p, p.t, task);
      if constexpr (requires { p.grad_output; }) shared.grad_output_base = batch_offset(p, p.grad_output, task.n);
    }
    __syncthreads();
    if (i >= kSimtTile || task.rows == 0) return;
    shared.rows.set(i, task.sequence, task.row_at(), task.rows);
    if (p.has_dropout) shared.head_number[i] = shared.dropout.head(p, task.n, shared.rows.head[i]);
    set_row(i, shared.rows.number(p, task.n, i));
  }
  // For a kernel that passes over keys. Calls set_rows() for the block with the index `number`, then calls add(key) for
  // each tile of keys in which some row sees some key. Called by all threads.
  template <class SetRow, class Add>
  __device__ __forceinline__ void go_over_keys(int64_t number, SetRow set_row, Add add) {
    set_rows([&](Task& task) { task.set(p, number, kSimtTile, kSimtTile); }, set_row);
    __syncthreads();
    for (int64_t key = task.first_key; key < task.last_key; key += kSimtTile)
      if (shows_some(key)) {
        if constexpr (kPaged) find_in_pages(key);
        if constexpr (kMayBeEight) find_scales(key);
        add(key);
      }
  }
  // Looks up each row of a tile, because a page may be smaller than the tile. Needs no barrier of its own. After the
  // threads have read the offsets of the previous tile's rows, they pass a barrier in add_to(). Before they read the
  // offsets of this tile's rows, they pass a barrier in add_dots().
  __device__ __forceinline__ void find_in_pages(int64_t key) {
    static_assert(kSimtThreads == 2 * kSimtTile);
    const int i = threadIdx.x % kSimtTile;
    if (key + i >= task.last_key) return;
    const auto offset = [&](const Operand& x) { return key_row_offset(p, x, task.n, key + i); };
    if (threadIdx.x < kSimtTile)
      shared_scores.in_pages.key[i] = offset(p.key);
    else
      shared_scores.in_pages.value[i] = offset(p.value);
  }
  // Looks up the scale of each key and value of a tile. As find_in_pages(), it needs no barrier of its own.
  __device__ __forceinline__ void find_scales(int64_t key) {
    const int i = threadIdx.x % kSimtTile;
    const bool of_key = threadIdx.x < kSimtTile;
    auto& scales = shared_scores.scales;
    (of_key ? scales.key : scales.value)[i] = scales.all.of(p, task, of_key, key + i);
  }
  // Sets the rows of a tile. The tile begins with row `first` of the list of rows that begins with `head`. It ends
  // before row `last`.
  template <class SetRow>
  __device__ __forceinline__ void go_to_rows(int64_t n, int64_t head, int64_t first, int64_t last, SetRow set_row) {
    const auto set_task = [&](Task& task) {
      task.set_rows(p, n, head, first, smaller(kSimtTile, last - first));
      task.last_key = smaller(task.first_key + kSimtTile, task.sequence.keys);  // of this batch entry
    };
    set_rows(set_task, set_row);
  }

  // of() returns the score of the thread's row a and key b in x, which is stored as [own][other]. row_of() returns the
  // number of row a in the tile, and key_of() returns the number of key b in the tile.
  template <class X>
  static __device__ __forceinline__ auto& of(X& x, int a, int b) {
    if constexpr (kOwnsKeys)
      return x[b][a];
    else
      return x[a][b];
  }
  static __device__ __forceinline__ int row_of(const SimtThread& t, int a) { return kOwnsKeys ? t.col(a) : t.row(a); }
  static __device__ __forceinline__ int key_of(const SimtThread& t, int b) { return kOwnsKeys ? t.row(b) : t.col(b); }

  // Calls f(score, row of the tile, key of the tile, i) for score i of the thread.
  template <class F>
  __device__ __forceinline__ void each(Scores& x, F f) const {
    const SimtThread thread;
#pragma unroll
    for (int a = 0; a < kRows; ++a)
#pragma unroll
      for (int b = 0; b < kKeys; ++b) f(of(x, a, b), row_of(thread, a), key_of(thread, b), a * kKeys + b);
  }

  __device__ __forceinline__ void clear(Scores& x) const {
    each(x, [](T& score, int, int, int) { score = 0; });
  }

  // x += <row, key>. The rows are the task's rows in `of_rows`. The keys are those in `of_keys` from `key` on.
  __device__ __forceinline__ void add_dots(Scores& x, const Operand& of_rows, int64_t rows_base, const Operand& of_keys,
                                           int64_t keys_base, int64_t key, int64_t cols) {
    const SimtThread thread;
    Shared& shared = shared_scores;
    if constexpr (!kPaged) keys_base += key * of_keys.row;
    int64_t d = 0;
    do {                // once even without columns, because the barriers are needed
      __syncthreads();  // what is in shared memory has been read
      load_transposed(kOwnsKeys ? shared.other : shared.own, of_rows, rows_base, task.rows, cols, d,
                      [&](int i) { return shared.rows.offset(of_rows, i); });
      load_transposed<kMayBeEight>(kOwnsKeys ? shared.own : shared.other, of_keys, keys_base, task.last_key - key, cols,
                                   d, [&](int j) {
                                     if constexpr (kPaged)
                                       return shared.in_pages.key[j];
                                     else
                                       return j * of_keys.row;
                                   });
      __syncthreads();
      add_products(x, thread, shared.own, kStride, shared.other, kStride);
      d += kSimtDepth<T>;
    } while (d < cols);
  }

  // |position of a row's query - position of a key|
  __device__ __forceinline__ T distance(int row, int64_t key) const {
    const int64_t ahead = key - (shared_scores.rows.position[row] + task.sequence.offset);
    return static_cast<T>(ahead < 0 ? -ahead : ahead);
  }
  // `numbers` is an array with one element per head. Returns the element of the row's head.
  __device__ __forceinline__ T of_head(const void* numbers, int row) const {
    return static_cast<const T*>(numbers)[task.n * p.heads + shared_scores.rows.head[row]];
  }

  // Computes the scores (score.h) of the keys from `key` on. Rows or keys that do not exist get -inf. If there is a
  // cap, calls on_cap(y, row, key), where y is tanh(scaled product / cap), the argument of SoftCap's functions. `row`
  // and `key` count from the start of the tile.
  template <class F>
  __device__ __forceinline__ void scores(Scores& x, int64_t key, F on_cap) {
    Shared& shared = shared_scores;
    clear(x);
    add_dots(x, p.query, shared.base.query, p.key, shared.base.key, key, p.head_dim);
    if constexpr (kMayBeEight)
      if (p.key_scale.data) each(x, [&](T& product, int, int k, int) { product *= shared.scales.key[k]; });
    T slope = ScoreFunction<T>::of(p).slope();
    if (has_score_terms(p)) {
      const auto cap = SoftCap<T>::of(p);
      each(x, [&](T& score, int row, int k, int) {
        score *= slope;
        if (p.softcap > 0) {
          const T y = tanh(score / cap.most);
          on_cap(y, row, k);
          score = cap.value(y);
        }
        if (p.alibi_slopes)
          score = fma(of_head(p.alibi_slopes, row), Alibi<T>::by_slope(distance(row, key + k)), score);
      });
      slope = 1;
    }
    if (p.has_mask)
      each_of_mask(x, p.mask, shared.base.mask, key,
                   [&](T& score, T bias) { score = masked_score(score, slope, bias); });
    else
      each(x, [&](T& score, int, int, int) { score *= slope; });
    hide_keys(x, key);
  }
  __device__ __forceinline__ void scores(Scores& x, int64_t key) {
    scores(x, key, [](T, int, int) {});
  }

  // Calls f(score, what the mask adds to it).
  template <class F>
  __device__ __forceinline__ void each_of_mask(Scores& x, const Operand& mask, int64_t base, int64_t key, F f) {
    const SimtThread thread;
    const int64_t keys = task.last_key - key;
    with_loaded_mask<T>(mask, [&]<class N>() {
      N loaded[kRows][kKeys];
#pragma unroll
      for (int a = 0; a < kRows; ++a) {
        const N* row = static_cast<const N*>(mask.data) + base + shared_scores.rows.offset(mask, row_of(thread, a));
#pragma unroll
        for (int b = 0; b < kKeys; ++b)
          loaded[a][b] = key_of(thread, b) < keys ? row[(key + key_of(thread, b)) * mask.col] : static_cast<N>(0);
      }
#pragma unroll
      for (int a = 0; a < kRows; ++a)
#pragma unroll
        for (int b = 0; b < kKeys; ++b)
          if (key_of(thread, b) < keys) f(of(x, a, b), value_of<T>(mask, loaded[a][b]));
    });
  }

  // Says whether some row sees some key of the tile that begins with `key`. Takes positions and the mask into account.
  // Reads no operand except the mask. Called by all threads.
  __device__ __forceinline__ bool shows_some(int64_t key) {
    if (!any_visible(task.sequence, task.positions, {key, task.last_key})) return false;
    if (!p.has_mask) return true;
    __syncthreads();  // the rows are set
    bool some = false;
    Scores none;
    each_of_mask(none, p.mask, shared_scores.base.mask, key, [&](T&, T bias) { some |= bias != -infinity<T>(); });
    return __syncthreads_or(some);
  }

  // The next three functions compute derivatives along p.t. Where a key is hidden, their results are arbitrary.

  // Computes tz = slope * (tQ K^T + Q tK^T), the derivative of the scaled products.
  __device__ __forceinline__ void tangent_products(Scores& x, int64_t key) {
    const Bases &base = shared_scores.base, &tangent = shared_scores.tangent_base;
    clear(x);
    if (p.t.query.data) add_dots(x, p.t.query, tangent.query, p.key, base.key, key, p.head_dim);
    if (p.t.key.data) add_dots(x, p.query, base.query, p.t.key, tangent.key, key, p.head_dim);
    const T slope = ScoreFunction<T>::of(p).slope();
    each(x, [&](T& product, int, int, int) { product *= slope; });
  }
  // Returns -tslope |p - j| + tM, the derivative of what ALiBi and the mask add.
  __device__ __forceinline__ T tangent_terms(int row, int64_t key) const {
    const Operand& mask = p.t.mask;
    T sum = 0;
    if (p.t.alibi_slopes) sum = of_head(p.t.alibi_slopes, row) * Alibi<T>::by_slope(distance(row, key));
    if (!mask.data || key >= task.last_key) return sum;
    const int64_t base = shared_scores.tangent_base.mask + shared_scores.rows.offset(mask, row);
    return sum + read_mask<T>(mask, base + key * mask.col);
  }
  // Writes the scores to x, and the derivatives of the scores, tx = cap' tz + tangent_terms(), to shared memory.
  __device__ __forceinline__ void scores_and_tangents(Scores& x, int64_t key) {
    __syncthreads();  // the rows are there, and the last weights have been read
    tangent_products(x, key);
    store_weights(x);
    scores(x, key, [&](T y, int row, int k) { weight(row, k) *= SoftCap<T>::slope(y); });
    each(x, [&](T&, int row, int k, int) { weight(row, k) += tangent_terms(row, key + k); });
  }

  __device__ __forceinline__ void hide_keys(Scores& x, int64_t key) {
    const SimtThread thread;
    if (task.rows == kSimtTile && task.all_visible(key, kSimtTile)) return;
#pragma unroll
    for (int a = 0; a < kRows; ++a) {
      const int row = row_of(thread, a);
      const int64_t position = shared_scores.rows.position[row];
      const Range seen = row < task.rows ? visible_keys(task.sequence, {position, position + 1}) : Range{0, 0};
      const TileRange in_tile(seen, key);
#pragma unroll
      for (int b = 0; b < kKeys; ++b)
        if (!in_tile.contains(key_of(thread, b))) of(x, a, b) = -infinity<T>();
    }
  }

  // Returns bits. Bit i says whether dropout keeps score i of the thread, in the order of each().
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
            (key + key_of(thread, b)) / 4,
            {static_cast<uint32_t>(shared_scores.rows.position[row]), shared_scores.head_number[row]});
        bits |= four << (a * kKeys + b);
      }
    return bits;
  }
  // The factor of the thread's weight i: 1 / (1 - dropout_p), or 0 if dropout drops the weight.
  __device__ __forceinline__ T factor(uint32_t kept, int i) const {
    return static_cast<T>(kept >> i & 1) * static_cast<T>(p.keep_scale);
  }

  // The tile of weights in shared memory. Each thread reads and writes its own part of the tile, and so needs no
  // barrier.
  __device__ __forceinline__ void store_weights(const Scores& x) { store_own(shared_scores.weights, x); }
  __device__ __forceinline__ T& weight(int row, int key) const { return own(shared_scores.weights, row, key); }

  // The same for another tile.
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

  // sum[own][d] += sum_other weights[other][own] x[other][first_col + d], where `other` counts rows if kOwnsKeys, else
  // keys from `key` on.
  template <Factor kFactor>
  __device__ __forceinline__ void add_to(Sums& sum, const Operand& x, int64_t base, int64_t key, int64_t cols,
                                         int64_t first_col) {
    const SimtThread thread;
    Shared& shared = shared_scores;
    const int64_t count = kOwnsKeys ? task.rows : task.last_key - key;
    if constexpr (!kOwnsKeys && !kPaged) base += key * x.row;
    for (int first = 0; first < kSimtTile && first < count; first += kSimtDepth<T>) {
      __syncthreads();
      load_rows<kCols, kFactor, kMayBeEight>(shared.factor, x, base, count - first, cols, first_col, [&](int i) {
        if constexpr (kOwnsKeys)
          return shared.rows.offset(x, first + i);
        else if constexpr (kPaged)
          return shared.in_pages.value[first + i];
        else
          return (first + i) * x.row;
      });
      __syncthreads();
      add_products(sum, thread, shared.weights + first * kStride, kStride, shared.factor, kFactorStride);
    }
  }
};

}  // namespace attn::cuda
