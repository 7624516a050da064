#include "operators/formulas.h"

#include <ATen/ATen.h>
#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <array>
#include <limits>

#include "operators/call.h"
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

// A tensor [..., L, E] as a sum: the tensor with 0 in place of NaN, and of every row the sum of its NaNs, 0 or NaN,
// [..., L].
std::array<Tensor, 2> split_nan(const Tensor& t) {
  const Tensor is_nan = t.isnan();
  return {t.masked_fill(is_nan, 0), t.masked_fill(is_nan.logical_not(), 0).sum(-1)};
}

// scale * query key^T, without the mask.
//
// The NaNs are added to the scores behind the product. In the product itself, the gradient 0 of a masked score times
// the NaN of its key would be NaN.
Tensor products(const Shape& shape, const Tensor& query, const Tensor& key, std::optional<double> scale) {
  const double s = scale_or_default(scale, shape.head_dim.guard_int(__FILE__, __LINE__));
  const auto [query_numbers, query_nan] = split_nan(widened(query) * s);
  const auto [key_numbers, key_nan] = split_nan(repeat_heads(widened(key), shape));
  return at::matmul(query_numbers, key_numbers.transpose(-2, -1))
      .add_(query_nan.unsqueeze(-1))
      .add_(key_nan.unsqueeze(-2))
      .expand_symint(shape.expanded(shape.heads, shape.queries, shape.keys));
}

// true where no attention is paid, or undefined if nothing is masked.
Tensor masked_positions(const Shape& shape, const Tensor& query, const std::optional<Tensor>& attn_mask,
                        bool is_causal) {
  Tensor masked;
  if (attn_mask)
    masked = attn_mask->scalar_type() == at::kBool ? attn_mask->logical_not() : attn_mask->eq(kMinusInfinity);
  if (!is_causal) return masked;
  const Tensor hidden =
      at::ones_symint({shape.queries, shape.keys}, query.options().dtype(at::kBool)).tril().logical_not();
  return masked.defined() ? masked.logical_or(hidden) : hidden;
}

void check_no_dropout(double dropout_p) {
  TORCH_CHECK(dropout_p == 0, "attn::sdpa: dropout_p is ", dropout_p,
              ", but third derivatives and forward over forward are supported without dropout only; set it to 0");
}

// In the formulas from here on autocast is off: their inputs have the type to compute in.

// (weights, scores) of attention_formula.
std::array<Tensor, 2> weights_and_scores(const Shape& shape, const Inputs& inputs, const PlainOptions& options) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const auto& [query, key, value, attn_mask] = inputs;
  Tensor scores = products(shape, query, key, options.scale);
  if (attn_mask && attn_mask->scalar_type() != at::kBool) scores = scores + attn_mask->to(scores.scalar_type());
  const Tensor masked = masked_positions(shape, query, attn_mask, options.is_causal);
  if (masked.defined()) scores = scores.masked_fill(masked, kMinusInfinity);
  // softmax where a fully masked row gives 0 and finite gradients
  const Tensor empty_row = scores.eq(kMinusInfinity).all(-1, /*keepdim=*/true);
  return {at::softmax(scores.masked_fill(empty_row, 0), -1).masked_fill(empty_row, 0), scores};
}

}  // namespace

OutputAndWeights attention_formula(const Inputs& inputs, const PlainOptions& options) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const Shape shape = validate(inputs, options);
  const auto [weights, scores] = weights_and_scores(shape, inputs, options);
  return {at::matmul(weights, repeat_heads(widened(inputs.value), shape)), weights, scores};
}

TangentResults tangent_formula(const Inputs& inputs, const Direction& direction, const PlainOptions& options) {
  check_no_dropout(options.dropout_p);
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const Shape shape = validate(inputs, options);
  const Tensor weights = attention_formula(inputs, options).weights;
  Tensor tangent_scores = at::zeros_like(weights);
  if (direction.query) tangent_scores = tangent_scores + products(shape, *direction.query, inputs.key, options.scale);
  if (direction.key) tangent_scores = tangent_scores + products(shape, inputs.query, *direction.key, options.scale);
  if (direction.attn_mask) tangent_scores = tangent_scores + direction.attn_mask->to(tangent_scores.scalar_type());
  const Tensor weighted = weights * tangent_scores;
  const Tensor tangent_logsumexp = weighted.sum(-1, /*keepdim=*/true);
  Tensor output = at::matmul(weighted - weights * tangent_logsumexp, repeat_heads(widened(inputs.value), shape));
  if (direction.value) output = output + at::matmul(weights, repeat_heads(widened(*direction.value), shape));
  const Tensor rounded = output.to(inputs.query.scalar_type());
  const Tensor residual = has_residual(inputs, options) ? output - rounded : at::empty({0}, rounded.options());
  return {rounded, at::constant_pad_nd(tangent_logsumexp, {0, 1}), residual};
}

