#include "operators/call.h"

#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>

namespace attn {

namespace {

using at::Tensor;

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
  p.mask_row_tasks = one_row ? 1 : divide_up(p.queries, kMaskTaskRows);
  p.mask_key_tasks = divide_up(p.keys, kMaskTaskKeys);
}

// Sums gradients that were written at a broadcast shape back to the shapes of their inputs.
Gradients reduced(Gradients grads, const Inputs& inputs) {
  const auto reduce = [](size_t, Tensor& grad, const std::optional<Tensor>& input) {
    if (grad.defined() && grad.sizes() != input->sizes())
      grad = empty_gradient(*input).copy_(at::sum_to(grad, input->sizes()));
  };
  for_each_field(reduce, grads, inputs);
  return grads;
}

// Takes `p` and `builder` with everything but the gradients.
template <class Params>
Gradients gradients(Params& p, ProblemBuilder& builder, const Shape& shape, const Inputs& inputs, Wanted wanted,
                    Run<Params>* run) {
  Gradients grads;
  const auto add = [&](bool is_wanted, Operand& operand, Tensor& grad, const Tensor& input,
                       const c10::SymDimVector& sizes) {
    if (!is_wanted) return;
    // The gradient of a broadcast input is written at the broadcast shape, and reduced() sums it back to the
    // input's: rounded to a half type before the sum, large gradients of opposite signs would be infinities.
    grad = input.sym_sizes() == c10::SymIntArrayRef(sizes) ? empty_gradient(input)
                                                           : at::empty_symint(sizes, compute_options(input));
    builder.add_result(operand, grad);
  };
  const auto& [wants_query, wants_key, wants_value, wants_mask] = wanted;
  add(wants_query, p.grad_query, grads.query, inputs.query, shape.expanded(shape.heads, shape.queries, shape.head_dim));
  add(wants_key, p.grad_key, grads.key, inputs.key, shape.expanded(shape.key_heads, shape.keys, shape.head_dim));
  add(wants_value, p.grad_value, grads.value, inputs.value,
      shape.expanded(shape.value_heads, shape.keys, shape.value_dim));
  if (wants_mask) {
    grads.attn_mask = at::zeros_like(*inputs.attn_mask);  // tiles that causality hides are never written
    // A number added to all scores of a row changes nothing: a mask shared by all keys has gradient 0.
    if (inputs.attn_mask->size(-1) > 1) builder.add_result(p.grad_mask, grads.attn_mask);
  }

  if (no_rows(p) || p.keys == 0) {
    for_each_field([](size_t, Tensor& t) { t.defined() ? t.zero_() : t; }, grads);
    return reduced(grads, inputs);
  }
  builder.merge_batch_dims();
  plan_mask(p);
  run(p, inputs.query);
  return reduced(grads, inputs);
}

// Describes the point at which a derivative is taken, in any of the params. Returns the logsumexp that they point to.
template <class Params>
Tensor describe_point(Params& p, ProblemBuilder& builder, const Inputs& inputs, const Saved& saved,
                      const PlainOptions& options) {
  describe(p, builder, inputs, options, saved.rng_state);
  builder.add(p.output, saved.output);
  if (saved.residual.dim() > 1) builder.add(p.residual, saved.residual);
  const Tensor logsumexp = saved.logsumexp.contiguous();
  p.logsumexp = logsumexp.const_data_ptr();
  return logsumexp;
}

void describe_direction(Tangents& t, ProblemBuilder& builder, const Direction& direction) {
  const auto add = [&](Operand& operand, const std::optional<Tensor>& tangent) {
    if (tangent && tangent->numel() > 0) builder.add(operand, *tangent);
  };
  add(t.query, direction.query);
  add(t.key, direction.key);
  add(t.value, direction.value);
  add(t.mask, direction.attn_mask);
}

void point_to(StatsParams& p, const Statistics& results) {
  p.largest_score = results.largest_score.mutable_data_ptr();
  p.entropy = results.entropy.mutable_data_ptr();
  p.logsumexp = results.logsumexp.mutable_data_ptr();
  p.received_weight = results.received_weight.mutable_data_ptr();
}

}  // namespace

