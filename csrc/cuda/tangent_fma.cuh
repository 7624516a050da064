// J t, the derivative of the output along a direction, with plain multiply-adds: the formulas of cpu/tangent.inl, whose
// names are used here.
#pragma once

#include "scores_fma.cuh"

namespace attn::cuda {

// T: the type it computes in. kCols: the columns of the output that a block computes.
template <class T, int kCols>
struct TangentFma : ScoresFma<T, TangentParams, false, kCols> {
  using Base = ScoresFma<T, TangentParams, false, kCols>;
  using Base::kN;
  using Base::p;
  using Base::task;
  using typename Base::Scores, typename Base::Sums;

  struct Statistics {
    T logsumexp, logsumexp_low;  // +inf for a row that attends to no key
    T guess, moved;              // r, c - r
    bool has_guess;
  };
  struct Shared : Base::Shared {
    int64_t tangent_query_base, tangent_key_base, tangent_value_base, tangent_mask_base;
    Statistics row[kFmaTile];
  };

  Shared& shared;
  const int64_t first_col;  // of the output
  Sums sum = {};

  // Called by one thread, followed by a barrier.
  __device__ static void set(const TangentParams& p, Shared& shared, int64_t number) {
    Task& task = shared.task;
    const int64_t row_tasks = p.row_tasks();
    const int64_t row = (row_tasks - 1 - number % row_tasks) * p.rows_per_task, group = number / row_tasks;
    task.n = group / p.groups();
    task.set_rows(p, group % p.groups() * p.group, row, smaller(p.rows_per_task, p.rows() - row));
    task.set_keys(p, 0, p.keys);
    Base::set_bases(p, shared);
    const auto base_of = [&](const Operand& x, int64_t head) {
      return x.data ? batch_offset(p, x, task.n) + head * x.head : 0;
    };
    shared.tangent_query_base = base_of(p.t.query, 0);
    shared.tangent_key_base = base_of(p.t.key, task.key_head);
    shared.tangent_value_base = base_of(p.t.value, task.value_head);
    shared.tangent_mask_base = base_of(p.t.mask, 0);
  }

  __device__ TangentFma(const TangentParams& p, Shared& shared, int64_t first_col)
      : Base(p, shared), shared(shared), first_col(first_col) {}

  __device__ __forceinline__ int64_t statistic(int row) const {
    return (task.n * p.heads + shared.rows.head[row]) * p.queries + shared.rows.position[row];
  }

  __device__ void run() {
    this->set_rows();
    for (int i = threadIdx.x; i < kFmaTile; i += kFmaThreads) {  // the rows that this thread has set
      const T* pair = static_cast<const T*>(p.logsumexp) + 2 * statistic(i);
      const bool empty = pair[0] == -infinity<T>();
      shared.row[i] = {empty ? infinity<T>() : pair[0], empty ? 0 : pair[1], 0, 0, false};
    }
    __syncthreads();
    for (int64_t key = 0; key < task.last_key; key += kFmaTile) {
      Scores x = {};
      this->scores(x, key);
      this->each(x, [&](T& score, int row, int, int) {
        const Statistics& s = shared.row[row];
        score = score == -infinity<T>() ? 0 : exp((score - s.logsumexp) - s.logsumexp_low);
      });
      this->store_weights(x);
      Scores tangent = {};
      tangent_scores(tangent, key);
      move_weights(tangent);
      const uint32_t kept = this->kept(key);
      const auto drop = [&](T& weight, int, int, int bit) {
        weight *= static_cast<T>(kept >> bit & 1) * static_cast<T>(p.keep_scale);
      };
      if (p.t.value.data) {
        if (p.has_dropout) this->each(x, [&](T&, int row, int k, int bit) { drop(this->weight(row, k), row, k, bit); });
        this->template add_to<AsItIs>(sum, p.t.value, shared.tangent_value_base, key, p.value_dim, first_col);
        __syncthreads();  // the weights have been read
      }
      if (p.has_dropout) this->each(tangent, drop);
      this->store_weights(tangent);
      this->template add_to<AsItIs>(sum, p.value, shared.value_base, key, p.value_dim, first_col);
    }
    write();
  }

