// Turns products in the fragments of tensor cores into scores (score.h), for the forward and the backward. Applies the
// cap, ALiBi and the mask, and hides keys. Also finds out which weights dropout keeps.
#pragma once

#include <type_traits>

#include "cuda/kernels.h"
#include "cuda/mma/mma.cuh"
#include "cuda/shared/softmax.cuh"

namespace attn::cuda {

// Returns tanh(x ln(2) / 2) = 1 - 2 / (2^x + 1) with an error of at most 2^-21, however small the result is. (The
// instruction tanh.approx has one of 2^-11.)
__device__ __forceinline__ float tanh_of_exponent(float x) {
  return fmaf(-2, reciprocal_approx(exp2_approx(x) + 1), 1);
}

// Turns a product into y = tanh(scaled product / cap), which SoftCap's functions take; changes nothing without a cap. A
// cap multiplies the error of y. The caps of models are 20 to 50. With these, the error changes a score by at most
// 2^-15, which is far less than the rounding of weights to 16 bits. Larger caps get tanhf().
template <Cap kCap>
struct Tanh {
  float factor;

  static __device__ __forceinline__ Tanh of(const Problem& p) {
    const float argument = ScoreFunction<float>::of(p).slope() * SoftCap<float>::of(p).inverse;
    return {kCap == Cap::small ? argument * (2 * kLog2E<float>) : argument};
  }
  __device__ __forceinline__ float operator()(float product) const {
    if constexpr (kCap == Cap::none) return product;
    return kCap == Cap::small ? tanh_of_exponent(product * factor) : tanhf(product * factor);
  }
};

// Kernels whose options are a cap and ALiBi alone turn products into numbers that are scores but for this factor.
__device__ __forceinline__ float terms_left(const Problem& p) {
  return static_cast<float>(p.softcap > 0 ? p.softcap : p.scale);
}

// How many bytes one number of the mask has. The mask is boolean or of 16-bit numbers.
__device__ __forceinline__ int mask_number_bytes(const Problem& p) { return p.mask.dtype == DType::boolean ? 1 : 2; }

// Calls f.template operator()<Number>(): uint8_t for a boolean mask, else uint16_t.
template <class F>
__device__ __forceinline__ void with_mask_number(const Problem& p, F f) {
  if (p.mask.dtype == DType::boolean)
    f.template operator()<uint8_t>();
  else
    f.template operator()<uint16_t>();
}

// A 32-bit word of mask numbers that all hide their keys: false in a boolean mask, or -inf in a mask of type S.
template <class S, class Number>
constexpr uint32_t kHidden = sizeof(Number) == 1 ? 0 : (std::is_same_v<S, Half> ? 0xfc00fc00 : 0xff80ff80);

// Whether ScoresMma::add_terms() turns products into scores before the mask is added.
__device__ __forceinline__ bool has_terms(const Problem& p) { return p.softcap > 0 || p.alibi_slopes; }

// The scores of a warp: 16 rows by 8 kFragments keys. With kOwnsKeys they are 16 keys by 8 kFragments rows. The 16 rows
// or keys begin at row or key `own` of the block's tile. S: the type of query and key, and of a mask that is not
// boolean.
template <class S, int kFragments, bool kOwnsKeys>
struct ScoresMma {
  using Scores = float[kFragments][4];
  using Kept = uint32_t[2];  // bit 2 n + c of kept[half]: of element (half, c) of fragment n

  // The score that belongs to a bit of kept[half].
  static __device__ __forceinline__ float& at(Scores& x, int half, int bit) { return x[bit / 2][2 * half + bit % 2]; }
  // Calls f(score, row, key, half, bit of Kept) for each score of the thread. `row` and `key` count from the start of
  // the block's tiles.
  template <class F>
  static __device__ __forceinline__ void each(Scores& x, int own, F f) {
    const MmaThread thread;
#pragma unroll
    for (int n = 0; n < kFragments; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int mine = own + thread.group + 8 * half, other = thread.col(n) + c;
          f(x[n][2 * half + c], kOwnsKeys ? other : mine, kOwnsKeys ? mine : other, half, 2 * n + c);
        }
  }