Gradients second_formula(const Tensor& grad_output, const Inputs& inputs, const Direction& direction,
                         const PlainOptions& options, Wanted wanted) {
  using torch::autograd::grad;
  using torch::autograd::variable_list;
  check_no_dropout(options.dropout_p);
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  at::AutoGradMode enable(true);
  // grad_x <t, J'u>, by differentiating twice. u and t may themselves depend on x; aliases keep those paths apart.
  const auto variable = [](const Tensor& t) {
    Tensor alias = t.view_as(t);
    return alias.requires_grad() ? alias : alias.requires_grad_();
  };
  const std::optional<Tensor> directions[] = {direction.query, direction.key, direction.value, direction.attn_mask};
  variable_list x = {variable(inputs.query), variable(inputs.key), variable(inputs.value)};
  std::optional<Tensor> mask = inputs.attn_mask;
  if (mask && mask->is_floating_point()) x.push_back(*(mask = variable(*mask)));
  const Tensor u = variable(grad_output);
  const Tensor output = attention_formula({x[0], x[1], x[2], mask}, options).output.to(inputs.query.scalar_type());
  const variable_list gradients = grad({output}, x, {u}, /*retain_graph=*/true, /*create_graph=*/true);
  variable_list along, t;
  for (size_t i = 0; i < x.size(); ++i) {
    if (!directions[i]) continue;
    along.push_back(gradients[i]);
    t.push_back(variable(*directions[i]));
  }
  variable_list second(4);
  if (!along.empty()) {
    const variable_list h = grad(along, x, t, true, true, /*allow_unused=*/true);
    for (size_t i = 0; i < x.size(); ++i)
      if (wanted[i]) second[i] = h[i].defined() ? h[i] : at::zeros_like(x[i]);
  }
  return {second[0], second[1], second[2], second[3]};
}

namespace {

// (weights, scores) of the query's type.
std::array<Tensor, 2> rounded_weights(const Inputs& inputs, const PlainOptions& options) {
  const auto dtype = inputs.query.scalar_type();
  const auto [weights, scores] = weights_and_scores(validate(inputs, options), inputs, options);
  return {weights.to(dtype), scores.to(dtype)};
}

// The kernel's weights and scores. Few who ask for them ask for a gradient through them, too: the backward computes
// them again, by the formula, which is differentiable to any order.
struct SdpaWeights : torch::autograd::Function<SdpaWeights> {
  using Context = torch::autograd::AutogradContext;
  using Tensors = torch::autograd::variable_list;

  static Tensors forward(Context* context, const Tensor& query, const Tensor& key, const Tensor& value,
                         const std::optional<Tensor>& attn_mask, const PlainOptions& options) {
    context->set_materialize_grads(false);
    context->save_for_backward({query, key, value, attn_mask.value_or(Tensor())});
    context->saved_data["is_causal"] = options.is_causal;
    context->saved_data["scale"] = options.scale;
    context->saved_data["enable_gqa"] = options.enable_gqa;
    const auto [weights, scores] = compute_weights(*device_of_weights, {query, key, value, attn_mask}, options);
    return {weights, scores};
  }

  static Tensors backward(Context* context, const Tensors& grad_outputs) {
    const auto saved = context->get_saved_variables();
    PlainOptions options;
    options.is_causal = context->saved_data["is_causal"].toBool();
    options.scale = context->saved_data["scale"].toOptional<double>();
    options.enable_gqa = context->saved_data["enable_gqa"].toBool();
    const bool create_graph = at::GradMode::is_enabled();
    at::AutoGradMode enable(true);
    // Aliases, so that the gradient is that of the formula alone. Without a graph of it they need none of their own.
    Tensors x, wanted, outputs, along;
    for (const Tensor& t : saved) {
      const bool differentiable = t.defined() && t.requires_grad();
      x.push_back(differentiable ? create_graph ? t.view_as(t) : t.detach().requires_grad_() : t);
      if (differentiable) wanted.push_back(x.back());
    }
    const auto mask = x[3].defined() ? std::optional(x[3]) : std::nullopt;
    const auto results = rounded_weights({x[0], x[1], x[2], mask}, options);
    for (size_t i = 0; i < results.size(); ++i)
      if (grad_outputs[i].defined()) {
        outputs.push_back(results[i]);
        along.push_back(grad_outputs[i]);
      }
    Tensors gradients(5);
    const Tensors found = torch::autograd::grad(outputs, wanted, along, create_graph, create_graph,
                                                /*allow_unused=*/true);
    for (size_t i = 0, next = 0; i < saved.size(); ++i)
      if (saved[i].defined() && saved[i].requires_grad()) gradients[i] = found[next++];
    return gradients;
  }
};

// Whether these are tensors of the CPU and nothing else: no sample of vmap, no symbol of a compiler, no dual number.
bool has_kernel(const Inputs& inputs) {
  if (!device_of_weights || at::tracer::impl::is_dispatch_enabled()) return false;
  const auto plain = [](const Tensor& t) {
    return t.device().is_cpu() && t.layout() == at::kStrided && !at::isTensorSubclassLike(t) && !t.is_neg() &&
           !t._is_zerotensor() && !t._fw_grad(/*level=*/0).defined();
  };
  return plain(inputs.query) && plain(inputs.key) && plain(inputs.value) &&
         (!inputs.attn_mask || plain(*inputs.attn_mask));
}

OutputAndWeights sdpa_with_weights(const Inputs& inputs, const PlainOptions& options) {
  const Tensor output = SdpaOp::call(inputs, options);
  if (!has_kernel(inputs)) {
    const auto [weights, scores] = rounded_weights(inputs, options);
    return {output, weights, scores};
  }
  const auto& [query, key, value, attn_mask] = inputs;
  // Neither depends on the numbers of the value.
  const auto results = SdpaWeights::apply(query, key, value.detach(), attn_mask, options);
  return {output, results[0], results[1]};
}

constexpr auto kernel = WeightsOp::kernel<sdpa_with_weights>;

}  // namespace

TORCH_LIBRARY_IMPL(attn, CompositeImplicitAutograd, m) { m.impl("sdpa_with_weights", kernel); }

// Under vmap too it is what it calls: torch 2.15 would call it for one sample after the other.
TORCH_LIBRARY_IMPL(attn, FuncTorchBatchedDecomposition, m) { m.impl("sdpa_with_weights", kernel); }

}  // namespace attn
