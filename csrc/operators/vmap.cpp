// Batching rules: under vmap an operator runs once, with the mapped dimension as one more leading dimension. The
// operators broadcast leading dimensions, so inputs that are not mapped stay as they are.
#include <ATen/ATen.h>
#include <ATen/functorch/BatchedTensorImpl.h>
#include <ATen/functorch/DynamicLayer.h>
#include <ATen/functorch/PlumbingHelper.h>
#include <torch/library.h>

#include <limits>

#include "operators/validate.h"

namespace attn {
namespace {

using at::Tensor;
using at::functorch::RandomnessType;

// The innermost vmap, and the rank of a mapped call: [mapped, leading dimensions..., head, L, E].
class Batch {
 public:
  const Shape sample;  // the call as one sample makes it

  Batch(const char* op, const Inputs& inputs, const PlainOptions& options)
      : sample(validate(op, inputs, options)),
        layer_(*at::functorch::maybeCurrentDynamicLayer()),
        guard_(c10::DispatchKeySet({c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::FuncTorchVmapMode})) {}

  RandomnessType randomness() const { return layer_.randomness(); }
  c10::SymInt size() const { return layer_.batchSize(); }
  // A mapped dimension in front of [L, E] must not become the head.
  int64_t rank() const { return std::max<int64_t>(sample.dims, 3) + 1; }

  bool is_mapped(const Tensor& t) const { return at::functorch::isBatchedAtLevel(t, layer_.layerId()); }
  bool is_mapped(const std::optional<Tensor>& t) const { return t && is_mapped(*t); }

  // The tensor below vmap: as it is if it is not mapped, else [mapped, 1..., own dimensions] of this rank.
  Tensor physical(const Tensor& t) const {
    auto [x, dim] = at::functorch::unwrapTensorAtLevel(t, layer_.layerId());
    if (!dim) return x;
    x = x.movedim(*dim, 0);
    return padded(x);
  }
  std::optional<Tensor> physical(const std::optional<Tensor>& t) const {
    return t ? std::optional(physical(*t)) : std::nullopt;
  }
  Inputs physical(const Inputs& inputs) const {
    return map_tensors(inputs, [&](const Tensor& t) { return physical(t); });
  }
  // Returns physical(t) with the mapped dimension: a tensor that is not mapped is expanded, by a view. One of a single
  // dimension, an rng_state for all samples or no residual, stays as it is.
  Tensor expanded(const Tensor& t) const {
    if (is_mapped(t) || t.dim() < 2) return physical(t);
    const Tensor x = padded(at::functorch::unwrapTensorAtLevel(t, layer_.layerId()));
    c10::SymDimVector sizes(x.sym_sizes());
    sizes[0] = size();
    return x.expand_symint(sizes);
  }
  template <Struct T>
  T expanded(const T& tensors) const {
    return map_tensors(tensors, [&](const Tensor& t) { return expanded(t); });
  }

  // A mapped result of `dims` dimensions above vmap. One of a single dimension, no residual, is that of all samples.
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
    return map_tensors(results, [&](const Tensor& t) { return logical(t, dims); });
  }
  Gradients logical(const Gradients& grads, const Inputs& inputs) const {
    Gradients results;
    const auto map = [&](size_t, Tensor& result, const Tensor& grad, const std::optional<Tensor>& input) {
      if (grad.defined()) result = logical(grad, input->dim());
    };
    for_each_field(map, results, grads, inputs);
    return results;
  }

 private:
  Tensor padded(Tensor x) const {
    while (x.dim() < rank()) x = x.unsqueeze(1);
    return x;
  }
  Tensor padded(std::tuple<Tensor, std::optional<int64_t>> unmapped) const {
    return padded(std::get<0>(unmapped).unsqueeze(0));
  }

