// What the glue asks of torch about the device.
#pragma once

// Not ATen/cuda/CUDAContext.h: it wants the headers of cuBLAS and cuSPARSE.
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <mutex>

#include "cuda/launch.h"

#define ATTN_CUDA_KEY CUDA

namespace attn::cuda {

// Makes a tensor's device the current one for as long as it lives; throws where the kernels do not run.
class OnDeviceOf {
 public:
  explicit OnDeviceOf(const at::Tensor& tensor) : guard_(tensor.device()) {
    const int major = attribute(cudaDevAttrComputeCapabilityMajor);
    TORCH_CHECK(major >= 8, "attn: query is on ", tensor.device(), ", a GPU of compute capability ", major, ".",
                attribute(cudaDevAttrComputeCapabilityMinor), "; it must be 8.0 (Ampere) or higher");
    multiprocessors = attribute(cudaDevAttrMultiProcessorCount);
    stream = c10::cuda::getCurrentCUDAStream();
  }

  int64_t multiprocessors;
  Stream stream;

 private:
  int attribute(cudaDeviceAttr which) const {
    int value = 0;
    C10_CUDA_CHECK(cudaDeviceGetAttribute(&value, which, guard_.current_device().index()));
    return value;
  }

  c10::cuda::CUDAGuard guard_;
};

// Numbers of the device's generator that no other call gets; right also where a graph is captured. Of torch's own
// kernels the last word of a counter is 0; ours is the offset, one more than a multiple of four.
inline void draw_numbers(const at::Tensor& on_device, RngNumber& seed, RngNumber& offset) {
  constexpr uint64_t kStep = 4;  // the generator counts in fours
  auto* generator = at::get_generator_or_default<at::CUDAGeneratorImpl>(
      std::nullopt, at::cuda::detail::getDefaultCUDAGenerator(on_device.get_device()));
  const std::lock_guard<std::mutex> lock(generator->mutex_);
  const at::PhiloxCudaState state = generator->philox_cuda_state(kStep);
  if (state.captured_) {
    seed = {0, state.seed_.ptr};
    offset = {state.offset_intragraph_ + 1, state.offset_.ptr};
  } else {
    seed = {state.seed_.val, nullptr};
    offset = {state.offset_.val + 1, nullptr};
  }
}

}  // namespace attn::cuda
