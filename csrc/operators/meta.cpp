// Shapes without data: Meta, FakeTensor, dynamic shapes.
#include <ATen/ATen.h>
#include <torch/library.h>

#include "operators/validate.h"

namespace attn {
namespace {

using at::Tensor;

Tensor sdpa_meta(const Inputs& inputs, const PlainOptions& options) {
  return empty_output(validate(inputs, options), inputs.query);
}

Saved forward_meta(const Inputs& inputs, const PlainOptions& options, const std::optional<Tensor>& rng_state) {
  const Shape shape = validate_forward(inputs, options, rng_state);
  const Tensor output = empty_output(shape, inputs.query);
  return {output, empty_logsumexp(shape, inputs.query),
          rng_state ? at::empty_like(*rng_state) : empty_rng_state(inputs.query, options.dropout_p),
          empty_residual(output, inputs, options)};
}

Gradients empty_gradients(const Inputs& inputs, Wanted wanted) {
  Gradients grads;
  const auto allocate = [&](size_t i, Tensor& grad, const std::optional<Tensor>& input) {
    if (wanted[i]) grad = empty_gradient(*input);
  };
  for_each_field(allocate, grads, inputs);
  return grads;
}

Gradients backward_meta(const Tensor& grad_output, const Inputs& inputs, const Saved& saved,
                        const PlainOptions& options, Wanted wanted) {
  validate_backward(grad_output, inputs, saved, options, wanted);
  return empty_gradients(inputs, wanted);
}

TangentResults tangent_meta(const Inputs& inputs, const Saved& saved, const Direction& direction,
                            const PlainOptions& options) {
  const Shape shape = validate_tangent(inputs, saved, direction, options);
  const Tensor output = empty_output(shape, inputs.query);
  return {output, empty_logsumexp(shape, inputs.query), empty_residual(output, inputs, options)};
}

Gradients second_meta(const Tensor& grad_output, const Inputs& inputs, const Saved& saved, const Direction& direction,
                      const TangentResults& tangent, const PlainOptions& options, Wanted wanted) {
  validate_second(grad_output, inputs, saved, direction, tangent, options, wanted);
  return empty_gradients(inputs, wanted);
}

Statistics stats_meta(const QueryAndKey& inputs, const ScoreOptions& options) {
  return empty_statistics(validate_stats(inputs, options), inputs.query);
}

}  // namespace

TORCH_LIBRARY_IMPL(attn, Meta, m) {
  m.impl("sdpa", SdpaOp::kernel<sdpa_meta>);
  m.impl("_sdpa_forward", ForwardOp::kernel<forward_meta>);
  m.impl("_sdpa_backward", BackwardOp::kernel<backward_meta>);
  m.impl("_sdpa_tangent", TangentOp::kernel<tangent_meta>);
  m.impl("_sdpa_second", SecondOp::kernel<second_meta>);
  m.impl("sdpa_stats", StatsOp::kernel<stats_meta>);
}

}  // namespace attn
