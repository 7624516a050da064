// Batching rules: under vmap an operator runs once, with the mapped dimension as one more leading dimension. The
// operators broadcast leading dimensions, so inputs that are not mapped are passed on as they are.
#include <ATen/ATen.h>
#include <ATen/functorch/BatchedTensorImpl.h>
#include <ATen/functorch/DynamicLayer.h>
#include <ATen/functorch/PlumbingHelper.h>
#include <torch/library.h>
// After functorch's headers, whose calls of functions with the same names would be ambiguous.
#include <ATen/LegacyBatchedTensorImpl.h>

#include <limits>

#include "operators/validate.h"

namespace attn {
namespace {

using at::Tensor;
using at::functorch::RandomnessType;

// The innermost vmap. The query of a mapped call is [mapped, leading dimensions..., head, L, E]. rank() is the number
// of all dimensions of this query.
class Batch {
 public:
  const Shape sample;  // the shape of one sample's call

  Batch(const char* op, const Call& call)
      : sample(validate(op, call)),
        layer_(*at::functorch::maybeCurrentDynamicLayer()),
        guard_(c10::DispatchKeySet({c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::FuncTorchVmapMode})) {
    const auto check = [&](size_t i, const auto& t) {
      TORCH_CHECK(!Tensors::about(i).has(kOfPacking) || !is_mapped(t), op, ": ", Tensors::about(i).name,
                  " is mapped by vmap; all samples must have the same, as they are computed at once");
    };
    for_each_tensor(check, tensors_of(call));
  }

  RandomnessType randomness() const { return layer_.randomness(); }
  c10::SymInt size() const { return layer_.batchSize(); }
  // At least 4, because a mapped dimension directly in front of [L, E] would become the head.
  int64_t rank() const { return std::max<int64_t>(sample.dims, 3) + 1; }

  bool is_mapped(const Tensor& t) const { return at::functorch::isBatchedAtLevel(t, layer_.layerId()); }
  bool is_mapped(const std::optional<Tensor>& t) const { return t && is_mapped(*t); }

  // Unwraps t. If t is mapped, the mapped dimension comes first, then dimensions of size 1, then t's own dimensions.
  // The result then has rank() - `less` dimensions, where `less` is how many of the dimensions head, L and E t lacks.
  Tensor physical(const Tensor& t, int64_t less = 0) const {
    auto [x, dim] = at::functorch::unwrapTensorAtLevel(t, layer_.layerId());
    return dim ? padded(x.movedim(*dim, 0), less) : x;
  }
  // Returns physical(t), expanded by a view if t is not mapped. A tensor of one dimension (an rng_state for all
  // samples, or an empty residual) is not expanded.
  Tensor expanded(const Tensor& t, int64_t less = 0) const {
    if (is_mapped(t) || t.dim() + less < 2) return physical(t, less);
    const Tensor x = padded(std::get<0>(at::functorch::unwrapTensorAtLevel(t, layer_.layerId())).unsqueeze(0), less);
    c10::SymDimVector sizes(x.sym_sizes());
    sizes[0] = size();
    return x.expand_symint(sizes);
  }
  std::optional<Tensor> physical(const std::optional<Tensor>& t, int64_t less = 0) const {
    return t ? std::optional(physical(*t, less)) : std::nullopt;
  }
  std::optional<Tensor> expanded(const std::optional<Tensor>& t, int64_t less) const {
    return t ? std::optional(expanded(*t, less)) : std::nullopt;
  }

  // The same for all tensors of a struct. In a call, expanded() expands the inputs only, never tensors of integers.
  template <Struct T>
  T physical(T x) const {
    for_each_tensor([&](size_t i, auto& t) { t = physical(t, less_of<T>(i)); }, tensors_of(x));
    return x;
  }
  template <Struct T>
  T expanded(T x) const {
    for_each_input([&](size_t i, auto& t) { t = expanded(t, less_of<T>(i)); }, x);
    return x;
  }
  Call expanded(const Call& call) const {
    Call x = physical(call);
    const auto expand = [&](size_t i, auto& result, const auto& t) {
      result = expanded(t, less_of(Inputs::about(i).kind));
    };
    for_each_input(expand, x, call);
    return x;
  }
  template <Struct T>
  bool is_mapped(const T& x) const {
    return any_of([&](const auto& t) { return is_mapped(t); }, tensors_of(x));
  }

