// Strips of a tile, which functions of the pair are evaluated over: numbers and integers in vectors, and sums.
//
// A strip is kStrip keys of a tile, with all rows of the tile. The rows of a tile belong to one head.
#pragma once

#include "cpu/simd/functions.inl"
#include "cpu/simd/transpose.inl"
#include "cpu/tiles/bounds.inl"
#include "cpu/tiles/formats.inl"

namespace attn::ATTN_ISA {

constexpr int64_t kStrip = 16;

// Numbers of the pairs of a tile, or of a strip. Number (j, lane) is at data[j * step + (lane & lanes)].
template <class T>
struct Values {
  const T* data;
  int64_t step;
  int64_t lanes;  // all bits, or 0 if all lanes are the same
};

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

// Calls a function of the C library, in double, for each lane. All functions share this loop.
template <class T, class... Doubles>
__attribute__((noinline)) void call_by_lane(double (*f)(double, Doubles...), T* x, [[maybe_unused]] const T* y) {
  for (int i = 0; i < kLanes<T>; ++i) x[i] = static_cast<T>(f(x[i], static_cast<Doubles>(y[i])...));
}
template <class T>
ATTN_INLINE Vec<T> by_lane(double (*f)(double), Vec<T> x) {
  T numbers[kLanes<T>];
  store<T>(numbers, x);
  call_by_lane<T>(f, numbers, nullptr);
  return load<T>(numbers);
}
template <class T>
ATTN_INLINE Vec<T> by_lane(double (*f)(double, double), Vec<T> x, Vec<T> y) {
  T numbers[2][kLanes<T>];
  store<T>(numbers[0], x);
  store<T>(numbers[1], y);
  call_by_lane<T, double>(f, numbers[0], numbers[1]);
  return load<T>(numbers[0]);
}

template <class T>
ATTN_INLINE Vec<T> square_roots(Vec<T> x) {
  return each_lane<T>(x, [](T n) { return sizeof(T) == 4 ? __builtin_sqrtf(n) : __builtin_sqrt(n); });
}
template <class T>
ATTN_INLINE Vec<T> floors(Vec<T> x) {
  return each_lane<T>(x, [](T n) { return sizeof(T) == 4 ? __builtin_floorf(n) : __builtin_floor(n); });
}
// Round to whole numbers, half to even and towards 0. Beyond kWhole all numbers are whole.
template <class T>
ATTN_INLINE Vec<T> nearest(Vec<T> x) {
  constexpr T kWhole = sizeof(T) == 4 ? T{0x1p23} : T{0x1p52};
  const Vec<T> magnitude = absolute<T>(x);
  return magnitude < kWhole ? with_sign<T>((magnitude + kWhole) - kWhole, x) : x;
}
template <class T>
ATTN_INLINE Vec<T> towards_0(Vec<T> x) {
  const Vec<T> found = absolute<T>(nearest<T>(x));
  return with_sign<T>(found > absolute<T>(x) ? found - 1 : found, x);
}

// A shift by a negative number, or by more bits than there are, shifts all bits out.
template <class T>
ATTN_INLINE Vec<UInt<T>> shifted_left(Vec<T> x, Vec<T> by) {
  constexpr UInt<T> kBits = 8 * sizeof(T);
  return bits<T>(by) < kBits ? bits<T>(x) << (bits<T>(by) & (kBits - 1)) : Vec<UInt<T>>{};
}
template <class T>
ATTN_INLINE Vec<Int<T>> shifted_right(Vec<T> x, Vec<T> by) {
  constexpr UInt<T> kBits = 8 * sizeof(T);
  return whole<T>(x) >> whole<T>(as_number<T>(bits<T>(by) < kBits ? bits<T>(by) : splat<UInt<T>>(kBits - 1)));
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

// The same of whole numbers. By 0: 0.
template <class T>
  requires std::is_integral_v<T>
ATTN_INLINE T remainder_towards_0(T x, T y) {
  return y == 0 || y == -1 ? 0 : x % y;
}
template <class T>
  requires std::is_integral_v<T>
ATTN_INLINE T remainder_of(T x, T y) {
  const T rest = remainder_towards_0(x, y);
  return rest != 0 && (y < 0) != (rest < 0) ? rest + y : rest;
}
template <class T>
  requires std::is_integral_v<T>
ATTN_INLINE T floor_quotient_of(T x, T y) {
  if (y == 0) return 0;
  if (y == -1) return static_cast<T>(-static_cast<std::make_unsigned_t<T>>(x));
  return x / y - (x % y != 0 && (x < 0) != (y < 0) ? 1 : 0);
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
