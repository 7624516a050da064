// csrc/cpu/isa/instructions_avx512.inl in software, for processors with AVX2: vectors of 64 bytes become two of 32, and
// each function has the results of the instruction that it stands for (Intel's Software Developer's Manual, volume 2).
#pragma once

#ifndef ATTN_ISA  // included by itself
#define ATTN_ISA avx512
#endif
#include "cpu/isa.h"

// From here to the end of the file that opened the target region.
#pragma GCC target("no-avx512f")
#pragma GCC diagnostic ignored "-Wpsabi"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

namespace attn::ATTN_ISA {

constexpr int kVectorBytes = 64;
constexpr int kRegisters = 32;
constexpr bool kHasExp2 = true;

}  // namespace attn::ATTN_ISA

#include "cpu/simd/vectors.inl"

namespace attn::ATTN_ISA {

// The result of f over the halves of vectors.
template <class To, class F, class... From>
ATTN_INLINE To by_halves(F f, From... from) {
  To to;
  for (size_t half = 0; half < 2; ++half) {
    const auto part = f([&] {
      typename VectorOf<char, sizeof(from) / 2>::type x;
      __builtin_memcpy(&x, reinterpret_cast<const char*>(&from) + half * sizeof x, sizeof x);
      return x;
    }()...);
    static_assert(2 * sizeof part == sizeof to);
    __builtin_memcpy(reinterpret_cast<char*>(&to) + half * sizeof part, &part, sizeof part);
  }
  return to;
}

ATTN_INLINE Vec<float> half_to_float(Shorts<float> h) {
  return by_halves<Vec<float>>([](auto x) { return _mm256_cvtph_ps(bit_cast<__m128i>(x)); }, h);
}
ATTN_INLINE Shorts<float> float_to_half(Vec<float> f) {
  const auto convert = [](auto x) { return _mm256_cvtps_ph(bit_cast<__m256>(x), _MM_FROUND_TO_NEAREST_INT); };
  return by_halves<Shorts<float>>(convert, f);
}
ATTN_INLINE Vec<uint32_t> widened(Shorts<float> s) { return __builtin_convertvector(s, Vec<uint32_t>); }
ATTN_INLINE Vec<int32_t> widened(SignedBytes<float> b) { return __builtin_convertvector(b, Vec<int32_t>); }
ATTN_INLINE Shorts<float> widened(Bytes<float> b) { return __builtin_convertvector(b, Shorts<float>); }

ATTN_INLINE uint64_t nonzero_bytes(const uint8_t* bytes) {
  uint64_t bits = 0;
  for (int i = 0; i < 64; ++i) bits |= static_cast<uint64_t>(bytes[i] != 0) << i;
  return bits;
}

ATTN_INLINE Vec<uint64_t> multiply_low_halves(Vec<uint64_t> a, Vec<uint64_t> b) {
  return (a & 0xffffffffu) * (b & 0xffffffffu);
}

ATTN_INLINE Vec<float> floor_of(Vec<float> x) {
  return by_halves<Vec<float>>([](auto half) { return _mm256_floor_ps(bit_cast<__m256>(half)); }, x);
}
ATTN_INLINE Vec<float> fraction(Vec<float> x) {
  const auto infinite = (x == kInfinity<float>) | (x == -kInfinity<float>);
  return infinite ? Vec<float>{} : x - floor_of(x);
}
ATTN_INLINE Vec<float> from_nearest(Vec<float> x) {
  const auto infinite = (x == kInfinity<float>) | (x == -kInfinity<float>);
  return infinite ? Vec<float>{} : x - floor_of(x + 0.5f);
}
ATTN_INLINE Vec<float> scaled(Vec<float> p, Vec<float> x) {
  // in two steps, as the result may be subnormal
  const Vec<float> n = floor_of(x), clamped = n < -252.0f ? splat(-252.0f) : n > 254.0f ? splat(254.0f) : n;
  const Vec<int32_t> whole = __builtin_convertvector(x == x ? clamped : Vec<float>{}, Vec<int32_t>), half = whole >> 1;
  const Vec<float> power = bit_cast<Vec<float>>((half + 127) << 23);
  const Vec<float> rest = bit_cast<Vec<float>>((whole - half + 127) << 23);
  return x == x ? (n < -252.0f ? p * 0.0f : p * power * rest) : x;
}

}  // namespace attn::ATTN_ISA
