// Numbers of any dtype as T, the type a kernel computes in.
#pragma once

#include "cuda/ptx.cuh"
#include "params.h"

namespace attn::cuda {

template <class T>
__device__ __forceinline__ T infinity() {
  return static_cast<T>(HUGE_VALF);
}

// How a mask's boolean reads as a number that is added to the score.
struct Boolean {
  uint8_t attend;
};

template <class T>
__device__ __forceinline__ T convert(float x) {
  return static_cast<T>(x);
}
template <class T>
__device__ __forceinline__ T convert(double x) {
  return static_cast<T>(x);
}
template <class T>
__device__ __forceinline__ T convert(Half x) {
  return static_cast<T>(to_float(x));
}
template <class T>
__device__ __forceinline__ T convert(BFloat16 x) {
  return static_cast<T>(to_float(x));
}
template <class T>
__device__ __forceinline__ T convert(Boolean x) {
  return x.attend ? static_cast<T>(0) : -infinity<T>();
}

// Calls f with a pointer of the operand's type. A kernel that computes in double meets no 16-bit numbers.
template <class T, class F>
__device__ __forceinline__ void with_type(const void* data, DType dtype, F f) {
  if (dtype == DType::boolean) return f(static_cast<const Boolean*>(data));
  if (dtype == DType::f32) return f(static_cast<const float*>(data));
  if constexpr (sizeof(T) == 8) {
    f(static_cast<const double*>(data));
  } else {
    if (dtype == DType::bf16) return f(static_cast<const BFloat16*>(data));
    f(static_cast<const Half*>(data));
  }
}

// Writes x rounded to the dtype; returns what is stored.
template <class T>
__device__ __forceinline__ T store_rounded(void* data, DType dtype, int64_t index, T x) {
  if constexpr (sizeof(T) == 8) {
    if (dtype == DType::f64) return static_cast<double*>(data)[index] = x;
    return static_cast<float*>(data)[index] = static_cast<float>(x);
  } else {
    if (dtype == DType::f32) return static_cast<float*>(data)[index] = x;
    if (dtype == DType::bf16) return to_float(static_cast<BFloat16*>(data)[index] = from_float<BFloat16>(x));
    return to_float(static_cast<Half*>(data)[index] = from_float<Half>(x));
  }
}

constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return divide_up(a, b) * b; }
constexpr int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
constexpr int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

}  // namespace attn::cuda
