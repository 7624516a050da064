// What the gradients on tensor cores have in common, on any GPU.
#pragma once

#include "cuda/mma/scores.cuh"

namespace attn::cuda {

// Exponents of 2 are log2(e) (score - logsumexp), where scores are numbers times terms_left(), which is positive.
// Without a cap and ALiBi these numbers are products. Returns the factor of a number: d(log2 of the weight) /
// d(number).
__device__ __forceinline__ float exponent_slope(const Problem& p) { return terms_left(p) * kLog2E<float>; }
// Returns the factor of a logsumexp. exponent_slope() is rounded, and this factor is computed from the rounded number,
// because a large score and a large logsumexp must cancel in their difference.
__device__ __forceinline__ double exponent_per_score(const Problem& p) {
  return double{exponent_slope(p)} / terms_left(p);
}
// Returns what is subtracted from the exponents of a row; infinity if the row sees no key, so that its weights are 0.
__device__ __forceinline__ Pair<float> exponent_shift(Pair<float> logsumexp, double per_score) {
  if (logsumexp.high == -infinity<float>()) return {infinity<float>(), 0};
  const double exponent = (double{logsumexp.high} + logsumexp.low) * per_score;
  const float high = static_cast<float>(exponent);
  return {high, static_cast<float>(exponent - high)};
}
__device__ __forceinline__ float exponent_of(float number, float slope, Pair<float> shift) {
  return fmaf(number, slope, -shift.high) - shift.low;
}

// What ALiBi needs of a row: the slope of its head, and how far the row is ahead of the first key of the block.
struct alignas(8) BackwardSlope {
  float slope, ahead;
};

// Writes a row of a gradient, if it exists (`there`): elements 2 half and 2 half + 1 of each fragment, times `scale`.
// Called by all lanes of a warp.
template <class S, int kFragments>
__device__ __forceinline__ void write_gradient(const Problem& p, const Operand& to, int64_t base, int64_t cols,
                                               const float (&sum)[kFragments][4], int half, float scale, bool there) {
  const MmaThread thread;
  const auto value = [&](int n, int c) { return sum[n][2 * half + c] * scale; };
  if (takes_vectors(p, to, cols)) return write_vectors<S, kFragments>(to, base, cols, there, value);
  if (!there) return;
#pragma unroll
  for (int n = 0; n < kFragments; ++n)
#pragma unroll
    for (int c = 0; c < 2; ++c)
      if (thread.col(n) + c < cols) store_rounded(to, base + (thread.col(n) + c) * to.col, value(n, c));
}

// Writes the sum of `sum` over the four lanes of row `number`, if the row exists (`there`). Called by all lanes of a
// warp.
__device__ __forceinline__ void write_of_row(void* to, int64_t number, float sum, bool there) {
  sum += __shfl_xor_sync(~0u, sum, 1);
  sum += __shfl_xor_sync(~0u, sum, 2);
  if (there && MmaThread().place == 0) static_cast<float*>(to)[number] = sum;
}

}  // namespace attn::cuda
