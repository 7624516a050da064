#include "operators/formulas.h"

#include <ATen/ATen.h>
#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/library.h>

#include <limits>

#include "operators/validate.h"

namespace attn {
namespace {

using at::Tensor;

constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();

Tensor widened(const Tensor& t) {
  return t.scalar_type() == at::kHalf || t.scalar_type() == at::kBFloat16 ? t.to(at::kFloat) : t;
}

// Brings key or value heads to the query's: each is repeated for its group of query heads.
Tensor repeat_heads(const Tensor& t, const Shape& shape) {
  if (t.dim() < 3) return t;
  const c10::SymInt heads = t.sym_size(-3);
  if (TORCH_GUARD_OR_FALSE(heads.sym_eq(shape.heads)) || TORCH_GUARD_OR_FALSE(heads.sym_eq(1))) return t;
  return t.repeat_interleave_symint(shape.heads / heads, -3);
}

// scale * query key^T, without the mask.
//
// The gradient runs through the finite numbers: that of a hidden score is 0, and 0 times the NaN or infinity of a key
// (or query) would be NaN. What is not finite is added to the scores behind their product, as a constant; a NaN also as
// a sum of its row, which gives the NaN itself a gradient.
Tensor products(const Shape& shape, const Tensor& query, const Tensor& key, std::optional<double> scale) {
  const double s = scale_or_default(scale, shape.head_dim.guard_int(__FILE__, __LINE__));
  const Tensor q = widened(query) * s, k = repeat_heads(widened(key), shape).transpose(-2, -1);
  const auto finite = [](const Tensor& t) { return t.masked_fill(t.isfinite().logical_not(), 0); };
  const auto nan = [](const Tensor& t) { return t.masked_fill(t.isnan().logical_not(), 0); };
  const Tensor all = at::matmul(q.detach(), k.detach());
  return at::matmul(finite(q), finite(k))
      .add_(all.masked_fill(all.isfinite(), 0))
      .add_(nan(q).sum(-1, /*keepdim=*/true))
      .add_(nan(k).sum(-2, /*keepdim=*/true))
      .expand_symint(shape.expanded(shape.heads, shape.queries, shape.keys));
}

void check_no_dropout(double dropout_p) {
  TORCH_CHECK(dropout_p == 0, "attn::sdpa: dropout_p is ", dropout_p,
              ", but third derivatives and forward over forward are supported without dropout only; set it to 0");
}

// Weights and scores of weights_formula, in float32 where the query has a half type.
//
// Autocast is off here and in the formulas below: their inputs have the type to compute in.
WeightsAndScores wide_weights(const Shape& shape, const Inputs& inputs, const PlainOptions& options) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const auto& [query, key, value, attn_mask] = inputs;
  Tensor scores = products(shape, query, key, options.scale);
  if (attn_mask && attn_mask->scalar_type() != at::kBool) scores = scores + attn_mask->to(scores.scalar_type());
  Tensor masked;
  if (attn_mask)
    masked = attn_mask->scalar_type() == at::kBool ? attn_mask->logical_not() : attn_mask->eq(kMinusInfinity);
  if (options.is_causal) {
    const auto boolean = query.options().dtype(at::kBool);
    const Tensor hidden = at::ones_symint({shape.queries, shape.keys}, boolean).tril().logical_not();
    masked = masked.defined() ? masked.logical_or(hidden) : hidden;
  }
  if (masked.defined()) scores = scores.masked_fill(masked, kMinusInfinity);
  // softmax where a fully masked row gives 0 and finite gradients
  const Tensor empty_row = scores.eq(kMinusInfinity).all(-1, /*keepdim=*/true);
  return {at::softmax(scores.masked_fill(empty_row, 0), -1).masked_fill(empty_row, 0), scores, Tensor()};
}

Tensor weighted_values(const Shape& shape, const Tensor& weights, const Tensor& value) {
  return at::matmul(weights, repeat_heads(widened(value), shape));
}

}  // namespace

Tensor independent(const Tensor& t) {
  if (!t.defined()) return t;
  Tensor same = t.view_as(t);
  return same.requires_grad() || !same.is_floating_point() ? same : same.requires_grad_();
}

std::vector<Tensor> differentiate(const std::vector<Tensor>& results, const std::vector<Tensor>& grads,
                                  const std::vector<Tensor>& inputs, const std::function<bool(size_t)>& is_wanted,
                                  bool create_graph) {
  std::vector<Tensor> from, with, to, gradients(inputs.size());
  for (size_t i = 0; i < grads.size(); ++i)
    if (grads[i].defined() && results[i].defined() && results[i].requires_grad()) {
      from.push_back(results[i]);
      with.push_back(grads[i]);
    }
  std::vector<size_t> places;
  for (size_t i = 0; i < inputs.size(); ++i)
    if (inputs[i].defined() && is_wanted(i)) {
      to.push_back(inputs[i]);
      places.push_back(i);
    }
  if (from.empty() || to.empty()) return gradients;
  const auto found = torch::autograd::grad(from, to, with, create_graph, create_graph, /*allow_unused=*/true);
  for (size_t i = 0; i < found.size(); ++i) gradients[places[i]] = found[i];
  return gradients;
}

WeightsAndScores weights_formula(const Inputs& inputs, const PlainOptions& options, const WantedWeights& wanted) {
  const auto dtype = inputs.query.scalar_type();
  const auto [weights, scores, _] = wide_weights(validate(WeightsOp::name, inputs, options), inputs, options);
  const auto none = [&] { return at::empty({0}, inputs.query.options()); };
  return {(wanted.mean ? weights.mean(-3) : weights).to(dtype), wanted.scores ? scores.to(dtype) : none(), none()};
}

