// Keys and values of 8 bits, int8 or float8_e4m3fn. Each of these numbers is a number of Half and of BFloat16, too, so
// tensor cores multiply exactly what is stored. Their scales (ForwardParams::key_scale) multiply products and weights.
#pragma once

#include "cuda/mma/mma.cuh"

namespace attn::cuda {

// Calls f.template operator()<kE4m3>() for an operand of 8 bits.
template <class F>
__device__ __forceinline__ void with_eight_bits(const Operand& x, F f) {
  if (x.dtype == DType::e4m3)
    f.template operator()<true>();
  else
    f.template operator()<false>();
}

// Makes two words, of two numbers of type S each, of the four numbers in `four`: (0, 1) and (2, 3), or with kInTurns
// (0, 2) and (1, 3). kConverts: whether the GPU has an instruction for float8_e4m3fn.
template <class S, bool kE4m3, bool kInTurns = false, bool kConverts = kConvertsE4m3>
__device__ __forceinline__ void widen(uint32_t four, uint32_t& first, uint32_t& second) {
  constexpr bool kIsHalf = std::is_same_v<S, Half>;
  if constexpr (!kE4m3) {
    // The low bits of 2^7 + i in BFloat16, or of 2^10 + i in Half, are the whole number i.
    constexpr unsigned kFirst = kInTurns ? 0x4240 : 0x4140, kSecond = kInTurns ? 0x4341 : 0x4342;
    const auto number = [&](unsigned select) {
      if constexpr (kIsHalf) {
        const uint32_t above = __byte_perm(four ^ 0x80808080, 0x64646464, select);  // 2^10 + 2^7 + the number
        return multiply_add_two<S>(above, 0x3c003c00, 0xe480e480);                  // times 1, minus 2^10 + 2^7
      } else {
        // The low seven bits of a number make 2^7 + i. The number is i, or i - 2^7 if its sign bit is set. So 2^7 is
        // subtracted, or 2^8 if the sign bit is set.
        const uint32_t above = __byte_perm(four, 0x43434343, select);
        return multiply_add_two<S>(above & 0xff80ff80, 0xbf80bf80, above & 0xff7fff7f);  // times -1
      }
    };
    first = number(kFirst);
    second = number(kSecond);
  } else if constexpr (kConverts) {
    const auto two = [](uint32_t numbers) {
      const uint32_t halves = halves_of_e4m3(numbers);
      if constexpr (kIsHalf) return halves;
      return pack<S>(to_float(Half{static_cast<uint16_t>(halves)}),
                     to_float(Half{static_cast<uint16_t>(halves >> 16)}));
    };
    const uint32_t sorted = kInTurns ? __byte_perm(four, 0, 0x3120) : four;
    first = two(sorted);
    second = two(sorted >> 16);
  } else {
    // Sign, exponent and mantissa move to where S has them. Then the exponent lacks the difference of the biases.
    constexpr unsigned kFirst = kInTurns ? 0x2404 : 0x1404, kSecond = kInTurns ? 0x3414 : 0x3424;
    constexpr int kShift = kIsHalf ? 1 : 4;
    constexpr uint32_t kMagnitude = kIsHalf ? 0x3f803f80 : 0x07f007f0;
    constexpr uint32_t kFactor = kIsHalf ? 0x5c005c00 : 0x7b807b80;  // 2^8, 2^120
    constexpr uint32_t kSigns = 0x80008000;                          // also -0, to which 0 and -0 can be added
    const auto number = [&](unsigned select) {
      const uint32_t high = __byte_perm(four, 0, select);
      return multiply_add_two<S>((high >> kShift & kMagnitude) | (high & kSigns), kFactor, kSigns);
    };
    first = number(kFirst);
    second = number(kSecond);
    // NaN is where all bits but the sign are 1.
    if (const uint32_t nan = ((four & 0x7f7f7f7f) + 0x01010101) & 0x80808080; nan) {
      const auto all_bits = [&](unsigned select) {
        const uint32_t high = __byte_perm(nan, 0, select);
        return high - (high >> 15);
      };
      first |= all_bits(kFirst);
      second |= all_bits(kSecond);
    }
  }
}

// Copies as CopyAsync, but numbers of 8 bits, which it widens to S.
template <bool kE4m3>
struct Widen {
  template <class S>
  __device__ __forceinline__ void operator()(S* to, const uint8_t* row, int first, bool there) const {
    Vec16<uint32_t> wide{};
    if (there) {
      const auto [low, high] = *reinterpret_cast<const Vec8*>(row + first);
      widen<S, kE4m3>(low, wide.at[0], wide.at[1]);
      widen<S, kE4m3>(high, wide.at[2], wide.at[3]);
    }
    *reinterpret_cast<Vec16<uint32_t>*>(to) = wide;
  }
};

// Values are multiplied as BFloat16, because a weight times a scale may be too small or too large for Half. BFloat16
// has fewer digits than Half. So beside a query of type Half, a weight is split into two numbers of BFloat16, and both
// multiply the value.
template <class S>
constexpr bool kSplitsWeights = std::is_same_v<S, Half>;
__device__ __forceinline__ float high_part(float weight) {
  return __uint_as_float(__float_as_uint(weight) & 0xffff0000);
}
// Returns 0 for infinity and NaN, which high_part() has already.
__device__ __forceinline__ float low_part(float weight) {
  const float low = weight - high_part(weight);
  return low == low ? low : 0;
}

// The scales of keys and values, of two tiles: the one in use, and the next one, whose scales are loaded meanwhile.
template <int kKeys>
struct ScaleTiles : Scales {
  float numbers[2][2][kKeys];

