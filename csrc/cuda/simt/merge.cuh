// Puts the splits of the keys together, a warp a row (of packed sequences as many for each as the longest has), which
// reads each partial output once and, for every 32 columns, computes the weights of all splits anew:
// O = sum_s w_s O_s / sum_s w_s, w_s = exp(logsumexp_s - the largest of them).
#pragma once

#include "cuda/kernels.h"
#include "cuda/launch.cuh"
#include "cuda/shared/softmax.cuh"

namespace attn::cuda {

constexpr int kMergeThreads = 128;
constexpr int kMergeRows = kMergeThreads / 32;  // of a block, a warp each

template <class T>
__global__ void __launch_bounds__(kMergeThreads) merge_splits(const __grid_constant__ ForwardParams p) {
  const int64_t all_rows = number_of_rows(p);
  const int64_t number = block_number() * kMergeRows + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const Row row = row_of_number(p, number);
  if (row.n >= p.batch || row.position >= sequence_of(p, row.n).queries) return;
  const int64_t r = row_number(p, row.n, row.head, row.position);
  const auto part = [&](int64_t s) { return static_cast<const Pair<T>*>(p.partial_logsumexp)[s * all_rows + r]; };
  Pair<T> best = part(0);
  for (int64_t s = 1; s < p.splits; ++s) {
    const Pair<T> x = part(s);
    if (x.high > best.high || (x.high == best.high && x.low > best.low)) best = x;
  }
  const T shift = shift_of(best.high);
  const auto weight = [&](int64_t s) { return exp((part(s).high - shift) + (part(s).low - best.low)); };
  T sum = 0;
  for (int64_t s = 0; s < p.splits; ++s) sum += weight(s);
  Pair<T> logsumexp = logsumexp_of(shift, best.low, sum);
  const T left = add_sink(p, row, logsumexp);

  const auto offset_in = [&](const Operand& x) {
    return batch_offset(p, x, row.n) + row.head * x.head + row.position * x.row;
  };
  const int64_t output_at = offset_in(p.output), residual_at = offset_in(p.residual);
  for (int64_t d = lane; d < p.value_dim; d += 32) {
    T total = 0;
    for (int64_t s = 0; s < p.splits; ++s) {
      const T w = weight(s);  // 0 where the split saw no key
      if (w != 0) total += w * static_cast<const T*>(p.partial_output)[(s * all_rows + r) * p.value_dim + d];
    }
    store_exactly(p.output, output_at + d * p.output.col, p.residual, residual_at + d * p.residual.col,
                  sum == 0 ? 0 * left : total / sum * left);
  }
  if (lane > 0) return;
  T max_score = -infinity<T>();
  if (p.partial_max)
    for (int64_t s = 0; s < p.splits; ++s)
      max_score = max_or_nan(static_cast<const T*>(p.partial_max)[s * all_rows + r], max_score);
  write_statistics(p, row, logsumexp, max_score);
}

template <class T>
Error launch_merge_splits(const ForwardParams& p, Stream stream) {
  return launch<Nothing>(merge_splits<T>, p, divide_up(p.batch * p.heads * p.queries, kMergeRows), kMergeThreads,
                         stream);
}

}  // namespace attn::cuda
