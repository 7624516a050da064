// The functions with which device.cpp asks torch and CUDA about the device. tests/stand_in has its own version of this
// header.
#pragma once

// Does not include ATen/cuda/CUDAContext.h, because that header needs the headers of cuBLAS and cuSPARSE.
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <array>
#include <atomic>
#include <limits>
#include <mutex>

#include "cuda/launch.h"

#define ATTN_CUDA_KEY CUDA

namespace attn::cuda {

constexpr auto kDeviceType = c10::kCUDA;

// Returns the compute capability of a device: 75 is 7.5. Returns 0 if the device does not exist. A tensor without data
// may be on such a device. Asks the driver once for each device that exists.
inline int compute_capability(c10::Device device) {
  static std::array<std::atomic<int>, std::numeric_limits<c10::DeviceIndex>::max() + 1> known{};
  if (!device.has_index()) return 0;
  std::atomic<int>& capability = known[static_cast<size_t>(device.index())];
  if (capability == 0) {
    int major = 0, minor = 0;
    const bool is_there =
        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device.index()) == cudaSuccess &&
        cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device.index()) == cudaSuccess;
    if (!is_there) cudaGetLastError();  // clears the error, else a later check would report it
    capability = is_there ? 10 * major + minor : 0;
  }
  return capability;
}

// Makes a device the current device while this object lives.
class OnDevice : public Gpu {
 public:
  explicit OnDevice(c10::Device device) : guard_(device) {
    int value = 0;
    C10_CUDA_CHECK(cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, guard_.current_device().index()));
    multiprocessors = value;
    stream = c10::cuda::getCurrentCUDAStream();
  }

 private:
  c10::cuda::CUDAGuard guard_;
};

// Draws a seed and an offset from the device's generator. No other call gets the same two numbers, even if a graph is
// being captured. Torch's own kernels set the last word of a Philox counter to 0. Our kernels set it to the offset,
// which is one more than a multiple of four. So our kernels and torch's kernels never use the same counter.
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
