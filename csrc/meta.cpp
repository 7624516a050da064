// Shapes without data: Meta, FakeTensor, dynamic shapes.
#include <ATen/ATen.h>
#include <torch/library.h>

#include "validate.h"

namespace attn {
namespace {

using at::Tensor;

Tensor sdpa_meta(ATTN_INPUTS_ARGS, ATTN_OPTIONS_ARGS) {
  return empty_output(validate(ATTN_INPUTS, ATTN_OPTIONS), query);
}

Tensors4 forward_meta(ATTN_INPUTS_ARGS, ATTN_OPTIONS_ARGS, const std::optional<Tensor>& rng_state) {
  const Shape shape = validate(ATTN_INPUTS, ATTN_OPTIONS);
  if (rng_state) validate_rng_state("attn::_sdpa_forward", *rng_state, shape, query, dropout_p);
  const Tensor output = empty_output(shape, query);
  return {output, empty_logsumexp(shape, query),
          rng_state ? at::empty_like(*rng_state) : empty_rng_state(query, dropout_p), empty_residual(output)};
}

Tensors4 empty_gradients(ATTN_INPUTS_ARGS, Wanted wanted) {
  const auto like = [](bool is_wanted, const Tensor& t) { return is_wanted ? empty_gradient(t) : Tensor(); };
  return {like(wanted[0], query), like(wanted[1], key), like(wanted[2], value),
          wanted[3] ? empty_gradient(*attn_mask) : Tensor()};
}

Tensors4 backward_meta(const Tensor& grad_output, ATTN_INPUTS_ARGS, ATTN_SAVED_ARGS, ATTN_OPTIONS_ARGS,
                       Wanted grad_input_mask) {
  const char* op = "attn::_sdpa_backward";
  const Shape shape = validate(ATTN_INPUTS, ATTN_OPTIONS);
  validate_like_output(op, "grad_output", grad_output, shape, query);
  validate_saved(op, shape, query, dropout_p, ATTN_SAVED);
  validate_wanted(op, attn_mask, grad_input_mask);
  return empty_gradients(ATTN_INPUTS, grad_input_mask);
}

Tensors3 tangent_meta(ATTN_INPUTS_ARGS, ATTN_SAVED_ARGS, ATTN_TANGENTS_ARGS, ATTN_OPTIONS_ARGS) {
  const char* op = "attn::_sdpa_tangent";
  const Shape shape = validate(ATTN_INPUTS, ATTN_OPTIONS);
  validate_saved(op, shape, query, dropout_p, ATTN_SAVED);
  validate_tangents(op, ATTN_INPUTS, ATTN_TANGENTS);
  const Tensor tangent_output = empty_output(shape, query);
  return {tangent_output, empty_logsumexp(shape, query), empty_residual(tangent_output)};
}

Tensors4 second_meta(const Tensor& grad_output, ATTN_INPUTS_ARGS, ATTN_SAVED_ARGS, ATTN_TANGENTS_ARGS, ATTN_MOVED_ARGS,
                     ATTN_OPTIONS_ARGS, Wanted grad_input_mask) {
  const char* op = "attn::_sdpa_second";
  const Shape shape = validate(ATTN_INPUTS, ATTN_OPTIONS);
  validate_like_output(op, "grad_output", grad_output, shape, query);
  validate_saved(op, shape, query, dropout_p, ATTN_SAVED);
  validate_tangents(op, ATTN_INPUTS, ATTN_TANGENTS);
  validate_moved(op, shape, query, ATTN_MOVED);
  validate_wanted(op, attn_mask, grad_input_mask);
  return empty_gradients(ATTN_INPUTS, grad_input_mask);
}

}  // namespace

TORCH_LIBRARY_IMPL(attn, Meta, m) {
  m.impl("sdpa", sdpa_meta);
  m.impl("_sdpa_forward", forward_meta);
  m.impl("_sdpa_backward", backward_meta);
  m.impl("_sdpa_tangent", tangent_meta);
  m.impl("_sdpa_second", second_meta);
}

}  // namespace attn
