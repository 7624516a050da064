// Storage types. Converts elements of tensors to numbers of the compute type (float or double), and back.
#pragma once

#include "cpu/simd/simd.inl"

namespace attn::ATTN_ISA {

struct BFloat16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};
struct Int8 {
  int8_t number;
};
struct Float8 {  // e4m3fn: a sign, 4 bits of exponent, 3 of mantissa; no infinities
  uint8_t bits;
};
struct Boolean {  // a mask: true is 0, false is -inf, ready to be added to a score
  uint8_t byte;
};

ATTN_INLINE Vec<float> bfloat16_to_float(Shorts<float> b) { return bit_cast<Vec<float>>(widened(b) << 16); }

ATTN_INLINE Shorts<float> float_to_bfloat16(Vec<float> f) {
  using U = Vec<uint32_t>;
  const U bits = bit_cast<U>(f);
  const U rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const U nan = (bits >> 16) | 0x40u;
  return __builtin_convertvector((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded, Shorts<float>);
}

// load_as<T>(p) loads kLanes<T> elements of a storage type from p, and converts them to the compute type T.
template <class T>
ATTN_INLINE Vec<T> load_as(const T* p) {
  return load<T>(p);
}
template <class T>
ATTN_INLINE Vec<T> load_as(const BFloat16* p) {
  Shorts<T> bits;
  __builtin_memcpy(&bits, p, sizeof bits);
  return bfloat16_to_float(bits);
}
template <class T>
ATTN_INLINE Vec<T> load_as(const Half* p) {
  Shorts<T> bits;
  __builtin_memcpy(&bits, p, sizeof bits);
  return half_to_float(bits);
}
template <class T>
ATTN_INLINE Vec<T> load_as(const Int8* p) {
  SignedBytes<T> bytes;
  __builtin_memcpy(&bytes, p, sizeof bytes);
  return __builtin_convertvector(widened(bytes), Vec<T>);
}
// Returns the Float8 in the high byte of each word, divided by kFloat8. Copies its exponent and mantissa bits into a
// half. The half, normal or subnormal, is the Float8 divided by kFloat8 = 2^8, because the exponent bias is 7 in a
// Float8 and 15 in a half. To make up for this factor, read_scales() multiplies scales by kFloat8.
constexpr float kFloat8 = 0x1p8f;
template <class T>
ATTN_INLINE Vec<T> float8_to_float(Shorts<T> words) {
  using Signed = typename VectorOf<int16_t, kLanes<T>>::type;
  // The shift by 1 moves 7 bits to their places and keeps the sign in its place. It also copies the sign to bit 14,
  // which 0xbf80 clears. A Float8 is a NaN if all 7 bits are 1. Only then does adding 0x80 carry into bit 14, which
  // makes the half a NaN, too.
  const Shorts<T> half = bit_cast<Shorts<T>>(bit_cast<Signed>(words) >> 1) & static_cast<uint16_t>(0xbf80);
  return half_to_float(half | ((half + static_cast<uint16_t>(0x80)) & static_cast<uint16_t>(0x4000)));
}
template <class T>
ATTN_INLINE Vec<T> load_as(const Float8* p) {
  Bytes<T> bytes;
  __builtin_memcpy(&bytes, p, sizeof bytes);
  return float8_to_float<T>(widened(bytes) << 8);
}
template <class T>
ATTN_INLINE Vec<T> load_as(const Boolean* p) {
  Bytes<T> bytes;
  __builtin_memcpy(&bytes, p, sizeof bytes);
  return __builtin_convertvector(bytes, Vec<Int<T>>) != 0 ? Vec<T>{} : splat<T>(-kInfinity<T>);
}
template <class T>
ATTN_INLINE Vec<T> load_as(const float* p)
  requires(sizeof(T) == 8)
{
  typename VectorOf<float, kLanes<T>>::type narrow;  // a float32 mask of float64 scores
  __builtin_memcpy(&narrow, p, sizeof narrow);
  return __builtin_convertvector(narrow, Vec<T>);
}

// Loads 2 kLanes<T> neighbours in the order of memory. But if kTakesTurns<S>, `first` gets the numbers 0, 2, 4, ... and
// `second` gets the numbers 1, 3, 5, ..., because this order takes fewer instructions.
template <class S>
constexpr bool kTakesTurns = std::is_same_v<S, BFloat16> || std::is_same_v<S, Float8>;
template <class T, class S>
ATTN_INLINE void load_two(const S* p, Vec<T>& first, Vec<T>& second) {
  if constexpr (std::is_same_v<S, Float8>) {
    Shorts<T> words;
    __builtin_memcpy(&words, p, sizeof words);
    first = float8_to_float<T>(words << 8);
    second = float8_to_float<T>(words);
  } else if constexpr (kTakesTurns<S>) {
    Vec<uint32_t> bits;
    __builtin_memcpy(&bits, p, sizeof bits);
    first = bit_cast<Vec<T>>(bits << 16);
    second = bit_cast<Vec<T>>(bits & 0xffff0000u);
  } else {
    first = load_as<T>(p);
    second = load_as<T>(p + kLanes<T>);
  }
}

ATTN_INLINE void store_as(float* p, Vec<float> v) { store<float>(p, v); }
ATTN_INLINE void store_as(double* p, Vec<double> v) { store<double>(p, v); }
ATTN_INLINE void store_as(BFloat16* p, Vec<float> v) {
  const auto bits = float_to_bfloat16(v);
  __builtin_memcpy(p, &bits, sizeof bits);
}
ATTN_INLINE void store_as(Half* p, Vec<float> v) {
  const auto bits = float_to_half(v);
  __builtin_memcpy(p, &bits, sizeof bits);
}
ATTN_INLINE void store_as(float* p, Vec<double> v) {
  const auto narrow = __builtin_convertvector(v, typename VectorOf<float, kLanes<double>>::type);
  __builtin_memcpy(p, &narrow, sizeof narrow);
}

// load_some() and store_some() load and store `count` < kLanes elements. They read or write nothing beyond these
// elements.
template <class T, class S>
ATTN_INLINE Vec<T> load_some(const S* p, int64_t count) {
  S buffer[kLanes<T>] = {};
  __builtin_memcpy(buffer, p, count * sizeof(S));
  return load_as<T>(buffer);
}
template <class T, class S>
ATTN_INLINE void store_some(S* p, Vec<T> v, int64_t count) {
  S buffer[kLanes<T>];
  store_as(buffer, v);
  __builtin_memcpy(p, buffer, count * sizeof(S));
}

}  // namespace attn::ATTN_ISA
