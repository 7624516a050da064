// Included by the inst_tangent_fma_*.cu files.
#pragma once

#include "kernels.h"
#include "launch.cuh"
#include "tangent_fma.cuh"

namespace attn::cuda {

template <class T, int kCols>
Error launch_tangent_fma_of(const TangentParams& p, Stream stream) {
  const int64_t passes = larger(1, divide_up(p.value_dim, kCols));
  return launch(tangent_fma<T, kCols>, p, p.tasks() * passes, kFmaThreads,
                sizeof(typename TangentFma<T, kCols>::Shared), stream);
}

template <class T>
Error launch_tangent_fma(const TangentParams& p, Stream stream) {
  if constexpr (sizeof(T) == 4)
    if (p.value_dim > 64) return launch_tangent_fma_of<T, 128>(p, stream);
  return launch_tangent_fma_of<T, 64>(p, stream);
}

}  // namespace attn::cuda
