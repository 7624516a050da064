// Strips of a tile, which functions of the pair are evaluated over: numbers and integers in vectors, and sums.
//
// A strip is kStrip keys of a tile, with all rows of the tile. The rows of a tile belong to one head.
#pragma once

#include "cpu/simd/exp.inl"
#include "cpu/simd/transpose.inl"
#include "cpu/tiles/bounds.inl"
#include "cpu/tiles/formats.inl"

namespace attn::ATTN_ISA {

constexpr int64_t kStrip = 16;

// whole() reinterprets numbers as signed integers of the same size, and bits() as unsigned integers. as_number() does
// the reverse. Unsigned integers wrap around, as PyTorch's integers do.
template <class T>
ATTN_INLINE Vec<Int<T>> whole(Vec<T> x) {
  return bit_cast<Vec<Int<T>>>(x);
}
template <class T>
ATTN_INLINE Vec<UInt<T>> bits(Vec<T> x) {
  return bit_cast<Vec<UInt<T>>>(x);
}
template <class T, class V>
ATTN_INLINE Vec<T> as_number(V x) {
  return bit_cast<Vec<T>>(x);
}

// Keeps a NaN of each of the three.
template <class T>
ATTN_INLINE Vec<T> bounded(Vec<T> x, Vec<T> least, Vec<T> most) {
  const Vec<T> above = x < least ? least : x, found = above > most ? most : above;
  return (least == least) & (most == most) ? found : least + most;
}

// Calls f for each lane, for operations that vectors lack.
template <class T, class F>
ATTN_INLINE Vec<T> each_lane(Vec<T> x, F f) {
  for (int i = 0; i < kLanes<T>; ++i) x[i] = static_cast<T>(f(x[i]));
  return x;
}
template <class T, class F>
ATTN_INLINE Vec<T> each_lane(Vec<T> x, Vec<T> y, F f) {
  for (int i = 0; i < kLanes<T>; ++i) x[i] = f(x[i], y[i]);
  return x;
}
template <class T, class F>
ATTN_INLINE Vec<T> each_whole(Vec<T> x, Vec<T> y, F f) {
  Vec<Int<T>> a = whole<T>(x), b = whole<T>(y);
  for (int i = 0; i < kLanes<T>; ++i) a[i] = f(a[i], b[i]);
  return as_number<T>(a);
}

// PyTorch's floor_divide and remainder of numbers, to the bit. Both begin with the remainder of fmod, which is exact.
template <class T>
ATTN_INLINE T remainder_towards_0(T x, T y) {
  return sizeof(T) == 4 ? __builtin_fmodf(x, y) : __builtin_fmod(x, y);
}
template <class T>
ATTN_INLINE T remainder_of(T x, T y) {
  const T rest = remainder_towards_0(x, y);
  return rest != 0 && (y < 0) != (rest < 0) ? rest + y : rest;
}
template <class T>
ATTN_INLINE T floor_quotient_of(T x, T y) {
  if (y == 0) return x / y;
  const T rest = remainder_towards_0(x, y);
  T quotient = (x - rest) / y;
  if (rest != 0 && (y < 0) != (rest < 0)) quotient -= 1;
  if (quotient == 0) return static_cast<T>(__builtin_copysign(0.0, x / y));
  const T whole = static_cast<T>(__builtin_floor(quotient));
  return quotient - whole > T{0.5} ? whole + 1 : whole;
}

// Rounds numbers to a storage type S.
template <class S, class T>
ATTN_INLINE Vec<T> rounded_to(Vec<T> x) {
  float narrow[larger(kLanes<T>, kLanes<float>)] = {};
  for (int i = 0; i < kLanes<T>; ++i) narrow[i] = static_cast<float>(x[i]);
  __asm__("" : "+m"(narrow));  // GCC 12 would leave out a conversion to float and back to double
  if constexpr (!std::is_same_v<S, float>) {
    S stored[kLanes<float>];
    store_as(stored, load<float>(narrow));
    store<float>(narrow, load_as<float>(stored));
  }
  for (int i = 0; i < kLanes<T>; ++i) x[i] = narrow[i];
  return x;
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
// e^x = 2^(x log2(e)). Corrects the result by the rounding error of the product.
template <class T>
ATTN_INLINE Vec<T> exp_of_any(Vec<T> x) {
  constexpr T kHigh = static_cast<T>(kLog2E), kLow = static_cast<T>(kLog2E - static_cast<double>(kHigh));
  const Vec<T> y = x * kHigh;
  Vec<T> rest = x * kHigh - y;  // one fused operation, if the instruction set has it
  rest += x * (sizeof(T) == 4 ? kLow : static_cast<T>(2.0355273740931033e-17));
  const Vec<T> power = exp2_of_any<T>(y);
  const auto is_usual = absolute<T>(y) < (sizeof(T) == 4 ? T{1000} : T{10000});
  return is_usual ? power + power * (rest * static_cast<T>(0.69314718055994530942)) : power;
}

ATTN_INLINE uint64_t all_lanes(int64_t count) { return ~uint64_t{} >> (kRowTile - count); }

// These functions sum a strip: add_rows() for each lane, add_lanes() for each key, and add_diagonals() for each
// diagonal, on which all pairs have the same distance. A sum over lanes leaves out the lanes without a row. These lanes
// may hold a NaN, because a function of their terms, which are 0, may be NaN (0 / 0).
template <class T>
void add_rows(const Values<T>& x, int64_t count, int64_t lanes, T* sums) {
  for (int64_t i = 0; i < lanes; i += kLanes<T>) {
    Vec<T> sum{};
    for (int64_t j = 0; j < count; ++j) sum += load<T>(x.data + j * x.step + i);
    store<T>(sums + i, load<T>(sums + i) + sum);
  }
}
template <class T>
void add_lanes(const Values<T>& x, int64_t count, int64_t rows, T* sums, int64_t step) {
  constexpr int W = kLanes<T>;
  const int64_t whole = rows / W * W;
  const auto has_row = lane_numbers<T>() < static_cast<Int<T>>(rows - whole);
  for (int64_t first = 0; first < count; first += W) {
    const int64_t keys = smaller(W, count - first);
    T of_keys[W * W];
    for (int64_t k = 0; k < W; ++k) {
      const T* const from = x.data + (first + smaller(k, keys - 1)) * x.step;
      Vec<T> sum{};
      for (int64_t i = 0; i < whole; i += W) sum += load<T>(from + i);
      if (whole < rows) sum += has_row ? load<T>(from + whole) : Vec<T>{};
      store<T>(of_keys + k * W, sum);
    }
    store<T>(of_keys, sums_of_rows<T>([&](int i) { return load<T>(of_keys + i * kLanes<T>); }));
    for (int64_t k = 0; k < keys; ++k) sums[(first + k) * step] += of_keys[k];
  }
}

// Adds number (j, i) of the strip to sums[i - j].
template <class T>
void add_diagonals(const Values<T>& x, int64_t count, int64_t rows, T* sums) {
  constexpr int64_t W = kLanes<T>;
  const auto numbers = lane_numbers<T>();
  const int64_t diagonals = rows + count - 1;
  for (int64_t first = 0; first < diagonals; first += W) {  // `first` is i - j of the first diagonal, plus count - 1
    Vec<T> sum{};
    for (int64_t j = 0; j < count; ++j) {
      const int64_t lane = first - (count - 1) + j;
      if (lane <= -W || lane >= rows) continue;
      const Vec<T> found = load<T>(x.data + j * x.step + lane);
      const auto row = numbers + static_cast<Int<T>>(lane);
      const bool inside = lane >= 0 && lane + W <= rows;
      sum += inside ? found : ((row >= 0) & (row < static_cast<Int<T>>(rows))) ? found : Vec<T>{};
    }
    T* const to = sums + first - (count - 1);
    if (first + W <= diagonals) {
      store<T>(to, load<T>(to) + sum);
    } else {
      for (int64_t i = 0; i < diagonals - first; ++i) to[i] += sum[i];
    }
  }
}

}  // namespace attn::ATTN_ISA