  // tx; meaningless where the score is masked. x is 0 before.
  __device__ __forceinline__ void tangent_scores(Scores& x, int64_t key) {
    if (p.t.query.data)
      this->add_dots(x, p.t.query, shared.tangent_query_base, p.key, shared.key_base, key, p.head_dim);
    if (p.t.key.data) this->add_dots(x, p.query, shared.query_base, p.t.key, shared.tangent_key_base, key, p.head_dim);
    const T scale = static_cast<T>(p.scale);
    this->each(x, [&](T& tangent, int, int, int) { tangent *= scale; });
    if (p.t.mask.data)
      this->each_of_mask(x, p.t.mask, shared.tangent_mask_base, key, [](T& tangent, T moved) { tangent += moved; });
  }

  static __device__ __forceinline__ T sum_of_row(T x) {
#pragma unroll
    for (int lanes = 1; lanes < 16; lanes *= 2) x += __shfl_xor_sync(~0u, x, lanes);
    return x;
  }

  // tx becomes P (tx - r); adds up c - r. P is in shared memory; by selection, nothing of a masked key comes through.
  __device__ __forceinline__ void move_weights(Scores& tangent) {
    const FmaThread thread;
#pragma unroll
    for (int i = 0; i < kFmaRows; ++i) {
      const int row = thread.row(i);
      const Statistics old = shared.row[row];
      T total = 0, mean = 0;
#pragma unroll
      for (int j = 0; j < kFmaCols; ++j) {
        const T weight = this->weight(row, thread.col(j));
        total += weight;
        mean += weight == 0 ? 0 : weight * tangent[i][j];
      }
      total = sum_of_row(total);
      mean = sum_of_row(mean);
      const bool guesses = !old.has_guess && total > 0;
      const T guess = guesses ? mean / total : old.guess;
      T moved = 0;
#pragma unroll
      for (int j = 0; j < kFmaCols; ++j) {
        const T weight = this->weight(row, thread.col(j));
        moved += tangent[i][j] = weight == 0 ? 0 : weight * (tangent[i][j] - guess);
      }
      moved = sum_of_row(moved);
      if (thread.x == 0) {  // all of the row have read: the shuffles have brought them together
        shared.row[row].guess = guess;
        shared.row[row].moved = old.moved + moved;
        shared.row[row].has_guess = old.has_guess || guesses;
      }
    }
    __syncwarp();
  }

  // Takes off (c - r) O.
  __device__ __forceinline__ void write() {
    __syncthreads();  // the statistics are there
    const FmaThread thread;
    const auto base_of = [&](const Operand& x) { return x.data ? batch_offset(p, x, task.n) : 0; };
    const int64_t output_base = base_of(p.output), residual_base = base_of(p.residual);
    const int64_t to_base = base_of(p.tangent_output), rest_base = base_of(p.tangent_residual);
#pragma unroll
    for (int i = 0; i < kFmaRows; ++i) {
      const int row = thread.row(i);
      if (row >= task.rows) break;
      const T moved = shared.row[row].moved;
      const auto at = [&](const Operand& x, int64_t base, int64_t d) {
        return base + shared.rows.offset(x, row) + d * x.col;
      };
#pragma unroll
      for (int j = 0; j < kN; ++j) {
        const int64_t d = first_col + thread.col(j);
        if (d >= p.value_dim) continue;
        T exact = sum[i][j] - moved * read<T>(p.output, at(p.output, output_base, d));
        if (p.residual.data)
          exact -= moved * static_cast<const float*>(p.residual.data)[at(p.residual, residual_base, d)];
        const T stored =
            store_rounded(p.tangent_output.data, p.tangent_output.dtype, at(p.tangent_output, to_base, d), exact);
        if (p.tangent_residual.data)
          static_cast<float*>(p.tangent_residual.data)[at(p.tangent_residual, rest_base, d)] = exact - stored;
      }
      if (thread.x == 0 && first_col == 0) {
        T* pair = static_cast<T*>(p.tangent_logsumexp) + 2 * statistic(row);
        pair[0] = shared.row[row].guess;
        pair[1] = moved;
      }
    }
  }
};

template <class T, int kCols>
__global__ void __launch_bounds__(kFmaThreads, 2) tangent_fma(const __grid_constant__ TangentParams p) {
  using Kernel = TangentFma<T, kCols>;
  const int64_t number = block_number(), tasks = p.tasks();
  if (number >= tasks * larger(1, divide_up(p.value_dim, kCols))) return;
  auto& shared = *reinterpret_cast<typename Kernel::Shared*>(shared_memory());
  if (threadIdx.x == 0) Kernel::set(p, shared, number % tasks);
  __syncthreads();
  Kernel(p, shared, number / tasks * kCols).run();
}

}  // namespace attn::cuda
