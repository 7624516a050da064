// Numbers of any dtype as T, the type a kernel computes in.
#pragma once

#include "cuda/shared/ptx.cuh"
#include "core/geometry.h"

namespace attn::cuda {

constexpr double kLog2E = 1.4426950408889634074;

template <class T>
__device__ __forceinline__ T infinity() {
  return static_cast<T>(HUGE_VALF);
}

// Returns the larger number; passes over a NaN in `x`, whose weight will be NaN. One instruction.
__device__ __forceinline__ float max_number(float x, float best) { return fmaxf(x, best); }
__device__ __forceinline__ double max_number(double x, double best) { return fmax(x, best); }

// Number `index` of an operand, not boolean. A kernel that computes in double meets no 16-bit numbers. The dtype is
// looked at for each number and not once outside of a loop: the loop is compiled once, the loads are predicated.
template <class T>
__device__ __forceinline__ T read(const Operand& x, int64_t index) {
  if (x.dtype == DType::f32) return static_cast<const float*>(x.data)[index];
  if constexpr (sizeof(T) == 8) {
    return static_cast<const double*>(x.data)[index];
  } else {
    const uint16_t bits = static_cast<const uint16_t*>(x.data)[index];
    return x.dtype == DType::bf16 ? to_float(BFloat16{bits}) : to_float(Half{bits});
  }
}
// What a mask adds to the score.
template <class T>
__device__ __forceinline__ T read_mask(const Operand& x, int64_t index) {
  if (x.dtype != DType::boolean) return read<T>(x, index);
  return static_cast<const uint8_t*>(x.data)[index] ? static_cast<T>(0) : -infinity<T>();
}

// The score of a product, its mask added; -inf by selection. Rounded once, and the same wherever it is computed:
// forward and derivatives must not differ where one unit in the last place of a score is large.
template <class T>
__device__ __forceinline__ T masked_score(T product, T slope, T bias) {
  return bias == -infinity<T>() ? bias : fma(product, slope, bias);
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

}  // namespace attn::cuda
