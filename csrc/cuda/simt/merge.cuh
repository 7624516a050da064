// Merges the splits' outputs O_s: O = sum_s w_s O_s / sum_s w_s with w_s = exp(logsumexp_s - max_s logsumexp_s).
//
// A warp loads the outputs of several splits at once, before it knows their weights, because nearly all time is spent
// waiting for memory. The warp may load the outputs early, because every split has written every row. A split has
// written 0 if the row sees none of its keys. Each lane computes the weights of some splits, and shuffles bring these
// weights to the other lanes.
#pragma once

#include "cuda/kernels.h"
#include "cuda/launch.cuh"
#include "cuda/shared/softmax.cuh"

namespace attn::cuda {

constexpr int kMergeThreads = 128;

// How a row is divided among threads. kWarps: the number of warps of a block that take turns at the splits. kCols: the
// number of columns of a lane. These columns are 32 apart. Further columns belong to another block or warp. kSplits:
// the number of splits that a warp loads at once.
template <int kWarps_, int kCols_, int kSplits_>
struct MergeShape {
  static constexpr int kWarps = kWarps_, kCols = kCols_, kSplits = kSplits_;

  // The number of parts that the columns of a row are cut into. kWarps warps compute each part. There is one part even
  // if value_dim is 0, because the warps of the first part also write the row's statistics.
  ATTN_INLINE static constexpr int64_t parts(const ForwardParams& p) {
    return larger(1, divide_up(p.value_dim, 32 * kCols));
  }
  ATTN_INLINE static constexpr int64_t blocks(const ForwardParams& p) {
    return divide_up(p.batch * p.heads * p.queries * parts(p) * kWarps, kMergeThreads / 32);
  }
};
using MergeFewRows = MergeShape<4, 1, 16>;  // as many warps as possible
using MergeManyRows = MergeShape<1, 4, 8>;  // as few instructions as possible

// The sums of all warps but the first.
template <class T, class Shape>
struct MergeShared {
  T total[Shape::kWarps - 1][32];
};

template <class T>
__device__ __forceinline__ Pair<T> larger_pair(Pair<T> a, Pair<T> b) {
  return a.high > b.high || (a.high == b.high && a.low > b.low) ? a : b;
}

// Merges a part of a row, with all lanes of the warps that have it, of which this one is `warp`.
template <class T, class Shape>
__device__ __forceinline__ void merge_row(const ForwardParams& p, const Row& row, int64_t part, int warp, int lane) {
  constexpr int kWarps = Shape::kWarps, kCols = Shape::kCols, kSplits = Shape::kSplits;
  const int64_t first_col = part * (32 * kCols) + lane;
  const int64_t all_rows = number_of_rows(p), r = row_number(p, row.n, row.head, row.position);
  const int splits = static_cast<int>(p.splits);

  // x[k] belongs to split first + k * kWarps. Splits that do not exist have weight 0.
  T x[kSplits][kCols];
  const auto load = [&](int first) {
    const T* from = static_cast<const T*>(p.partial_output) + (first * all_rows + r) * p.value_dim + first_col;
#pragma unroll
    for (int k = 0; k < kSplits; ++k, from += kWarps * all_rows * p.value_dim)
#pragma unroll
      for (int c = 0; c < kCols; ++c)
        x[k][c] = first + k * kWarps < splits && first_col + 32 * c < p.value_dim ? from[32 * c] : 0;
  };
  load(warp);

  const auto logsumexp_of_split = [&](int s) {
    return s < splits ? static_cast<const Pair<T>*>(p.partial_logsumexp)[s * all_rows + r] : Pair<T>{-infinity<T>(), 0};
  };
  Pair<T> best = logsumexp_of_split(lane);
#pragma unroll 4
  for (int s = lane + 32; s < splits; s += 32) best = larger_pair(logsumexp_of_split(s), best);
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2)
    best = larger_pair({__shfl_xor_sync(~0u, best.high, lanes), __shfl_xor_sync(~0u, best.low, lanes)}, best);
  const T shift = shift_of(best.high);
  const auto weight = [&](int s) {
    const Pair<T> of_split = logsumexp_of_split(s);
    return exp((of_split.high - shift) + (of_split.low - best.low));
  };
  T sum = 0;  // NaN if a split is NaN, though `best` may not be NaN
  for (int s = lane; s < splits; s += 32) sum += weight(s);
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) sum += __shfl_xor_sync(~0u, sum, lanes);

  T total[kCols] = {};
  for (int first = warp; first < splits;) {
    const T of_lane = weight(first + lane % kSplits * kWarps);
#pragma unroll
    for (int k = 0; k < kSplits; ++k) {
      const T w = __shfl_sync(~0u, of_lane, k);
#pragma unroll
      for (int c = 0; c < kCols; ++c)
        if (w != 0) total[c] += w * x[k][c];
    }
    first += kWarps * kSplits;
    if (first < splits) load(first);
  }
  if constexpr (kWarps > 1) {
    static_assert(kMergeThreads == 32 * kWarps && kCols == 1);  // all warps of the block have the same row
    auto& shared = *reinterpret_cast<MergeShared<T, Shape>*>(shared_memory());
    if (warp > 0) shared.total[warp - 1][lane] = total[0];
    __syncthreads();
    if (warp > 0) return;
    for (const auto& of_warp : shared.total) total[0] += of_warp[lane];
  }

  Pair<T> logsumexp = logsumexp_of(shift, best.low, sum);
  const T left = add_sink(p, row, logsumexp);
  const auto offset_in = [&](const Operand& x) {
    return batch_offset(p, x, row.n) + row.head * x.head + row.position * x.row;
  };
  const int64_t output_at = offset_in(p.output), residual_at = p.residual.data ? offset_in(p.residual) : 0;
