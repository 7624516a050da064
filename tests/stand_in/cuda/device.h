// In place of csrc/cuda/device.h: tensors of the CPU, for which the CUDA kernels are registered.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <torch/library.h>

#include <mutex>

#include "cuda/launch.h"

#define ATTN_CUDA_KEY CPU

namespace attn::cuda {

struct OnDeviceOf {
  explicit OnDeviceOf(const at::Tensor&) {}
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
