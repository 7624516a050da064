// Vectors of one instruction set: GNU vector types, so that the arithmetic is written once with + - * / and ?:.
// Included by isa_*.cpp inside a target region, with ATTN_ISA the namespace and ATTN_VECTOR_BYTES the vector's size.
// (The compiler's own macros, __AVX2__ and so on, do not follow the target region: g++ reads the whole file first.)

namespace attn::ATTN_ISA {

constexpr int kVectorBytes = ATTN_VECTOR_BYTES;
constexpr int kRegisters = kVectorBytes == 64 ? 32 : 16;

template <class T, int N>
struct VectorOf {
  typedef T type __attribute__((vector_size(sizeof(T) * N)));
};

template <class T>
constexpr int kLanes = kVectorBytes / sizeof(T);
template <class T>
using Vec = typename VectorOf<T, kLanes<T>>::type;

template <class T>
struct Float;  // what differs between the two compute types
template <>
struct Float<float> {
  using Int = int32_t;
  using UInt = uint32_t;
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
struct Float<double> {
  using Int = int64_t;
  using UInt = uint64_t;
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

template <class T>
constexpr T kInfinity = static_cast<T>(__builtin_inf());

template <class T>
ATTN_INLINE Vec<T> load(const T* p) {
  Vec<T> v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
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

// x as it was rounded: compilers contract a product and the sum that follows it, if they see both.
template <class V>
ATTN_INLINE V uncontracted(V x) {
#if defined(__x86_64__)
  asm("" : "+v"(x));
#elif defined(__aarch64__)
  asm("" : "+w"(x));
#endif
  return x;
}

// The larger of the two; a NaN in `x` is passed over.
template <class V>
ATTN_INLINE V max_number(V x, V best) {
  return x > best ? x : best;
}

template <class M>
ATTN_INLINE bool any(M mask) {
  typename VectorOf<uint64_t, sizeof(M) / 8>::type words = bit_cast<decltype(words)>(mask);
  uint64_t all = 0;
  for (size_t i = 0; i < sizeof(M) / 8; ++i) all |= words[i];
  return all != 0;
}

// e^x within 1 ulp for x <= 88 (709); 0 where the result is not a normal number; NaN stays NaN.
// x = n ln(2) + r with n an integer, e^x = 2^n e^r.
template <class T>
ATTN_INLINE Vec<T> exp(Vec<T> x) {
  using F = Float<T>;
  using U = Vec<typename F::UInt>;
  const Vec<T> shifted = x * static_cast<T>(1.4426950408889634074) + F::round_magic;
  const Vec<T> n = shifted - F::round_magic;
  Vec<T> r = x - n * F::ln2_high;
  r = r - n * F::ln2_low;
  Vec<T> p = splat<T>(F::exp_poly[0]);
#pragma GCC unroll 16
  for (size_t i = 1; i < sizeof(F::exp_poly) / sizeof(T); ++i) p = p * r + F::exp_poly[i];
  p = (p * (r * r) + r) + static_cast<T>(1);  // in this order, the last rounding is the only one that counts
  // the low bits of `shifted` hold n: move n + bias into the exponent field
  const U two_to_n = (bit_cast<U>(shifted) + static_cast<typename F::UInt>(F::exponent_bias)) << F::mantissa_bits;
  return x < F::exp_lowest ? Vec<T>{} : p * bit_cast<Vec<T>>(two_to_n);
}

constexpr float kLog2E = 1.4426950408889634074f;

#if ATTN_VECTOR_BYTES == 64
// 2^x for x <= 0 by a polynomial of the given degree in x - floor(x), the polynomial's relative error being at most 3e-6 (4), 1e-7 (5)
// or 2e-8 (6); 2^0 is 1 exactly. Coefficients: minimax for the relative error on [0, 1), the lowest held at 1.
template <int kDegree>
ATTN_INLINE Vec<float> exp2_of_degree(Vec<float> x) {
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
  const Vec<float> r = bit_cast<Vec<float>>(_mm512_reduce_ps(bit_cast<__m512>(x), _MM_FROUND_TO_NEG_INF));
  Vec<float> p = splat(c[0]);
#pragma GCC unroll 8
  for (int i = 1; i <= kDegree; ++i) p = p * r + c[i];
  return bit_cast<Vec<float>>(_mm512_scalef_ps(bit_cast<__m512>(p), bit_cast<__m512>(x)));
}
#endif

// ---------------------------------------------------------------------------------------------------------------
// Storage types: how an element of a tensor becomes a compute type (float or double) and back.

struct BFloat16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};
struct Boolean {  // a mask: true is 0, false is -inf, ready to be added to a score
  uint8_t byte;
};

template <class T>
using Shorts = typename VectorOf<uint16_t, kLanes<T>>::type;
template <class T>
using Bytes = typename VectorOf<uint8_t, kLanes<T>>::type;

// IEEE half <-> float by integer arithmetic: a half's exponent and mantissa are moved to a float's place, and the
// exponent's bias of 15 becomes 127.
ATTN_INLINE Vec<float> half_to_float(Shorts<float> h) {
#if ATTN_VECTOR_BYTES == 64
  return bit_cast<Vec<float>>(_mm512_cvtph_ps(bit_cast<__m256i>(h)));
#elif ATTN_VECTOR_BYTES == 32
  return bit_cast<Vec<float>>(_mm256_cvtph_ps(bit_cast<__m128i>(h)));
#else
  using U = Vec<uint32_t>;
  const U wide = __builtin_convertvector(h, U);
  const U magnitude = (wide & 0x7fffu) << 13;
  U bits = magnitude + (112u << 23);
  bits = magnitude >= (0x7c00u << 13) ? (magnitude | 0x7f800000u) : bits;  // infinity, NaN
  // A subnormal half is an integer times 2^-24. No float here is subnormal: torch.set_flush_denormal would make it 0.
  const Vec<float> subnormal = __builtin_convertvector(bit_cast<Vec<int32_t>>(wide & 0x3ffu), Vec<float>) * 0x1p-24f;
  bits = magnitude < (0x0400u << 13) ? bit_cast<U>(subnormal) : bits;
  return bit_cast<Vec<float>>(bits | ((wide & 0x8000u) << 16));
#endif
}

ATTN_INLINE Shorts<float> float_to_half(Vec<float> f) {
#if ATTN_VECTOR_BYTES == 64
  return bit_cast<Shorts<float>>(_mm512_cvtps_ph(bit_cast<__m512>(f), _MM_FROUND_TO_NEAREST_INT));
#elif ATTN_VECTOR_BYTES == 32
  return bit_cast<Shorts<float>>(_mm256_cvtps_ph(bit_cast<__m256>(f), _MM_FROUND_TO_NEAREST_INT));
#else
  using U = Vec<uint32_t>;
  const U all = bit_cast<U>(f);
  const U magnitude = all & 0x7fffffffu;
  // normal numbers: rebias the exponent, round to nearest even on the 13 bits that go
  const U normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  // subnormal: adding 0.5 aligns the mantissa so that the addition itself rounds
  const U subnormal = bit_cast<U>(bit_cast<Vec<float>>(magnitude) + 0.5f) - 0x3f000000u;
  U bits = magnitude < (113u << 23) ? subnormal : normal;
  bits = magnitude >= 0x477ff000u ? (magnitude > 0x7f800000u ? U{} + 0x7e00u : U{} + 0x7c00u) : bits;
  return __builtin_convertvector(bits | ((all >> 16) & 0x8000u), Shorts<float>);
#endif
}

ATTN_INLINE Vec<float> bfloat16_to_float(Shorts<float> b) {
  return bit_cast<Vec<float>>(__builtin_convertvector(b, Vec<uint32_t>) << 16);
}

ATTN_INLINE Shorts<float> float_to_bfloat16(Vec<float> f) {
  using U = Vec<uint32_t>;
  const U bits = bit_cast<U>(f);
  const U rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const U nan = (bits >> 16) | 0x40u;
  return __builtin_convertvector((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded, Shorts<float>);
}

// load_as<T>(p): kLanes<T> elements of storage type S from p, as compute type T.
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
ATTN_INLINE Vec<T> load_as(const Boolean* p) {
  using I = typename Float<T>::Int;
  Bytes<T> bytes;
  __builtin_memcpy(&bytes, p, sizeof bytes);
  return __builtin_convertvector(bytes, Vec<I>) != 0 ? Vec<T>{} : splat<T>(-kInfinity<T>);
}
template <class T>
ATTN_INLINE Vec<T> load_as(const float* p)
  requires(sizeof(T) == 8)
{
  typename VectorOf<float, kLanes<T>>::type narrow;  // a float32 mask of float64 scores
  __builtin_memcpy(&narrow, p, sizeof narrow);
  return __builtin_convertvector(narrow, Vec<T>);
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

// The same for `count` < kLanes elements: nothing beyond them is read or written.
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

// ---------------------------------------------------------------------------------------------------------------
// Transposition of kLanes rows of kLanes elements in registers. n rows of n units are transposed by taking, log2(n) times,
// every other unit of neighbouring rows: of all neighbours the even ones, then of all the odd ones. Units are first the
// elements of 128 bits, then those 128 bits: these are the shuffles that processors do in one step.

template <class T, int kUnit, int kSpan, class Indices>
struct EveryOther;
template <class T, int kUnit, int kSpan, int... I>
struct EveryOther<T, kUnit, kSpan, std::integer_sequence<int, I...>> {
  // Where element i comes from, span by span of kSpan elements; those of b are counted on from kLanes.
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
    return __builtin_shuffle(a, b, Vec<typename Float<T>::Int>{source(I, kOdd)...});
#endif
  }
};

// Transposes kCount units of the rows 0, kDistance, 2 * kDistance, ...
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

// Bit i: whether byte i of 64 is not 0.
ATTN_INLINE uint64_t nonzero_bytes(const uint8_t* bytes) {
#if ATTN_VECTOR_BYTES == 64
  const __m512i v = _mm512_loadu_si512(bytes);
  return _mm512_test_epi8_mask(v, v);
#else
  uint64_t bits = 0;
  for (int i = 0; i < 64; i += 16) {
#if defined(__SSE2__)
    const __m128i v = _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes + i));
    const auto zeros = static_cast<uint32_t>(_mm_movemask_epi8(_mm_cmpeq_epi8(v, _mm_setzero_si128())));
    bits |= static_cast<uint64_t>(~zeros & 0xffffu) << i;
#else
    for (int k = i; k < i + 16; ++k) bits |= static_cast<uint64_t>(bytes[k] != 0) << k;
#endif
  }
  return bits;
#endif
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

// Lane i: all bits set if bit i is, else 0.
template <class T>
ATTN_INLINE auto lanes_of_bits(uint64_t bits) {
  using U = typename Float<T>::UInt;
  Vec<U> bit;
  for (int i = 0; i < kLanes<T>; ++i) bit[i] = U{1} << i;
  return (splat<U>(static_cast<U>(bits)) & bit) != Vec<U>{};
}

// 32 x 32 -> 64 bit products of the low halves of 64-bit lanes.
ATTN_INLINE Vec<uint64_t> multiply_low_halves(Vec<uint64_t> a, Vec<uint64_t> b) {
#if ATTN_VECTOR_BYTES == 64
  return bit_cast<Vec<uint64_t>>(_mm512_mul_epu32(bit_cast<__m512i>(a), bit_cast<__m512i>(b)));
#elif ATTN_VECTOR_BYTES == 32
  return bit_cast<Vec<uint64_t>>(_mm256_mul_epu32(bit_cast<__m256i>(a), bit_cast<__m256i>(b)));
#elif defined(__SSE2__)
  return bit_cast<Vec<uint64_t>>(_mm_mul_epu32(bit_cast<__m128i>(a), bit_cast<__m128i>(b)));
#else
  return (a & 0xffffffffu) * (b & 0xffffffffu);
#endif
}

}  // namespace attn::ATTN_ISA