  __device__ __forceinline__ const float* of_keys(int64_t key) const { return numbers[key / kKeys % 2][0]; }
  __device__ __forceinline__ const float* of_values(int64_t key) const { return numbers[key / kKeys % 2][1]; }
  // Loads the scales of the tile that begins with `key`. All threads call this. A barrier must follow.
  __device__ __forceinline__ void load(const ForwardParams& p, const Task& task, int64_t key) {
    static_assert(2 * kKeys <= kMmaThreads);
    const int i = thread_index();
    if (i < 2 * kKeys) numbers[key / kKeys % 2][i / kKeys][i % kKeys] = of(p, task, i < kKeys, key + i % kKeys);
  }
};

// A tile of numbers of 8 bits as they are stored, two in the place of one of 16 bits. Rows have at least 128 bytes,
// because MmaTile spreads 128 bytes over the banks.
template <class S, int kRows, int kDim>
using EightBitTile = MmaTile<S, kRows, kDim / 2 < 64 ? 64 : kDim / 2>;

// Reorders the query for add_dots_8(). There a lane has four numbers of a key that follow each other, 4 place to 4
// place + 3 of 16 columns. So that is what it must get of the query, in the places of columns 2 place, 2 place + 1,
// 2 place + 8 and 2 place + 9. Called by all threads; a barrier must follow.
template <class S, int kRows, int kDim>
__device__ __forceinline__ void reorder(MmaTile<S, kRows, kDim>& query) {
  constexpr int kParts = kDim / 16;
  for (int i = thread_index(); i < kRows * kParts; i += kMmaThreads) {
    auto& low = *reinterpret_cast<Vec16<uint32_t>*>(query.at(i / kParts, 2 * (i % kParts)));
    auto& high = *reinterpret_cast<Vec16<uint32_t>*>(query.at(i / kParts, 2 * (i % kParts) + 1));
    const Vec16<uint32_t> a = low, b = high;
    low = {a.at[0], a.at[2], b.at[0], b.at[2]};
    high = {a.at[1], a.at[3], b.at[1], b.at[3]};
  }
}

// As add_dots(), for 16 rows, which reorder() has reordered, and keys of 8 bits.
template <bool kE4m3, class S, int kDim, int kFragments, class Keys>
__device__ __forceinline__ void add_dots_8(float (&x)[kFragments][4], MmaTile<S, 16, kDim>& query, Keys& keys) {
  const int lane = MmaThread().lane;
#pragma unroll
  for (int k = 0; k < kDim / 32; ++k) {
    uint32_t a[2][4];
#pragma unroll
    for (int part = 0; part < 2; ++part) load_a(a[part], query, lane, 0, 0, 2 * k + part);
#pragma unroll
    for (int n = 0; n < kFragments; n += 2) {
      uint32_t b[4];  // eight keys, columns 32 k to 32 k + 15; the next 16 columns; the same of the next eight keys
      load_matrices(b, keys.address(lane % 8 + lane / 16 * 8, lane / 8 % 2, k) + 8 * n * Keys::kRowBytes);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        uint32_t first, second;
        widen<S, kE4m3>(b[i], first, second);
        multiply_add<S>(x[n + i / 2], a[i % 2], first, second);
      }
    }
  }
}

