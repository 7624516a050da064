// How the gradients on Hopper turn products into weights and dS. As in mma/backward.cuh, every product has one of two
// forms, where a consumer owns 64 rows or keys of `own`, and `other` is the tile in use:
//
//   form               if the block owns keys      if it owns rows
//   own other^T        x = K Q^T, dP = V G^T       x = Q K^T, dP = G V^T
//   (16-bit x) other   dV += P^T G, dK += dS^T Q   dQ += dS K
//
// So weights stay in registers from the first product to the second, sums are added up in the order of the tiles, and
// their bits are always the same.
#pragma once

#include "cuda/mma/gradients.cuh"
#include "cuda/wgmma/row_tasks.cuh"

namespace attn::cuda {

// Whether a tile is finite, whose products with others are `x`. A number of the tile that is not finite makes all its
// products so. Therefore all warps of the block find the same answer, though each of them has products of its own.
template <class S, int kRows, int kCols>
__device__ __forceinline__ bool is_finite(const float (&x)[kRows / 8][4], const PanelTile<S, kRows, kCols>& tile) {
  if (ScoresMma<S, kRows / 8, false>::all_finite(&x)) return true;
  bool finite = true;
  for (int i = MmaThread().lane; i < kRows * kCols / kVector; i += 32)
    for (const uint32_t two : reinterpret_cast<const Vec16<uint32_t>*>(tile.numbers)[i].at)
      finite &= make_finite<S>(two) == two;
  __syncwarp();  // all lanes have read the tile
  return __all_sync(~0u, finite);
}

// A boolean mask alone changes no weights: where it hides a key, packed weights and packed dS are set to 0.
__device__ __forceinline__ bool clears_hidden(const Problem& p) {
  return p.mask.dtype == DType::boolean && !has_terms(p);
}

// How weights read a tile's mask: not at all, as booleans, as numbers, or as numbers that are all 0.
enum class Reads { nothing, booleans, numbers, zeros };
// Returns what exponent_under_mask() subtracts. If the mask holds numbers, `high` is a logsumexp, which is not yet
// multiplied by log2(e), because a product with the least number of a dtype would be infinite. `low` is multiplied.
__device__ __forceinline__ Pair<float> shift_under_mask(const Problem& p, Pair<float> logsumexp, double per_score) {
  if (!p.has_mask || p.mask.dtype == DType::boolean) return exponent_shift(logsumexp, per_score);
  if (logsumexp.high == -infinity<float>()) return {infinity<float>(), 0};
  return {logsumexp.high, logsumexp.low * kLog2E<float>};
}
// As exponent_of(), of a number that is a score but for terms_left(), `left`. `slope`: exponent_slope(). `mask`: two
// numbers of the mask, of which `which` counts; booleans have kBooleanBits bits.
template <class S, Reads kReads, int kBooleanBits>
__device__ __forceinline__ float exponent_under_mask(float number, float slope, float left, Pair<float> shift,
                                                     uint32_t mask, int which) {
  if constexpr (kReads == Reads::nothing) return exponent_of(number, slope, shift);
  if constexpr (kReads == Reads::booleans)
    return mask >> kBooleanBits * which & 0xff ? exponent_of(number, slope, shift) : -infinity<float>();
  const auto exponent = [&](float bias) {
    return fmaf(fmaf(number, left, bias) - shift.high, kLog2E<float>,
                -shift.low);  // rounds the score as the forward does
  };
  if constexpr (kReads == Reads::zeros) return exponent(0);
  const float bias = to_float(S{static_cast<uint16_t>(mask >> 16 * which)});
  return bias == -infinity<float>() ? bias : exponent(bias);
}

// Turns exponents into weights.
template <int kFragments>
__device__ __forceinline__ void turn_into_weights(float (&x)[kFragments][4]) {
#pragma unroll
  for (int n = 0; n < kFragments; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) x[n][i] = exp2_approx(x[n][i]);
}
// Turns dP - delta into dS, where `w` are weights. If some keys may be hidden, it is 0 where the weight is 0, because a
// NaN in a hidden key's value must not reach a gradient.
template <int kFragments>
__device__ __forceinline__ void turn_into_ds(float (&x)[kFragments][4], const float (&w)[kFragments][4], bool hides) {
  if (hides)
#pragma unroll
    for (int n = 0; n < kFragments; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (w[n][i] == 0) x[n][i] = 0;
#pragma unroll
  for (int n = 0; n < kFragments; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) x[n][i] *= w[n][i];
}

// Makes a tile finite, whose products with others are `x`: puts 0 in place of infinities and NaNs. So they reach a
// gradient only through dS, where a row sees the key. Called by kThreads threads, of all consumers, after products of
// this tile, and before they multiply dS by it.
template <int kThreads, class S, int kRows, int kCols>
__device__ __forceinline__ void make_finite(const float (&x)[kRows / 8][4], PanelTile<S, kRows, kCols>& tile) {
  if (is_finite(x, tile)) return;
  constexpr int kBarrier = 1;
  sync_threads<kThreads>(kBarrier);  // all threads have read the tile, and so have their products
  for (int i = thread_index(); i < kRows * kCols / kVector; i += kThreads)
    for (uint32_t& two : reinterpret_cast<Vec16<uint32_t>*>(tile.numbers)[i].at) two = make_finite<S>(two);
  publish_writes();
  sync_threads<kThreads>(kBarrier);
}

template <Cap kCap>
constexpr bool kMayHaveSlopes = kCap != Cap::small;

// SoftCap::slope() in one instruction.
__device__ __forceinline__ float cap_slope(float y) { return fmaf(-y, y, 1); }

}  // namespace attn::cuda
