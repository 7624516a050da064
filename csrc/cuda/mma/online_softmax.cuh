// The forwards' softmax over the fragments of tensor cores. Each tile of keys turns scores into weights, which are
// shifted by the largest score of the row so far.
#pragma once

#include "cuda/mma/scores.cuh"

namespace attn::cuda {

// x[t]: the scores of a warp's rows 16 t to 16 t + 15. A thread has numbers of 2 kTiles rows. Row r of a thread has the
// elements 2 (r % 2) and 2 (r % 2) + 1 of each fragment of tile r / 2. Works on all rows of a thread side by side, so
// that no instruction waits for the instruction before it. kGeneral: see is_general().
template <int kTiles, int kFragments, bool kGeneral>
struct OnlineSoftmax {
  static constexpr int kThreadRows = 2 * kTiles;
  using Scores = float[kFragments][4];
  using OfRows = float[kThreadRows];

  const ForwardParams& p;
  float left = 1;  // with kGeneral, what x still has to be multiplied by

  // The score is x * scale().
  __device__ __forceinline__ float scale() const { return kGeneral ? left : ScoreFunction<float>::of(p).slope(); }
  // exponent(x) returns log2(e) times the score, which is the base-2 exponent of exp(score). The exponent of the
  // maximum is rounded once. Its rounding error gives the same factor to all weights that are shifted by this maximum.
  // correction() gives this factor to the earlier weights, too. The division by the sum of the weights removes this
  // factor.
  __device__ __forceinline__ float exponent_slope() const { return scale() * kLog2E<float>; }
  __device__ __forceinline__ float exponent(float x) const { return __fmul_rn(x, exponent_slope()); }
  // If the mask holds large numbers, the exponent of a maximum and its rounding error can be large. The factor that
  // this error gives to the weights (see exponent()) would then be too large. So if the maximum of a row is large, the
  // row's scores are shifted before they are multiplied by log2(e).
  __device__ __forceinline__ bool is_large(float shift) const { return kGeneral && fabsf(shift * scale()) > 1024; }

  // Returns exp(score - maximum).
  __device__ __forceinline__ float weight(float x, float shift) const {
    return exp2_approx(fmaf(x, exponent_slope(), -exponent(shift)));
  }
  // Returns the factor that turns weights shifted by `old` into weights shifted by `shift`. It is 1 if `old` and
  // `shift` are equal.
  __device__ __forceinline__ float correction(float old, float shift) const {
    return exp2_approx(exponent(old) - exponent(shift));
  }

  // As correction(), but also right for a large shift, which find_shift() takes off before the multiplication.
  __device__ __forceinline__ float factor(float old, float shift) const {
    return is_large(shift) ? exp2_approx((old - shift) * exponent_slope()) : correction(old, shift);
  }

  // Raises `best`, the largest number of each row so far, to the largest of this tile, too; NaN if there is a NaN.
  static __device__ __forceinline__ void raise(OfRows& best, const Scores* x) {
#pragma unroll
    for (int r = 0; r < kThreadRows; ++r) {
      float of_column[2] = {best[r], best[r]};
#pragma unroll
      for (int n = 0; n < kFragments; ++n)
#pragma unroll
        for (int c = 0; c < 2; ++c) of_column[c] = max_or_nan(x[r / 2][n][2 * (r % 2) + c], of_column[c]);
      best[r] = max_or_nan(of_column[0], of_column[1]);
    }
#pragma unroll
    for (int lanes = 1; lanes < 4; lanes *= 2)
#pragma unroll
      for (float& b : best) b = max_or_nan(__shfl_xor_sync(~0u, b, lanes), b);
  }
  // Finds what the scores are shifted by and the factor of the earlier weights. If a shift is large, shifts the scores.
  __device__ __forceinline__ void find_shift(Scores* x, const OfRows& old, const OfRows& best, OfRows& shift,
                                             OfRows& factor) const {
    bool some_large = false;
#pragma unroll
    for (int r = 0; r < kThreadRows; ++r) {
      shift[r] = shift_of(best[r]);
      factor[r] = correction(old[r], shift[r]);
      some_large |= is_large(shift[r]);
    }
    if (some_large)
#pragma unroll
      for (int r = 0; r < kThreadRows; ++r) {
        const bool large = is_large(shift[r]);
        const float first = large ? shift[r] : 0;
        factor[r] = large ? exp2_approx((old[r] - first) * exponent_slope()) : factor[r];
#pragma unroll
        for (int n = 0; n < kFragments; ++n)
#pragma unroll
          for (int c = 0; c < 2; ++c) x[r / 2][n][2 * (r % 2) + c] -= first;
        shift[r] -= first;
      }
  }
  // Turns the scores of row r into weights and returns their sum, over this lane's columns.
  __device__ __forceinline__ float weigh(Scores* x, int r, float shift) const {
    float total[2] = {};
#pragma unroll
    for (int n = 0; n < kFragments; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float& score = x[r / 2][n][2 * (r % 2) + c];
        total[c] += score = weight(score, shift);
      }
    return total[0] + total[1];
  }

