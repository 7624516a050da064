// Computes multi-head latent attention (see wgmma/latent.cuh) on tensor cores of all GPUs since 8.0, where
// uses_latent() says so. Two warps share 16 rows. For the scores each has half of the keys, and for the output half of
// the columns. They give each other largest scores and weights through shared memory, because registers have no room
// for more. While a tile of keys is in use, the next one is copied.
#pragma once

#include "cuda/kernels.h"
#include "cuda/launch.cuh"
#include "cuda/mma/online_softmax.cuh"

namespace attn::cuda {

// S: the type of query and key.
template <class S>
struct LatentMma {
  static constexpr int kThreads = kMmaThreads, kBlocks = 2, kRows = 32, kKeys = 16, kStages = 2;
  static constexpr int kDim = kLatentKeyDim, kHalf = kLatentValueDim / 2;

  struct Shared {
    MmaTile<S, kRows, kDim> query;
    MmaTile<S, kKeys, kDim> key[kStages];
    MmaTile<S, kRows, 64> weights;  // of kKeys columns; a tile has no fewer
    Task task;
    RowTile<kRows> rows;
    float maximum[2][kRows], sum[2][kRows];  // of the keys of each half
  };
  using Softmax = OnlineSoftmax<1, 1, false>;
  using Output = float[1][kHalf / 8][4];

  const ForwardParams& p;
  Shared& shared;

  ATTN_INLINE static constexpr int64_t blocks(const ForwardParams& p) { return p.splits * blocks_of_rows(p, kRows); }

  // Starts to fill a tile with `rows` rows, of which row i begins from(i) numbers behind `data`. Eight threads copy a
  // row.
  template <int kTileRows, class From>
  __device__ __forceinline__ void start(MmaTile<S, kTileRows, kDim>& tile, const S* data, int rows, From from) {
#pragma unroll
    for (int i = own_copy(); i < kTileRows; i += kThreads / 8) {
      const S* const row = data + from(i);
#pragma unroll
      for (int vector = threadIdx.x % 8; vector < kDim / kVector; vector += 8)
        copy_async(tile.at(i, vector), row + vector * kVector, i < rows && vector * kVector < p.head_dim);
    }
  }
  static __device__ __forceinline__ int own_copy() { return static_cast<int>(threadIdx.x) / 8; }
  // Where the key that this thread copies begins, of the tile that begins with `key`. It is known one tile ahead.
  __device__ __forceinline__ int64_t find_key(int64_t key) const {
    static_assert(kKeys == kThreads / 8);
    key += own_copy();
    if (key >= shared.task.last_key) return 0;
    return p.paging.table ? offset_in_pages(p, p.key.page, p.key.row, shared.task.n, key) : key * p.key.row;
  }

