// The forward of forward_simt.cuh for bfloat16 and float16 on tensor cores, up to head_dim 256, in the shape of
// FlashAttention-2 (Dao, 2023): a warp owns rows, their weights stay in registers between the two products.
// Of K and V one tile is in use while the other's copy is under way.
#pragma once

#include "kernels.h"
#include "launch.cuh"
#include "scores_mma.cuh"

namespace attn::cuda {

// S: the type of query, key, value. kDim: head_dim of key and value, padded. kTiles: of 16 rows, of a warp. kGeneral:
// with a mask, dropout or a scale that is not positive.
template <class S, int kDim, int kTiles, bool kGeneral>
struct ForwardMma {
  static constexpr int kRows = kMmaThreads / 32 * 16 * kTiles;
  static constexpr int kKeys = kKeysPerTile;
  static constexpr float kLog2E = 1.4426950408889634f;

  struct Shared {
    MmaTile<S, kRows, kDim> query;
    MmaTile<S, kKeys, kDim> key;
    MmaTile<S, kKeys, kDim> value;
    Task task;
    Dropout dropout;
    const S* key_data;  // of the batch entry and head
    const S* value_data;
    bool key_aligned, value_aligned;
    int64_t mask_base;  // where the batch entry begins
    RowTile<kRows> rows;
    // Read and written once a tile of keys, which registers need not keep. The sums are those of a thread's columns.
    float maximum[kRows];
    float sum[2 * kTiles][kMmaThreads];
    uint32_t head_number[kGeneral ? kRows : 1];  // of dropout's counters
  };
  static_assert(sizeof(Shared) <= 99 << 10, "the shared memory of a block on sm_86 and sm_89");
  using Fragments = ScoresMma<kKeys / 8, false>;
  using Scores = Fragments::Scores[kTiles];
  using Output = float[kTiles][kDim / 8][4];

  const ForwardParams& p;
  Shared& shared;
  const Task& task;

  __device__ ForwardMma(const ForwardParams& p, Shared& shared) : p(p), shared(shared), task(shared.task) {}

  __device__ static void set(const ForwardParams& p, Shared& s, int64_t number) {
    s.task.set(p, number, kKeys);
    if (p.has_dropout) s.dropout.set(p, s.task.n);
    const int64_t n = s.task.n;
    s.key_data = static_cast<const S*>(p.key.data) + batch_offset(p, p.key, n) + s.task.key_head * p.key.head;
    s.value_data = static_cast<const S*>(p.value.data) + batch_offset(p, p.value, n) + s.task.value_head * p.value.head;
    s.key_aligned = chunks_are_aligned(p, p.key, p.head_dim);
    s.value_aligned = chunks_are_aligned(p, p.value, p.value_dim);
    s.mask_base = p.has_mask ? batch_offset(p, p.mask, n) : 0;
  }

  // The first row of tile t of a warp, in the block's tile; and the row of it that a thread's elements 0 and 1
  // (half 0) or 2 and 3 (half 1) are of.
  __device__ static __forceinline__ int row(const MmaThread& thread, int t) { return 16 * (kTiles * thread.warp + t); }
  __device__ static __forceinline__ int row(const MmaThread& thread, int t, int half) {
    return row(thread, t) + thread.group + 8 * half;
  }

  __device__ __forceinline__ void load_key(int64_t key) {
    load_tile(shared.key, shared.key_data + key * p.key.row, p.key.col, shared.key_aligned, task.last_key - key,
              p.head_dim, [&](int j) { return j * p.key.row; });
  }
  __device__ __forceinline__ void load_value(int64_t key) {
    load_tile(shared.value, shared.value_data + key * p.value.row, p.value.col, shared.value_aligned,
              task.last_key - key, p.value_dim, [&](int j) { return j * p.value.row; });
  }

  __device__ __forceinline__ void run() {
    Output output = {};
    for (int i = threadIdx.x; i < kRows; i += kMmaThreads) shared.maximum[i] = -infinity<float>();
    for (auto& sums : shared.sum) sums[threadIdx.x] = 0;
    shared.rows.set(p, task.n, task.first_head, task.first_row, task.rows);
    if constexpr (kGeneral)
      if (p.has_dropout)
        for (int i = threadIdx.x; i < kRows; i += kMmaThreads)  // the rows that this thread has set
          shared.head_number[i] = shared.dropout.head(p, task.n, shared.rows.head[i]);
    __syncthreads();
    if (task.first_key < task.last_key) {
      const S* query = static_cast<const S*>(p.query.data) + batch_offset(p, p.query, task.n);
      load_tile(shared.query, query, p.query.col, chunks_are_aligned(p, p.query, p.head_dim), task.rows, p.head_dim,
                [&](int i) { return shared.rows.offset(p.query, i); });
      load_key(task.first_key);
      commit_copies();
    }
    for (int64_t key = task.first_key; key < task.last_key; key += kKeys) {
      wait_for_copies<0>();
      __syncthreads();  // the keys are there, and the last values have been read
      load_value(key);
      commit_copies();
      Scores x = {};
      if (has_rows()) multiply_keys(x);
      wait_for_copies<0>();
      __syncthreads();  // the values are there, and the keys have been read
      if (key + kKeys < task.last_key) {
        load_key(key + kKeys);
        commit_copies();
      }
      if (!has_rows()) continue;
      make_scores(x, key);
      softmax(x, output);
      if constexpr (kGeneral)
        if (p.has_dropout) drop(x, key);
      multiply_values(x, output);
    }
    write(output);
  }

