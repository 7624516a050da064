// Computes dQ, dK and dV in one pass, in five products where two passes take seven. Blocks own keys, as in the second
// of the two passes, and each adds its share of a tile's dQ to sums in memory. The blocks of a tile do so in turn, from
// the last keys that it sees to the first ones, so that sums have the same bits on every run. A kernel then rounds the
// sums.
//
// The library does not launch it, because no GPU has shown yet where it is faster. A first run on a GPU times both.
#pragma once

#include "cuda/wgmma/grad_key.cuh"

namespace attn::cuda {

constexpr int kOnePassRows = 64;  // of a tile

// Whether one pass computes the gradients of a call that uses_backward_wgmma(). The keys that a tile sees have to be
// consecutive, so that each block knows how many come before it.
ATTN_INLINE constexpr bool takes_one_pass(const BackwardParams& p) {
  const bool consecutive = p.visibility.left < 0 || p.group == 1;
  return consecutive && p.sequences == 0 && !p.has_mask && !p.has_dropout && !p.grad_slopes && p.grad_query.data;
}
// The tiles of all rows. For each the caller allocates kOnePassRows * kDim floats in grad_query_sum, and a counter.
ATTN_INLINE constexpr int64_t one_pass_tiles(const Problem& p) {
  return p.batch * p.key_heads * divide_up(p.rows(), kOnePassRows);
}

// Rounds the sums of dQ. A block has the threads of the consumers that have computed a tile, and each thread reads the
// numbers that were its own.
template <class S, int kDim, int kConsumers = 2>
struct RoundQuerySums {
  static constexpr int kThreads = kGroupThreads * kConsumers, kBlocks = 0, kCols = kDim / kConsumers;
  using Shared = Nothing;

  const BackwardTaskParams& p;
  Shared& shared;

  ATTN_INLINE static constexpr int64_t blocks(const BackwardTaskParams& p) { return one_pass_tiles(p); }

  __device__ __forceinline__ void run(int64_t number) {
    const auto [list, tile] = divide(number, divide_up(p.rows(), kOnePassRows));
    const auto [n, key_head] = divide(list, p.key_heads);
    const int64_t queries = length_of(p.visibility.query_lengths, n, p.queries), rows = p.group * queries;
    const int consumer = thread_index() / kGroupThreads, thread = thread_index() % kGroupThreads;
    float sum[kCols / 8][4] = {};
    if (p.turns[number] > 0) {  // some keys are seen
      const float* const sums = static_cast<const float*>(p.grad_query_sum.data);
      const auto* const of_tile = reinterpret_cast<const Vec16<float>*>(sums + number * kOnePassRows * kDim);
#pragma unroll
      for (int i = 0; i < kCols / 8; ++i) {
        const Vec16<float> four = of_tile[(consumer * kCols / 8 + i) * kGroupThreads + thread];
#pragma unroll
        for (int k = 0; k < 4; ++k) sum[i][k] = four.at[k];
      }
    }
    const Operand& to = p.grad_query;
    const int64_t begin = batch_offset(p, to, n) + consumer * kCols * to.col;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t i = tile * kOnePassRows + 16 * (thread / 32) + thread % 32 / 4 + 8 * half;
      const bool is_there = i < rows;
      const Row row = is_there ? row_after(queries, Row{n, key_head * p.group, 0}, i) : Row{};
      write_gradient<S>(p, to, begin + row.head * to.head + row.position * to.row, p.head_dim - consumer * kCols, sum,
                        half, ScoreFunction<float>::of(p).slope(), is_there);
    }
  }
};

// counters: memory for 1 + one_pass_tiles() numbers.
template <class S, int kDim, Extra kExtra>
Error launch_one_pass(const BackwardParams& params, int* counters, const Gpu& gpu) {
  using Kernel = GradKeyWgmma<S, kDim, kOnePassRows, kDim <= 64 ? 4 : 2, kExtra, true>;
  BackwardTaskParams p{params, {}};
  p.order = lists_side_by_side(p, tiles_of_keys(p, Kernel::kKeys), p.batch * p.key_heads, p.group * p.queries);
  p.counters = counters;
  p.turns = counters + 1;
  if (Error error = clear_counters(counters, 1 + one_pass_tiles(p), gpu.stream)) return error;
  if (Error error = launch_persistent<Kernel>(p, gpu)) return error;
  return launch_blocks<RoundQuerySums<S, kDim>>(p, gpu.stream);
}

}  // namespace attn::cuda