  // Turns a physical result into a tensor of the innermost vmap. The mapped function sees `dims` dimensions of this
  // tensor. Returns a result of one dimension (an empty residual) as it is, because all samples share it.
  Tensor logical(Tensor t, int64_t dims) const {
    if (t.dim() < 2) return t;
    while (t.dim() > dims + 1) {
      TORCH_INTERNAL_ASSERT(t.sym_size(1) == 1, "attn: a mapped result of shape ", t.sym_sizes(), " has no rank ",
                            dims);
      t = t.squeeze(1);
    }
    return at::functorch::makeBatched(t, 0, layer_.layerId());
  }
  template <Struct T>
  T logical(const T& results, int64_t dims) const {
    return map_inputs(results, [&](const Tensor& t) { return logical(t, dims); });
  }
  OutputAndRows logical(const OutputAndRows& results, int64_t dims) const {
    return {logical(results.output, dims), logical(results.rows, dims - 1)};
  }
  Gradients logical(const Gradients& grads, const Call& call) const {
    Gradients results;
    const auto map = [&](size_t, Tensor& result, const Tensor& grad, const std::optional<Tensor>& input) {
      if (grad.defined()) result = input ? logical(grad, input->dim()) : grad;
    };
    for_each_input(map, results, grads, call);
    return results;
  }

 private:
  // Both functions return how many of the dimensions head, L and E a tensor lacks. The first function takes the kind of
  // the tensor. The second function takes the number of the tensor among the tensors of a struct T.
  static constexpr int64_t less_of(Kind kind) {
    return kind == Kind::scales ? 1 : kind == Kind::heads ? 2 : kind == Kind::entries ? 3 : 0;
  }
  template <class T>
  static constexpr int64_t less_of(size_t i) {
    if constexpr (std::is_same_v<T, Call>)
      return less_of(Tensors::about(i).kind);
    else if constexpr (std::is_same_v<T, Direction>)
      return less_of(Inputs::about(i).kind);
    else
      return std::is_same_v<T, GradResults> && i == 1 ? 1 : 0;
  }

  Tensor padded(Tensor x, int64_t less) const {
    while (x.dim() < rank() - less) x = x.unsqueeze(1);
    return x;
  }