  // Scales and caps products. See add_terms().
  template <Cap kCap, class OnCap>
  static __device__ __forceinline__ void scale(Scores& x, const Problem& p, OnCap on_cap) {
    const auto tanh = Tanh<kCap>::of(p);
    const float left = kCap == Cap::none ? ScoreFunction<float>::of(p).slope() : SoftCap<float>::of(p).most;
    each(x, 0, [&](float& score, int, int, int half, int bit) {
      const float y = tanh(score);
      if constexpr (kCap != Cap::none) on_cap(y, half, bit);
      score = y * left;
    });
  }
  // Turns products into scores, except for the mask: scales the products, caps them and adds ALiBi. If there is a cap,
  // calls on_cap(y, half, bit of Kept), where y is the argument of SoftCap's functions. ahead(i) returns the position
  // of row i minus the tile's first key. steepness(i) returns the slope of row i's head.
  template <class OnCap, class Ahead, class Steepness>
  static __device__ __forceinline__ void add_terms(Scores& x, int own, const Problem& p, OnCap on_cap, Ahead ahead,
                                                   Steepness steepness) {
    const Cap cap = cap_of(p);
    if (cap == Cap::none)
      scale<Cap::none>(x, p, on_cap);
    else if (cap == Cap::small)
      scale<Cap::small>(x, p, on_cap);
    else
      scale<Cap::large>(x, p, on_cap);
    if (p.alibi_slopes)
      each(x, own, [&](float& score, int i, int j, int, int) {
        score = fmaf(steepness(i), Alibi<float>::by_slope(fabsf(ahead(i) - static_cast<float>(j))), score);
      });
  }

  // The bits of one boolean in the words that MaskTile returns.
  static constexpr int kBooleanBits = kOwnsKeys ? 16 : 8;
  // The mask's numbers for the scores. Each word holds the mask's numbers for two neighbouring scores, in the mask's
  // dtype.
  using Mask = uint32_t[kFragments][2];

  // Whether all products of the warp's kTiles tiles from x on are finite. Some products are not finite if a query or
  // key holds a NaN or an infinity.
  template <int kTiles = 1>
  static __device__ __forceinline__ bool all_finite(const Scores* x) {
    float sum[kTiles][2] = {};  // of products of two scores; not finite if a score is not finite (or is very large)
    float total = 0;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (auto& four : x[t])
#pragma unroll
        for (int half = 0; half < 2; ++half) sum[t][half] = fmaf(four[2 * half], four[2 * half + 1], sum[t][half]);
      total += sum[t][0] + sum[t][1];
    }
    return __all_sync(~0u, total * 0 == 0);
  }