  // If there are few rows, the first warps have all of them, and the others only copy.
  __device__ __forceinline__ bool has_rows() const { return row(MmaThread(), 0) < task.rows; }

  // x = <q, k>
  __device__ __forceinline__ void multiply_keys(Scores& x) {
    const MmaThread thread;
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
      uint32_t a[kTiles][4];
#pragma unroll
      for (int t = 0; t < kTiles; ++t) load_a(a[t], shared.query, thread.lane, row(thread, t), k);
#pragma unroll
      for (int n = 0; n < kKeys / 8; n += 2) {
        uint32_t b[4];
        load_b_transposed(b, shared.key, thread.lane, 8 * n, k);
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          multiply_add<S>(x[t][n], a[t], b[0], b[1]);
          multiply_add<S>(x[t][n + 1], a[t], b[2], b[3]);
        }
      }
    }
  }

  // Products become scores if kGeneral; else they stay what they are, and weight() makes scores of them. In both cases
  // -inf where a key is hidden or there is none.
  __device__ __forceinline__ void make_scores(Scores& x, int64_t key) {
    const int keys = static_cast<int>(smaller(kKeys, task.last_key - key));
    if constexpr (kGeneral) {
      const auto score_of = ScoreFunction<float>::of(p);
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        const int own = row(MmaThread(), t);
        Fragments::each(x[t], own, [&](float& score, int, int, int, int) { score = score_of(score); });
        if (p.has_mask) Fragments::add_mask(x[t], own, p, shared.mask_base, shared.rows, key, keys);
      }
    }
    const bool hidden = !all_visible(p, task.positions, {key, key + kKeys});
    if (!hidden && keys == kKeys) return;
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
      Fragments::hide_keys(x[t], row(MmaThread(), t), p, shared.rows, kRows, key, keys, hidden);
  }

  // Base-2 exponent of the score of a product: product * slope * log2(e). Rounded once, so that weights that are
  // shifted by the same maximum, and what corrects them for another one, share a factor, which the division by their
  // sum removes.
  __device__ __forceinline__ float exponent_slope() const { return ScoreFunction<float>::of(p).slope() * kLog2E; }
  __device__ __forceinline__ float exponent(float product) const { return __fmul_rn(product, exponent_slope()); }

  // exp(score - maximum) of what make_scores() leaves.
  __device__ __forceinline__ float weight(float x, float shift) const {
    if constexpr (kGeneral) return exp2_approx((x - shift) * kLog2E);
    return exp2_approx(fmaf(x, exponent_slope(), -exponent(shift)));
  }
  // What weights that were shifted by `old` are multiplied by; 1 where nothing has changed.
  __device__ __forceinline__ float correction(float old, float shift) const {
    if constexpr (kGeneral) return weight(old, shift);
    return exp2_approx(exponent(old) - exponent(shift));
  }

  // Scores become weights.
  __device__ __forceinline__ void softmax(Scores& x, Output& output) {
    const MmaThread thread;
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float& sum = shared.sum[2 * t + half][32 * thread.warp + thread.lane];
        const float old = shared.maximum[row(thread, t, half)];
        float best = old;
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n)
          best = max_number(x[t][n][2 * half], max_number(x[t][n][2 * half + 1], best));
        best = max_number(__shfl_xor_sync(~0u, best, 1), best);
        best = max_number(__shfl_xor_sync(~0u, best, 2), best);
        const float shift = shift_of(best);
        const float factor = correction(old, shift);
        if (thread.place == 0) shared.maximum[row(thread, t, half)] = best;
        float total = 0;
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
          for (int c = 2 * half; c < 2 * half + 2; ++c) total += x[t][n][c] = weight(x[t][n][c], shift);
        sum = sum * factor + total;  // of this lane's columns