#pragma unroll
  for (int c = 0; c < kCols; ++c)
    if (const int64_t d = first_col + 32 * c; d < p.value_dim)
      store_exactly(p.output, output_at + d * p.output.col, p.residual, residual_at + d * p.residual.col,
                    sum == 0 ? 0 * left : total[c] / sum * left);
  if (part > 0) return;
  T max_score = -infinity<T>();
  if (p.partial_max) {
    for (int s = lane; s < splits; s += 32)
      max_score = max_or_nan(static_cast<const T*>(p.partial_max)[s * all_rows + r], max_score);
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2)
      max_score = max_or_nan(__shfl_xor_sync(~0u, max_score, lanes), max_score);
  }
  if (lane == 0) write_statistics(p, row, logsumexp, max_score);
}

template <class T, class Shape>
__global__ void __launch_bounds__(kMergeThreads) merge_splits(const __grid_constant__ ForwardParams p) {
  constexpr int kWarps = Shape::kWarps;
  // Rows are numbered as if each packed sequence had as many rows as the longest one. So some numbers have no row.
  const int64_t number = (block_number() * kMergeThreads + threadIdx.x) / (32 * kWarps), parts = Shape::parts(p);
  const Row row = row_of_number(p, number / parts);
  if (row.n >= p.batch || row.position >= sequence_of(p, row.n).queries) return;
  merge_row<T, Shape>(p, row, number % parts, threadIdx.x / 32 % kWarps, threadIdx.x % 32);
}

// Divides a row among several warps only if it has many splits and there are few rows. Each of these warps computes the
// row's place and the weights again. With many rows, this repetition takes longer than the waits for memory that the
// division saves.
template <class T>
Error launch_merge_splits(const ForwardParams& p, Stream stream) {
  constexpr int64_t kFewBlocks = 1024;  // an H100 runs about this many at a time
  if (p.splits > 2 * MergeManyRows::kSplits && MergeFewRows::blocks(p) <= kFewBlocks)
    return launch<MergeShared<T, MergeFewRows>>(merge_splits<T, MergeFewRows>, p, MergeFewRows::blocks(p),
                                                kMergeThreads, stream);
  return launch<Nothing>(merge_splits<T, MergeManyRows>, p, MergeManyRows::blocks(p), kMergeThreads, stream);
}

}  // namespace attn::cuda