  // Multiplies the output of a tile of 16 rows so far by its rows' factors. Seldom a largest score has risen, and a
  // factor of 1 would change no bits. Called by all lanes.
  template <int kOutputs>
  static __device__ __forceinline__ void rescale(float (&output)[kOutputs][4], const float (&factor)[2]) {
    if (__all_sync(~0u, factor[0] == 1 && factor[1] == 1)) return;
#pragma unroll
    for (auto& four : output)
#pragma unroll
      for (int i = 0; i < 4; ++i) four[i] *= factor[i / 2];
  }
  // Whether write() writes rows of the output in vectors.
  static __device__ __forceinline__ bool writes_vectors(const ForwardParams& p) {
    return p.splits == 1 && !p.residual.data && takes_vectors(p, p.output, p.value_dim);
  }
  // Divides row r of the output by the sum of its weights, writes it and its statistics. A row that saw no key outputs
  // 0, and its logsumexp without the sink is -inf. `total`: the sum of the weights in this lane's columns. `vectors`:
  // writes_vectors(). `there`: whether the row exists. `first`: the column of the output with which `output` begins;
  // the statistics go with column 0. Called by all lanes of a warp.
  template <class S, int kOutputs>
  __device__ __forceinline__ void write(const OutputRow<float>& to, bool vectors, bool there,
                                        const float (*output)[kOutputs][4], int r, float best, float total,
                                        int first = 0) const {
    const MmaThread thread;
    if (total == 0) best = 0;
    const float maximum = __fmul_rn(best, scale());
    // `maximum_low` is the rounding error of `maximum`, minus the logarithm of the factor that the rounding in
    // exponent() gives to all weights and so to `total`. If `best` is large, the weights lack this factor.
    float maximum_low = fmaf(best, scale(), -maximum);
    if (!is_large(best)) maximum_low -= fmaf(best, exponent_slope(), -exponent(best)) / kLog2E<float>;
    Pair<float> logsumexp = logsumexp_of(maximum, maximum_low, total);
    const float left = to.add_sink(logsumexp), inverse = static_cast<float>(p.keep_scale) * left / total;
    const auto value = [&](int n, int c) {
      return total == 0 ? 0 * left : output[r / 2][n][2 * (r % 2) + c] * inverse;
    };
    if (vectors) {
      write_vectors<S, kOutputs>(p.output, to.output_at + first, p.value_dim - first, there, value);
    } else if (there) {
#pragma unroll
      for (int n = 0; n < kOutputs; ++n)
#pragma unroll
        for (int c = 0; c < 2; ++c)
          if (const int col = first + thread.col(n) + c; col < p.value_dim) to.write(col, value(n, c));
    }
    if (thread.place == 0 && there && first == 0)
      to.write_statistics(logsumexp, total == 0 ? -infinity<float>() : maximum);
  }
};

}  // namespace attn::cuda