#pragma unroll
        for (int n = 0; n < kDim / 8; ++n) {
          output[t][n][2 * half] *= factor;
          output[t][n][2 * half + 1] *= factor;
        }
      }
  }

  __device__ __forceinline__ void drop(Scores& x, int64_t key) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const int own = row(MmaThread(), t);
      typename Fragments::Kept kept;
      Fragments::dropout_mask(kept, own, shared.dropout, shared.rows, shared.head_number, key);
      Fragments::each(x[t], own, [&](float& weight, int, int, int half, int bit) {
        weight *= static_cast<float>(kept[half] >> bit & 1);
      });
    }
  }

  __device__ __forceinline__ void multiply_values(const Scores& x, Output& output) {
    const MmaThread thread;
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
      // The C of two products, [16 x 8] each, is the A [16 x 16] of this one.
      uint32_t a[kTiles][4];
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        a[t][0] = pack<S>(x[t][2 * k][0], x[t][2 * k][1]);
        a[t][1] = pack<S>(x[t][2 * k][2], x[t][2 * k][3]);
        a[t][2] = pack<S>(x[t][2 * k + 1][0], x[t][2 * k + 1][1]);
        a[t][3] = pack<S>(x[t][2 * k + 1][2], x[t][2 * k + 1][3]);
      }
#pragma unroll
      for (int n = 0; n < kDim / 8; n += 2) {
        uint32_t b[4];
        load_b(b, shared.value, thread.lane, 16 * k, n);
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          multiply_add<S>(output[t][n], a[t], b[0], b[1]);
          multiply_add<S>(output[t][n + 1], a[t], b[2], b[3]);
        }
      }
    }
  }

  // Divides by the sum; a row that saw no key is 0, its logsumexp -inf.
  __device__ __forceinline__ void write(const Output& output) {
    const MmaThread thread;
    const int64_t output_base = batch_offset(p, p.output, task.n);
    const int64_t residual_base = p.residual.data ? batch_offset(p, p.residual, task.n) : 0;
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float total = shared.sum[2 * t + half][threadIdx.x];
        total += __shfl_xor_sync(~0u, total, 1);
        total += __shfl_xor_sync(~0u, total, 2);
        const int i = row(thread, t, half);
        if (i >= task.rows) continue;
        const bool empty = total == 0;
        const float inverse = static_cast<float>(p.keep_scale) / (empty ? 1 : total);
        const OutputRow<float> to(p, task.n, output_base, residual_base, shared.rows.head[i], shared.rows.position[i],
                                  task.split);
#pragma unroll
        for (int n = 0; n < kDim / 8; ++n)
#pragma unroll
          for (int c = 0; c < 2; ++c)
            if (thread.col(n) + c < p.value_dim)
              to.write(thread.col(n) + c, empty ? 0 : output[t][n][2 * half + c] * inverse);
        if (thread.place > 0) continue;
        const float best = empty ? 0 : shared.maximum[i];
        float maximum = best, maximum_low = 0;
        if constexpr (!kGeneral) {
          const float scale = ScoreFunction<float>::of(p).slope();
          maximum = __fmul_rn(best, scale);
          // What rounding took from the maximum, and the logarithm of the factor that all weights share.
          maximum_low = fmaf(best, scale, -maximum) - fmaf(best, scale * kLog2E, -exponent(best)) / kLog2E;
        }
        to.write_logsumexp(task.split, maximum, maximum_low, total);
      }
  }
};

template <class S, int kDim, int kTiles, bool kGeneral>
__global__ void __launch_bounds__(kMmaThreads) forward_mma(const __grid_constant__ ForwardParams p) {
  using Kernel = ForwardMma<S, kDim, kTiles, kGeneral>;
  const int64_t number = block_number();
  if (number >= p.tasks()) return;
  auto& shared = *reinterpret_cast<typename Kernel::Shared*>(shared_memory());
  if (threadIdx.x == 0) Kernel::set(p, shared, number);
  __syncthreads();
  Kernel(p, shared).run();
}

template <class S, int kDim, int kTiles, bool kGeneral>
Error launch_forward_mma_tiles(const ForwardParams& p, Stream stream) {
  return launch(forward_mma<S, kDim, kTiles, kGeneral>, p, p.tasks(), kMmaThreads,
                sizeof(typename ForwardMma<S, kDim, kTiles, kGeneral>::Shared), stream);
}

template <class S, int kDim, bool kGeneral>
Error launch_forward_mma_of(const ForwardParams& p, Stream stream) {
  constexpr int kTiles = forward_mma_tiles(kDim, kGeneral);
  return p.rows_per_task == forward_mma_rows(kTiles) ? launch_forward_mma_tiles<S, kDim, kTiles, kGeneral>(p, stream)
                                                     : launch_forward_mma_tiles<S, kDim, 1, kGeneral>(p, stream);
}

template <class S, int kDim>
Error launch_forward_mma(const ForwardParams& p, Stream stream) {
  return is_general(p) ? launch_forward_mma_of<S, kDim, true>(p, stream)
                       : launch_forward_mma_of<S, kDim, false>(p, stream);
}

}  // namespace attn::cuda