TangentResults tangent_formula(const Inputs& inputs, const Direction& direction, const PlainOptions& options) {
  check_no_dropout(options.dropout_p);
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const Shape shape = validate(SdpaOp::name, inputs, options);
  const auto [weights, scores, _] = wide_weights(shape, inputs, options);
  Tensor tangent_scores = at::zeros_like(weights);
  if (direction.query) tangent_scores = tangent_scores + products(shape, *direction.query, inputs.key, options.scale);
  if (direction.key) tangent_scores = tangent_scores + products(shape, inputs.query, *direction.key, options.scale);
  if (direction.attn_mask) tangent_scores = tangent_scores + direction.attn_mask->to(tangent_scores.scalar_type());
  // Scores of -inf, which hidden ones are, have no tangent, whatever their keys hold.
  tangent_scores = tangent_scores.masked_fill(scores.eq(kMinusInfinity), 0);
  const Tensor weighted = weights * tangent_scores;
  const Tensor tangent_logsumexp = weighted.sum(-1, /*keepdim=*/true);
  Tensor output = weighted_values(shape, weighted - weights * tangent_logsumexp, inputs.value);
  if (direction.value) output = output + weighted_values(shape, weights, *direction.value);
  const Tensor rounded = output.to(inputs.query.scalar_type());
  const Tensor residual = has_residual(inputs, options) ? output - rounded : at::empty({0}, rounded.options());
  return {rounded, at::constant_pad_nd(tangent_logsumexp, {0, 1}), residual};
}

Gradients second_formula(const Tensor& grad_output, const Inputs& inputs, const Direction& direction,
                         const PlainOptions& options, Wanted wanted) {
  check_no_dropout(options.dropout_p);
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  at::AutoGradMode enable(true);
  // grad_x <t, J'u>, by differentiating twice. u and t may themselves depend on x; aliases keep those paths apart.
  const Inputs x = independent(inputs);
  const Shape shape = validate(SdpaOp::name, x, options);
  const Tensor output = weighted_values(shape, wide_weights(shape, x, options).weights, x.value);
  const auto t = list(independent(direction));
  const auto along = differentiate({output.to(inputs.query.scalar_type())}, {independent(grad_output)}, list(x),
                                   [&](size_t i) { return t[i].defined(); });
  const auto h = differentiate(along, t, list(x), [&](size_t i) { return wanted[i]; });
  Gradients second;
  const auto put = [&](size_t i, Tensor& result, const std::optional<Tensor>& input) {
    if (wanted[i]) result = h[i].defined() ? h[i] : at::zeros_like(*input);
  };
  for_each_field(put, second, x);
  return second;
}

namespace {

// Whether these are tensors of a device with a kernel and nothing else: no sample of vmap, no symbol of a compiler, no
// dual number.
bool has_kernel(const Inputs& inputs) {
  static const bool on_cpu = WeightsKernelOp::handle().hasKernelForDispatchKey(c10::DispatchKey::CPU);
  if (!on_cpu || at::tracer::impl::is_dispatch_enabled()) return false;
  const auto plain = [](const Tensor& t) {
    return t.key_set().has(c10::DispatchKey::CPU) && !at::isTensorSubclassLike(t) && !t.is_neg() &&
           !t._is_zerotensor() && !t._fw_grad(/*level=*/0).defined();
  };
  return plain(inputs.query) && plain(inputs.key) && plain(inputs.value) &&
         (!inputs.attn_mask || plain(*inputs.attn_mask));
}

bool learns(const Inputs& inputs) {
  const auto requires_grad = [](const Tensor& t) { return t.requires_grad(); };
  return at::GradMode::is_enabled() &&
         (requires_grad(inputs.query) || requires_grad(inputs.key) || requires_grad(inputs.value) ||
          (inputs.attn_mask && requires_grad(*inputs.attn_mask)));
}

// The weights come first: they check the arguments, in the operator's name. Where scores are wanted, the output is
// sdpa's to the bit.
WeightsAndScores weights_and_output(const Inputs& inputs, const PlainOptions& options, WantedWeights wanted) {
  WeightsAndScores results;
  if (has_kernel(inputs)) {
    wanted.output = !wanted.scores && options.dropout_p == 0 && !learns(inputs);
    Inputs x = inputs;
    x.value = x.value.detach();  // weights do not depend on its numbers
    results = WeightsKernelOp::call(x, options, wanted);
  } else {
    results = weights_formula(inputs, options, wanted);
  }
  if (!wanted.output) results.output = SdpaOp::call(inputs, options);
  return results;
}

OutputAndWeights sdpa_with_weights(const Inputs& inputs, const PlainOptions& options) {
  const auto [weights, scores, output] = weights_and_output(inputs, options, {});
  return {output, weights, scores};
}
OutputAndMean sdpa_and_weights(const Inputs& inputs, const PlainOptions& options, bool mean) {
  const WeightsAndScores results = weights_and_output(inputs, options, {mean, /*scores=*/false});
  return {results.output, results.weights};
}

void register_both(torch::Library& m) {
  m.impl("sdpa_with_weights", WeightsOp::kernel<sdpa_with_weights>);
  m.impl("_sdpa_and_weights", ModuleOp::kernel<sdpa_and_weights>);
}

}  // namespace

TORCH_LIBRARY_IMPL(attn, CompositeImplicitAutograd, m) { register_both(m); }

// Under vmap too they are what they call: torch 2.15 would call them for one sample after the other.
TORCH_LIBRARY_IMPL(attn, FuncTorchBatchedDecomposition, m) { register_both(m); }

}  // namespace attn
