// Declares the functions that launch kernels. This header needs neither torch nor CUDA's headers.
#pragma once

#include "core/params.h"

struct CUstream_st;

namespace attn::cuda {

using Stream = CUstream_st*;
// What a launch returns: null, or a description of the error that holds until the thread's next launch.
using Error = const char*;

// The current device, and the stream that launches go to.
struct Gpu {
  int64_t multiprocessors = 0;
  int capability = 0;  // of which kernels are chosen: 90 is 9.0
  Stream stream = nullptr;
};

// The seed or the offset of a generator. Its value is `number`. While a graph is captured, its value is `number` +
// *pointer, and *pointer is known only when the graph runs.
struct RngNumber {
  uint64_t number = 0;
  const int64_t* pointer = nullptr;
};

// Whether tensor cores compute the forward and the gradients. Kernels with tensor cores read query, key, value,
// grad_output and the mask in vectors (in_vectors()), but for reads_numbers(). If each row of the mask has one number
// for all keys (`col` is 0), the row is a single vector that repeats this number.
bool uses_mma(const Problem& p);

// Where uses_mma(): whether keys and values are read from pages one number at a time, because their rows are not
// vectors.
bool reads_numbers(const Problem& p);

// Whether Hopper's tensor cores compute the forward, and the gradients. Within Problem::invariant it depends on the
// dtype, the heads, the options and the device alone.
bool uses_forward_wgmma(const ForwardParams& p, const Gpu& gpu);
bool uses_backward_wgmma(const BackwardParams& p, const Gpu& gpu);

constexpr int64_t kVector = 8;  // 16-bit numbers in 16 bytes, the unit of copies
ATTN_INLINE constexpr bool is_8_bit(const Operand& x) { return x.dtype == DType::i8 || x.dtype == DType::e4m3; }
ATTN_INLINE constexpr int64_t vector_of(const Operand& x) {
  return x.dtype == DType::boolean || is_8_bit(x) ? 2 * kVector : kVector;
}
// Says whether rows of `cols` columns consist of whole vectors, each at a multiple of 16 bytes.
ATTN_INLINE constexpr bool in_vectors(const Problem& p, const Operand& x, int64_t cols) {
  int64_t low_bits = cols | x.row | x.head;
  for (int d = 0; d < p.batch_dims; ++d) low_bits |= x.batch[d];
  const bool aligned = cols > 0 && x.col == 1 && (low_bits & (vector_of(x) - 1)) == 0;
  return aligned && reinterpret_cast<uintptr_t>(x.data) % 16 == 0;
}

// Every plan_*() and launch_*() takes a complete Problem: its sizes, `group` and `span` are set, and its operands are
// on the current device. Launches return before the kernels have run, and allocate nothing.

// If a call has a mask and uses_forward_wgmma() or uses_backward_wgmma(), the caller has allocated mask_tiles
// (set_mask_tiles()), which the launch writes.
// Sets rows_per_task, splits, keys_per_split, order and counter_count. If splits > 1, the caller then allocates
// partial_output and partial_logsumexp. It also allocates counter_count counters, which launch_forward() sets to 0.
void plan_forward(ForwardParams& p, const Gpu& gpu);

[[nodiscard]] Error launch_forward(const ForwardParams& p, const Gpu& gpu);

// Sets few_rows, which changes no bits of the gradients.
void plan_backward(BackwardParams& p, const Gpu& gpu);

// Both functions write `delta`, and launch_second() also writes `tangent_delta`. The caller allocates this memory. If
// several scores share a number of the mask, the caller first sets the fields mask_*. `counter` is memory for one
// number if uses_backward_wgmma().
[[nodiscard]] Error launch_backward(const BackwardParams& p, int* counter, const Gpu& gpu);
[[nodiscard]] Error launch_second(const SecondParams& p, Stream stream);

[[nodiscard]] Error launch_tangent(const TangentParams& p, Stream stream);

// Sets the numbers and sizes of the splits of the first pass and of the chunks of the second pass. The caller then
// allocates `partial`, `pairs` and, if chunks > 1, partial_received.
void plan_stats(StatsParams& p, int64_t multiprocessors);
[[nodiscard]] Error launch_stats(const StatsParams& p, Stream stream);

// Writes the numbers of all sequences (PackedSequences::write()).
[[nodiscard]] Error launch_write_sequences(const PackedSequences& sequences, Stream stream);

// Writes (seed, offset, period) to `state`.
[[nodiscard]] Error launch_write_rng_state(int64_t* state, RngNumber seed, RngNumber offset, int64_t period,
                                           Stream stream);

}  // namespace attn::cuda
