// The operators on CUDA: launches on the current stream. Nothing waits for the device, and all memory comes from
// torch's allocator, so that a call can be captured in a graph.
#include <ATen/ATen.h>
#include <torch/library.h>

#include "../compute.h"
#include "cuda/device.h"
#include "launch.h"

namespace attn::cuda {
namespace {

using at::Tensor;

void check(Error error) { TORCH_CHECK(!error, "attn::sdpa: a CUDA kernel could not be launched: ", error); }

Tensor draw_rng_state(const Tensor& query, int64_t heads) {
  const OnDeviceOf device(query);
  const Tensor state = empty_rng_state(query, 1);
  RngNumber seed, offset;
  draw_numbers(query, seed, offset);
  check(launch_write_rng_state(state.mutable_data_ptr<int64_t>(), seed, offset, heads, device.stream));
  return state;
}

void run_forward(ForwardParams& p, const Tensor& query) {
  const OnDeviceOf device(query);
  plan_forward(p, device.multiprocessors);
  const auto partial = allocate_splits(p, query);
  check(launch_forward(p, device.stream));
}

// Memory for one number a row, [batch, heads, L].
Tensor allocate_rows(const Problem& p, const Tensor& query, void*& data) {
  const Tensor rows = at::empty({p.batch, p.heads, p.queries}, compute_options(query));
  data = rows.mutable_data_ptr();
  return rows;
}

void run_backward(BackwardParams& p, const Tensor& query) {
  const OnDeviceOf device(query);
  const Tensor delta = allocate_rows(p, query, p.delta);
  check(launch_backward(p, device.stream));
}

void run_tangent(TangentParams& p, const Tensor& query) {
  const OnDeviceOf device(query);
  plan_tangent(p);
  check(launch_tangent(p, device.stream));
}

void run_second(SecondParams& p, const Tensor& query) {
  const OnDeviceOf device(query);
  const Tensor delta = allocate_rows(p, query, p.delta);
  const Tensor tangent_delta = allocate_rows(p, query, p.tangent_delta);
  check(launch_second(p, device.stream));
}

constexpr Device kCuda{draw_rng_state, run_forward, run_backward, run_tangent, run_second};

}  // namespace

TORCH_LIBRARY_IMPL(attn, ATTN_CUDA_KEY, m) { register_kernels<kCuda>(m); }

}  // namespace attn::cuda
