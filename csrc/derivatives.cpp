#include "derivatives.h"

#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>

namespace attn {

namespace {

using at::Tensor;

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

void plan_mask(BackwardParams& p) {
  if (!p.grad_mask.data) return;
  int64_t shared = 1;
  const auto visit = [&](int64_t extent, int64_t stride) {
    if (stride == 0) shared *= extent;
  };
  for (int d = 0; d < p.batch_dims; ++d) visit(p.batch_size[d], p.grad_mask.batch[d]);
  visit(p.heads, p.grad_mask.head);
  const bool one_row = p.grad_mask.row == 0;
  p.mask_is_shared = shared > 1 || (one_row && p.queries > 1);
  p.mask_slices = p.batch * p.heads / shared;
  p.mask_row_tasks = one_row ? 1 : divide_up(p.queries, kRowTile);
  p.mask_key_tasks = divide_up(p.keys, kKeyTile);
}

// `p` and `builder` hold everything but the gradients.
template <class Params>
Tensors4 gradients(Params& p, ProblemBuilder& builder, const Shape& shape, ATTN_INPUTS_ARGS, Wanted wanted,
                   Run<Params> run) {
  const auto gradient = [&](bool is_wanted, Operand& operand, const Tensor& input, const c10::SymDimVector& sizes) {
    if (!is_wanted) return Tensor();
    // Of an input that was broadcast, the gradient is written at the broadcast shape and reduced() sums it back to the
    // input's: rounded to a half type before the sum, large gradients of opposite signs would be infinities.
    Tensor grad = input.sym_sizes() == c10::SymIntArrayRef(sizes) ? empty_gradient(input)
                                                                  : at::empty_symint(sizes, compute_options(input));
    builder.add_result(operand, grad);
    return grad;
  };
  const Tensor grad_query =
      gradient(wanted[0], p.grad_query, query, shape.expanded(shape.heads, shape.queries, shape.head_dim));
  const Tensor grad_key =
      gradient(wanted[1], p.grad_key, key, shape.expanded(shape.key_heads, shape.keys, shape.head_dim));
  const Tensor grad_value =
      gradient(wanted[2], p.grad_value, value, shape.expanded(shape.value_heads, shape.keys, shape.value_dim));
  Tensor grad_mask;
  if (wanted[3]) {
    grad_mask = at::zeros_like(*attn_mask);  // tiles that causality hides are never written
    // A number added to all scores of a row changes nothing: a mask shared by all keys has gradient 0.
    if (attn_mask->size(-1) > 1) builder.add_result(p.grad_mask, grad_mask);
  }

  if (no_rows(p) || p.keys == 0) {
    for (const Tensor& t : {grad_query, grad_key, grad_value})
      if (t.defined()) t.zero_();
  } else {
    builder.merge_batch_dims();
    plan_mask(p);
    run(p);
  }
  const auto reduced = [](const Tensor& grad, const Tensor& input) {
    if (!grad.defined() || grad.sizes() == input.sizes()) return grad;
    return empty_gradient(input).copy_(at::sum_to(grad, input.sizes()));
  };
  return {reduced(grad_query, query), reduced(grad_key, key), reduced(grad_value, value), grad_mask};
}

// Adds the forward's results to any of the params that hold them. Keeps `logsumexp` contiguous.
template <class Params>
void describe_saved(Params& p, ProblemBuilder& builder, Tensor& contiguous_logsumexp, ATTN_SAVED_ARGS) {
  (void)rng_state;
  builder.add(p.output, output);
  if (residual.dim() > 1) builder.add(p.residual, residual);
  contiguous_logsumexp = logsumexp.contiguous();
  p.logsumexp = contiguous_logsumexp.const_data_ptr();
}

void describe_tangents(Tangents& t, ProblemBuilder& builder, ATTN_TANGENTS_ARGS) {
  const auto add = [&](Operand& operand, const std::optional<Tensor>& tangent) {
    if (tangent && tangent->numel() > 0) builder.add(operand, *tangent);
  };
  add(t.query, tangent_query);
  add(t.key, tangent_key);
  add(t.value, tangent_value);
  add(t.mask, tangent_mask);
}

}  // namespace

Tensors4 derive_backward(const Tensor& grad_output, ATTN_INPUTS_ARGS, ATTN_SAVED_ARGS, ATTN_OPTIONS_ARGS,
                         Wanted grad_input_mask, Run<BackwardParams> run) {
  const char* op = "attn::_sdpa_backward";
  const Shape shape = validate(ATTN_INPUTS, ATTN_OPTIONS);
  validate_like_output(op, "grad_output", grad_output, shape, query);
  validate_saved(op, shape, query, dropout_p, ATTN_SAVED);
  validate_wanted(op, attn_mask, grad_input_mask);

  BackwardParams p;
  ProblemBuilder builder(p, shape);
  Tensor contiguous_logsumexp;
  describe(p, builder, rng_state, ATTN_INPUTS, ATTN_OPTIONS);
  describe_saved(p, builder, contiguous_logsumexp, ATTN_SAVED);
  builder.add(p.grad_output, grad_output);
  return gradients(p, builder, shape, ATTN_INPUTS, grad_input_mask, run);
}

Tensors4 derive_second(const Tensor& grad_output, ATTN_INPUTS_ARGS, ATTN_SAVED_ARGS, ATTN_TANGENTS_ARGS,
                       ATTN_MOVED_ARGS, ATTN_OPTIONS_ARGS, Wanted grad_input_mask, Run<SecondParams> run) {
  const char* op = "attn::_sdpa_second";
  const Shape shape = validate(ATTN_INPUTS, ATTN_OPTIONS);
  validate_like_output(op, "grad_output", grad_output, shape, query);
  validate_saved(op, shape, query, dropout_p, ATTN_SAVED);
  validate_tangents(op, ATTN_INPUTS, ATTN_TANGENTS);
  validate_moved(op, shape, query, ATTN_MOVED);
  validate_wanted(op, attn_mask, grad_input_mask);

  SecondParams p;
  ProblemBuilder builder(p, shape);
  Tensor contiguous_logsumexp;
  describe(p, builder, rng_state, ATTN_INPUTS, ATTN_OPTIONS);
  describe_saved(p, builder, contiguous_logsumexp, ATTN_SAVED);
  describe_tangents(p.t, builder, ATTN_TANGENTS);
  builder.add(p.grad_output, grad_output);
  builder.add(p.tangent_output, tangent_output);
  if (tangent_residual.dim() > 1) builder.add(p.tangent_residual, tangent_residual);
  const Tensor moved = tangent_logsumexp.contiguous();
  p.tangent_logsumexp = moved.const_data_ptr();
  return gradients(p, builder, shape, ATTN_INPUTS, grad_input_mask, run);
}

Tensors3 derive_tangent(ATTN_INPUTS_ARGS, ATTN_SAVED_ARGS, ATTN_TANGENTS_ARGS, ATTN_OPTIONS_ARGS,
                        Run<TangentParams> run) {
  const char* op = "attn::_sdpa_tangent";
  const Shape shape = validate(ATTN_INPUTS, ATTN_OPTIONS);
  validate_saved(op, shape, query, dropout_p, ATTN_SAVED);
  validate_tangents(op, ATTN_INPUTS, ATTN_TANGENTS);

  TangentParams p;
  ProblemBuilder builder(p, shape);
  Tensor contiguous_logsumexp;
  const Tensor tangent_output = empty_output(shape, query);
  const Tensor tangent_logsumexp = empty_logsumexp(shape, query);
  const Tensor tangent_residual = empty_residual(tangent_output);
  describe(p, builder, rng_state, ATTN_INPUTS, ATTN_OPTIONS);
  describe_saved(p, builder, contiguous_logsumexp, ATTN_SAVED);
  describe_tangents(p.t, builder, ATTN_TANGENTS);
  builder.add_result(p.tangent_output, tangent_output);
  if (tangent_residual.dim() > 1) builder.add_result(p.tangent_residual, tangent_residual);
  p.tangent_logsumexp = tangent_logsumexp.mutable_data_ptr();
  if (!no_rows(p)) {
    builder.merge_batch_dims();
    run(p);
  }
  return {tangent_output, tangent_logsumexp, tangent_residual};
}

}  // namespace attn
