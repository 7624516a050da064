// Computes statistics of the scores of every row and the weight that every key receives, for every dtype, with plain
// multiply-adds. statistics.h has the formulas, and cpu/kernels/stats.inl describes the two passes. Each pass computes
// all scores once. The first pass reads K once per 64 rows, and the second pass reads Q once per 64 keys. No sum uses
// atomic operations, so equal calls give equal bits.
#pragma once

#include "cuda/simt/scores.cuh"
#include "core/statistics.h"

namespace attn::cuda {

// Merges the statistics of two parts of a row.
template <class T>
__device__ __forceinline__ RowStatistics<T> together(const RowStatistics<T>& a, const RowStatistics<T>& b) {
  if (has_nan(a) || b.largest == -infinity<T>()) return a;
  if (has_nan(b) || a.largest == -infinity<T>()) return b;
  const T reference = common_reference(a, b), slope = kLog2E<T>;
  const T of_a = exponent_of(a.largest, reference, slope), of_b = exponent_of(b.largest, reference, slope);
  return added(reference, brought_to(reference, a, of_a, exp2(of_a)), brought_to(reference, b, of_b, exp2(of_b)));
}

// The first pass. A block owns 64 rows and passes over keys. T: the type that the kernel computes in.
template <class T>
struct RowStatsSimt : ScoresSimt<T, StatsParams, false, kSimtTile> {
  using Base = ScoresSimt<T, StatsParams, false, kSimtTile>;
  using Base::p;
  using Base::task;

  struct Shared : Base::Shared {
    RowStatistics<T> row[kSimtTile];
  };

  Shared& shared;

  __device__ RowStatsSimt(const StatsParams& p, Shared& shared) : Base(p, shared), shared(shared) {}

  ATTN_INLINE static constexpr int64_t blocks(const StatsParams& p) { return p.splits * blocks_of_rows(p, kSimtTile); }
  __device__ void run(int64_t number) {
    const auto begin_row = [&](int i, int64_t) { shared.row[i] = {-infinity<T>(), 0, 0, 0}; };
    this->go_over_keys(number, begin_row, [&](int64_t key) {
      typename Base::Scores x;
      this->scores(x, key);
      add(x);
    });
    __syncthreads();
    auto* partial = static_cast<RowStatistics<T>*>(p.partial) + task.split * number_of_rows(p);
    const int i = threadIdx.x;
    if (i < task.rows) partial[shared.rows.number(p, task.n, i)] = shared.row[i];
  }

  // Adds the scores of a tile to the statistics of their rows.
  __device__ __forceinline__ void add(const typename Base::Scores& x) {
    const SimtThread thread;
#pragma unroll
    for (int i = 0; i < kSimtRows; ++i) {
      T best = -infinity<T>();
#pragma unroll
      for (T score : x[i]) best = max_or_nan(score, best);
      RowStatistics<T> tile{max_over_x(best), 0, 0, 0};
      const T shift = shift_of(tile.largest);
#pragma unroll
      for (T score : x[i]) {
        const T exponent = exponent_of(score, shift, kLog2E<T>);
        const T weight = exponent == 0 ? 0 : exp2(exponent);
        tile.ones += exponent == 0 ? 1 : 0;
        tile.rest += weight;
        tile.moment += exponent * weight;
      }
      tile.ones = sum_over_x(tile.ones);
      tile.rest = sum_over_x(tile.rest);
      tile.moment = sum_over_x(tile.moment);
      const int row = thread.row(i);
      const RowStatistics<T> sum = together(shared.row[row], tile);
      __syncwarp();
      if (thread.x == 0) shared.row[row] = sum;
    }
    __syncwarp();
  }
};

// The second pass. A block owns 64 keys for one head of the query, and passes over a chunk of that head's rows.
template <class T>
struct KeyStatsSimt : ScoresSimt<T, StatsParams, true, kSimtTile> {
  using Base = ScoresSimt<T, StatsParams, true, kSimtTile>;
  using Base::p;
  using Base::task;

  struct Shared : Base::Shared {
    int64_t head;
    T reference[kSimtTile], inverse_sum[kSimtTile];
  };

  Shared& shared;

  __device__ KeyStatsSimt(const StatsParams& p, Shared& shared) : Base(p, shared), shared(shared) {}

