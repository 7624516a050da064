// Reads and writes numbers of every dtype. A kernel computes with them in the type T.
#pragma once

#include "cuda/shared/ptx.cuh"
#include "core/geometry.h"

namespace attn::cuda {

template <class T>
constexpr T kLog2E = static_cast<T>(1.4426950408889634074);

template <class T>
__device__ __forceinline__ T infinity() {
  return static_cast<T>(HUGE_VALF);
}

// Returns the larger number, or NaN if one of them is NaN. For float, ptx.cuh has a function of the same name, because
// float has an instruction for it.
__device__ __forceinline__ double max_or_nan(double a, double b) { return a > b || a != a ? a : b; }

// 16 bytes that one instruction loads or stores.
template <class T>
struct alignas(16) Vec16 {
  static constexpr int kSize = 16 / sizeof(T);
  T at[kSize];
};

// The same of 8 bytes.
struct alignas(8) Vec8 {
  uint32_t low, high;
};

template <int N, class T>
__device__ __forceinline__ void load_vec16(T (&to)[N], const T* from, int offset = 0) {
#pragma unroll
  for (int i = 0; i < N; i += Vec16<T>::kSize) {
    const Vec16<T> q = *reinterpret_cast<const Vec16<T>*>(from + offset + i);
#pragma unroll
    for (int k = 0; k < Vec16<T>::kSize; ++k) to[i + k] = q.at[k];
  }
}

// How kernels read operands, such as K or V, that they multiply by weights or by dS. `as_it_is` keeps every number.
// `finite` puts 0 in place of infinities and NaNs.
enum class Factor { as_it_is, finite };

// Calls f.template operator()<N>(), where N is the type in which a kernel loads the operand's numbers. Kernels that
// compute in double load no 16-bit numbers. Put loops into f. If a loop branched on the dtype for each number, each
// load would wait for the load before it. kMayBeEight: whether the numbers may have 8 bits.
template <class T, bool kMayBeEight = false, class F>
__device__ __forceinline__ void with_loaded(const Operand& x, F f) {
  if constexpr (kMayBeEight)
    if (is_8_bit(x)) return f.template operator()<int8_t>();
  if (x.dtype == DType::f32)
    f.template operator()<float>();
  else if constexpr (sizeof(T) == 8)
    f.template operator()<double>();
  else
    f.template operator()<uint16_t>();
}
// The same for a mask, which may be boolean.
template <class T, class F>
__device__ __forceinline__ void with_loaded_mask(const Operand& x, F f) {
  if (x.dtype == DType::boolean)
    f.template operator()<uint8_t>();
  else
    with_loaded<T>(x, f);
}
// Returns the value of a number of float8_e4m3fn: a sign, four bits of exponent, whose bias is 7, and three of
// mantissa. It has no infinities, and NaN is where all bits but the sign are 1.
__device__ __forceinline__ float e4m3_to_float(uint32_t bits) {
  const uint32_t magnitude = bits & 0x7f;
  if (magnitude == 0x7f) return infinity<float>() - infinity<float>();
  return __uint_as_float((bits & 0x80) << 24 | magnitude << 20) * 0x1p120f;  // a float's bias is 127
}
// Returns the value of a number that was loaded as N. If N is uint8_t, the operand is a boolean mask, and its value is
// what it adds to the score. If N is int8_t, the number is int8 or float8_e4m3fn.
template <class T, class N>
__device__ __forceinline__ T value_of(const Operand& x, N loaded) {
  if constexpr (std::is_same_v<N, uint8_t>)
    return loaded ? static_cast<T>(0) : -infinity<T>();
  else if constexpr (std::is_same_v<N, int8_t>)
    return x.dtype == DType::i8 ? static_cast<T>(loaded) : e4m3_to_float(static_cast<uint8_t>(loaded));
  else if constexpr (std::is_same_v<N, uint16_t>)
    return x.dtype == DType::bf16 ? to_float(BFloat16{loaded}) : to_float(Half{loaded});
  else
    return static_cast<T>(loaded);
}
// Number `index` of an operand.
template <class T>
__device__ __forceinline__ T read(const Operand& x, int64_t index) {
  T value;
  with_loaded<T>(x, [&]<class N>() { value = value_of<T>(x, static_cast<const N*>(x.data)[index]); });
  return value;
}
template <class T>
__device__ __forceinline__ T read_mask(const Operand& x, int64_t index) {
  T value;
  with_loaded_mask<T>(x, [&]<class N>() { value = value_of<T>(x, static_cast<const N*>(x.data)[index]); });
  return value;
}

// Turns a product into a score and adds the mask. Where the mask is -inf, the result is -inf even if the product is
// NaN. The score is rounded once, in fma(). So the forward and the derivatives compute scores with the same bits. The
// bits must be the same, because one unit in the last place of a large score changes its weight a lot.
template <class T>
__device__ __forceinline__ T masked_score(T product, T slope, T bias) {
  return bias == -infinity<T>() ? bias : fma(product, slope, bias);
}

// Rounds x to the dtype of an operand and stores it there as number `index`. Returns the rounded number.
template <class T>
__device__ __forceinline__ T store_rounded(const Operand& to, int64_t index, T x) {
  if constexpr (sizeof(T) == 8) {
    if (to.dtype == DType::f64) return static_cast<double*>(to.data)[index] = x;
    return static_cast<float*>(to.data)[index] = static_cast<float>(x);
  } else {
    if (to.dtype == DType::f32) return static_cast<float*>(to.data)[index] = x;
    if (to.dtype == DType::bf16) return to_float(static_cast<BFloat16*>(to.data)[index] = from_float<BFloat16>(x));
    return to_float(static_cast<Half*>(to.data)[index] = from_float<Half>(x));
  }
}
// Does the same. Also writes the rounding error of x to `rest`, if `rest` has data.
template <class T>
__device__ __forceinline__ void store_exactly(const Operand& to, int64_t index, const Operand& rest, int64_t rest_index,
                                              T x) {
  const T stored = store_rounded(to, index, x);
  if (rest.data) static_cast<float*>(rest.data)[rest_index] = x - stored;
}

}  // namespace attn::cuda
