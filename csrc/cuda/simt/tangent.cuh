// Computes J t, the derivative of the output along a direction, for every dtype, with plain multiply-adds, in one pass
// over the keys a block of 64 rows, per 64 or 128 columns: the formulas of cpu/kernels/tangent.inl, whose
// names are used here.
#pragma once

#include "cuda/simt/scores.cuh"

namespace attn::cuda {

// T: the type it computes in. kCols: the columns of the output that a block computes.
template <class T, int kCols>
struct TangentSimt : ScoresSimt<T, TangentParams, false, kCols> {
  using Base = ScoresSimt<T, TangentParams, false, kCols>;
  using Base::kN;
  using Base::p;
  using Base::task;
  using typename Base::Scores, typename Base::Sums;

  struct Statistics {
    T logsumexp, logsumexp_low;  // +inf for a row that attends to no key
    T shift, shifted_sum;        // r, c - r
    bool has_shift;
  };
  struct Shared : Base::Shared {
    TangentBases tangent_base;
    Statistics row[kSimtTile];
  };

  Shared& shared;
  int64_t first_col = 0;  // of the output
  Sums sum = {};

  __device__ TangentSimt(const TangentParams& p, Shared& shared) : Base(p, shared), shared(shared) {}

  __device__ __forceinline__ int64_t number_of(int row) const {
    return row_number(p, task.n, shared.rows.head[row], shared.rows.position[row]);
  }

  ATTN_INLINE static constexpr int64_t blocks(const TangentParams& p) {
    return p.tasks() * larger(1, divide_up(p.value_dim, kCols));
  }
  __device__ void run(int64_t number) {
    first_col = number / p.tasks() * kCols;
    this->set_task(number % p.tasks());
    if (threadIdx.x == 0) shared.tangent_base.set(p, task);
    for (int i = threadIdx.x; i < kSimtTile; i += kSimtThreads) {  // the rows that this thread has set
      const T* pair = static_cast<const T*>(p.logsumexp) + 2 * number_of(i);
      const bool empty = pair[0] == -infinity<T>();
      shared.row[i] = {empty ? infinity<T>() : pair[0], empty ? 0 : pair[1], 0, 0, false};
    }
    __syncthreads();
    for (int64_t key = task.first_key; key < task.last_key; key += kSimtTile) {
      if (!this->shows_some(key)) continue;
      Scores x = {};
      this->scores(x, key);
      this->each(x, [&](T& score, int row, int, int) {
        const Statistics& s = shared.row[row];
        score = score == -infinity<T>() ? 0 : exp((score - s.logsumexp) - s.logsumexp_low);
      });
      this->store_weights(x);
      Scores tangent = {};
      this->tangent_scores(tangent, shared.tangent_base, key);
      differentiate_weights(tangent);
      const uint32_t kept = this->kept(key);
      const auto drop = [&](T& weight, int, int, int bit) {
        weight *= static_cast<T>(kept >> bit & 1) * static_cast<T>(p.keep_scale);
      };
      if (p.t.value.data) {
        if (p.has_dropout) this->each(x, [&](T&, int row, int k, int bit) { drop(this->weight(row, k), row, k, bit); });
        this->template add_to<AsItIs>(sum, p.t.value, shared.tangent_base.value, key, p.value_dim, first_col);
        __syncthreads();  // the weights have been read
      }
      if (p.has_dropout) this->each(tangent, drop);
      this->store_weights(tangent);
      this->template add_to<AsItIs>(sum, p.value, shared.value_base, key, p.value_dim, first_col);
    }
    write();
  }

  // tx becomes P (tx - r); adds up c - r. P is in shared memory; by selection, nothing of a masked key comes through.
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
      const T shift = begins ? mean / total : old.shift;
      T shifted_sum = 0;
#pragma unroll
      for (int j = 0; j < kSimtCols; ++j) {
        const T weight = this->weight(row, thread.col(j));
        shifted_sum += tangent[i][j] = weight == 0 ? 0 : weight * (tangent[i][j] - shift);
      }
      shifted_sum = sum_over_x(shifted_sum);
      if (thread.x == 0) {  // all of the row have read: the shuffles have brought them together
        shared.row[row].shift = shift;
        shared.row[row].shifted_sum = old.shifted_sum + shifted_sum;
        shared.row[row].has_shift = old.has_shift || begins;
      }
    }
    __syncwarp();
  }

  // Subtracts (c - r) O and writes the results.
  __device__ __forceinline__ void write() {
    __syncthreads();  // the statistics are there
    const SimtThread thread;
    const auto base_of = [&](const Operand& x) { return x.data ? batch_offset(p, x, task.n) : 0; };
    const int64_t output_base = base_of(p.output), residual_base = base_of(p.residual);
    const int64_t to_base = base_of(p.tangent_output), rest_base = base_of(p.tangent_residual);
#pragma unroll
    for (int i = 0; i < kSimtRows; ++i) {
      const int row = thread.row(i);
      if (row >= task.rows) break;
      const T shifted_sum = shared.row[row].shifted_sum;
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
        const T stored =
            store_rounded(p.tangent_output.data, p.tangent_output.dtype, at(p.tangent_output, to_base, d), exact);
        if (p.tangent_residual.data)
          static_cast<float*>(p.tangent_residual.data)[at(p.tangent_residual, rest_base, d)] = exact - stored;
      }
      if (thread.x == 0 && first_col == 0) {
        T* pair = static_cast<T*>(p.tangent_logsumexp) + 2 * number_of(row);
        pair[0] = shared.row[row].shift;
        pair[1] = shifted_sum;
      }
    }
  }
};

template <class T>
Error launch_tangent_simt(const TangentParams& p, Stream stream) {
  return with_cols<T>(p.value_dim, [&]<int kCols>() { return launch_simt<TangentSimt<T, kCols>>(p, stream); });
}

}  // namespace attn::cuda
