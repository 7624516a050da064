// For programs that check kernels without torch, on a GPU or with the stand-in.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <random>

#include "cuda/launch.cuh"

namespace attn::cuda {

inline void require(bool condition, const char* what) {
  if (condition) return;
  std::printf("wrong: %s\n", what);
  std::exit(1);
}

inline void require_launched(Error error) {
  if (!error && cudaDeviceSynchronize() == cudaSuccess) return;
  std::printf("not launched: %s\n", error ? error : "the kernel failed");
  std::exit(1);
}

// Memory that host and device share.
template <class T>
class Array {
 public:
  explicit Array(int64_t size) : size_(size) {
    if (cudaMallocManaged(&data_, static_cast<size_t>(size) * sizeof(T)) != cudaSuccess) std::abort();
    for (int64_t i = 0; i < size; ++i) data_[i] = T{};
  }
  Array(const Array&) = delete;
  ~Array() { cudaFree(data_); }
  T* data() { return data_; }
  int64_t size() const { return size_; }
  T& operator[](int64_t i) { return data_[i]; }

 private:
  T* data_ = nullptr;
  int64_t size_;
};

// Of a number that is not too small to be normal; exact for those that a test draws.
inline float host_float(uint16_t bits, bool is_half) {
  if (!is_half) return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const float size = exponent == 0 ? std::ldexp(static_cast<float>(fraction), -24)
                                   : std::ldexp(static_cast<float>(1024 + fraction), exponent - 25);
  return bits >> 15 ? -size : size;
}

}  // namespace attn::cuda
