// What the programs that time variants of kernels on a GPU have in common.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "check.h"

namespace attn::cuda {

// `count` numbers of bfloat16 on the GPU, about normally distributed (the sum of four); of seed 0 without a value.
inline uint16_t* make_numbers(size_t count, unsigned seed) {
  uint16_t* memory = nullptr;
  require_done(cudaMalloc(&memory, 2 * count));
  if (seed == 0) return memory;
  std::vector<uint16_t> numbers(count);
  std::minstd_rand random(seed);
  for (uint16_t& x : numbers) {
    float sum = -2;
    for (int i = 0; i < 4; ++i) sum += static_cast<float>(random() % 65536) / 65536;
    x = static_cast<uint16_t>(std::bit_cast<uint32_t>(sum * 1.7f) >> 16);
  }
  require_done(cudaMemcpy(memory, numbers.data(), 2 * count, cudaMemcpyHostToDevice));
  return memory;
}

// The largest difference of two such arrays; NaN if a number of them is one.
inline double largest_difference(const uint16_t* x, const uint16_t* y, size_t count) {
  std::vector<uint16_t> a(count), b(count);
  require_done(cudaMemcpy(a.data(), x, 2 * count, cudaMemcpyDeviceToHost));
  require_done(cudaMemcpy(b.data(), y, 2 * count, cudaMemcpyDeviceToHost));
  double most = 0;
  for (size_t i = 0; i < count; ++i) {
    const double off = std::fabs(host_float(a[i], false) - host_float(b[i], false));
    if (!(off <= most)) most = off;
  }
  return most;
}

// The median time of ten launches, after two more.
template <class F>
double median_ms(F launch_once) {
  cudaEvent_t from, to;
  require_done(cudaEventCreate(&from));
  require_done(cudaEventCreate(&to));
  std::vector<float> times;
  for (int i = 0; i < 12; ++i) {
    require_done(cudaEventRecord(from));
    const Error error = launch_once();
    require(!error, error ? error : "");
    require_done(cudaEventRecord(to));
    require_done(cudaEventSynchronize(to));
    float ms = 0;
    require_done(cudaEventElapsedTime(&ms, from, to));
    if (i > 1) times.push_back(ms);
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

}  // namespace attn::cuda