  at::functorch::DynamicLayer layer_;
  c10::impl::ExcludeDispatchKeyGuard guard_;
};

// Seeds of dropout for a mapped call: one for all samples, or one each. Every sample counts its heads from 0, so that
// derivatives taken under another nesting of vmap find the numbers of the forward again.
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

// The forward as it is called below vmap.
struct ForwardCall {
  Inputs inputs;
  std::optional<Tensor> rng_state;
  bool mapped;        // false if no input is: then the call runs once, for all samples
  bool state_mapped;  // every sample has an rng_state of its own
};

ForwardCall forward_call(const Batch& batch, const Inputs& inputs, const PlainOptions& options,
                         const std::optional<Tensor>& rng_state) {
  const auto& [query, key, value, attn_mask] = inputs;
  const bool random = options.dropout_p > 0 && !rng_state;
  const bool different = random && batch.randomness() == RandomnessType::Different;
  TORCH_CHECK(!random || batch.randomness() != RandomnessType::Error, "vmap: dropout_p = ", options.dropout_p,
              " draws random numbers, but randomness is 'error'; call vmap with randomness='different' or 'same'");
  const bool inputs_mapped = batch.is_mapped(query) || batch.is_mapped(key) || batch.is_mapped(value);
  const bool mapped = inputs_mapped || batch.is_mapped(attn_mask) || batch.is_mapped(rng_state) || different;
  ForwardCall call{batch.physical(inputs), batch.physical(rng_state), mapped, different || batch.is_mapped(rng_state)};
  // The query carries the mapped dimension where neither key nor value does: the mask may not enlarge the scores.
  if (mapped && !inputs_mapped) call.inputs.query = batch.expanded(query);
  if (random && mapped) call.rng_state = draw_rng_state(batch, different, call.inputs.query);
  return call;
}

Tensor sdpa_vmap(const Inputs& inputs, const PlainOptions& options) {
  const Batch batch(SdpaOp::name, inputs, options);
  const ForwardCall c = forward_call(batch, inputs, options, std::nullopt);
  const Tensor output =
      c.rng_state ? ForwardOp::call(c.inputs, options, c.rng_state).output : SdpaOp::call(c.inputs, options);
  return c.mapped ? batch.logical(output, batch.sample.dims) : output;
}

Saved forward_vmap(const Inputs& inputs, const PlainOptions& options, const std::optional<Tensor>& rng_state) {
  const Batch batch(SdpaOp::name, inputs, options);
  const ForwardCall c = forward_call(batch, inputs, options, rng_state);
  const Saved results = ForwardOp::call(c.inputs, options, c.rng_state);
  if (!c.mapped) return results;
  const int64_t state_dims = rng_state ? rng_state->dim() : 1;
  return {batch.logical(results.output, batch.sample.dims), batch.logical(results.logsumexp, batch.sample.dims),
          c.state_mapped ? batch.logical(results.rng_state, state_dims) : results.rng_state,
          batch.logical(results.residual, batch.sample.dims)};
}

// The derivatives return something for every sample, so every tensor they take is mapped, if only by a view.

Gradients backward_vmap(const Tensor& grad_output, const Inputs& inputs, const Saved& saved,
                        const PlainOptions& options, Wanted wanted) {
  const Batch batch(SdpaOp::name, inputs, options);
  const Gradients grads =
      BackwardOp::call(batch.expanded(grad_output), batch.expanded(inputs), batch.expanded(saved), options, wanted);
  return batch.logical(grads, inputs);
}

TangentResults tangent_vmap(const Inputs& inputs, const Saved& saved, const Direction& direction,
                            const PlainOptions& options) {
  const Batch batch(SdpaOp::name, inputs, options);
  const TangentResults tangent =
      TangentOp::call(batch.expanded(inputs), batch.expanded(saved), batch.expanded(direction), options);
  return batch.logical(tangent, batch.sample.dims);
}

Gradients second_vmap(const Tensor& grad_output, const Inputs& inputs, const Saved& saved, const Direction& direction,
                      const TangentResults& tangent, const PlainOptions& options, Wanted wanted) {
  const Batch batch(SdpaOp::name, inputs, options);
  const Gradients grads = SecondOp::call(batch.expanded(grad_output), batch.expanded(inputs), batch.expanded(saved),
                                         batch.expanded(direction), batch.expanded(tangent), options, wanted);
  return batch.logical(grads, inputs);
}

Statistics stats_vmap(const QueryAndKey& tensors, const ScoreOptions& options) {
  const Batch batch(StatsOp::name, tensors.inputs(), options.options());
  const ForwardCall c = forward_call(batch, tensors.inputs(), options.options(), std::nullopt);
  const Statistics results = StatsOp::call({c.inputs.query, c.inputs.key, c.inputs.attn_mask}, options);
  if (!c.mapped) return results;
  return batch.logical(results, batch.sample.dims - 1);  // [..., head, L or S]
}

}  // namespace

TORCH_LIBRARY_IMPL(attn, FuncTorchBatched, m) {
  m.impl("sdpa", SdpaOp::kernel<sdpa_vmap>);
  m.impl("_sdpa_forward", ForwardOp::kernel<forward_vmap>);
  m.impl("_sdpa_backward", BackwardOp::kernel<backward_vmap>);
  m.impl("_sdpa_tangent", TangentOp::kernel<tangent_vmap>);
  m.impl("_sdpa_second", SecondOp::kernel<second_vmap>);
  m.impl("sdpa_stats", StatsOp::kernel<stats_vmap>);
}

// Called inside vmap with nothing mapped: dropout must heed `randomness` all the same.
TORCH_LIBRARY_IMPL(attn, FuncTorchVmapMode, m) {
  m.impl("sdpa", SdpaOp::kernel<sdpa_vmap>);
  m.impl("_sdpa_forward", ForwardOp::kernel<forward_vmap>);
}

}  // namespace attn
