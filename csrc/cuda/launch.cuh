// Launches kernels, each of which takes one struct of parameters.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "cuda/launch.h"
#include "cuda/shared/numbers.cuh"

namespace attn::cuda {

// Returns a grid of `blocks` blocks or a few more. Kernels compare block_number() with the number of their tasks, so
// that the extra blocks do nothing.
inline dim3 grid_of(int64_t blocks) {
  constexpr int64_t kMaxX = 0x7fffffff;
  const int64_t y = divide_up(blocks, kMaxX);
  return {static_cast<unsigned>(divide_up(blocks, y)), static_cast<unsigned>(y), 1};
}

// This block's number in such a grid.
__device__ __forceinline__ int64_t block_number() { return blockIdx.x + static_cast<int64_t>(blockIdx.y) * gridDim.x; }

// Stands for the shared memory of a kernel that needs none, or for a member that an instance of a template does not
// need.
struct Nothing {};

// Shared: the struct of everything that a block keeps in shared memory. It must fit into a block's shared memory on
// every supported device. No member of Shared may be [[no_unique_address]], because nvcc 13.0 then puts members of
// derived structs beyond the size that sizeof() returns.
template <class Shared, class Params>
[[nodiscard]] Error launch(void (*kernel)(Params), const Params& p, int64_t blocks, int threads, Stream stream) {
  static_assert(sizeof(Shared) <= 99 << 10, "the shared memory of a block on sm_86 and sm_89");
  constexpr size_t kAlwaysThere = 48 << 10;
  constexpr size_t shared_bytes = std::is_empty_v<Shared> ? 0 : sizeof(Shared);
  if (blocks == 0) return nullptr;
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
  cudaGetLastError();  // clears the error, else a later check would report it
  return cudaGetErrorString(error);
}

// Runs one block of a Kernel. Kernel::blocks(p) is the number of blocks. Kernel::kBlocks is the number of blocks whose
// registers must fit into a multiprocessor at a time. If kBlocks is 0, the compiler chooses how many registers a thread
// has.
template <class Kernel, class Params>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kBlocks) run_block(const __grid_constant__ Params p) {
  const int64_t number = block_number();
  if (number < Kernel::blocks(p)) Kernel{p, *reinterpret_cast<typename Kernel::Shared*>(shared_memory())}.run(number);
}
template <class Kernel, class Params>
[[nodiscard]] Error launch_blocks(const Params& p, Stream stream) {
  return launch<typename Kernel::Shared>(run_block<Kernel, Params>, p, Kernel::blocks(p), Kernel::kThreads, stream);
}

}  // namespace attn::cuda
