// Launching a kernel that takes one struct.
#pragma once

#include <cuda_runtime.h>

#include "launch.h"
#include "numbers.cuh"

namespace attn::cuda {

// As many blocks as asked for, or a few more: kernels compare block_number() with what they have to do.
inline dim3 grid_of(int64_t blocks) {
  constexpr int64_t kMaxX = 0x7fffffff;
  const int64_t y = divide_up(blocks, kMaxX);
  return {static_cast<unsigned>(divide_up(blocks, y)), static_cast<unsigned>(y), 1};
}

template <class Params>
[[nodiscard]] Error launch(void (*kernel)(Params), const Params& p, int64_t blocks, int threads, size_t shared_bytes,
                           Stream stream) {
  constexpr size_t kAlwaysThere = 48 << 10;
  cudaError_t error = cudaSuccess;
  if (shared_bytes > kAlwaysThere)
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
  if (error == cudaSuccess) {
    cudaLaunchConfig_t config{};
    config.gridDim = grid_of(blocks);
    config.blockDim = {static_cast<unsigned>(threads), 1, 1};
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    error = cudaLaunchKernelEx(&config, kernel, p);
  }
  if (error == cudaSuccess) return nullptr;
  cudaGetLastError();  // else whoever asks next would take it for an error of theirs
  return cudaGetErrorString(error);
}

}  // namespace attn::cuda