  at::functorch::DynamicLayer layer_;
  c10::impl::ExcludeDispatchKeyGuard guard_;
};

// Draws dropout's seeds for a mapped call: one for all samples, or one for each sample. Head numbers are taken modulo
// the period of rng_state (core/params.h). The period is the number of heads in one sample, so that the heads of every
// sample are numbered from 0. Derivatives under another nesting of vmap then get the random numbers of the forward.
Tensor draw_rng_state(const Batch& batch, bool one_each, const Tensor& query) {
  c10::SymInt heads = batch.sample.heads;
  for (const c10::SymInt& size : batch.sample.batch) heads = heads * size;
  c10::SymDimVector sizes(batch.rank(), 1);
  if (one_each) sizes[0] = batch.size();
  const auto int64 = query.options().dtype(at::kLong);
  const auto limits = std::numeric_limits<int64_t>();
  const Tensor seed = at::randint_symint(limits.min(), limits.max(), sizes, int64);
  const Tensor offset = at::zeros_symint(sizes, int64);
  const Tensor period = at::full_symint(sizes, heads.max(1), int64);
  const Tensor state = at::cat({seed, offset, period}, -1);
  return one_each ? state : state.reshape({3});
}

// The arguments with which the innermost vmap calls the forward at the next lower level. There the mapped dimension is
// an ordinary leading dimension.
struct ForwardCall {
  Call call;
  std::optional<Tensor> rng_state;
  bool mapped;        // false if no tensor is mapped: the call then runs once for all samples
  bool state_mapped;  // every sample has an rng_state of its own
};

ForwardCall forward_call(const Batch& batch, const Call& call, const std::optional<Tensor>& rng_state) {
  const bool random = call.dropout_p > 0 && !rng_state;
  const bool different = random && batch.randomness() == RandomnessType::Different;
  TORCH_CHECK(!random || batch.randomness() != RandomnessType::Error, "vmap: dropout_p = ", call.dropout_p,
              " draws random numbers, but randomness is 'error'; call vmap with randomness='different' or 'same'");
  const bool sizes_mapped = batch.is_mapped(call.query) || batch.is_mapped(call.key) || batch.is_mapped(call.value);
  const bool mapped = batch.is_mapped(call) || batch.is_mapped(rng_state) || different;
  ForwardCall below{batch.physical(call), batch.physical(rng_state), mapped, different || batch.is_mapped(rng_state)};
  // If neither query, key nor value is mapped, the query is expanded by the mapped dimension. One of the three must
  // have this dimension, because other inputs broadcast to the scores and cannot enlarge them.
  if (mapped && !sizes_mapped) below.call.query = batch.expanded(call.query);
  if (random && mapped) below.rng_state = draw_rng_state(batch, different, below.call.query);
  return below;
}

ForwardResults forward_vmap(const Call& call, const std::optional<Tensor>& rng_state, bool exact_residual) {
  const Batch batch(SdpaOp::name, call);
  const ForwardCall below = forward_call(batch, call, rng_state);
  const ForwardResults results = ForwardOp::call(below.call, below.rng_state, exact_residual);
  if (!below.mapped) return results;
  const int64_t state_dims = rng_state ? rng_state->dim() : 1;
  Saved saved = batch.logical(results.saved, batch.sample.dims);
  saved.rng_state = below.state_mapped ? batch.logical(results.saved.rng_state, state_dims) : results.saved.rng_state;
  return {saved, batch.logical(results.rows, batch.sample.dims - 1)};
}

// sdpa, attention or flex_attention.
template <class Op>
auto attend_vmap(const Call& call) {
  const Batch batch(Op::name, call);
  const ForwardCall below = forward_call(batch, call, std::nullopt);
  const auto results = below.rng_state ? attend_by_forward<Op>(below.call, below.rng_state) : Op::call(below.call);
  return below.mapped ? batch.logical(results, batch.sample.dims) : results;
}

// The operators of derivatives return a result for every sample, so every tensor that they take must have the mapped
// dimension. A tensor that is not mapped is expanded by a view.

Gradients backward_vmap(const GradResults& u, const Saved& saved, const Call& call, Wanted wanted) {
  const Batch batch(SdpaOp::name, call);
  const Gradients grads = BackwardOp::call(batch.expanded(u), batch.expanded(saved), batch.expanded(call), wanted);
  return batch.logical(grads, call);
}

TangentResults tangent_vmap(const Saved& saved, const Direction& direction, const Call& call) {
  const Batch batch(SdpaOp::name, call);
  const TangentResults tangent =
      TangentOp::call(batch.expanded(saved), batch.expanded(direction), batch.expanded(call));
  return batch.logical(tangent, batch.sample.dims);
}

Gradients second_vmap(const GradResults& u, const Saved& saved, const Direction& direction,
                      const TangentResults& tangent, const Call& call, Wanted wanted) {
  const Batch batch(SdpaOp::name, call);
  const Gradients grads = SecondOp::call(batch.expanded(u), batch.expanded(saved), batch.expanded(direction),
                                         batch.expanded(tangent), batch.expanded(call), wanted);
  return batch.logical(grads, call);
}

Statistics stats_vmap(const Call& scores) {
  const Call call = with_key_as_value(scores);
  const Batch batch(StatsOp::name, call);
  const ForwardCall below = forward_call(batch, call, std::nullopt);
  const Statistics results = StatsOp::call(below.call);
  if (!below.mapped) return results;
  return batch.logical(results, batch.sample.dims - 1);  // [..., head, L or S]
}

// The vmap of torch.autograd.grad(is_grads_batched=True) is an older one, which calls an operator once for each sample.
// Its own code for that would overlook the tensors of a list.
template <class Op>
constexpr auto of_each_sample = [](auto... arguments) {
  int64_t level = 0, size = 0;
  const auto find = [&](size_t, const std::optional<Tensor>& t) {
    const auto* const batched = t ? at::maybeGetBatchedImpl(*t) : nullptr;
    if (!batched || batched->bdims().back().level() < level) return;
    level = batched->bdims().back().level();
    size = batched->value().size(batched->bdims().back().dim());
  };
  const auto visit = [](const auto& f, auto& argument) {
    if constexpr (Struct<decltype(argument)>) for_each_tensor(f, tensors_of(argument));
  };
  (visit(find, arguments), ...);
  const auto sample = [&](auto argument, int64_t n) {
    const auto select = [&](size_t, auto& t) {
      if (std::optional<Tensor> x = t; x && at::isBatchedTensor(*x))
        t = at::_remove_batch_dim(*x, level, size, 0).select(0, n);
    };
    visit(select, argument);
    return argument;
  };
  auto results = Op::call(sample(arguments, 0)...);
  std::vector<std::vector<Tensor>> of_results;
  for_each_tensor([&](size_t, Tensor& t) { of_results.push_back({t}); }, fields_of(results));
  for (int64_t n = 1; n < size; ++n) {
    const auto more = Op::call(sample(arguments, n)...);
    for_each_tensor([&](size_t i, const Tensor& t) { of_results[i].push_back(t); }, fields_of(more));
  }
  const auto merge = [&](size_t i, Tensor& t) {
    if (t.defined()) t = at::_add_batch_dim(at::stack(of_results[i]), 0, level);
  };
  for_each_tensor(merge, fields_of(results));
  return results;
};

}  // namespace

TORCH_LIBRARY_IMPL(attn, Batched, m) {
  m.impl("flex_attention", FlexOp::kernel<of_each_sample<FlexOp>>);
  m.impl("_sdpa_forward", ForwardOp::kernel<of_each_sample<ForwardOp>>);
  m.impl("_sdpa_backward", BackwardOp::kernel<of_each_sample<BackwardOp>>);
  m.impl("_sdpa_tangent", TangentOp::kernel<of_each_sample<TangentOp>>);
  m.impl("_sdpa_second", SecondOp::kernel<of_each_sample<SecondOp>>);
}

TORCH_LIBRARY_IMPL(attn, FuncTorchBatched, m) {
  m.impl("sdpa", SdpaOp::kernel<attend_vmap<SdpaOp>>);
  m.impl("attention", AttentionOp::kernel<attend_vmap<AttentionOp>>);
  m.impl("flex_attention", FlexOp::kernel<attend_vmap<FlexOp>>);
  m.impl("_sdpa_forward", ForwardOp::kernel<forward_vmap>);
  m.impl("_sdpa_backward", BackwardOp::kernel<backward_vmap>);
  m.impl("_sdpa_tangent", TangentOp::kernel<tangent_vmap>);
  m.impl("_sdpa_second", SecondOp::kernel<second_vmap>);
  m.impl("sdpa_stats", StatsOp::kernel<stats_vmap>);
}

// Inside vmap, these kernels serve calls without a mapped tensor, because dropout must follow vmap's `randomness` in
// these calls, too.
TORCH_LIBRARY_IMPL(attn, FuncTorchVmapMode, m) {
  m.impl("sdpa", SdpaOp::kernel<attend_vmap<SdpaOp>>);
  m.impl("attention", AttentionOp::kernel<attend_vmap<AttentionOp>>);
  m.impl("flex_attention", FlexOp::kernel<attend_vmap<FlexOp>>);
  m.impl("_sdpa_forward", ForwardOp::kernel<forward_vmap>);
}

}  // namespace attn