  // How a mask is added. `boolean` is for boolean masks. `to_finite` needs products that are all finite. `to_any` takes
  // any products, but takes longer.
  enum class Add { boolean, to_finite, to_any };
  // Calls f.template operator()<kHow>(). `finite()` says whether all products are finite. This function calls finite()
  // only if the mask is not boolean. Number: see with_mask_number().
  template <class Number, class Finite, class F>
  static __device__ __forceinline__ void choose_add(Finite finite, F f) {
    if constexpr (sizeof(Number) == 1)
      f.template operator()<Add::boolean>();
    else if (finite())
      f.template operator()<Add::to_finite>();
    else
      f.template operator()<Add::to_any>();
  }
  // Turns products into scores and adds the mask to them. If add_terms() has already turned the products into scores,
  // `slope` is 1.
  template <Add kHow>
  static __device__ __forceinline__ void add_mask(Scores& x, const Mask& mask, float slope) {
#pragma unroll
    for (int n = 0; n < kFragments; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) add_two<kHow>(x, n, half, mask[n][half], slope);
  }
  // The same for two neighbouring scores.
  template <Add kHow>
  static __device__ __forceinline__ void add_two(Scores& x, int n, int half, uint32_t two, float slope) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      float& score = x[n][2 * half + c];
      if constexpr (kHow == Add::boolean) {
        score = two >> kBooleanBits * c & 0xff ? score * slope : -infinity<float>();
      } else {
        const float bias = to_float(S{static_cast<uint16_t>(two >> 16 * c)});
        score = kHow == Add::to_finite ? fmaf(score, slope, bias) : masked_score(score, slope, bias);
      }
    }
  }

  // Sets a score to `hidden` if its row does not see its key. The tile's first key is `key`. With kOwnsKeys also sets
  // the scores of rows from `count` on, because these rows must add nothing to sums over rows. Called by all lanes.
  template <class Rows>
  static __device__ __forceinline__ void hide_keys(Scores& x, int own, const Sequence& s, const Rows& rows, int count,
                                                   int64_t key, float hidden = -infinity<float>()) {
    const auto seen_by = [&](int i) {  // the keys of the tile that row i sees
      const int64_t position = rows.position[i];
      return TileRange(kOwnsKeys && i >= count ? Range{0, 0} : visible_keys(s, {position, position + 1}), key);
    };
    if constexpr (kOwnsKeys) {
      each(x, own, [&](float& score, int i, int j, int, int) { score = seen_by(i).contains(j) ? score : hidden; });
      return;
    }
    const TileRange mine = seen_by(own + thread_index() % 16);  // one row per lane: 64-bit numbers take registers
    const MmaThread thread;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const TileRange seen = mine.of_lane(thread.group + 8 * half);
#pragma unroll
      for (int n = 0; n < kFragments; ++n)
#pragma unroll
        for (int c = 0; c < 2; ++c)
          if (!seen.contains(thread.col(n) + c)) x[n][2 * half + c] = hidden;
    }
  }

  // Sets a bit of `kept` to 1 if dropout keeps the weight of this bit, else to 0. row_of(i, half) returns row i; `half`
  // is 0 with kOwnsKeys. kAtOnce: how many of dropout's counters a thread computes side by side. More
  // counters take more registers, so kAtOnce is 1 where registers are fewest.
  template <int kAtOnce = kFragments / 2, class RowOf>
  static __device__ __forceinline__ void dropout_mask(Kept& kept, int own, const Dropout& dropout, RowOf row_of,
                                                      int64_t key) {
    const MmaThread thread;
    kept[0] = kept[1] = 0;
    if constexpr (kOwnsKeys) {
      // One counter of dropout yields the random numbers of four keys. Four lanes hold these keys. The lanes have the
      // same place and neighbouring groups. Each lane computes one counter, and shuffles bring the counter's bits to
      // the other three lanes.
      const int mine = thread.group % 4;
      const int64_t quad = (key + own + thread.group + 8 * (mine / 2)) / 4;
#pragma unroll kAtOnce
      for (int n = 0; n < kFragments; ++n) {
        const int i = thread.col(n) + mine % 2;
        uint32_t bits = dropout.kept(quad, row_of(i, 0)) << 4 * mine;
        bits |= __shfl_xor_sync(~0u, bits, 4);
        bits |= __shfl_xor_sync(~0u, bits, 8);
        bits >>= thread.group % 4;
#pragma unroll
        for (int c = 0; c < 4; ++c) kept[c / 2] |= (bits >> 4 * c & 1) << (2 * n + c % 2);
      }
    } else {
      constexpr int kUnrolledRounds = kAtOnce == 1 ? 5 : 10;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int i = own + thread.group + 8 * half;
        // Two neighbouring lanes hold the four keys of one counter. The lane with an even place computes the counters
        // of even fragments, and the lane with an odd place computes the counters of odd fragments.
#pragma unroll kAtOnce
        for (int n = 0; n < kFragments; n += 2) {
          const int mine = n + thread.place % 2;
          const unsigned of_mine =
              dropout.kept<kUnrolledRounds>((key + 8 * mine) / 4 + thread.place / 2, row_of(i, half));
          const unsigned of_other = __shfl_xor_sync(~0u, of_mine, 1);
#pragma unroll
          for (int m = 0; m < 2; ++m) {
            const unsigned bits = (m == thread.place % 2 ? of_mine : of_other) >> 2 * (thread.place % 2);
            kept[half] |= (bits & 3) << 2 * (n + m);
          }
        }
      }
    }
  }
};

}  // namespace attn::cuda