Saved compute_forward(const Device& device, bool for_derivatives, const Inputs& inputs, const PlainOptions& options,
                      const std::optional<Tensor>& given_state) {
  const Tensor& query = inputs.query;
  const Shape shape = validate_forward(inputs, options, given_state);
  ForwardParams p;
  ProblemBuilder builder(p, shape);
  Saved results;
  results.output = empty_output(shape, query);
  if (given_state)
    results.rng_state = given_state->clone();
  else if (options.dropout_p > 0)
    results.rng_state = device.draw_rng_state(query, std::max<int64_t>(1, p.batch * p.heads));
  else
    results.rng_state = empty_rng_state(query, 0);
  describe(p, builder, inputs, options, results.rng_state);
  builder.add_result(p.output, results.output);
  if (for_derivatives) {
    results.logsumexp = empty_logsumexp(shape, query);
    results.residual = empty_residual(results.output, inputs, options);
    p.logsumexp = results.logsumexp.mutable_data_ptr();
    if (results.residual.dim() > 1) builder.add_result(p.residual, results.residual);
  }
  if (!no_rows(p)) {
    builder.merge_batch_dims();
    device.forward(p, query);
  }
  return results;
}

Gradients compute_backward(const Device& device, const Tensor& grad_output, const Inputs& inputs, const Saved& saved,
                           const PlainOptions& options, Wanted wanted) {
  const Shape shape = validate_backward(grad_output, inputs, saved, options, wanted);
  BackwardParams p;
  ProblemBuilder builder(p, shape);
  const Tensor logsumexp = describe_point(p, builder, inputs, saved, options);
  builder.add(p.grad_output, grad_output);
  return gradients(p, builder, shape, inputs, wanted, device.backward);
}

Gradients compute_second(const Device& device, const Tensor& grad_output, const Inputs& inputs, const Saved& saved,
                         const Direction& direction, const TangentResults& tangent, const PlainOptions& options,
                         Wanted wanted) {
  const Shape shape = validate_second(grad_output, inputs, saved, direction, tangent, options, wanted);
  SecondParams p;
  ProblemBuilder builder(p, shape);
  const Tensor logsumexp = describe_point(p, builder, inputs, saved, options);
  describe_direction(p.t, builder, direction);
  builder.add(p.grad_output, grad_output);
  builder.add(p.tangent_output, tangent.output);
  if (tangent.residual.dim() > 1) builder.add(p.tangent_residual, tangent.residual);
  const Tensor tangent_logsumexp = tangent.logsumexp.contiguous();
  p.tangent_logsumexp = tangent_logsumexp.const_data_ptr();
  return gradients(p, builder, shape, inputs, wanted, device.second);
}

TangentResults compute_tangent(const Device& device, const Inputs& inputs, const Saved& saved,
                               const Direction& direction, const PlainOptions& options) {
  const Shape shape = validate_tangent(inputs, saved, direction, options);
  TangentParams p;
  ProblemBuilder builder(p, shape);
  TangentResults results;
  results.output = empty_output(shape, inputs.query);
  results.logsumexp = empty_logsumexp(shape, inputs.query);
  results.residual = empty_residual(results.output, inputs, options);
  const Tensor logsumexp = describe_point(p, builder, inputs, saved, options);
  describe_direction(p.t, builder, direction);
  builder.add_result(p.tangent_output, results.output);
  if (results.residual.dim() > 1) builder.add_result(p.tangent_residual, results.residual);
  p.tangent_logsumexp = results.logsumexp.mutable_data_ptr();
  if (!no_rows(p)) {
    builder.merge_batch_dims();
    device.tangent(p, inputs.query);
  }
  return results;
}

Statistics compute_stats(const Device& device, const QueryAndKey& inputs, const ScoreOptions& options) {
  const Shape shape = validate_stats(inputs, options);
  StatsParams p;
  ProblemBuilder builder(p, shape);
  describe(p, builder, inputs.inputs(), options.options(), /*rng_state=*/Tensor());
  const Statistics results = empty_statistics(shape, inputs.query);
  if (no_rows(p)) {
    results.received_weight.zero_();
    return results;
  }
  builder.merge_batch_dims();
  point_to(p, results);
  device.stats(p, inputs.query);
  return results;
}

WeightsAndScores compute_weights(const Device& device, const Inputs& inputs, const PlainOptions& options) {
  PlainOptions without_dropout = options;
  without_dropout.dropout_p = 0;
  const Shape shape = validate(inputs, options);
  StatsParams p;
  ProblemBuilder builder(p, shape);
  describe(p, builder, inputs, without_dropout, /*rng_state=*/Tensor());
  const auto sizes = shape.expanded(shape.heads, shape.queries, shape.keys);
  const Tensor weights = at::empty_symint(sizes, inputs.query.options());
  const Tensor scores = at::empty_symint(sizes, inputs.query.options());
  if (no_rows(p) || p.keys == 0) return {weights, scores};
  builder.add_result(p.weights, weights);
  builder.add_result(p.scores, scores);
  builder.merge_batch_dims();
  const Statistics of_rows = empty_statistics(shape, inputs.query);
  point_to(p, of_rows);
  device.stats(p, inputs.query);
  return {weights, scores};
}

}  // namespace attn
