// The operators on CUDA: tensors to params, launches on the current stream. Nothing waits for the device, and all memory
// comes from torch's allocator, so that a call can be captured in a graph.
#include <ATen/ATen.h>
#include <torch/library.h>

#include "../derivatives.h"
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
  draw(query, seed, offset);
  check(launch_write_rng_state(state.mutable_data_ptr<int64_t>(), seed, offset, heads, device.stream));
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

// A number of every row.
Tensor allocate_rows(const Problem& p, const Tensor& query, void*& data) {
  const Tensor rows = at::empty({p.batch, p.heads, p.queries}, compute_options(query));
  data = rows.mutable_data_ptr();
  return rows;
}

Tensors4 backward_cuda(const Tensor& grad_output, ATTN_INPUTS_ARGS, ATTN_SAVED_ARGS, ATTN_OPTIONS_ARGS,
                       Wanted grad_input_mask) {
  return derive_backward(grad_output, ATTN_INPUTS, ATTN_SAVED, ATTN_OPTIONS, grad_input_mask, [&](BackwardParams& p) {
    const OnDeviceOf device(query);
    const Tensor delta = allocate_rows(p, query, p.delta);
    check(launch_backward(p, device.stream));
  });
}

Tensors3 tangent_cuda(ATTN_INPUTS_ARGS, ATTN_SAVED_ARGS, ATTN_TANGENTS_ARGS, ATTN_OPTIONS_ARGS) {
  return derive_tangent(ATTN_INPUTS, ATTN_SAVED, ATTN_TANGENTS, ATTN_OPTIONS, [&](TangentParams& p) {
    const OnDeviceOf device(query);
    plan_tangent(p);
    check(launch_tangent(p, device.stream));
  });
}

Tensors4 second_cuda(const Tensor& grad_output, ATTN_INPUTS_ARGS, ATTN_SAVED_ARGS, ATTN_TANGENTS_ARGS, ATTN_MOVED_ARGS,
                     ATTN_OPTIONS_ARGS, Wanted grad_input_mask) {
  return derive_second(grad_output, ATTN_INPUTS, ATTN_SAVED, ATTN_TANGENTS, ATTN_MOVED, ATTN_OPTIONS, grad_input_mask,
                       [&](SecondParams& p) {
                         const OnDeviceOf device(query);
                         const Tensor delta = allocate_rows(p, query, p.delta);
                         const Tensor tangent_delta = allocate_rows(p, query, p.tangent_delta);
                         check(launch_second(p, device.stream));
                       });
}

}  // namespace

TORCH_LIBRARY_IMPL(attn, ATTN_CUDA_KEY, m) {
  m.impl("sdpa", sdpa_cuda);
  m.impl("_sdpa_forward", forward_cuda);
  m.impl("_sdpa_backward", backward_cuda);
  m.impl("_sdpa_tangent", tangent_cuda);
  m.impl("_sdpa_second", second_cuda);
}

}  // namespace attn::cuda
