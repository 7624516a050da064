// Included by the inst_backward_fma_*.cu and inst_second_fma_*.cu files.
#pragma once

#include "backward_fma.cuh"
#include "kernels.h"
#include "launch.cuh"

namespace attn::cuda {

template <class T, Gradient kOf, int kCols, class Params>
Error launch_gradient_fma_of(const Params& p, Stream stream) {
  const int64_t blocks = gradient_tasks<kOf>(p) * divide_up(gradient_cols<kOf>(p), kCols);
  return launch(gradient_fma<T, Params, kOf, kCols>, p, blocks, kFmaThreads,
                sizeof(typename GradientFma<T, Params, kOf, kCols>::Shared), stream);
}

template <class T, Gradient kOf, class Params>
Error launch_gradient_fma(const Operand& to, const Params& p, Stream stream) {
  if (!to.data || gradient_cols<kOf>(p) == 0) return nullptr;
  if constexpr (sizeof(T) == 4 && kOf != Gradient::mask)
    if (gradient_cols<kOf>(p) > 64) return launch_gradient_fma_of<T, kOf, 128>(p, stream);
  return launch_gradient_fma_of<T, kOf, 64>(p, stream);
}

template <class T, class Params>
Error launch_delta_fma(const Params& p, Stream stream) {
  return launch(delta_fma<T, Params>, p, gradient_tasks<Gradient::query>(p), kFmaThreads,
                sizeof(typename DeltaFma<T, Params>::Shared), stream);
}

template <class T, class Params>
Error launch_gradients_fma(const Params& p, Stream stream) {
  if (Error error = launch_gradient_fma<T, Gradient::query>(p.grad_query, p, stream)) return error;
  if (Error error = launch_gradient_fma<T, Gradient::key>(p.grad_key, p, stream)) return error;
  if (Error error = launch_gradient_fma<T, Gradient::value>(p.grad_value, p, stream)) return error;
  return launch_gradient_fma<T, Gradient::mask>(p.grad_mask, p, stream);
}

}  // namespace attn::cuda
