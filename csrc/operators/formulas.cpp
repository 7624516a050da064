#include "operators/formulas.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/autograd.h>

#include <limits>

#include "core/score.h"
#include "operators/problem.h"

namespace attn {
namespace {

using at::Tensor;

constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();

Tensor widened(const Tensor& t) {
  return t.scalar_type() == at::kHalf || t.scalar_type() == at::kBFloat16 ? t.to(at::kFloat) : t;
}

// Repeats each key or value head for its group of query heads.
Tensor repeat_heads(const Tensor& t, const Shape& shape) {
  if (t.dim() < 3) return t;
  const c10::SymInt heads = t.sym_size(-3);
  if (TORCH_GUARD_OR_FALSE(heads.sym_eq(shape.heads)) || TORCH_GUARD_OR_FALSE(heads.sym_eq(1))) return t;
  return t.repeat_interleave_symint(shape.heads / heads, -3);
}

// Removes leading dimensions of 1 that the call lacks.
Tensor at_rank(Tensor t, const Shape& shape) {
  while (t.defined() && t.dim() > shape.dims) t = t.squeeze(0);
  return t;
}
// Turns a tensor that broadcasts to [*batch] into one that broadcasts to [*batch, heads, rows, keys].
Tensor for_entries(const Tensor& of_entries) {
  return of_entries.to(at::kLong).unsqueeze(-1).unsqueeze(-1).unsqueeze(-1);
}
// Turns a tensor that broadcasts to [*batch, heads] into one that broadcasts to [*batch, heads, rows, keys].
Tensor for_rows(const Tensor& of_heads, const Shape& shape, const Tensor& like) {
  return at_rank(of_heads.to(like.scalar_type()).unsqueeze(-1).unsqueeze(-1), shape);
}

// The sequence that each query and key belongs to, if sequences are packed. Tokens outside all N sequences have the
// number N.
struct Packed {
  Tensor row_sequence, key_sequence;  // [T_q], [T_k]
  Tensor position, place;             // [*batch, T_q], [T_k]: of a query and of a key in its sequence
  Tensor beyond;                      // [*batch, T_k]: keys beyond the length of their sequence

