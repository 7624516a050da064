// The exponential function of vectors.
#pragma once

#include "cpu/simd.inl"

namespace attn::ATTN_ISA {

template <class T>
struct ExpConstants;
template <>
struct ExpConstants<float> {
  static constexpr int mantissa_bits = 23;
  static constexpr int exponent_bias = 127;
  static constexpr float round_magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  static constexpr float ln2_high = 0.693359375f;    // few bits, so that n * ln2_high is exact
  static constexpr float ln2_low = -2.12194440e-4f;
  static constexpr float exp_lowest = -87.3365f;  // exp() of less is not a normal number; returned as 0
  // exp(r) = 1 + r + r^2 p(r), |r| <= ln(2) / 2; minimax coefficients of Cephes' expf, highest power first
  static constexpr float exp_poly[] = {1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f,
                                       4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
};
template <>
struct ExpConstants<double> {
  static constexpr int mantissa_bits = 52;
  static constexpr int exponent_bias = 1023;
  static constexpr double round_magic = 6755399441055744.0;  // 1.5 * 2^52
  static constexpr double ln2_high = 6.93145751953125e-1;
  static constexpr double ln2_low = 1.42860682030941723212e-6;
  static constexpr double exp_lowest = -708.396;
  // the Taylor series to r^13: what is left out is below 2^-57 for |r| <= ln(2) / 2
  static constexpr double exp_poly[] = {1.0 / 6227020800, 1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800,
                                        1.0 / 362880,     1.0 / 40320,     1.0 / 5040,     1.0 / 720,
                                        1.0 / 120,        1.0 / 24,        1.0 / 6,        1.0 / 2};
};

// 2^x for x <= 0 by a polynomial of the degree, defined where kHasExp2 is true.
template <int kDegree>
Vec<float> exp2_of_degree(Vec<float>);

constexpr float kLog2E = 1.4426950408889634074f;

// e^x within 1 ulp for x <= 88 (709); 0 where the result is not a normal number; NaN stays NaN.
// x = n ln(2) + r with n an integer, e^x = 2^n e^r.
template <class T>
ATTN_INLINE Vec<T> exp(Vec<T> x) {
  using F = ExpConstants<T>;
  using U = Vec<UInt<T>>;
  const Vec<T> shifted = x * static_cast<T>(1.4426950408889634074) + F::round_magic;
  const Vec<T> n = shifted - F::round_magic;
  Vec<T> r = x - n * F::ln2_high;
  r = r - n * F::ln2_low;
  Vec<T> p = splat<T>(F::exp_poly[0]);
#pragma GCC unroll 16
  for (size_t i = 1; i < sizeof(F::exp_poly) / sizeof(T); ++i) p = p * r + F::exp_poly[i];
  p = (p * (r * r) + r) + static_cast<T>(1);  // in this order, the last rounding is the only one that counts
  // the low bits of `shifted` hold n: move n + bias into the exponent field
  const U two_to_n = (bit_cast<U>(shifted) + static_cast<UInt<T>>(F::exponent_bias)) << F::mantissa_bits;
  return x < F::exp_lowest ? Vec<T>{} : p * bit_cast<Vec<T>>(two_to_n);
}

// e^x for x <= 0, exactly 1 for 0; 0 where the result is not a normal number; NaN stays NaN. As 2^(x log2(e)) where the
// instruction set has the powers of 2 (kHasExp2): that takes fewer instructions.
template <class T>
ATTN_INLINE Vec<T> exp_of_nonpositive(Vec<T> x) {
  if constexpr (kHasExp2 && sizeof(T) == 4) {
    const Vec<T> power = x * kLog2E;
    return power < -126.0f ? Vec<T>{} : exp2_of_degree<6>(power);
  } else {
    return exp<T>(x);
  }
}

}  // namespace attn::ATTN_ISA