  ATTN_INLINE static constexpr int64_t blocks(const StatsParams& p) { return p.key_tasks(); }
  __device__ void run(int64_t number) {
    const int64_t chunk = number % p.chunks;
    if (threadIdx.x == 0) shared.head = shared.task.set_own_keys(p, number / p.chunks, p.heads, kSimtTile);
    __syncthreads();
    const Range keys{task.first_key, task.last_key};
    Range rows{chunk * p.rows_per_chunk, smaller((chunk + 1) * p.rows_per_chunk, p.queries)};
    rows = keys.empty() ? Range{0, 0} : in_tiles(common(rows, visible_rows(task.sequence, keys)), kSimtTile);
    T received[kSimtRows] = {};
    for (int64_t row = rows.first; row < rows.last; row += kSimtTile) {
      this->go_to_rows(task.n, shared.head, row, rows.last, [&](int i, int64_t r) {
        const T* pair = static_cast<const T*>(p.pairs) + 2 * r;
        shared.reference[i] = pair[0];
        shared.inverse_sum[i] = pair[1];
      });
      if (this->shows_some(task.first_key)) add_tile(received);
    }

    const SimtThread thread;
    T* to = static_cast<T*>(p.chunks > 1 ? p.partial_received : p.received_weight);
    to += ((chunk * p.batch + task.n) * p.heads + shared.head) * p.keys + task.first_key;
#pragma unroll
    for (int i = 0; i < kSimtRows; ++i) {
      const T sum = sum_over_x(received[i]);
      if (thread.x == 0 && task.first_key + thread.row(i) < p.keys) to[thread.row(i)] = sum;
    }
  }

  __device__ __forceinline__ void add_tile(T (&received)[kSimtRows]) {
    typename Base::Scores x;
    this->scores(x, task.first_key);
    const SimtThread thread;
#pragma unroll
    for (int b = 0; b < kSimtRows; ++b) {
      T sum = 0;
#pragma unroll
      for (int a = 0; a < kSimtCols; ++a) {
        const int row = thread.col(a);
        const T score = x[b][a];
        // Skips hidden scores, so that a row whose sum is NaN adds no NaN to a key that the row does not see.
        if (score != -infinity<T>()) sum += exp2((score - shared.reference[row]) * kLog2E<T>) * shared.inverse_sum[row];
      }
      received[b] += sum;
    }
  }
};

// Merges the splits of each row and writes the row's statistics, with one thread per row.
template <class T>
__global__ void __launch_bounds__(kSimtThreads) finish_row_stats(const __grid_constant__ StatsParams p) {
  const int64_t rows = number_of_rows(p), r = block_number() * kSimtThreads + threadIdx.x;
  if (r >= rows) return;
  const auto* partial = static_cast<const RowStatistics<T>*>(p.partial);
  RowStatistics<T> row = partial[r];
  for (int64_t s = 1; s < p.splits; ++s) row = together(row, partial[s * rows + r]);
  const T largest = row.largest, sink = sink_of<T>(p, row_of_number(p, r));  // -inf: none
  double sink_weight = 0;
  if (sink != -infinity<T>() && !has_nan(row)) {
    const T reference = sink > largest ? sink : largest, exponent = exponent_of(largest, reference, kLog2E<T>);
    row = brought_to(reference, row, exponent, exp2(exponent));
    sink_weight = exp(static_cast<double>(sink) - static_cast<double>(reference));
  }
  const double log_sum = log1p(sum_without_one(row, sink_weight));
  const FinishedRow<T> results = finished(row, largest, static_cast<T>(1), sink_weight, log_sum, infinity<T>());
  static_cast<T*>(p.largest_score)[r] = results.largest_score;
  static_cast<T*>(p.entropy)[r] = results.entropy;
  static_cast<T*>(p.logsumexp)[r] = results.logsumexp;
  T* pair = static_cast<T*>(p.pairs) + 2 * r;
  pair[0] = results.reference;
  pair[1] = results.inverse_sum;
}

// Adds up what each key has received from the chunks, in the order of the chunks, with one thread per key.
template <class T>
__global__ void __launch_bounds__(kSimtThreads) add_received(const __grid_constant__ StatsParams p) {
  const int64_t keys = p.batch * p.heads * p.keys, k = block_number() * kSimtThreads + threadIdx.x;
  if (k >= keys) return;
  T sum = 0;
  for (int64_t c = 0; c < p.chunks; ++c) sum += static_cast<const T*>(p.partial_received)[c * keys + k];
  static_cast<T*>(p.received_weight)[k] = sum;
}

template <class T>
Error launch_stats_simt(const StatsParams& p, Stream stream) {
  const auto launch_flat = [&](void (*kernel)(StatsParams), int64_t numbers) {
    return launch<Nothing>(kernel, p, divide_up(numbers, kSimtThreads), kSimtThreads, stream);
  };
  if (Error error = launch_blocks<RowStatsSimt<T>>(p, stream)) return error;
  if (Error error = launch_flat(finish_row_stats<T>, number_of_rows(p))) return error;
  if (Error error = launch_blocks<KeyStatsSimt<T>>(p, stream)) return error;
  return p.chunks == 1 ? nullptr : launch_flat(add_received<T>, p.batch * p.heads * p.keys);
}

}  // namespace attn::cuda
