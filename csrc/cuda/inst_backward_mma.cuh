// Included by the inst_backward_mma_*.cu files.
#pragma once

#include "backward_mma.cuh"
#include "kernels.h"
#include "launch.cuh"

namespace attn::cuda {

template <class S, int kDim, MmaGradient kOf>
Error launch_gradient_mma(const BackwardParams& p, Stream stream) {
  const auto run = [&](auto kernel, size_t shared_bytes) {
    return launch(kernel, p, backward_mma_tasks<kOf>(p), kMmaThreads, shared_bytes, stream);
  };
  if (p.has_mask || p.has_dropout)
    return run(backward_mma<S, kDim, kOf, true>, sizeof(typename BackwardMma<S, kDim, kOf, true>::Shared));
  return run(backward_mma<S, kDim, kOf, false>, sizeof(typename BackwardMma<S, kDim, kOf, false>::Shared));
}

template <class S, int kDim>
Error launch_backward_mma(const BackwardParams& p, Stream stream) {
  if (p.grad_query.data || (p.grad_mask.data && !p.mask_is_shared))
    if (Error error = launch_gradient_mma<S, kDim, MmaGradient::query>(p, stream)) return error;
  BackwardParams of_key = p, of_value = p;  // where one block can't have both
  of_key.grad_value.data = of_value.grad_key.data = nullptr;
  if constexpr (kDim <= 128) {
    constexpr auto kBoth = MmaGradient::key_and_value;
    if (p.key_heads == p.value_heads && p.grad_key.data && p.grad_value.data)
      return launch_gradient_mma<S, kDim, kBoth>(p, stream);
  }
  if (p.grad_key.data)
    if (Error error = launch_gradient_mma<S, kDim, MmaGradient::key>(of_key, stream)) return error;
  if (p.grad_value.data) return launch_gradient_mma<S, kDim, MmaGradient::value>(of_value, stream);
  return nullptr;
}

}  // namespace attn::cuda
