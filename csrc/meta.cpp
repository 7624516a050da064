// Shapes without data: Meta, FakeTensor, dynamic shapes.
#include <ATen/ATen.h>
#include <torch/library.h>

#include "validate.h"

namespace attn {
namespace {

at::Tensor sdpa_meta(ATTN_ARGUMENTS) { return empty_output(validate(ATTN_PASS), query); }

Tensors3 forward_meta(ATTN_ARGUMENTS) {
  const Shape shape = validate(ATTN_PASS);
  return {empty_output(shape, query), empty_logsumexp(shape, query), empty_rng_state(query, dropout_p)};
}

Tensors4 backward_meta(ATTN_BACKWARD_ARGUMENTS) {
  validate_backward(ATTN_BACKWARD_PASS);
  const auto like = [](bool wanted, const at::Tensor& t) { return wanted ? at::empty_like(t) : at::Tensor(); };
  return {like(grad_input_mask[0], query), like(grad_input_mask[1], key), like(grad_input_mask[2], value),
          grad_input_mask[3] ? at::empty_like(*attn_mask) : at::Tensor()};
}

}  // namespace

TORCH_LIBRARY_IMPL(attn, Meta, m) {
  m.impl("sdpa", sdpa_meta);
  m.impl("_sdpa_forward", forward_meta);
  m.impl("_sdpa_backward", backward_meta);
}

}  // namespace attn
