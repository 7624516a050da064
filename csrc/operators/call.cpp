#include "operators/call.h"

#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>

#include <limits>

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
  p.mask_row_tasks = one_row ? 1 : divide_up(p.queries, kScoreTile);
  p.mask_key_tasks = divide_up(p.keys, kScoreTile);
}

// The results of the backward and the second-order operator, uninitialised.
Gradients empty_gradients(const Inputs& inputs, Wanted wanted) {
  Gradients grads;
  const auto allocate = [&](size_t i, Tensor& grad, const std::optional<Tensor>& input) {
    if (wanted[i]) grad = at::empty_like(*input);
  };
  for_each_field(allocate, grads, inputs);
  return grads;
}

// Takes `p` and `builder` with everything but the gradients.
template <class Params>
Gradients gradients(Run<Params>* run, Params& p, ProblemBuilder& builder, const Shape& shape, const Tensor& query,
                    const Gradients& grads) {
  if (no_rows(p) || p.keys == 0) {
    for_each_field([](size_t, const Tensor& grad) { grad.defined() ? grad.zero_() : grad; }, grads);
    return grads;
  }
  Gradients written = grads;
  const auto add = [&](Operand& operand, Tensor& grad, const c10::SymDimVector& sizes) {
    if (!grad.defined()) return;
    // The gradient of a broadcast input is written at the broadcast shape, and then summed to the input's: rounded to a
    // half type before the sum, large gradients of opposite signs would be infinities.
    if (grad.sym_sizes() != c10::SymIntArrayRef(sizes)) grad = at::empty_symint(sizes, compute_options(grad));
    builder.add_result(operand, grad);
  };
  add(p.grad_query, written.query, shape.expanded(shape.heads, shape.queries, shape.head_dim));
  add(p.grad_key, written.key, shape.expanded(shape.key_heads, shape.keys, shape.head_dim));
  add(p.grad_value, written.value, shape.expanded(shape.value_heads, shape.keys, shape.value_dim));
  if (const Tensor& mask = grads.attn_mask; mask.defined()) {
    mask.zero_();  // tiles that causality hides are never written
    // A number added to all scores of a row changes nothing: a mask shared by all keys has gradient 0.
    if (mask.size(-1) > 1) builder.add_result(p.grad_mask, mask);
  }
  builder.merge_batch_dims();
  plan_mask(p);
  run(p, query);
  const auto sum = [](size_t, const Tensor& grad, const Tensor& at_broadcast_shape) {
    if (!grad.is_same(at_broadcast_shape)) grad.copy_(at::sum_to(at_broadcast_shape, grad.sizes()));
  };
  for_each_field(sum, grads, written);
  return grads;
}

// Describes the point at which a derivative is taken, in any of the params.
template <class Params>
void describe_point(Params& p, ProblemBuilder& builder, const Saved& saved) {
  builder.add(p.output, saved.output);
  if (saved.residual.dim() > 1) builder.add(p.residual, saved.residual);
  p.logsumexp = builder.contiguous(saved.logsumexp);
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

}  // namespace