// As add_weighted(), for 16 keys of 8 bits, from key `first_key` of the tile on. Fragment n, for an even n, gets the
// even columns of columns 8 n to 8 n + 15, and fragment n + 1 the odd ones: see sort_columns(). kSplits: see
// kSplitsWeights.
template <bool kE4m3, bool kSplits, int kDim, class Values, class Weight>
__device__ __forceinline__ void add_weighted_8(float (&sum)[kDim / 8][4], Values& values, int first_key,
                                               Weight weight) {
  const int lane = MmaThread().lane;
  uint32_t a[kSplits ? 2 : 1][4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float first = weight(i / 2, i % 2, 0), second = weight(i / 2, i % 2, 1);
    if constexpr (kSplits) {
      a[0][i] = pack<BFloat16>(high_part(first), high_part(second));
      a[1][i] = pack<BFloat16>(low_part(first), low_part(second));
    } else {
      a[0][i] = pack<BFloat16>(first, second);
    }
  }
#pragma unroll
  for (int k = 0; k < kDim / 32; ++k) {
    uint32_t b[4];  // columns 32 k to 32 k + 15 of keys 0 to 7, of keys 8 to 15; the next 16 columns
    load_matrices_transposed(b, values.address(lane % 16, lane / 16, k) + first_key * Values::kRowBytes);
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      uint32_t even[2], odd[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) widen<BFloat16, kE4m3, true>(b[2 * part + half], even[half], odd[half]);
#pragma unroll
      for (const auto& weights : a) {
        multiply_add<BFloat16>(sum[4 * k + 2 * part], weights, even[0], even[1]);
        multiply_add<BFloat16>(sum[4 * k + 2 * part + 1], weights, odd[0], odd[1]);
      }
    }
  }
}

// Gives the fragments of add_weighted_8() the columns that they have elsewhere. Called by all lanes.
template <int kFragments>
__device__ __forceinline__ void sort_columns(float (&sum)[kFragments][4]) {
  const MmaThread thread;
#pragma unroll
  for (int n = 0; n < kFragments; n += 2)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float of_both[2][2];  // [fragment][c]: this lane has columns 4 place + 2 c + fragment
#pragma unroll
      for (int i = 0; i < 4; ++i) of_both[i / 2][i % 2] = sum[n + i / 2][2 * half + i % 2];
#pragma unroll
      for (int i = 0; i < 2; ++i)  // gets columns 8 i + 2 place + c
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int from = thread.lane / 4 * 4 + 2 * i + thread.place / 2;
          const float low = __shfl_sync(~0u, of_both[c][0], from), high = __shfl_sync(~0u, of_both[c][1], from);
          sum[n + i][2 * half + c] = thread.place % 2 ? high : low;
        }
    }
}

}  // namespace attn::cuda
