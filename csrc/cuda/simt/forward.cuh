// Computes O = softmax(scale Q K^T + mask) V where uses_mma() is false, tile by tile with the online softmax (Milakov &
// Gimelshein, 2018; Dao et al., FlashAttention, 2022). A block owns 64 rows and up to 128 columns of the output (64 in
// float64). It reads K, and these columns of V, once. It keeps the running maximum m and sum l of each row. When a tile
// raises m, the block multiplies what it has accumulated before by exp(m_old - m_new).
#pragma once

#include "cuda/simt/scores.cuh"

namespace attn::cuda {

// T: the type that the kernel computes in. kValueCols: the columns of the output that a block computes. kPaged: see
// ScoresSimt.
template <class T, int kValueCols, bool kPaged>
struct ForwardSimt : ScoresSimt<T, ForwardParams, false, kValueCols, kPaged> {
  using Base = ScoresSimt<T, ForwardParams, false, kValueCols, kPaged>;
  using Base::kN;
  using Base::p;
  using Base::task;

  struct Shared : Base::Shared {
    T maximum[kSimtTile], sum[kSimtTile];  // read and written once per tile of keys, so registers need not keep them
  };

  Shared& shared;
  int64_t first_col = 0;  // of the output
  typename Base::Sums output = {};

  __device__ ForwardSimt(const ForwardParams& p, Shared& shared) : Base(p, shared), shared(shared) {}

  ATTN_INLINE static constexpr int64_t blocks(const ForwardParams& p) {
    return row_blocks(p) * larger(1, divide_up(p.value_dim, kValueCols));
  }
  ATTN_INLINE static constexpr int64_t row_blocks(const ForwardParams& p) {
    return p.splits * blocks_of_rows(p, kSimtTile);
  }
  __device__ void run(int64_t number) {
    first_col = number / row_blocks(p) * kValueCols;
    const auto begin_row = [&](int i, int64_t) {
      shared.maximum[i] = -infinity<T>();
      shared.sum[i] = 0;
    };
    this->go_over_keys(number % row_blocks(p), begin_row, [&](int64_t key) {
      typename Base::Scores x;
      this->scores(x, key);
      softmax(x);
      if constexpr (Base::kMayBeEight)
        if (p.value_scale.data) this->each(x, [&](T& weight, int, int k, int) { weight *= shared.scales.value[k]; });
      if (p.has_dropout) {
        const uint32_t kept = this->kept(key);
        this->each(x, [&](T& weight, int, int, int bit) { weight *= static_cast<T>(kept >> bit & 1); });
      }
      this->store_weights(x);
      this->template add_to<Factor::as_it_is>(output, p.value, shared.base.value, key, p.value_dim, first_col);
    });
    write();
  }

  // Turns scores into weights exp(x - maximum).
  __device__ __forceinline__ void softmax(typename Base::Scores& x) {
    const SimtThread thread;
#pragma unroll
    for (int i = 0; i < kSimtRows; ++i) {
      const int row = thread.row(i);
      const T old = shared.maximum[row], old_sum = shared.sum[row];
      T best = old;
#pragma unroll
      for (T score : x[i]) best = max_or_nan(score, best);
      best = max_over_x(best);
      const T shift = shift_of(best);
      T total = 0;
#pragma unroll
      for (T& score : x[i]) total += score = exp(score - shift);
      total = sum_over_x(total);
      const T correction = exp(old - shift);
      __syncwarp();  // all threads of the row have read; shuffles wait for threads, but do not order memory
      if (thread.x == 0) {
        shared.maximum[row] = best;
        shared.sum[row] = old_sum * correction + total;
      }
#pragma unroll
      for (T& o : output[i]) o *= correction;
    }
  }

  // Divides the output by the sum of the weights and writes the results. A row that saw no key outputs 0, and its
  // logsumexp without the sink is -inf.
  __device__ __forceinline__ void write() {
    const SimtThread thread;
    const int64_t output_base = batch_offset(p, p.output, task.n);
    const int64_t residual_base = batch_offset(p, p.residual, task.n);
#pragma unroll
    for (int i = 0; i < kSimtRows; ++i) {
      const int row = thread.row(i);
      if (row >= task.rows) break;
      const OutputRow<T> to(p, output_base, residual_base, shared.rows.at(task.n, row), task.split);
      const T maximum = shared.maximum[row], sum = shared.sum[row];
      Pair<T> logsumexp = logsumexp_of<T>(maximum, 0, sum);
      const T left = to.add_sink(logsumexp), inverse = static_cast<T>(p.keep_scale) * left / sum;
#pragma unroll
      for (int j = 0; j < kN; ++j) {
        const int64_t d = first_col + thread.col(j);
        if (d < p.value_dim) to.write(d, sum == 0 ? 0 * left : output[i][j] * inverse);
      }
      if (thread.x == 0 && first_col == 0) to.write_statistics(logsumexp, maximum);
    }
  }
};

template <class T>
Error launch_forward_simt(const ForwardParams& p, Stream stream) {
  return with_cols<T>(p.value_dim, [&]<int kCols>() {
    return p.paging.table ? launch_blocks<ForwardSimt<T, kCols, true>>(p, stream)
                          : launch_blocks<ForwardSimt<T, kCols, false>>(p, stream);
  });
}

}  // namespace attn::cuda
