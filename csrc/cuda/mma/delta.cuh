// Computes delta of each row (write_delta()) from <G, O + residual>, before tensor cores compute gradients.
#pragma once

#include "cuda/kernels.h"
#include "cuda/launch.cuh"
#include "cuda/shared/softmax.cuh"

namespace attn::cuda {

constexpr int kDeltaThreads = 128;
constexpr int kDeltaSteps = 4;  // rows of a thread, whose loads are all under way at a time

// The number of lanes that share a row of up to kDim columns. Each lane reads one vector of the row.
template <int kDim>
constexpr int kDeltaLanes = kDim / kVector;
// The number of rows of a block.
template <int kDim>
constexpr int kDeltaRows = kDeltaSteps * kDeltaThreads / kDeltaLanes<kDim>;

template <int kDim>
__host__ __device__ int64_t delta_tasks(const BackwardParams& p) {
  return entries_of(p) * p.heads * tiles_of(p, p.queries, p.tokens, kDeltaRows<kDim>);
}

// Sums are short and always in the same order. First each lane sums eight products. Then lanes add their sums in pairs.
template <class S, int kDim>
__global__ void __launch_bounds__(kDeltaThreads) delta_mma(const __grid_constant__ BackwardParams p) {
  constexpr int kLanes = kDeltaLanes<kDim>, kRowsAtOnce = kDeltaThreads / kLanes;
  const int64_t number = block_number(), places = tiles_of(p, p.queries, p.tokens, kDeltaRows<kDim>);
  if (number >= delta_tasks<kDim>(p)) return;
  const int64_t head = number / places;
  const Tile tile =
      Tile::at(p, head / p.heads, number % places, p.query_starts, p.queries, p.tokens, 1, kDeltaRows<kDim>);
  const int64_t queries = length_of(p.visibility.query_lengths, tile.n, p.queries);
  const Row first{tile.n, head % p.heads, tile.first(queries, kDeltaRows<kDim>)};
  const int rows = static_cast<int>(smaller(kDeltaRows<kDim>, queries - first.position));
  if (rows <= 0) return;
  const int col = threadIdx.x % kLanes * kVector, own = threadIdx.x / kLanes;
  const int own_rows = col < p.value_dim ? rows : 0;  // 0 if this thread's columns are beyond value_dim

  const auto begin = [&](const Operand& x) {
    return batch_offset(p, x, first.n) + first.head * x.head + (first.position + own) * x.row + col;
  };
  const auto* grad_output = static_cast<const S*>(p.grad_output.data) + begin(p.grad_output);
  const auto* output = static_cast<const S*>(p.output.data) + begin(p.output);
  const auto* residual = p.residual.data ? static_cast<const float*>(p.residual.data) + begin(p.residual) : nullptr;
  float sum[kDeltaSteps] = {};
#pragma unroll
  for (int k = 0; k < kDeltaSteps; ++k) {
    const int64_t i = k * kRowsAtOnce;
    if (own + i >= own_rows) continue;
    S g[kVector], o[kVector];
    float rest[kVector] = {};
    load_vec16(g, grad_output + i * p.grad_output.row);
    load_vec16(o, output + i * p.output.row);
    if (residual) load_vec16(rest, residual + i * p.residual.row);
    float of_rest = 0;
#pragma unroll
    for (int c = 0; c < kVector; ++c) {
      sum[k] = fmaf(to_float(g[c]), to_float(o[c]), sum[k]);
      of_rest = fmaf(to_float(g[c]), rest[c], of_rest);
    }
    sum[k] += of_rest;
  }
#pragma unroll
  for (int lanes = 1; lanes < kLanes; lanes *= 2)
#pragma unroll
    for (float& s : sum) s += __shfl_xor_sync(~0u, s, lanes);
  if (col > 0) return;
#pragma unroll
  for (int k = 0; k < kDeltaSteps; ++k)
    if (own + k * kRowsAtOnce < rows)
      write_delta<float>(p, {first.n, first.head, first.position + own + k * kRowsAtOnce}, sum[k], 0);
}

template <class S>
Error launch_delta_mma(const BackwardParams& p, Stream stream) {
  return with_padded_dim(p.value_dim, [&]<int kDim>() {
    return launch<Nothing>(delta_mma<S, kDim>, p, delta_tasks<kDim>(p), kDeltaThreads, stream);
  });
}

}  // namespace attn::cuda
