#include "operators/run.h"

#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>

#include <limits>
#include <numeric>

namespace attn {

namespace {

using at::Tensor;

// No task writes the results of rows outside all packed sequences, the gradients of keys beyond the length of their
// sequence, or the gradients of a sequence that lacks keys or queries. All these must be 0. Therefore the caller sets
// all results to 0 first if leaves_rows_out() or leaves_some_out() is true.
bool leaves_rows_out(const Problem& p, const Tensor& query) {
  if (p.sequences == 0 || !query.is_cpu()) return p.tokens > 0;
  const int64_t* const lengths = p.visibility.query_lengths;
  return std::accumulate(lengths, lengths + p.batch, int64_t{0}) != p.batch / p.sequences * p.tokens;
}
bool leaves_some_out(const Problem& p, const Tensor& query, const Shape& shape) {
  const auto [left, right, offsets, key_lengths, query_lengths] = p.visibility;
  if (!key_lengths) return leaves_rows_out(p, query);
  if (!query.is_cpu() || leaves_rows_out(p, query)) return true;
  int64_t all_keys = 0;
  for (int64_t n = 0; n < p.batch; ++n) {
    if (key_lengths[n] == 0 || (query_lengths && query_lengths[n] == 0)) return true;
    all_keys += key_lengths[n];
  }
  return shape.keys * (p.batch / std::max<int64_t>(p.sequences, 1)) != all_keys;
}
template <Struct T>
void zero(const T& results) {
  map_inputs(results, [](const Tensor& t) { return t.defined() ? t.zero_() : t; });
}

// The results of the backward and the second-order operator, uninitialised.
Gradients empty_gradients(const Call& call, Wanted wanted) {
  Gradients grads;
  const auto allocate = [&](size_t i, Tensor& grad, const std::optional<Tensor>& input) {
    if (wanted[i])
      grad = at::empty_like(*input);
    else if (i >= Inputs::kCount - 1)
      grad = at::empty({0}, call.query.options());
  };
  for_each_input(allocate, grads, call);
  return grads;
}

// Sums over the rows of every head, [batch, heads, L] -> [*batch, heads], in float64 and, on a CPU, in one fixed order
// for any number of threads.
Tensor sum_of_rows(const Tensor& rows, const Shape& shape) {
  const Tensor numbers = rows.to(at::kDouble).contiguous();
  if (!rows.is_cpu()) return numbers.sum(-1).view_symint(shape.of_heads());
  const Tensor sums = at::zeros_symint(shape.of_heads(), numbers.options());
  const int64_t length = numbers.size(-1);
  for (int64_t head = 0; head < sums.numel(); ++head)
    for (int64_t i = 0; i < length; ++i)
      sums.mutable_data_ptr<double>()[head] += numbers.const_data_ptr<double>()[head * length + i];
  return sums;
}

// Makes the tensors that kernels write gradients to. The gradient of an input is written in the shape that the input is
// broadcast to, or as one number per row. A gradient that is summed to the input's shape later is written in the
// compute dtype, because in a half type large gradients of opposite signs would become infinities.
class RoomForGradients {
 public:
  RoomForGradients(ProblemBuilder& builder, const Shape& shape, const Tensor& query, bool leaves_some_out)
      : builder_(builder), shape_(shape), query_(query), leaves_some_out_(leaves_some_out) {}

  Tensor add(Operand& operand, const Tensor& grad, const c10::SymDimVector& sizes, Axis axis) {
    if (!grad.defined()) return grad;
    const Tensor room = of_shape(grad, sizes);
    if (leaves_some_out_) room.zero_();
    builder_.add_result(operand, room, axis);
    return room;
  }
  Tensor of_shape(const Tensor& grad, const c10::SymDimVector& sizes) const {
    if (grad.sym_sizes() == c10::SymIntArrayRef(sizes)) return grad;
    return at::empty_symint(sizes, compute_options(grad));
  }
  Tensor of_rows(void*& data) const {
    const Tensor rows = empty_numbers(shape_.numbers(shape_.queries), query_);
    if (leaves_some_out_) rows.zero_();
    data = rows.mutable_data_ptr();
    return rows;
  }

