// In place of csrc/cuda/device.h: tensors of the CPU, for which the CUDA kernels are registered.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <torch/library.h>

#include <cstdlib>
#include <mutex>

#include "cuda/launch.h"
#include "cuda_runtime.h"

#define ATTN_CUDA_KEY CPU

namespace attn::cuda {

constexpr auto kDeviceType = c10::kCPU;

inline int compute_capability(c10::Device) { return stand_in::capability(); }

struct OnDevice : Gpu {
  explicit OnDevice(c10::Device) { multiprocessors = 8; }
};

inline void draw_numbers(const at::Tensor&, RngNumber& seed, RngNumber& offset) {
  auto* generator =
      at::get_generator_or_default<at::CPUGeneratorImpl>(std::nullopt, at::detail::getDefaultCPUGenerator());
  const std::lock_guard<std::mutex> lock(generator->mutex_);
  seed = {generator->random64(), nullptr};
  offset = {0, nullptr};
}

}  // namespace attn::cuda
