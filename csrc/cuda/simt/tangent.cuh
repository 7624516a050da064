// Computes J t, the derivative of the output along a direction, for every dtype, with plain multiply-adds. The header
// of cpu/kernels/tangent.inl has the formulas and their names. A block owns 64 rows and up to 128 columns of the output
// (64 in float64), because registers hold no more sums. A block passes over the keys once.
#pragma once

#include "cuda/simt/scores.cuh"

namespace attn::cuda {

// T: the type that the kernel computes in. kCols: the columns of the output that a block computes.
template <class T, int kCols>
struct TangentSimt : ScoresSimt<T, TangentParams, false, kCols> {
  using Base = ScoresSimt<T, TangentParams, false, kCols>;
  using Base::kN;
  using Base::p;
  using Base::task;
  using typename Base::Scores, typename Base::Sums;

  struct Statistics : SavedRow<T> {
    T shift, shifted_sum;  // r, c - r
    bool has_shift;
  };
  struct Shared : Base::Shared {
    Statistics row[kSimtTile];
  };

  Shared& shared;
  int64_t first_col = 0;  // of the output
  Sums sum = {};

  __device__ TangentSimt(const TangentParams& p, Shared& shared) : Base(p, shared), shared(shared) {}

  ATTN_INLINE static constexpr int64_t blocks(const TangentParams& p) {
    return blocks_of_rows(p, kSimtTile) * larger(1, divide_up(p.value_dim, kCols));
  }
  __device__ void run(int64_t number) {
    const int64_t row_blocks = blocks_of_rows(p, kSimtTile);
    first_col = number / row_blocks * kCols;
    const auto begin_row = [&](int i, int64_t r) { shared.row[i] = {SavedRow<T>::read(p.logsumexp, r), 0, 0, false}; };
    this->go_over_keys(number % row_blocks, begin_row, [&](int64_t key) {
      Scores x;
      this->scores_and_tangents(x, key);
      this->each(x, [&](T& score, int row, int k, int) {  // x becomes tx; P goes to shared memory
        const T weight = shared.row[row].weight(score);
        score = this->weight(row, k);
        this->weight(row, k) = weight;
      });
      differentiate_weights(x);
      const uint32_t kept = this->kept(key);
      const auto drop = [&](T& weight, int, int, int bit) { weight *= this->factor(kept, bit); };
      if (p.t.value.data) {
        if (p.has_dropout) this->each(x, [&](T&, int row, int k, int bit) { drop(this->weight(row, k), row, k, bit); });
        this->template add_to<Factor::as_it_is>(sum, p.t.value, shared.tangent_base.value, key, p.value_dim, first_col);
        __syncthreads();  // the weights have been read
      }
      if (p.has_dropout) this->each(x, drop);
      this->store_weights(x);
      this->template add_to<Factor::as_it_is>(sum, p.value, shared.base.value, key, p.value_dim, first_col);
    });
    write();
  }

  // The weight of a row's sink, and the tangent of the sink. Only for calls with sinks.
  struct Sink {
    T weight, tangent;
  };
  __device__ __forceinline__ Sink sink(int row) const {
    const T tangent = p.t.sinks ? this->of_head(p.t.sinks, row) : 0;
    return {shared.row[row].weight(this->of_head(p.sinks, row)), tangent};
  }

  // Turns tx into P (tx - r), where P is in shared memory and r is the row's shift. Adds this tile's part of c - r to
  // the row's statistics. Sets the results of masked keys to 0, so that no NaN in a masked key reaches the output's
  // derivative.
  __device__ __forceinline__ void differentiate_weights(Scores& tangent) {
    const SimtThread thread;
#pragma unroll
    for (int i = 0; i < kSimtRows; ++i) {
      const int row = thread.row(i);
      const Statistics old = shared.row[row];
      T total = 0, mean = 0;
#pragma unroll
      for (int j = 0; j < kSimtCols; ++j) {
        const T weight = this->weight(row, thread.col(j));
        total += weight;
        mean += weight == 0 ? 0 : weight * tangent[i][j];
      }
      total = sum_over_x(total);
      mean = sum_over_x(mean);
      const bool begins = !old.has_shift && total > 0;
      if (begins && p.sinks) {  // the sink may have nearly all of the weight
        const auto [weight, tangent] = sink(row);
        total += weight;
        mean += weight * tangent;
      }
      const T shift = begins ? mean / total : old.shift;
      T shifted_sum = 0;
#pragma unroll
      for (int j = 0; j < kSimtCols; ++j) {
        const T weight = this->weight(row, thread.col(j));
        shifted_sum += tangent[i][j] = weight == 0 ? 0 : weight * (tangent[i][j] - shift);
      }
      shifted_sum = sum_over_x(shifted_sum);
      __syncwarp();  // all threads of the row have read; shuffles wait for threads, but do not order memory
      if (thread.x == 0) {
        shared.row[row].shift = shift;
        shared.row[row].shifted_sum = old.shifted_sum + shifted_sum;
        shared.row[row].has_shift = old.has_shift || begins;
      }
    }
    __syncwarp();
  }

  // Subtracts (c - r) O from the sum and writes the results.
  __device__ __forceinline__ void write() {
    __syncthreads();  // the statistics are there
    const SimtThread thread;
    const auto base_of = [&](const Operand& x) { return batch_offset(p, x, task.n); };
    const int64_t output_base = base_of(p.output), residual_base = base_of(p.residual);
    const int64_t to_base = base_of(p.tangent_output), rest_base = base_of(p.tangent_residual);
#pragma unroll
    for (int i = 0; i < kSimtRows; ++i) {
      const int row = thread.row(i);
      if (row >= task.rows) break;
      T shifted_sum = shared.row[row].shifted_sum;
      if (p.sinks) {  // c includes Psink tsink
        const auto [weight, tangent] = sink(row);
        shifted_sum += weight * (tangent - shared.row[row].shift);
      }
      const auto at = [&](const Operand& x, int64_t base, int64_t d) {
        return base + shared.rows.offset(x, row) + d * x.col;
      };
#pragma unroll
      for (int j = 0; j < kN; ++j) {
        const int64_t d = first_col + thread.col(j);
        if (d >= p.value_dim) continue;
        T exact = sum[i][j] - shifted_sum * read<T>(p.output, at(p.output, output_base, d));
        if (p.residual.data)
          exact -= shifted_sum * static_cast<const float*>(p.residual.data)[at(p.residual, residual_base, d)];
        store_exactly(p.tangent_output, at(p.tangent_output, to_base, d), p.tangent_residual,
                      at(p.tangent_residual, rest_base, d), exact);
      }
      if (thread.x == 0 && first_col == 0)
        static_cast<Pair<T>*>(p.tangent_logsumexp)[shared.rows.number(p, task.n, row)] = {shared.row[row].shift,
                                                                                          shifted_sum};
    }
  }
};

template <class T>
Error launch_tangent_simt(const TangentParams& p, Stream stream) {
  return with_cols<T>(p.value_dim, [&]<int kCols>() { return launch_blocks<TangentSimt<T, kCols>>(p, stream); });
}

}  // namespace attn::cuda
