// Launches kernels, each of which takes one struct of parameters.
#pragma once

#include <cuda_runtime.h>

#include <string>
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

// The most shared memory of a block: on every supported device (sm_86 and sm_89 have the least), and on Hopper.
constexpr size_t kMostShared = 99 << 10, kMostSharedOfHopper = 227 << 10;

// A type's name, for messages.
template <class T>
std::string name_of() {
  const std::string all = __PRETTY_FUNCTION__;
  const size_t begin = all.find("T = ") + 4;
  return all.substr(begin, all.find_first_of(";]", begin) - begin);
}

// Shared: the struct of everything that a block keeps in shared memory. No member of Shared may be
// [[no_unique_address]], because nvcc 13.0 then puts members of derived structs beyond the size that sizeof() returns.
// Name: a type that messages name.
template <class Shared, size_t kMost = kMostShared, class Name = Shared, class Params>
[[nodiscard]] Error launch(void (*kernel)(Params), const Params& p, int64_t blocks, int threads, Stream stream) {
  static_assert(sizeof(Shared) <= kMost);
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
  static thread_local std::string message;
  message = name_of<Name>() + " with " + std::to_string(threads) + " threads and " + std::to_string(shared_bytes) +
            " bytes of shared memory: " + cudaGetErrorString(error);
  return message.c_str();
}

// Sets a call's counters to 0, before its kernel.
[[nodiscard]] inline Error clear_counters(int* counters, int64_t count, Stream stream) {
  if (!counters) return nullptr;
  const cudaError_t error = cudaMemsetAsync(counters, 0, static_cast<size_t>(count) * sizeof *counters, stream);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(cudaGetLastError());  // which clears it, as launch() does
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
  return launch<typename Kernel::Shared, kMostShared, Kernel>(run_block<Kernel, Params>, p, Kernel::blocks(p),
                                                              Kernel::kThreads, stream);
}
// The same for a Kernel whose block `number` also does the work of the blocks number + k gridDim, so that there are as
// many blocks as multiprocessors.
template <class Kernel, class Params>
[[nodiscard]] Error launch_persistent(const Params& p, const Gpu& gpu) {
  const int64_t blocks = smaller(Kernel::blocks(p), larger(1, gpu.multiprocessors));
  return launch<typename Kernel::Shared, kMostSharedOfHopper, Kernel>(run_block<Kernel, Params>, p, blocks,
                                                                      Kernel::kThreads, gpu.stream);
}

}  // namespace attn::cuda