Saved compute_forward(const Device& device, bool for_derivatives, const Inputs& inputs, const PlainOptions& options,
                      const std::optional<Tensor>& given_state) {
  const Tensor& query = inputs.query;
  const Checker check{inputs, options};
  if (given_state) check.rng_state(*given_state);
  const bool draws = options.dropout_p > 0 && !given_state;
  Saved results;
  results.output = empty_output(check.shape, query);
  results.rng_state = given_state ? given_state->clone() : at::empty({draws ? 3 : 0}, query.options().dtype(at::kLong));
  if (for_derivatives) {
    results.logsumexp = empty_logsumexp(check.shape, query);
    results.residual = empty_residual(results.output, inputs, options);
  }
  if (!device.forward) return results;
  ForwardParams p;
  ProblemBuilder builder(p, check.shape, inputs, options, results.rng_state);
  if (draws) device.draw_rng_state(results.rng_state, std::max<int64_t>(1, p.batch * p.heads));
  builder.add_result(p.output, results.output);
  if (for_derivatives) {
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
  const Checker check{inputs, options};
  check.like_output("grad_output", grad_output);
  check.saved(saved);
  check.wanted(wanted);
  const Gradients grads = empty_gradients(inputs, wanted);
  if (!device.backward) return grads;
  BackwardParams p;
  ProblemBuilder builder(p, check.shape, inputs, options, saved.rng_state);
  describe_point(p, builder, saved);
  builder.add(p.grad_output, grad_output);
  return gradients(device.backward, p, builder, check.shape, inputs.query, grads);
}

Gradients compute_second(const Device& device, const Tensor& grad_output, const Inputs& inputs, const Saved& saved,
                         const Direction& direction, const TangentResults& tangent, const PlainOptions& options,
                         Wanted wanted) {
  const Checker check{inputs, options};
  check.like_output("grad_output", grad_output);
  check.saved(saved);
  check.direction(direction);
  check.tangent(tangent);
  check.wanted(wanted);
  const Gradients grads = empty_gradients(inputs, wanted);
  if (!device.second) return grads;
  SecondParams p;
  ProblemBuilder builder(p, check.shape, inputs, options, saved.rng_state);
  describe_point(p, builder, saved);
  describe_direction(p.t, builder, direction);
  builder.add(p.grad_output, grad_output);
  builder.add(p.tangent_output, tangent.output);
  if (tangent.residual.dim() > 1) builder.add(p.tangent_residual, tangent.residual);
  p.tangent_logsumexp = builder.contiguous(tangent.logsumexp);
  return gradients(device.second, p, builder, check.shape, inputs.query, grads);
}

TangentResults compute_tangent(const Device& device, const Inputs& inputs, const Saved& saved,
                               const Direction& direction, const PlainOptions& options) {
  const Checker check{inputs, options};
  check.saved(saved);
  check.direction(direction);
  TangentResults results;
  results.output = empty_output(check.shape, inputs.query);
  results.logsumexp = empty_logsumexp(check.shape, inputs.query);
  results.residual = empty_residual(results.output, inputs, options);
  if (!device.tangent) return results;
  TangentParams p;
  ProblemBuilder builder(p, check.shape, inputs, options, saved.rng_state);
  describe_point(p, builder, saved);
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

Statistics compute_stats(const Device& device, const QueryAndKey& x, const ScoreOptions& options) {
  const Inputs inputs = x.inputs();
  const Shape shape = validate(StatsOp::name, inputs, options.options());
  const Statistics results = empty_statistics(shape, inputs.query);
  if (!device.stats) return results;
  StatsParams p;
  ProblemBuilder builder(p, shape, inputs, options.options(), /*rng_state=*/Tensor());
  if (no_rows(p)) {
    results.received_weight.zero_();
    return results;
  }
  builder.merge_batch_dims();
  p.largest_score = results.largest_score.mutable_data_ptr();
  p.entropy = results.entropy.mutable_data_ptr();
  p.logsumexp = results.logsumexp.mutable_data_ptr();
  p.received_weight = results.received_weight.mutable_data_ptr();
  device.stats(p, inputs.query);
  return results;
}

WeightsAndScores compute_weights(Run<WeightsParams>* run, const Inputs& inputs, const PlainOptions& options,
                                 const WantedWeights& wanted) {
  const Shape shape = validate(WeightsOp::name, inputs, options);
  const auto empty = [&](const c10::SymInt& heads) {
    return at::empty_symint(shape.expanded(heads, shape.queries, shape.keys), inputs.query.options());
  };
  const auto none = [&] { return at::empty({0}, inputs.query.options()); };
  const WeightsAndScores results = {empty(wanted.mean ? 1 : shape.heads), wanted.scores ? empty(shape.heads) : none(),
                                    wanted.output ? empty_output(shape, inputs.query) : none()};
  if (shape.keys == 0) results.output.zero_();
  if (shape.heads == 0) results.weights.fill_(std::numeric_limits<double>::quiet_NaN());  // a mean of nothing
  if (results.weights.numel() > 0 && shape.heads > 0) {
    PlainOptions without_dropout = options;
    without_dropout.dropout_p = 0;
    WeightsParams p;
    ProblemBuilder builder(p, shape, inputs, without_dropout, /*rng_state=*/Tensor());
    p.of_all_heads = wanted.mean;
    builder.add_result(p.weights, results.weights);
    if (wanted.scores) builder.add_result(p.scores, results.scores);
    if (wanted.output) builder.add_result(p.output, results.output);
    builder.merge_batch_dims();
    run(p, inputs.query);
  }
  return {wanted.mean ? results.weights.squeeze(-3) : results.weights, results.scores, results.output};
}

}  // namespace attn
