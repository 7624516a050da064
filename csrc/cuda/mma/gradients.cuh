// What the gradients on tensor cores have in common, on any GPU.
#pragma once

#include "cuda/mma/scores.cuh"

namespace attn::cuda {

// Turns products into exponents of 2, log2(e) (score - logsumexp), where scores are products times a positive number.
struct Exponents {
  float slope;  // of a product: d(log2 of the weight) / d(product)
  // Of a logsumexp. `slope` is rounded, and this factor is computed from the rounded number, because a large score and
  // a large logsumexp must cancel in their difference.
  double per_score;

  static __device__ __forceinline__ float slope_of(const Problem& p) {
    return ScoreFunction<float>::of(p).slope() * kLog2E<float>;
  }
  static __device__ __forceinline__ Exponents of(const Problem& p) {
    return {slope_of(p), double{slope_of(p)} / ScoreFunction<float>::of(p).slope()};
  }
  // What is subtracted from exponents of a row; infinity if the row sees no key, so that its weights are 0.
  __device__ __forceinline__ Pair<float> shift(Pair<float> logsumexp) const {
    if (logsumexp.high == -infinity<float>()) return {infinity<float>(), 0};
    const double exponent = (double{logsumexp.high} + logsumexp.low) * per_score;
    const float high = static_cast<float>(exponent);
    return {high, static_cast<float>(exponent - high)};
  }
};

// The tile that begins with row `number` of a group's list of rows.
struct TileOfRows {
  int64_t number;
  Row first;

  __device__ __forceinline__ TileOfRows after(int64_t queries, int64_t rows) const {
    return {number + rows, row_after(queries, first, rows)};
  }
  // Returns the first tile of `most` rows, from this one on, that has a row of the positions `seen`. The list has
  // `rows` rows: the tile is beyond them if there is none.
  __device__ __forceinline__ TileOfRows first_seeing(Range seen, int64_t queries, int64_t rows, int64_t most) const {
    if (seen.empty()) return {rows, first};
    return after(queries, rows_until(seen, first.position, queries, rows - number, most));
  }
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

}  // namespace attn::cuda