  Packed(const Shape& shape, const Call& call, const at::TensorOptions& device) {
    const auto integers = device.dtype(at::kLong);
    const auto number_in = [&](const Tensor& cu_seq, const Tensor& tokens) {
      return at::searchsorted(cu_seq.narrow_symint(0, 1, *shape.sequences), tokens, /*out_int32=*/false,
                              /*right=*/true);
    };
    const Tensor rows = at::arange(shape.queries, integers), keys = at::arange(shape.keys, integers);
    const Tensor cu_seq_q = call.cu_seq_q->to(at::kLong), cu_seq_k = call.cu_seq_k->to(at::kLong);
    row_sequence = number_in(cu_seq_q, rows);
    key_sequence = number_in(cu_seq_k, keys);
    // Returns, for each token, the number that belongs to the token's sequence, or 0 if the token is outside all
    // sequences.
    const auto of_tokens = [](const Tensor& of_sequences, const Tensor& sequence) {
      return at::constant_pad_nd(of_sequences, {0, 1}).index_select(-1, sequence);
    };
    const Tensor queries_of = cu_seq_q.diff(), keys_of = cu_seq_k.diff();
    const Tensor lengths = call.key_lengths ? call.key_lengths->to(at::kLong) : keys_of;
    const Tensor offset = call.query_offset ? call.query_offset->to(at::kLong) : lengths - queries_of;
    place = keys - cu_seq_k.index_select(0, key_sequence);
    position = rows - cu_seq_q.index_select(0, row_sequence) + of_tokens(offset, row_sequence);
    beyond = place.ge(of_tokens(lengths, key_sequence)).logical_or(key_sequence.eq(*shape.sequences));
  }
};

// Returns keys or values, with the rows beyond the length of each sequence set to 0, because the caller may have stored
// any numbers there.
Tensor in_use(const Tensor& of_keys, const Shape& shape, const Call& call) {
  if (!call.key_lengths) return of_keys;
  if (call.is_packed()) {
    const Tensor beyond = Packed(shape, call, of_keys.options()).beyond.unsqueeze(-1).unsqueeze(-3);
    return at::where(at_rank(beyond, shape), at::zeros({}, of_keys.options()), of_keys);
  }
  const Tensor keys = at::arange(shape.keys, of_keys.options().dtype(at::kLong)).unsqueeze(-1);
  const Tensor beyond = at_rank(keys.ge(for_entries(*call.key_lengths)), shape);  // [*batch, 1, S, 1]
  return at::where(beyond, at::zeros({}, of_keys.options()), of_keys);
}

Problem scores_of(const Call& call) {
  Problem p;
  describe_scores(p, call);
  return p;
}

// scale * query key^T, without the mask.
//
// Autograd sees the product of the finite elements only. Otherwise a hidden score, whose gradient is 0, would spread
// NaN, because 0 times a NaN or infinity of the key (or query) is NaN. Products that are not finite are added as
// constants. The sum of the NaNs in each row of the query and of the key is added too, so that a NaN element also gets
// a gradient.
Tensor products(const Shape& shape, const Call& call) {
  const Tensor q = widened(call.query) * ScoreFunction<double>::of(scores_of(call)).slope();
  const Tensor k = repeat_heads(widened(in_use(call.key, shape, call)), shape).transpose(-2, -1);
  const auto finite = [](const Tensor& t) { return t.masked_fill(t.isfinite().logical_not(), 0); };
  const auto nan = [](const Tensor& t) { return t.masked_fill(t.isnan().logical_not(), 0); };
  const Tensor all = at::matmul(q.detach(), k.detach());
  return at::matmul(finite(q), finite(k))
      .add_(all.masked_fill(all.isfinite(), 0))
      .add_(nan(q).sum(-1, /*keepdim=*/true))
      .add_(nan(k).sum(-2, /*keepdim=*/true))
      .expand_symint(shape.expanded(shape.heads, shape.queries, shape.keys));
}

// Refuses calls with dropout or a program, which have neither third derivatives nor forward mode over forward mode.
void check_third_derivative(const Call& call) {
  TORCH_CHECK(call.dropout_p == 0, "attn::sdpa: dropout_p is ", call.dropout_p,
              ", but third derivatives and forward over forward are supported without dropout only; set it to 0");
  TORCH_CHECK(!call.has_program(), FlexOp::name,
              ": a third derivative, or forward mode over forward mode, is asked for; functions of the pair have first "
              "and second derivatives");
}

// Returns the call's mask in a shape that broadcasts to the scores. With packed sequences the result has one column for
// each key of the call.
std::optional<Tensor> mask_of(const Shape& shape, const Call& call) {
  const auto& mask = call.attn_mask;
  if (!mask || !call.is_packed()) return mask;
  const Packed packed(shape, call, mask->options());
  const Tensor place = packed.place.clamp(0, mask->sym_size(-1).guard_int(__FILE__, __LINE__) - 1);
  return mask->index_select(-1, place);
}

// For every pair, |position of the query - position of the key| and whether the score is hidden.
struct Distances {
  Tensor distance, hidden;
};
Distances distances(const Shape& shape, const Call& call) {
  const auto integers = call.query.options().dtype(at::kLong);
  Tensor hidden;
  const auto hide = [&](const Tensor& more) { hidden = hidden.defined() ? hidden.logical_or(more) : more; };
  Tensor rows = at::arange(shape.queries, integers).unsqueeze(-1), keys = at::arange(shape.keys, integers);
  if (call.is_packed()) {
    const Packed packed(shape, call, integers);
    rows = packed.position.unsqueeze(-1).unsqueeze(-3);  // [*batch, 1, T_q, 1]
    keys = packed.place;
    hide(packed.row_sequence.unsqueeze(-1).ne(packed.key_sequence));
    hide(packed.beyond.unsqueeze(-2).unsqueeze(-2));
  } else if (call.query_offset) {
    rows = rows + for_entries(*call.query_offset);  // [*batch, 1, L, 1]
  }
  const Tensor ahead = keys - rows;  // of the query
  const auto [left, window_right] = call.window_size;
  const int64_t right = call.is_causal ? 0 : window_right;
  if (right >= 0) hide(ahead.gt(right));
  if (left >= 0) hide(ahead.lt(-left));
  if (call.key_lengths && !call.is_packed()) hide(keys.ge(for_entries(*call.key_lengths)));
  hidden = at_rank(hidden, shape);
  if (const auto mask = mask_of(shape, call))
    hide(mask->scalar_type() == at::kBool ? mask->logical_not() : mask->eq(kMinusInfinity));
  return {at_rank(ahead.abs(), shape), hidden};
}

// Applies the soft cap to products. ALiBi and masks are added later. No gradient runs through hidden scores, because
// the gradient of tanh times the NaN of a hidden key would be NaN.
Tensor capped(const Tensor& products, const Tensor& hidden, const Call& call) {
  const double cap = scores_of(call).softcap;
  if (cap == 0) return products;
  return cap * ((hidden.defined() ? products.masked_fill(hidden, 0) : products) / cap).tanh();
}

// What all formulas compute first: the scores, the weights and the rows' logsumexp. The logsumexp of a row that has
// neither keys nor a sink is -inf.
struct WideWeights {
  Tensor weights, scores, logsumexp;
};
// Results are float32 if the query has a half type.
//
// Autocast is off here and in the formulas below, because their inputs already have the right type.
WideWeights wide_weights(const Shape& shape, const Call& call) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const auto& [attn_mask, alibi_slopes, sinks] = std::tie(call.attn_mask, call.alibi_slopes, call.sinks);
  const auto [distance, hidden] = distances(shape, call);
  Tensor scores = capped(products(shape, call), hidden, call);
  if (alibi_slopes) scores = scores - for_rows(*alibi_slopes, shape, scores) * distance;
  if (attn_mask && attn_mask->scalar_type() != at::kBool)
    scores = scores + mask_of(shape, call)->to(scores.scalar_type());
  if (hidden.defined()) scores = scores.masked_fill(hidden, kMinusInfinity);
  // The softmax of a fully masked row must be 0 and have finite gradients.
  const Tensor empty_row = scores.eq(kMinusInfinity).all(-1, /*keepdim=*/true);
  Tensor logits = scores.masked_fill(empty_row, 0);
  if (sinks) {
    const Tensor sink = for_rows(*sinks, shape, scores).expand_as(empty_row);
    logits = at::cat({scores, sink}, -1);
    const Tensor nothing = logits.eq(kMinusInfinity).all(-1, /*keepdim=*/true);
    const Tensor safe = logits.masked_fill(nothing, 0);
    const Tensor weights = at::softmax(safe, -1).masked_fill(nothing, 0).narrow_symint(-1, 0, shape.keys).contiguous();
    return {weights, scores, at::logsumexp(safe, {-1}).masked_fill(nothing.squeeze(-1), kMinusInfinity)};
  }
  const Tensor weights = at::softmax(logits, -1).masked_fill(empty_row, 0);
  return {weights, scores, at::logsumexp(logits, {-1}).masked_fill(empty_row.squeeze(-1), kMinusInfinity)};
}

// The output, in the type of the weights, and the logsumexp, which autograd may differentiate with respect to `x`.
struct Formula {
  Call x;
  Tensor output, logsumexp;
};
// No gradient runs through a dependence of u or t on the inputs of a call, because the inputs of `x`, like
// independent(u) and independent(t), are aliases.
Formula formula_of(const Call& call) {
  check_third_derivative(call);
  const Call x = independent(call);
  const Shape shape = validate(call.is_packed() ? VarlenOp::name : SdpaOp::name, x);
  const WideWeights wide = wide_weights(shape, x);
  return {x, at::matmul(wide.weights, repeat_heads(widened(in_use(x.value, shape, x)), shape)), wide.logsumexp};
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
  for (size_t i = 0; i < std::min(grads.size(), results.size()); ++i)
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

OutputAndWeights weights_formula(const Call& call, const WantedWeights& wanted) {
  const auto dtype = call.query.scalar_type();
  const auto [weights, scores, _] = wide_weights(validate(WeightsOp::name, call), call);
  return {{}, (wanted.mean ? weights.mean(-3) : weights).to(dtype), wanted.scores ? scores.to(dtype) : Tensor()};
}

// J t = d<J'u, t>/du for every u, because J'u is linear in u. So this computes J'u, as second_formula() does, and
// differentiates <J'u, t> by u.
TangentResults tangent_formula(const Direction& direction, const Call& call) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const bool create_graph = at::GradMode::is_enabled();
  at::AutoGradMode enable(true);
  const auto [x, output, logsumexp] = formula_of(call);
  const std::vector<Tensor> u = {at::zeros_like(output).requires_grad_(), at::zeros_like(logsumexp).requires_grad_()};
  const auto t = list(direction);
  const auto along =
      differentiate({output, logsumexp}, u, list(x), [&](size_t i) { return i < t.size() && t[i].defined(); });
  const auto tangents = differentiate(along, t, u, [](size_t) { return true; }, create_graph);
  const auto of = [&](size_t i) { return tangents[i].defined() ? tangents[i] : at::zeros_like(u[i]); };
  const Tensor rounded = of(0).to(call.query.scalar_type());
  const Tensor residual = has_residual(call) ? of(0) - rounded : at::empty({0}, rounded.options());
  return {rounded, at::constant_pad_nd(of(1).unsqueeze(-1), {0, 1}), residual};
}

// Computes grad_x <t, J'u> by differentiating twice. u and t may themselves depend on x.
Gradients second_formula(const GradResults& u, const Direction& direction, const Call& call, Wanted wanted) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const bool create_graph = at::GradMode::is_enabled();
  at::AutoGradMode enable(true);
  const auto [x, output, logsumexp] = formula_of(call);
  const auto t = list(independent(direction));
  const auto along = differentiate({output.to(call.query.scalar_type()), logsumexp}, list(independent(u)), list(x),
                                   [&](size_t i) { return i < t.size() && t[i].defined(); });
  const auto h = differentiate(along, t, list(x), [&](size_t i) { return wanted[i]; }, create_graph);
  Gradients second;
  const auto put = [&](size_t i, Tensor& result, const std::optional<Tensor>& input) {
    if (wanted[i]) result = h[i].defined() ? h[i] : at::zeros_like(*input);
  };
  for_each_input(put, second, x);
  return second;
}

}  // namespace attn
