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

  Batch(const char* op, const Inputs& inputs, const CallOptions& options)
      : sample(validate(op, inputs, options)),
        layer_(*at::functorch::maybeCurrentDynamicLayer()),
        guard_(c10::DispatchKeySet({c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::FuncTorchVmapMode})) {
    const auto& [cu_seq_q, cu_seq_k, max_q, max_k, block_table] = options.packing;
    TORCH_CHECK(!is_mapped(cu_seq_q) && !is_mapped(cu_seq_k) && !is_mapped(block_table), op,
                ": cu_seq_q, cu_seq_k or block_table is mapped by vmap; all samples must have the same, as they are "
                "computed at once");
  }

  RandomnessType randomness() const { return layer_.randomness(); }
  c10::SymInt size() const { return layer_.batchSize(); }
  // A mapped dimension in front of [L, E] must not become the head.
  int64_t rank() const { return std::max<int64_t>(sample.dims, 3) + 1; }

  bool is_mapped(const Tensor& t) const { return at::functorch::isBatchedAtLevel(t, layer_.layerId()); }
  bool is_mapped(const std::optional<Tensor>& t) const { return t && is_mapped(*t); }

  // The tensor below vmap: as it is if it is not mapped, else [mapped, 1..., own dimensions] of this rank, or, without
  // `less` of the dimensions head, L and E, of one so much lower.
  Tensor physical(const Tensor& t, int64_t less = 0) const {
    auto [x, dim] = at::functorch::unwrapTensorAtLevel(t, layer_.layerId());
    if (!dim) return x;
    x = x.movedim(*dim, 0);
    return padded(x, less);
  }
  std::optional<Tensor> physical(const std::optional<Tensor>& t, int64_t less = 0) const {
    return t ? std::optional(physical(*t, less)) : std::nullopt;
  }
  template <Struct T>
  T physical(T tensors) const {
    for_each_field([&](size_t i, auto& t) { t = physical(t, less_of<T>(i)); }, tensors);
    return tensors;
  }
  CallOptions physical(CallOptions options) const {
    options.query_offset = physical(options.query_offset, kOfEntries);
    options.key_lengths = physical(options.key_lengths, kOfEntries);
    return options;
  }
  template <Struct T>
  bool is_mapped(const T& x) const {
    return std::apply([&](const auto&... t) { return (is_mapped(t) || ...); }, fields_of(x));
  }
  bool is_mapped(const CallOptions& o) const { return is_mapped(o.query_offset) || is_mapped(o.key_lengths); }
  // Returns physical(t) with the mapped dimension: a tensor that is not mapped is expanded, by a view. One of a single
  // dimension, an rng_state for all samples or no residual, stays as it is.
  Tensor expanded(const Tensor& t, int64_t less = 0) const {
    if (is_mapped(t) || t.dim() + less < 2) return physical(t, less);
    const Tensor x = padded(std::get<0>(at::functorch::unwrapTensorAtLevel(t, layer_.layerId())).unsqueeze(0), less);
    c10::SymDimVector sizes(x.sym_sizes());
    sizes[0] = size();
    return x.expand_symint(sizes);
  }
  std::optional<Tensor> expanded(const std::optional<Tensor>& t, int64_t less) const {
    return t ? std::optional(expanded(*t, less)) : std::nullopt;
  }
  template <Struct T>
  T expanded(T tensors) const {
    for_each_field([&](size_t i, auto& t) { t = expanded(t, less_of<T>(i)); }, tensors);
    return tensors;
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
  // Of the dimensions head, L and E, those that field number i of a struct lacks; and an option with one number a batch
  // entry.
  template <class T>
  static constexpr int64_t less_of(size_t i) {
    if (kFields<T> == kFields<Inputs>) return i < kFields<BuiltinInputs> ? 0 : 2;
    return std::is_same_v<T, GradResults> && i == 1 ? 1 : 0;
  }
  static constexpr int64_t kOfEntries = 3;

  Tensor padded(Tensor x, int64_t less) const {
    while (x.dim() < rank() - less) x = x.unsqueeze(1);
    return x;
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
  CallOptions options;
  std::optional<Tensor> rng_state;
  bool mapped;        // false if no input is: then the call runs once, for all samples
  bool state_mapped;  // every sample has an rng_state of its own

  BuiltinInputs builtin_inputs() const { return {inputs}; }
  HeadInputs of_heads() const { return {inputs.alibi_slopes, inputs.sinks}; }
};

ForwardCall forward_call(const Batch& batch, const Inputs& inputs, const CallOptions& options,
                         const std::optional<Tensor>& rng_state) {
  const bool random = options.dropout_p > 0 && !rng_state;
  const bool different = random && batch.randomness() == RandomnessType::Different;
  TORCH_CHECK(!random || batch.randomness() != RandomnessType::Error, "vmap: dropout_p = ", options.dropout_p,
              " draws random numbers, but randomness is 'error'; call vmap with randomness='different' or 'same'");
  const bool sizes_mapped =
      batch.is_mapped(inputs.query) || batch.is_mapped(inputs.key) || batch.is_mapped(inputs.value);
  const bool mapped = batch.is_mapped(inputs) || batch.is_mapped(options) || batch.is_mapped(rng_state) || different;
  ForwardCall call{batch.physical(inputs), batch.physical(options), batch.physical(rng_state), mapped,
                   different || batch.is_mapped(rng_state)};
  // The query carries the mapped dimension where neither key nor value does: nothing else may enlarge the scores.
  if (mapped && !sizes_mapped) call.inputs.query = batch.expanded(inputs.query);
  if (random && mapped) call.rng_state = draw_rng_state(batch, different, call.inputs.query);
  return call;
}

Tensor sdpa_vmap(const BuiltinInputs& inputs, const BuiltinOptions& options) {
  const Batch batch(SdpaOp::name, inputs, options);
  const ForwardCall c = forward_call(batch, inputs, options, std::nullopt);
  const Tensor output = c.rng_state ? ForwardOp::call(c.inputs, options, c.rng_state, false, false).saved.output
                                    : SdpaOp::call(c.builtin_inputs(), options);
  return c.mapped ? batch.logical(output, batch.sample.dims) : output;
}

ForwardResults forward_vmap(const Inputs& inputs, const CallOptions& options, const std::optional<Tensor>& rng_state,
                            bool with_rows, bool sums_scores) {
  const Batch batch(SdpaOp::name, inputs, options);
  const ForwardCall c = forward_call(batch, inputs, options, rng_state);
  const ForwardResults results = ForwardOp::call(c.inputs, c.options, c.rng_state, with_rows, sums_scores);
  if (!c.mapped) return results;
  const int64_t state_dims = rng_state ? rng_state->dim() : 1;
  Saved saved = batch.logical(results.saved, batch.sample.dims);
  saved.rng_state = c.state_mapped ? batch.logical(results.saved.rng_state, state_dims) : results.saved.rng_state;
  return {saved, batch.logical(results.rows, batch.sample.dims - 1)};
}

OutputAndRows attention_vmap(const BuiltinInputs& x, const CallOptions& options, const HeadInputs& of_heads) {
  const Inputs inputs = all_inputs(x, of_heads);
  const Batch batch(AttentionOp::name, inputs, options);
  const ForwardCall c = forward_call(batch, inputs, options, std::nullopt);
  OutputAndRows results;
  if (c.rng_state) {
    const auto [saved, rows] = ForwardOp::call(c.inputs, c.options, c.rng_state, /*with_rows=*/true, false);
    results = {saved.output, rows};
  } else {
    results = AttentionOp::call(c.builtin_inputs(), c.options, c.of_heads());
  }
  if (!c.mapped) return results;
  return {batch.logical(results.output, batch.sample.dims), batch.logical(results.rows, batch.sample.dims - 1)};
}

// The derivatives return something for every sample, so every tensor they take is mapped, if only by a view.

Gradients backward_vmap(const GradResults& u, const Inputs& inputs, const Saved& saved, const CallOptions& options,
                        Wanted wanted) {
  const Batch batch(SdpaOp::name, inputs, options);
  const Gradients grads = BackwardOp::call(batch.expanded(u), batch.expanded(inputs), batch.expanded(saved),
                                           batch.physical(options), wanted);
  return batch.logical(grads, inputs);
}

TangentResults tangent_vmap(const Inputs& inputs, const Saved& saved, const Direction& direction,
                            const CallOptions& options) {
  const Batch batch(SdpaOp::name, inputs, options);
  const TangentResults tangent = TangentOp::call(batch.expanded(inputs), batch.expanded(saved),
                                                 batch.expanded(direction), batch.physical(options));
  return batch.logical(tangent, batch.sample.dims);
}

Gradients second_vmap(const GradResults& u, const Inputs& inputs, const Saved& saved, const Direction& direction,
                      const TangentResults& tangent, const CallOptions& options, Wanted wanted) {
  const Batch batch(SdpaOp::name, inputs, options);
  const Gradients grads =
      SecondOp::call(batch.expanded(u), batch.expanded(inputs), batch.expanded(saved), batch.expanded(direction),
                     batch.expanded(tangent), batch.physical(options), wanted);
  return batch.logical(grads, inputs);
}

Statistics stats_vmap(const QueryAndKey& tensors, const ScoreOptions& options, const HeadInputs& of_heads) {
  const Inputs inputs = all_inputs(tensors, of_heads);
  const Batch batch(StatsOp::name, inputs, options);
  const ForwardCall c = forward_call(batch, inputs, options, std::nullopt);
  const Statistics results =
      StatsOp::call({c.inputs.query, c.inputs.key, c.inputs.attn_mask}, {c.options}, c.of_heads());
  if (!c.mapped) return results;
  return batch.logical(results, batch.sample.dims - 1);  // [..., head, L or S]
}

}  // namespace

TORCH_LIBRARY_IMPL(attn, FuncTorchBatched, m) {
  m.impl("sdpa", SdpaOp::kernel<sdpa_vmap>);
  m.impl("attention", AttentionOp::kernel<attention_vmap>);
  m.impl("_sdpa_forward", ForwardOp::kernel<forward_vmap>);
  m.impl("_sdpa_backward", BackwardOp::kernel<backward_vmap>);
  m.impl("_sdpa_tangent", TangentOp::kernel<tangent_vmap>);
  m.impl("_sdpa_second", SecondOp::kernel<second_vmap>);
  m.impl("sdpa_stats", StatsOp::kernel<stats_vmap>);
}

// Called inside vmap with nothing mapped: dropout must heed `randomness` all the same.
TORCH_LIBRARY_IMPL(attn, FuncTorchVmapMode, m) {
  m.impl("sdpa", SdpaOp::kernel<sdpa_vmap>);
  m.impl("attention", AttentionOp::kernel<attention_vmap>);
  m.impl("_sdpa_forward", ForwardOp::kernel<forward_vmap>);
}

}  // namespace attn
