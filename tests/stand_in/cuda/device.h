// In place of csrc/cuda/device.h: tensors of the CPU, for which the CUDA kernels are registered.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <torch/library.h>

#include <cstdlib>
#include <mutex>

#include "cuda/launch.h"

#define ATTN_CUDA_KEY CPU

namespace attn::cuda {

constexpr auto kDeviceType = c10::kCPU;

// The capability of an A100, or another for tests: 75 is 7.5.
inline int compute_capability(c10::Device) {
  const char* capability = std::getenv("ATTN_STAND_IN_CAPABILITY");
  return capability ? std::atoi(capability) : 80;
}

struct OnDevice {
  explicit OnDevice(c10::Device) {}
  int64_t multiprocessors = 8;
  Stream stream = nullptr;
};

inline void draw_numbers(const at::Tensor&, RngNumber& seed, RngNumber& offset) {
  auto* generator =
      at::get_generator_or_default<at::CPUGeneratorImpl>(std::nullopt, at::detail::getDefaultCPUGenerator());
  const std::lock_guard<std::mutex> lock(generator->mutex_);
  seed = {generator->random64(), nullptr};
  offset = {0, nullptr};
}

}  // namespace attn::cuda
