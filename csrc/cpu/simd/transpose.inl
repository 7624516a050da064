// Transposition in registers, of vectors and of bits.
#pragma once

#include "cpu/simd/simd.inl"

namespace attn::ATTN_ISA {

// How kLanes rows of kLanes elements are transposed in registers. n rows of n units take log2(n) steps. A step takes
// two neighbouring rows at a time, and makes a row of their even units and a row of their odd units. In the first
// steps, a unit is an element, and units move only within 128 bits. In the last steps, a unit has 128 bits. Processors
// have one instruction for each of these shuffles.

template <class T, int kUnit, int kSpan, class Indices>
struct EveryOther;
template <class T, int kUnit, int kSpan, int... I>
struct EveryOther<T, kUnit, kSpan, std::integer_sequence<int, I...>> {
  // Returns the number of the element that becomes element i of the result. The elements of `a` have the numbers below
  // kLanes, and the elements of `b` have the numbers from kLanes on. Each span of kSpan elements is split into even and
  // odd units on its own.
  static constexpr int source(int i, int odd) {
    const int unit = i % kSpan / kUnit, units = kSpan / kUnit;
    const int from = 2 * unit % units + odd;
    return (2 * unit >= units ? kLanes<T> : 0) + i / kSpan * kSpan + from * kUnit + i % kUnit;
  }
  template <int kOdd>
  static ATTN_INLINE Vec<T> of(Vec<T> a, Vec<T> b) {
#if defined(__clang__)
    return __builtin_shufflevector(a, b, (source(I, kOdd))...);
#else
    return __builtin_shuffle(a, b, Vec<Int<T>>{source(I, kOdd)...});
#endif
  }
};

// Transposes kCount rows, which are the rows 0, kDistance, 2 * kDistance, ... of `rows`, in units of kUnit elements.
template <class T, int kCount, int kDistance, int kUnit, int kSpan>
ATTN_INLINE void transpose_units(Vec<T>* rows) {
  using Units = EveryOther<T, kUnit, kSpan, std::make_integer_sequence<int, kLanes<T>>>;
#pragma GCC unroll 4
  for (int step = 1; step < kCount; step *= 2) {
    Vec<T> next[kCount];
#pragma GCC unroll 8
    for (int i = 0; i < kCount / 2; ++i) {
      const Vec<T> a = rows[2 * i * kDistance], b = rows[(2 * i + 1) * kDistance];
      next[i] = Units::template of<0>(a, b);
      next[i + kCount / 2] = Units::template of<1>(a, b);
    }
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i) rows[i * kDistance] = next[i];
  }
}

template <class T>
ATTN_INLINE void transpose(Vec<T> (&rows)[kLanes<T>]) {
  constexpr int N = kLanes<T>, kIn128 = 16 / sizeof(T);
#pragma GCC unroll 8
  for (int i = 0; i < N; i += kIn128) transpose_units<T, kIn128, 1, 1, kIn128>(rows + i);
#pragma GCC unroll 4
  for (int i = 0; i < kIn128; ++i) transpose_units<T, N / kIn128, kIn128, kIn128, N>(rows + i);
}

// Returns the elements in reverse order.
template <class T, int... I>
ATTN_INLINE Vec<T> reversed(Vec<T> x, std::integer_sequence<int, I...>) {
#if defined(__clang__)
  return __builtin_shufflevector(x, x, (kLanes<T> - 1 - I)...);
#else
  return __builtin_shuffle(x, Vec<Int<T>>{(kLanes<T> - 1 - I)...});
#endif
}
template <class T>
ATTN_INLINE Vec<T> reversed(Vec<T> x) {
  return reversed<T>(x, std::make_integer_sequence<int, kLanes<T>>());
}

// Returns the elements kBy, kBy + 1, ... of `x` and then the first elements of `next`.
template <class T, int kBy, int... I>
ATTN_INLINE Vec<T> shifted(Vec<T> x, Vec<T> next, std::integer_sequence<int, I...>) {
#if defined(__clang__)
  return __builtin_shufflevector(x, next, (kBy + I)...);
#else
  return __builtin_shuffle(x, next, Vec<Int<T>>{(kBy + I)...});
#endif
}
template <class T, int kBy>
ATTN_INLINE Vec<T> shifted(Vec<T> x, Vec<T> next) {
  return shifted<T, kBy>(x, next, std::make_integer_sequence<int, kLanes<T>>());
}

// Returns the vector whose lane i is element places[i] of x.
template <class T>
ATTN_INLINE Vec<T> chosen(Vec<T> x, Vec<UInt<T>> places) {
#if defined(__clang__)
  Vec<T> found;
  for (int i = 0; i < kLanes<T>; ++i) found[i] = x[places[i]];
  return found;
#else
  return __builtin_shuffle(x, places);
#endif
}

// Returns the vector whose lane j is the sum of the elements of row j, for kLanes rows. A step makes a vector of the
// even units and a vector of the odd units of two vectors, as a step of a transposition does, and then adds both. So
// kRows rows become one vector, which has kLanes / kRows partial sums of each row. If kDone is 1, row(i) returns row i.
// Otherwise earlier steps have made one vector of each kDone rows, and row(i) returns vector number i.
template <class T, int kRows = kLanes<T>, int kDone = 1, class Row>
ATTN_INLINE Vec<T> sums_of_rows(Row row) {
  if constexpr (kRows == kDone) {
    return row(0);
  } else {
    constexpr int N = kLanes<T>, kIn128 = 16 / sizeof(T);
    using Units =
        EveryOther<T, kRows <= kIn128 ? 1 : kIn128, kRows <= kIn128 ? kIn128 : N, std::make_integer_sequence<int, N>>;
    const Vec<T> a = sums_of_rows<T, kRows / 2, kDone>(row);
    const Vec<T> b = sums_of_rows<T, kRows / 2, kDone>([&](int i) { return row(i + kRows / 2 / kDone); });
    return Units::template of<0>(a, b) + Units::template of<1>(a, b);
  }
}

// Bit i of row j becomes bit j of row i (Warren, Hacker's Delight, section 7-3).
ATTN_INLINE void transpose_bits(uint64_t (&rows)[64]) {
  uint64_t low = 0x00000000ffffffffu;  // of every 2 * step bits, the lower half
  for (int step = 32; step != 0; step /= 2, low ^= low << step)
    for (int block = 0; block < 64; block += 2 * step)
      for (int k = block; k < block + step; ++k) {
        const uint64_t swapped = ((rows[k] >> step) ^ rows[k + step]) & low;
        rows[k] ^= swapped << step;
        rows[k + step] ^= swapped;
      }
}

// Returns a mask. In lane i of the mask, all bits are set if bit i of `bits` is set. Otherwise no bit of the lane is
// set.
template <class T>
ATTN_INLINE auto lanes_of_bits(uint64_t bits) {
  using U = UInt<T>;
  Vec<U> bit;
  for (int i = 0; i < kLanes<T>; ++i) bit[i] = U{1} << i;
  return (splat<U>(static_cast<U>(bits)) & bit) != Vec<U>{};
}

}  // namespace attn::ATTN_ISA