  __device__ __forceinline__ void run(int64_t number) {
    if (threadIdx.x == 0) shared.task.set(p, number, kRows, kKeys);
    __syncthreads();
    const Task& task = shared.task;
    if (task.rows == 0) return;
    if (const int i = static_cast<int>(threadIdx.x); i < kRows)
      shared.rows.set(i, task.sequence, task.row_at(), task.rows);
    __syncthreads();
    const int64_t first = task.first_key, last = task.last_key;
    const S* const data = head_of<S>(p, p.key, task.n, task.key_head);
    int64_t offset = find_key(first);
    const auto start_keys = [&](int64_t key) {
      const int keys = static_cast<int>(smaller(kKeys, last - key));
      if (keys <= 0) return;
      start(shared.key[key / kKeys % kStages], data, keys, [&](int) { return offset; });
      commit_copies();
      offset = find_key(key + kKeys);
    };
    if (first < last) {
      start(shared.query, head_of<S>(p, p.query, task.n, 0), task.rows,
            [&](int i) { return shared.rows.offset(p.query, i); });
      start_keys(first);
    }

    const MmaThread thread;
    const int half = thread.warp % 2, own = thread.warp / 2 * 16;  // the first of 16 rows
    const Softmax softmax{p};
    Output output = {};
    float best[2] = {-infinity<float>(), -infinity<float>()}, sum[2] = {};
    for (int64_t key = first; key < last; key += kKeys) {
      wait_for_copies<0>();
      __syncthreads();  // the keys are copied, and the previous ones have been read
      start_keys(key + kKeys);
      float x[1][1][4] = {};
      auto& tile = shared.key[key / kKeys % kStages];
      add_scores(x[0][0], tile, own, half);
      if (!task.all_visible(key, kKeys))
        ScoresMma<S, 1, false>::hide_keys(x[0], own, task.sequence, shared.rows, kRows, key + 8 * half);
      float shift[2], factor[2];
      const float old[2] = {best[0], best[1]};
      softmax.raise(best, x);
      exchange(shared.maximum, best, own, half, [](float a, float b) { return max_or_nan(a, b); });
      softmax.find_shift(x, old, best, shift, factor);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        sum[r] = sum[r] * factor[r] + softmax.weigh(x, r, shift[r]);
        const int row = own + thread.group + 8 * r;
        reinterpret_cast<uint32_t*>(shared.weights.at(row, half))[thread.place] =
            pack<S>(x[0][0][2 * r], x[0][0][2 * r + 1]);
      }
      Softmax::rescale(output[0], factor);
      __syncthreads();  // the weights are there
      add_output(output[0], tile, own, half);
    }
#pragma unroll
    for (float& of_row : sum) {
      of_row += __shfl_xor_sync(~0u, of_row, 1);
      of_row += __shfl_xor_sync(~0u, of_row, 2);
    }
    exchange(shared.sum, sum, own, half, [](float a, float b) { return a + b; });
    const int64_t residual = p.residual.data ? batch_offset(p, p.residual, task.n) : 0;
    const bool vectors = softmax.writes_vectors(p);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int i = own + thread.group + 8 * r;
      const OutputRow<float> to(p, batch_offset(p, p.output, task.n), residual, shared.rows.at(task.n, i), task.split);
      softmax.template write<S>(to, vectors, i < task.rows, output, r, best[r], sum[r], half * kHalf);
    }
  }

  // Combines what both warps have for their rows, in the same order.
  template <class Combine>
  __device__ __forceinline__ void exchange(float (&halves)[2][kRows], float (&x)[2], int own, int half,
                                           Combine combine) {
    const MmaThread thread;
    if (thread.place == 0)
#pragma unroll
      for (int r = 0; r < 2; ++r) halves[half][own + thread.group + 8 * r] = x[r];
    __syncthreads();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int i = own + thread.group + 8 * r;
      x[r] = combine(halves[0][i], halves[1][i]);
    }
  }
  // Products of 16 rows and eight keys.
  __device__ __forceinline__ void add_scores(float (&x)[4], MmaTile<S, kKeys, kDim>& tile, int own, int half) {
    const int lane = MmaThread().lane;
#pragma unroll
    for (int k = 0; k < kDim / 16; k += 2) {
      uint32_t a[2][4], b[4];  // B of two steps
      load_matrices(b, tile.address(8 * half + lane % 8, lane / 8 % 2, k + lane / 16));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        load_a(a[i], shared.query, lane, own, 0, k + i);
        multiply_add<S>(x, a[i], b[2 * i], b[2 * i + 1]);
      }
    }
  }
  // Products of the weights of 16 rows and half of the columns of the values.
  __device__ __forceinline__ void add_output(float (&output)[kHalf / 8][4], MmaTile<S, kKeys, kDim>& tile, int own,
                                             int half) {
    const int lane = MmaThread().lane;
    uint32_t a[4];
    load_a(a, shared.weights, lane, own, 0, 0);
#pragma unroll
    for (int n = 0; n < kHalf / 8; n += 2) {
      uint32_t b[4];
      load_matrices_transposed(b, tile.address(lane % 16, lane / 16, half * kHalf / 16 + n / 2));
#pragma unroll
      for (int i = 0; i < 2; ++i) multiply_add<S>(output[n + i], a, b[2 * i], b[2 * i + 1]);
    }
  }
};

template <class S>
Error launch_latent_mma(const ForwardParams& p, Stream stream) {
  static_assert(LatentMma<S>::kRows == kLatentMmaRows);
  return launch_blocks<LatentMma<S>>(p, stream);
}

}  // namespace attn::cuda
