// Powers of 2 and of e of vectors, and the hyperbolic tangent.
#pragma once

#include "cpu/simd/simd.inl"

namespace attn::ATTN_ISA {

// ln(2) as two numbers. The first has so few bits that a small whole number times it has no rounding error.
constexpr double kLn2High = 0x1.62e42fee00000p-1, kLn2Low = 1.90821492927058770002e-10;

// How a number is stored, and the coefficients of a polynomial p with 2^r = 1 + r p(r) for |r| <= 1/2, the highest
// power first.
template <class T>
struct Exp2Constants;
template <>
struct Exp2Constants<float> {
  static constexpr int mantissa_bits = 23;
  static constexpr int exponent_bias = 127;
  static constexpr float round_magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  // minimax coefficients of Cephes' exp2f
  static constexpr float poly[] = {1.535336188319500e-4f, 1.339887440266574e-3f, 9.618437357674640e-3f,
                                   5.550332471162809e-2f, 2.402264791363012e-1f, 6.931472028550421e-1f};
};
template <>
struct Exp2Constants<double> {
  static constexpr int mantissa_bits = 52;
  static constexpr int exponent_bias = 1023;
  static constexpr double round_magic = 6755399441055744.0;  // 1.5 * 2^52
  // the Taylor series, ln(2)^k / k!, up to r^13; the terms left out are below 2^-57
  static constexpr double poly[] = {1.3691488853904129e-12, 2.5678435993488201e-11, 4.4455382718708115e-10,
                                    7.0549116208011234e-9,  1.0178086009239699e-7,  1.3215486790144310e-6,
                                    1.5252733804059841e-5,  1.5403530393381610e-4,  1.3333558146428443e-3,
                                    9.6181291076284772e-3,  5.5504108664821580e-2,  2.4022650695910072e-1,
                                    6.9314718055994531e-1};
};

// Replaces every x <= 0 by 2^x, with a polynomial in x - floor(x) whose relative error is at most 3e-6 (degree 4), 1e-7
// (5) or 2e-8 (6). 2^0 is 1 exactly. The coefficients are minimax for the relative error on [0, 1), with the constant
// coefficient fixed at 1. Needs fraction() and scaled(), which only instruction sets with kHasExp2 have.
template <int kDegree, int N>
ATTN_INLINE void exp2_of_degree(Vec<float> (&x)[N]) {
  static constexpr float kFour[] = {0.013426683843135834f, 0.052242472767829895f, 0.241280198097229f,
                                    0.6930448412895203f, 1};
  static constexpr float kFive[] = {0.0018671300495043397f, 0.009017030708491802f, 0.05579991266131401f,
                                    0.24016444385051727f,   0.6931512951850891f,   1};
  static constexpr float kSix[] = {0.00021612914861179888f,
                                   0.0012467846972867846f,
                                   0.009675451554358006f,
                                   0.055485282093286514f,
                                   0.2402293086051941f,
                                   0.6931470632553101f,
                                   1};
  const float* c = kDegree == 4 ? kFour : kDegree == 5 ? kFive : kSix;
  Vec<float> r[N], p[N];
#pragma GCC unroll 8
  for (int v = 0; v < N; ++v) r[v] = fraction(x[v]);
#pragma GCC unroll 8
  for (int v = 0; v < N; ++v) p[v] = splat(c[0]);
#pragma GCC unroll 8
  for (int i = 1; i <= kDegree; ++i)
#pragma GCC unroll 8
    for (int v = 0; v < N; ++v) p[v] = p[v] * r[v] + c[i];
#pragma GCC unroll 8
  for (int v = 0; v < N; ++v) x[v] = scaled(p[v], x[v]);
}

// Replaces every x <= 127 (1023 in double) by 2^x, within 1 ulp. 2^0 is exactly 1. Results near or below the least
// normal number become 0. NaN stays NaN. With x = n + r, where n is an integer, 2^x = 2^n 2^r. If the caller computes x
// as a product, compilers fuse this product with the additions below. The code does each step for all N vectors before
// the next step, because the steps of one vector wait for each other, and processors look ahead only a little.
template <class T, int N>
ATTN_INLINE void exp2(Vec<T> (&x)[N]) {
  if constexpr (kHasExp2 && sizeof(T) == 4) {
    Vec<T> power[N];
#pragma GCC unroll 8
    for (int v = 0; v < N; ++v) power[v] = x[v];
    exp2_of_degree<6>(power);
#pragma GCC unroll 8
    for (int v = 0; v < N; ++v) x[v] = x[v] < -126.0f ? Vec<T>{} : power[v];
  } else {
    using F = Exp2Constants<T>;
    using U = Vec<UInt<T>>;
    Vec<T> shifted[N], n[N], r[N], p[N];
#pragma GCC unroll 8
    for (int v = 0; v < N; ++v) shifted[v] = x[v] + F::round_magic;
#pragma GCC unroll 8
    for (int v = 0; v < N; ++v) n[v] = shifted[v] - F::round_magic;
#pragma GCC unroll 8
    for (int v = 0; v < N; ++v) r[v] = x[v] - n[v];
#pragma GCC unroll 8
    for (int v = 0; v < N; ++v) p[v] = splat<T>(F::poly[0]);
#pragma GCC unroll 16
    for (size_t i = 1; i < sizeof(F::poly) / sizeof(T); ++i)
#pragma GCC unroll 8
      for (int v = 0; v < N; ++v) p[v] = p[v] * r[v] + F::poly[i];
#pragma GCC unroll 8
    for (int v = 0; v < N; ++v) {
      p[v] = p[v] * r[v] + static_cast<T>(1);
      // the low bits of `shifted` hold n: move n + bias into the exponent field
      const U two_to_n = (bit_cast<U>(shifted[v]) + static_cast<UInt<T>>(F::exponent_bias)) << F::mantissa_bits;
      x[v] = n[v] < static_cast<T>(2 - F::exponent_bias) ? Vec<T>{} : p[v] * bit_cast<Vec<T>>(two_to_n);
    }
  }
}

template <class T>
ATTN_INLINE Vec<T> exp2(Vec<T> x) {
  Vec<T> power[] = {x};
  exp2<T>(power);
  return power[0];
}

// Returns 2^x for every x, even where the result is infinite.
template <class T>
ATTN_INLINE Vec<T> exp2_of_any(Vec<T> x) {
  constexpr T kMost = sizeof(T) == 4 ? 190 : 1086, kLarge = sizeof(T) == 4 ? 120 : 1000, kPart = 64;
  const Vec<T> bounded = x > kMost ? splat<T>(kMost) : x;
  const auto is_large = bounded > kLarge;
  const Vec<T> power = exp2<T>(is_large ? bounded - kPart : bounded);
  return is_large ? power * static_cast<T>(0x1p64) : power;
}
// e^x = 2^y with y = x log2(e). The factor e^(x - y ln(2)) corrects the rounding error of y. With n, the whole number
// next to y, x - y ln(2) is x - n ln(2) - (y - n) ln(2). Here n times the high bits of ln(2) has no rounding error.
template <class T>
ATTN_INLINE Vec<T> exp_of_any(Vec<T> x) {
  constexpr T kHigh = static_cast<T>(sizeof(T) == 4 ? 0.693359375 : kLn2High);
  constexpr T kLow = static_cast<T>(sizeof(T) == 4 ? -2.1219444005469058277e-4 : kLn2Low);
  constexpr T kMagic = Exp2Constants<T>::round_magic;
  const Vec<T> y = x * static_cast<T>(kLog2E), n = (y + kMagic) - kMagic;
  const Vec<T> rest = ((x - n * kHigh) - n * kLow) - (y - n) * static_cast<T>(kLn2);
  const Vec<T> power = exp2_of_any<T>(y);
  return absolute<T>(y) < (sizeof(T) == 4 ? T{128} : T{1024}) ? power + power * rest : power;  // not of infinity
}

// Returns most * tanh(y ln(2) / 2), accurate for small y too. y may be infinite or NaN, and `most` is finite. With f =
// 2^-|y| = 2^n (1 + r p(r)), the tanh of |y| ln(2) / 2 is (1 - f) / (1 + f). Where the tanh is small, 1 - f is computed
// as (1 - 2^n) - 2^n r p(r), which does not cancel. Where the tanh is near 1, it is computed as 1 - 2 f / (1 + f), so
// that only the subtraction from `most` rounds the result.
template <class T>
ATTN_INLINE Vec<T> tanh_of_exponent(Vec<T> y, T most) {
  using F = Exp2Constants<T>;
  const Vec<T> one = splat<T>(1), x = with_sign<T>(y, splat<T>(-1));
  Vec<T> r, two_to_n;
  if constexpr (kHasExp2 && sizeof(T) == 4) {
    r = from_nearest(x);
    two_to_n = scaled(one, x - r);
  } else {
    constexpr T kMost = sizeof(T) == 4 ? 40 : 80;  // 1 + 2^-kMost rounds to 1
    const Vec<T> bounded = x < -kMost ? splat<T>(-kMost) : x, shifted = bounded + F::round_magic;
    r = bounded - (shifted - F::round_magic);
    const auto bits = (bit_cast<Vec<UInt<T>>>(shifted) + static_cast<UInt<T>>(F::exponent_bias)) << F::mantissa_bits;
    two_to_n = bit_cast<Vec<T>>(bits);
  }
  Vec<T> p = splat<T>(F::poly[0]);
#pragma GCC unroll 16
  for (size_t i = 1; i < sizeof(F::poly) / sizeof(T); ++i) p = p * r + F::poly[i];
  const Vec<T> rest = p * r * two_to_n, f = two_to_n + rest;
  const auto is_near_1 = x < -2;
  const Vec<T> quotient = (is_near_1 ? f + f : (one - two_to_n) - rest) / (one + f);
  return with_sign_changed<T>(is_near_1 ? most - most * quotient : most * quotient, y);
}

}  // namespace attn::ATTN_ISA
