// Vectors are GNU vector types, so that arithmetic is written once, with + - * / and ?:, for all instruction sets. A
// file cpu/isa/instructions_*.inl defines kVectorBytes and then includes this file. If this file is included alone, it
// includes simd.inl, which chooses one of these files.
#ifndef ATTN_ISA
#include "cpu/simd/simd.inl"
#elif !defined(ATTN_VECTORS_INL)
#define ATTN_VECTORS_INL

namespace attn::ATTN_ISA {

template <class T, int N>
struct VectorOf {
  typedef T type __attribute__((vector_size(sizeof(T) * N)));
};

template <class T>
constexpr int kLanes = kVectorBytes / sizeof(T);
template <class T>
using Vec = typename VectorOf<T, kLanes<T> >::type;
template <class T>
using Shorts = typename VectorOf<uint16_t, kLanes<T> >::type;
template <class T>
using Bytes = typename VectorOf<uint8_t, kLanes<T> >::type;
template <class T>
using SignedBytes = typename VectorOf<int8_t, kLanes<T> >::type;

template <class T>
struct IntegersOf;  // of the same size
template <>
struct IntegersOf<float> {
  using Int = int32_t;
  using UInt = uint32_t;
};
template <>
struct IntegersOf<double> {
  using Int = int64_t;
  using UInt = uint64_t;
};
template <class T>
using Int = typename IntegersOf<T>::Int;
template <class T>
using UInt = typename IntegersOf<T>::UInt;

template <class T>
constexpr T kInfinity = static_cast<T>(__builtin_inf());

// With GCC this does not use memcpy, because GCC 12 would copy some vectors through the stack. With clang it uses
// memcpy, because clang's ThreadSanitizer overlooks other reads of more than 16 bytes.
template <class T>
ATTN_INLINE Vec<T> load(const T* p) {
#if defined(__clang__)
  Vec<T> v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
#else
  typedef Vec<T> Anywhere __attribute__((aligned(1), may_alias));
  return *reinterpret_cast<const Anywhere*>(p);
#endif
}

template <class T, class V>
ATTN_INLINE void store(T* p, V v) {
  static_assert(sizeof(v) == sizeof(T) * kLanes<T>);
  __builtin_memcpy(p, &v, sizeof v);
}

template <class T>
ATTN_INLINE Vec<T> splat(T x) {
  return x - Vec<T>{};
}

template <class To, class From>
ATTN_INLINE To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}

// 0, 1, 2, ...
template <class T>
ATTN_INLINE Vec<Int<T> > lane_numbers() {
  Vec<Int<T> > numbers;
  for (int i = 0; i < kLanes<T>; ++i) numbers[i] = i;
  return numbers;
}

// absolute() returns |x|. with_sign() returns x, which must not be negative, with the sign of `of`. with_sign_changed()
// returns -x where `by` is negative, and elsewhere x.
template <class T>
constexpr UInt<T> kSignBit = UInt<T>{1} << (8 * sizeof(T) - 1);
template <class T>
ATTN_INLINE Vec<T> absolute(Vec<T> x) {
  return bit_cast<Vec<T> >(bit_cast<Vec<UInt<T> > >(x) & ~kSignBit<T>);
}
template <class T>
ATTN_INLINE Vec<T> with_sign(Vec<T> x, Vec<T> of) {
  return bit_cast<Vec<T> >(bit_cast<Vec<UInt<T> > >(x) | (bit_cast<Vec<UInt<T> > >(of) & kSignBit<T>));
}

template <class T>
ATTN_INLINE Vec<T> with_sign_changed(Vec<T> x, Vec<T> by) {
  return bit_cast<Vec<T> >(bit_cast<Vec<UInt<T> > >(x) ^ (bit_cast<Vec<UInt<T> > >(by) & kSignBit<T>));
}

// Returns the larger number, lane by lane. Where `x` is NaN, returns `best`.
template <class V>
ATTN_INLINE V max_number(V x, V best) {
  return x > best ? x : best;
}

// Returns the largest number of a vector without NaNs.
template <class V>
ATTN_INLINE auto largest_of(V v) {
  auto largest = v[0];
  for (size_t i = 1; i < sizeof(V) / sizeof largest; ++i) largest = v[i] > largest ? v[i] : largest;
  return largest;
}

template <class M>
ATTN_INLINE bool any(M mask) {
  typename VectorOf<uint64_t, sizeof(M) / 8>::type words = bit_cast<decltype(words)>(mask);
  uint64_t all = 0;
  for (size_t i = 0; i < sizeof(M) / 8; ++i) all |= words[i];
  return all != 0;
}

// Returns a word whose bit i says whether lane i of a mask is set.
template <class M>
ATTN_INLINE uint64_t bits_of(M mask) {
  uint64_t bits = 0;
  for (size_t i = 0; i < sizeof(M) / sizeof mask[0]; ++i) bits |= uint64_t{mask[i] != 0} << i;
  return bits;
}

}  // namespace attn::ATTN_ISA

#endif
