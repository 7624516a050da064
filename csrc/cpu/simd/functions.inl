// Logarithms, sines, exponentials near 0 and error functions of vectors, within 5 ulp of float64.
//
// Numbers of type float are computed in double, too, which leaves hardly more than the last rounding. FreeBSD's
// library msun has the same polynomials of logarithms and sines, and the same parts of pi / 2.
#pragma once

#include "cpu/simd/exp.inl"

namespace attn::ATTN_ISA {

using Doubles = Vec<double>;

// Adds up a polynomial, the highest power first.
template <size_t N>
ATTN_INLINE Doubles polynomial(const double (&coefficients)[N], Doubles x) {
  Doubles sum = splat(coefficients[0]);
#pragma GCC unroll 24
  for (size_t i = 1; i < N; ++i) sum = sum * x + coefficients[i];
  return sum;
}

// Applies a function to the lanes of a vector. The loop is not inlined, because a list has many functions.
template <Doubles (*function)(Doubles), class T>
__attribute__((noinline)) void apply_in_double(T* x) {
  constexpr int W = kLanes<double>;
  typedef T Numbers __attribute__((vector_size(sizeof(T) * W)));
  for (int i = 0; i < kLanes<T>; i += W) {
    Numbers numbers;
    __builtin_memcpy(&numbers, x + i, sizeof numbers);
    numbers = __builtin_convertvector(function(__builtin_convertvector(numbers, Doubles)), Numbers);
    __builtin_memcpy(x + i, &numbers, sizeof numbers);
  }
}
template <Doubles (*function)(Doubles), class T>
ATTN_INLINE Vec<T> in_double(Vec<T> x) {
  T numbers[kLanes<T>];
  store<T>(numbers, x);
  apply_in_double<function, T>(numbers);
  return load<T>(numbers);
}

// log(x) = exponent * ln(2) + rest for positive x, where |rest| <= ln(2) / 2.
struct Logarithm {
  Doubles exponent, rest;
};
ATTN_INLINE Logarithm logarithm(Doubles x) {
  static constexpr double kRest[] = {1.479819860511658591e-1, 1.531383769920937332e-1, 1.818357216161805012e-1,
                                     2.222219843214978396e-1, 2.857142874366239149e-1, 3.999999999940941908e-1,
                                     6.666666666666735130e-1};
  constexpr uint64_t kRootOfHalf = 0x3fe6a09e667f3bcd, kOne = 0x3ff0000000000000;
  const auto is_tiny = x < 0x1p-1022;
  const auto bits = bit_cast<Vec<uint64_t>>(is_tiny ? x * 0x1p54 : x) + (kOne - kRootOfHalf);
  const Doubles biased = bit_cast<Doubles>((bits >> 52) | 0x4330000000000000) - 0x1p52;
  const Doubles f = bit_cast<Doubles>((bits & 0xfffffffffffff) + kRootOfHalf) - 1.0;
  const Doubles s = f / (f + 2.0), z = s * s, half = f * f * 0.5;
  return {biased - (is_tiny ? splat(1023.0 + 54) : splat(1023.0)), s * (half + z * polynomial(kRest, z)) - half + f};
}
// Selects what a logarithm of x is where x is not a positive, finite number.
ATTN_INLINE Doubles of_positive(Doubles x, Doubles logarithm) {
  const Doubles at_most_0 = x == 0 ? splat(-kInfinity<double>) : splat(__builtin_nan(""));
  return x < kInfinity<double> ? (x > 0 ? logarithm : at_most_0) : x;
}
ATTN_INLINE Doubles log_in_double(Doubles x) {
  const Logarithm l = logarithm(x);
  return of_positive(x, l.exponent * kLn2High + (l.rest + l.exponent * kLn2Low));
}
ATTN_INLINE Doubles log2_in_double(Doubles x) {
  const Logarithm l = logarithm(x);
  return of_positive(x, l.exponent + l.rest * kLog2E);
}
// log(y) + e / y, where y + e is 1 + x without a rounding error.
ATTN_INLINE Doubles log1p_in_double(Doubles x) {
  const Doubles y = x + 1.0, error = x > 1 ? 1.0 - (y - x) : x - (y - 1.0);
  const Logarithm l = logarithm(y);
  return of_positive(y, l.exponent * kLn2High + (l.rest + (l.exponent * kLn2Low + error / y)));
}

// e^x - 1 = 2^n (e^r - 1) + (2^n - 1), where n is a whole number.
ATTN_INLINE Doubles expm1_in_double(Doubles x) {
  using F = Exp2Constants<double>;
  const Doubles bounded = x < -50 ? splat(-50.0) : x > 710 ? splat(710.0) : x;
  const Doubles shifted = bounded * kLog2E + F::round_magic, n = shifted - F::round_magic;
  const Doubles y = ((bounded - n * kLn2High) - n * kLn2Low) * kLog2E;
  const Doubles half = bit_cast<Doubles>((bit_cast<Vec<uint64_t>>(shifted) + (F::exponent_bias - 1)) << 52);
  return (half * (y * polynomial(F::poly, y)) + (half - 0.5)) * 2.0;
}

// The sine of x + quarters * pi / 2, by the sine or cosine of x - n pi / 2, which is y + rest. If `of_both`, returns
// the quotient of sine and cosine.
ATTN_INLINE Doubles sine(Doubles x, int quarters, bool of_both, double (*of_large)(double)) {
  static constexpr double kSine[] = {1.58969099521155010221e-10, -2.50507602534068634195e-8, 2.75573137070700676789e-6,
                                     -1.98412698298579493134e-4, 8.33333333332248946124e-3};
  static constexpr double kCosine[] = {-1.13596475577881948265e-11, 2.08757232129817482790e-9,
                                       -2.75573143513906633035e-7,  2.48015872894767294178e-5,
                                       -1.38888888888741095749e-3,  4.16666666666666019037e-2};
  constexpr double kMagic = Exp2Constants<double>::round_magic;
  const Doubles shifted = x * 6.36619772367581382433e-1 + kMagic, n = shifted - kMagic;
  const Doubles first = x - n * 1.57079632673412561417, second = n * 6.07710050630396597660e-11;
  const Doubles r = first - second, third = n * 2.02226624879595063154e-21 - ((first - r) - second);
  const Doubles y = r - third, rest = (r - y) - third, z = y * y, v = z * y, half = z * 0.5, w = 1.0 - half;
  const Doubles sin = y - ((z * (rest * 0.5 - v * polynomial(kSine, z)) - rest) + v * 1.66666666666666324348e-1);
  const Doubles cos = w + (((1.0 - w) - half) + (z * z * polynomial(kCosine, z) - y * rest));
  const auto quadrant = bit_cast<Vec<uint64_t>>(shifted) + static_cast<uint64_t>(quarters);
  const auto is_odd = (quadrant & 1) != 0;
  const Doubles found = of_both ? (is_odd ? -cos / sin : sin / cos) : is_odd ? cos : sin;
  Doubles result = of_both ? found : bit_cast<Doubles>(bit_cast<Vec<uint64_t>>(found) ^ ((quadrant & 2) << 62));
  const auto is_large = !(absolute<double>(x) < 0x1p20);  // also a NaN
  if (any(is_large))
    for (int i = 0; i < kLanes<double>; ++i)
      if (is_large[i]) result[i] = of_large(x[i]);
  return result;
}
ATTN_INLINE Doubles sin_in_double(Doubles x) { return sine(x, 0, false, ::sin); }
ATTN_INLINE Doubles cos_in_double(Doubles x) { return sine(x, 1, false, ::cos); }
ATTN_INLINE Doubles tan_in_double(Doubles x) { return sine(x, 0, true, ::tan); }

// The error function and its complement. Below 0.84, erf(x) is x times a polynomial of x^2. Above, erfc(x) is
// exp(-x^2) t times a polynomial of t = 1 / (x + 3).
ATTN_INLINE Doubles error_function(Doubles x, bool complement) {
  static constexpr double kNear[] = {1.0726571432176348e-8,  -1.571446067260244e-7, 1.640162967934702e-6,
                                     -1.4922121574443055e-5, 1.2055199941321885e-4, -8.54832379116413e-4,
                                     5.223977576377844e-3,   -2.686617064077985e-2, 1.1283791670935311e-1,
                                     -3.76126389031834e-1,   1.2837916709551256e-1};
  static constexpr double kFar[] = {
      9.213052525483772e-11, -1.0412842270147401e-11, -1.4030021354167095e-9, 4.832223010424203e-10,
      1.6475524675785406e-8, -6.014563710471533e-9,   -2.0365819513153363e-7, -2.8890733061555775e-8,
      2.754290361827559e-6,  4.1129898963135665e-6,   -3.541354071324484e-5,  -1.6157106001704694e-4,
      1.064195698945484e-4,  3.9171630295669144e-3,   2.2173941482510805e-2,  8.103961186416013e-2,
      2.2629816259254468e-1, 5.136527361792833e-1,    9.76354582381974e-1};
  const Doubles a = absolute<double>(x), rest = x * polynomial(kNear, x * x);
  // a^2 is high^2, without a rounding error, plus (a - high) (a + high), which is small.
  const Doubles bounded = a > 30 ? splat(30.0) : a;
  const Doubles high = bit_cast<Doubles>(bit_cast<Vec<uint64_t>>(bounded) & ~uint64_t{0x7ffffff});
  const Doubles low = (high - bounded) * (high + bounded), t = 1.0 / (bounded + 3.0);
  const Doubles power = exp_of_any<double>(-(high * high)) * (low * (low * (low * (1.0 / 6) + 0.5) + 1.0) + 1.0);
  const Doubles far = power * t * polynomial(kFar, t * 8.817204301075268 - 1.2939068100358424);
  const auto is_near = (a < 0.84375) | (x != x);
  if (!complement) return is_near ? x + rest : with_sign<double>(1.0 - far, x);
  const Doubles near = x < 0.25 ? 1.0 - (x + rest) : 0.5 - ((x - 0.5) + rest);
  return is_near ? near : x < 0 ? 2.0 - far : far;
}
ATTN_INLINE Doubles erf_in_double(Doubles x) { return error_function(x, false); }
ATTN_INLINE Doubles erfc_in_double(Doubles x) { return error_function(x, true); }

}  // namespace attn::ATTN_ISA
