// The operators on CUDA: tensors to params, launches on the current stream. Nothing waits for the device, and all memory
// comes from torch's allocator, so that a call can be captured in a graph.
#include <ATen/ATen.h>
#include <torch/library.h>

#include "../problem.h"
#include "cuda/device.h"
#include "launch.h"

namespace attn::cuda {
namespace {

using at::Tensor;

void check(Error error) { TORCH_CHECK(!error, "attn::sdpa: a CUDA kernel could not be launched: ", error); }

Tensor draw_rng_state(const Tensor& query, int64_t heads) {
  const Tensor state = empty_rng_state(query, 1);
  RngNumber seed, offset;
  draw(query, seed, offset);
  check(launch_write_rng_state(state.mutable_data_ptr<int64_t>(), seed, offset, heads, OnDeviceOf(query).stream));
  return state;
}

Tensors4 forward(bool for_derivatives, ATTN_INPUTS_ARGS, ATTN_OPTIONS_ARGS, const std::optional<Tensor>& given_state) {
  ForwardParams p;
  const Tensors4 result = describe_forward(p, for_derivatives, ATTN_INPUTS, ATTN_OPTIONS, given_state, draw_rng_state);
  if (no_rows(p)) return result;
  const OnDeviceOf device(query);
  plan_forward(p, device.multiprocessors);
  const auto partial = allocate_splits(p, query);
  check(launch_forward(p, device.stream));
  return result;
}

Tensor sdpa_cuda(ATTN_INPUTS_ARGS, ATTN_OPTIONS_ARGS) {
  return std::get<0>(forward(false, ATTN_INPUTS, ATTN_OPTIONS, std::nullopt));
}

Tensors4 forward_cuda(ATTN_INPUTS_ARGS, ATTN_OPTIONS_ARGS, const std::optional<Tensor>& rng_state) {
  return forward(true, ATTN_INPUTS, ATTN_OPTIONS, rng_state);
}

}  // namespace

TORCH_LIBRARY_IMPL(attn, ATTN_CUDA_KEY, m) {
  m.impl("sdpa", sdpa_cuda);
  m.impl("_sdpa_forward", forward_cuda);
}

}  // namespace attn::cuda
