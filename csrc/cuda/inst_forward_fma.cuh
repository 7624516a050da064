// Included by the inst_forward_fma_*.cu files.
#pragma once

#include "forward_fma.cuh"
#include "kernels.h"
#include "launch.cuh"
#include "merge.cuh"

namespace attn::cuda {

template <class T, int kValueCols>
Error launch_forward_fma_of(const ForwardParams& p, Stream stream) {
  const int64_t passes = larger(1, divide_up(p.value_dim, kValueCols));
  return launch(forward_fma<T, kValueCols>, p, p.tasks() * passes, kFmaThreads,
                sizeof(typename ForwardFma<T, kValueCols>::Shared), stream);
}

template <class T>
Error launch_forward_fma(const ForwardParams& p, Stream stream) {
  if constexpr (sizeof(T) == 4)
    if (p.value_dim > 64) return launch_forward_fma_of<T, 128>(p, stream);
  return launch_forward_fma_of<T, 64>(p, stream);
}

template <class T>
Error launch_merge_splits(const ForwardParams& p, Stream stream) {
  const int64_t rows = p.batch * p.heads * p.queries;
  return launch(merge_splits<T>, p, divide_up(rows, kMergeRows), kMergeThreads, 0, stream);
}

}  // namespace attn::cuda