 private:
  ProblemBuilder& builder_;
  const Shape& shape_;
  const Tensor& query_;
  bool leaves_some_out_;
};

// Sums the written gradients to the shapes of the inputs.
void sum_to_inputs(const Gradients& grads, const Gradients& written) {
  const auto sum = [](size_t i, const Tensor& grad, const Tensor& found) {
    TORCH_INTERNAL_ASSERT(found.defined() || !grad.defined(), "attn: no kernel writes the gradient of ",
                          Inputs::name(i));
    if (!grad.is_same(found)) grad.copy_(at::sum_to(found, grad.sizes()));
  };
  for_each_input(sum, grads, written);
}

// Describes the point at which a derivative is taken.
template <class Params>
void describe_point(Params& p, ProblemBuilder& builder, const Saved& saved) {
  builder.add(p.output, saved.output);
  if (saved.residual.dim() > 1) builder.add(p.residual, saved.residual);
  p.logsumexp = builder.contiguous(saved.logsumexp);
}

void describe_direction(Tangents& t, ProblemBuilder& builder, const Direction& direction) {
  using enum Axis;
  const auto add = [&](Operand& operand, const std::optional<Tensor>& tangent, Axis axis = queries) {
    if (tangent && tangent->numel() > 0) builder.add(operand, *tangent, axis);
  };
  add(t.query, direction.query);
  add(t.key, direction.key, keys);
  add(t.value, direction.value, keys);
  add(t.mask, direction.attn_mask);
  t.alibi_slopes = builder.of_heads(direction.alibi_slopes);
  t.sinks = builder.of_heads(direction.sinks);
  if (builder.program) builder.program->add_tangents(direction);
}

// Computes the backward, or the second-order operator if a direction and its tangent are given.
template <class Params>
Gradients gradients(const Device& device, Run<Params>* run, const GradResults& u, const Saved& saved, const Call& call,
                    Wanted wanted, const Direction* direction = nullptr, const TangentResults* tangent = nullptr) {
  constexpr bool kIsSecond = std::is_same_v<Params, SecondParams>;
  const ValidatedCall valid{call};
  const Shape& shape = valid.shape;
  valid.check(u);
  valid.check(saved);
  if constexpr (kIsSecond) valid.check(*direction);
  if constexpr (kIsSecond) valid.check(*tangent);
  valid.check(wanted);
  const Gradients grads = empty_gradients(call, wanted);
  if (!run) return grads;
  Params p;
  ProblemBuilder builder(p, shape, call, saved.rng_state, device.write_sequences);
  describe_point(p, builder, saved);
  builder.add(p.grad_output, u.output);
  if constexpr (kIsSecond) {
    describe_direction(p.t, builder, *direction);
    builder.add(p.tangent_output, tangent->output);
    if (tangent->residual.dim() > 1) builder.add(p.tangent_residual, tangent->residual);
    p.tangent_logsumexp = builder.contiguous(tangent->logsumexp);
  }
  RoomForGradients room(builder, shape, call.query, leaves_some_out(p, call.query, shape));
  if (u.logsumexp) p.grad_logsumexp = builder.contiguous(*u.logsumexp);
  if (no_rows(p) || (p.keys == 0 && !call.is_packed())) {
    zero(grads);
    // The logsumexp of a row without keys is the sink.
    if (!kIsSecond && grads.sinks.defined() && u.logsumexp && !call.is_packed())
      grads.sinks.copy_(
          at::sum_to(sum_of_rows(*u.logsumexp, shape).masked_fill(call.sinks->isneginf(), 0), grads.sinks.sizes()));
    return grads;
  }
  Gradients written;
  using enum Axis;
  written.query =
      room.add(p.grad_query, grads.query, shape.expanded(shape.heads, shape.queries, shape.head_dim), queries);
  written.key = room.add(p.grad_key, grads.key, shape.expanded(shape.key_heads, shape.keys, shape.head_dim), keys);
  written.value =
      room.add(p.grad_value, grads.value, shape.expanded(shape.value_heads, shape.keys, shape.value_dim), keys);
  Tensor grad_mask_rows;
  if (Tensor grad_mask = grads.attn_mask; grad_mask.defined()) {
    if (call.is_packed())  // only heads share the mask; each sequence has its own part
      grad_mask = room.of_shape(grad_mask,
                                shape.expanded(grad_mask.sym_size(-3), grad_mask.sym_size(-2), grad_mask.sym_size(-1)));
    grad_mask.zero_();  // tasks skip tiles that positions hide
    written.attn_mask = grad_mask;
    if ((grad_mask.dim() > 0 && grad_mask.size(-1) != 1) || call.score_mod)
      builder.add_result(p.grad_mask, grad_mask);
    else if (p.sinks || p.grad_logsumexp)
      // This mask adds one number to all scores of a row. The number changes only the row's logsumexp and, with a sink,
      // the sum of the row's weights.
      grad_mask_rows = room.of_rows(p.grad_mask_rows);
  }
  const Tensor grad_slopes = grads.alibi_slopes.defined() ? room.of_rows(p.grad_slopes) : Tensor();
  const Tensor grad_sinks = grads.sinks.defined() ? room.of_rows(p.grad_sinks) : Tensor();
  written.tables = grads.tables;
  if (builder.program) builder.program->add_gradients(p, grads, wanted, written);
  builder.merge_batch_dims();
  plan_mask(p);
  run(p, call.query);
  if (builder.program) builder.program->check_indices();
  if (grad_mask_rows.defined()) written.attn_mask = grad_mask_rows.unsqueeze(-1);
  if (grad_slopes.defined()) written.alibi_slopes = sum_of_rows(grad_slopes, shape);
  if (grad_sinks.defined()) written.sinks = sum_of_rows(grad_sinks, shape);
  sum_to_inputs(grads, written);
  return grads;
}

}  // namespace

const Device*& device_of(c10::DeviceType type) {
  static std::array<const Device*, static_cast<size_t>(c10::COMPILE_TIME_MAX_DEVICE_TYPES)> devices{};
  return devices.at(static_cast<size_t>(type));
}

ForwardResults compute_forward(const Device& device, bool for_derivatives, const Call& call,
                               const std::optional<Tensor>& given_state, bool exact_residual) {
  const Tensor& query = call.query;
  const ValidatedCall valid{call};
  const Shape& shape = valid.shape;
  if (for_derivatives) valid.refuse_derivatives();
  if (given_state) valid.check_rng_state(*given_state);
  const bool draws = call.dropout_p > 0 && !given_state;
  ForwardResults all;
  auto& [results, rows] = all;
  results.output = empty_output(shape, query);
  results.rng_state = given_state ? given_state->clone() : at::empty({draws ? 3 : 0}, query.options().dtype(at::kLong));
  if (for_derivatives) {
    results.logsumexp = empty_numbers(shape.logsumexp(), query);
    results.residual = empty_residual(results.output, call);
  }
  const c10::SymDimVector of_rows = call.with_rows ? shape.numbers(shape.queries) : c10::SymDimVector{0};
  rows = {empty_numbers(of_rows, query), empty_numbers(of_rows, query)};
  if (!device.forward) return all;
  ForwardParams p;
  ProblemBuilder builder(p, shape, call, results.rng_state, device.write_sequences);
  if (leaves_rows_out(p, query)) {
    zero(Saved{results.output, results.logsumexp, {}, results.residual});
    zero(rows);
  }
  if (draws) device.draw_rng_state(results.rng_state, std::max<int64_t>(1, p.batch * p.heads));
  builder.add_result(p.output, results.output);
  if (for_derivatives) {
    p.logsumexp = results.logsumexp.mutable_data_ptr();
    if (results.residual.dim() > 1) {
      builder.add_result(p.residual, results.residual);
      p.exact_residual = exact_residual;
    }
  }
  if (call.with_rows) {
    p.row_logsumexp = rows.logsumexp.mutable_data_ptr();
    p.max_score = rows.max_score.mutable_data_ptr();
  }
  builder.add_scale_of_8_bits(p.key_scale, call.key_scale, call.key);
  builder.add_scale_of_8_bits(p.value_scale, call.value_scale, call.value);
  if (!no_rows(p)) {
    builder.merge_batch_dims();
    device.forward(p, query);
    if (builder.program) builder.program->check_indices();
  }
  return all;
}

Gradients compute_backward(const Device& device, const GradResults& u, const Saved& saved, const Call& call,
                           Wanted wanted) {
  return gradients(device, device.backward, u, saved, call, wanted);
}

Gradients compute_second(const Device& device, const GradResults& u, const Saved& saved, const Direction& direction,
                         const TangentResults& tangent, const Call& call, Wanted wanted) {
  return gradients(device, device.second, u, saved, call, wanted, &direction, &tangent);
}

TangentResults compute_tangent(const Device& device, const Saved& saved, const Direction& direction, const Call& call) {
  const ValidatedCall valid{call};
  valid.check(saved);
  valid.check(direction);
  TangentResults results;
  results.output = empty_output(valid.shape, call.query);
  results.logsumexp = empty_numbers(valid.shape.logsumexp(), call.query);
  results.residual = empty_residual(results.output, call);
  if (!device.tangent) return results;
  TangentParams p;
  ProblemBuilder builder(p, valid.shape, call, saved.rng_state, device.write_sequences);
  describe_point(p, builder, saved);
  describe_direction(p.t, builder, direction);
  if (leaves_rows_out(p, call.query)) zero(results);
  builder.add_result(p.tangent_output, results.output);
  if (results.residual.dim() > 1) builder.add_result(p.tangent_residual, results.residual);
  p.tangent_logsumexp = results.logsumexp.mutable_data_ptr();
  if (!no_rows(p)) {
    builder.merge_batch_dims();
    device.tangent(p, call.query);
    if (builder.program) builder.program->check_indices();
  }
  return results;
}

Statistics compute_stats(const Device& device, const Call& scores) {
  refuse_over_processes(StatsOp::name);
  const Call call = with_key_as_value(scores);
  const Shape shape = validate(StatsOp::name, call);
  const auto empty = [&](const c10::SymInt& length) { return empty_numbers(shape.numbers(length), call.query); };
  const Statistics results = {empty(shape.queries), empty(shape.queries), empty(shape.queries), empty(shape.keys)};
  if (!device.stats) return results;
  StatsParams p;
  ProblemBuilder builder(p, shape, call, /*rng_state=*/Tensor(), device.write_sequences);
  if (no_rows(p)) {
    results.received_weight.zero_();
    return results;
  }
  builder.merge_batch_dims();
  p.largest_score = results.largest_score.mutable_data_ptr();
  p.entropy = results.entropy.mutable_data_ptr();
  p.logsumexp = results.logsumexp.mutable_data_ptr();
  p.received_weight = results.received_weight.mutable_data_ptr();
  device.stats(p, call.query);
  return results;
}

OutputAndWeights compute_weights(const Device& device, const Call& call, const WantedWeights& wanted) {
  const Shape shape = validate(WeightsOp::name, call);
  const auto empty = [&](const c10::SymInt& heads) {
    return at::empty_symint(shape.expanded(heads, shape.queries, shape.keys), call.query.options());
  };
  OutputAndWeights results;
  if (wanted.output) results.output = empty_output(shape, call.query);
  results.weights = empty(wanted.mean ? 1 : shape.heads);
  if (wanted.scores) results.scores = empty(shape.heads);
  if (wanted.output && shape.keys == 0) results.output.zero_();
  if (shape.heads == 0) results.weights.fill_(std::numeric_limits<double>::quiet_NaN());  // a mean of nothing
  if (results.weights.numel() > 0 && shape.heads > 0) {
    Call without_dropout = call;
    without_dropout.dropout_p = 0;
    WeightsParams p;
    ProblemBuilder builder(p, shape, without_dropout, /*rng_state=*/Tensor(), /*write=*/nullptr);  // never packed
    p.of_all_heads = wanted.mean;
    builder.add_result(p.weights, results.weights);
    if (wanted.scores) builder.add_result(p.scores, results.scores);
    if (wanted.output) builder.add_result(p.output, results.output);
    builder.merge_batch_dims();
    device.weights(p, call.query);
  }
  if (wanted.mean) results.weights = results.weights.squeeze(-3);
  return results;
}

}  // namespace attn
