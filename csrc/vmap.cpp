// Batching rules: under vmap an operator runs once, with the mapped dimension as one more leading dimension. The
// operators broadcast leading dimensions, so inputs that are not mapped stay as they are.
#include <ATen/ATen.h>
#include <ATen/functorch/BatchedTensorImpl.h>
#include <ATen/functorch/DynamicLayer.h>
#include <ATen/functorch/PlumbingHelper.h>
#include <torch/library.h>

#include <limits>

#include "validate.h"

namespace attn {
namespace {

using at::Tensor;
using at::functorch::RandomnessType;

// The innermost vmap, and the rank of a mapped call: [mapped, leading dimensions..., head, L, E].
class Batch {
 public:
  explicit Batch(std::initializer_list<const Tensor*> inputs)
      : layer_(*at::functorch::maybeCurrentDynamicLayer()),
        size_(layer_.batchSize()),
        guard_(c10::DispatchKeySet({c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::FuncTorchVmapMode})) {
    const char* names[] = {"query", "key", "value"};
    for (size_t i = 0; const Tensor* t : inputs) {
      TORCH_CHECK(t->dim() >= 2, "attn::sdpa: ", names[i], " has shape ", t->sym_sizes(),
                  " under vmap; it must have at least 2 dimensions: [..., length, head_dim]");
      dims_ = std::max(dims_, t->dim());
      ++i;
    }
    rank_ = std::max<int64_t>(dims_, 3) + 1;  // a mapped dimension in front of [L, E] must not become the head
  }

  // The rank that the mask has for one sample decides, not that of the mapped call.
  void check_mask(const std::optional<Tensor>& mask) const {
    TORCH_CHECK(!mask || (mask->dim() >= 2 && mask->dim() <= dims_), "attn::sdpa: attn_mask has shape ",
                mask->sym_sizes(),
                " under vmap; it must have at least 2 dimensions and no more than query, key and value (", dims_, ")");
  }

  RandomnessType randomness() const { return layer_.randomness(); }
  const c10::SymInt& size() const { return size_; }

  bool is_mapped(const Tensor& t) const { return at::functorch::isBatchedAtLevel(t, layer_.layerId()); }
  bool is_mapped(const std::optional<Tensor>& t) const { return t && is_mapped(*t); }

  // The tensor below vmap: as it is if it is not mapped, else [mapped, 1..., own dimensions] of rank rank_.
  Tensor physical(const Tensor& t) const {
    auto [x, dim] = at::functorch::unwrapTensorAtLevel(t, layer_.layerId());
    if (!dim) return x;
    x = x.movedim(*dim, 0);
    return padded(x);
  }
  std::optional<Tensor> physical(const std::optional<Tensor>& t) const {
    return t ? std::optional(physical(*t)) : std::nullopt;
  }
  // The same, mapped in any case, by a view.
  Tensor expanded(const Tensor& t) const {
    if (is_mapped(t)) return physical(t);
    const Tensor x = padded(at::functorch::unwrapTensorAtLevel(t, layer_.layerId()));
    c10::SymDimVector sizes(x.sym_sizes());
    sizes[0] = size_;
    return x.expand_symint(sizes);
  }
  std::optional<Tensor> expanded(const std::optional<Tensor>& t) const {
    return t ? std::optional(expanded(*t)) : std::nullopt;
  }

  // A mapped result of `dims` dimensions above vmap.
  Tensor logical(Tensor t, int64_t dims) const {
    if (!t.defined()) return t;
    while (t.dim() > dims + 1) {
      TORCH_INTERNAL_ASSERT(t.sym_size(1) == 1, "attn: a mapped result of shape ", t.sym_sizes(), " has no rank ",
                            dims);
      t = t.squeeze(1);
    }
    return at::functorch::makeBatched(t, 0, layer_.layerId());
  }
  Tensor logical_output(const Tensor& t) const { return logical(t, dims_); }

 private:
  Tensor padded(Tensor x) const {
    while (x.dim() < rank_) x = x.unsqueeze(1);
    return x;
  }
  Tensor padded(std::tuple<Tensor, std::optional<int64_t>> unmapped) const {
    return padded(std::get<0>(unmapped).unsqueeze(0));
  }

  at::functorch::DynamicLayer layer_;
  c10::SymInt size_;
  int64_t dims_ = 0;
  int64_t rank_ = 0;
  c10::impl::ExcludeDispatchKeyGuard guard_;
};

// Seeds of dropout for a mapped call: one for all samples, or one each. Every sample counts its heads from 0, so that
// derivatives taken under another nesting of vmap find the numbers of the forward again.
Tensor draw_rng_state(const Batch& batch, bool one_each, ATTN_INPUTS_ARGS, ATTN_OPTIONS_ARGS) {
  const Shape shape = validate(ATTN_INPUTS, ATTN_OPTIONS);  // of the mapped call
  c10::SymInt heads = shape.heads;
  for (size_t d = 1; d < shape.batch.size(); ++d) heads = heads * shape.batch[d];
  c10::SymDimVector sizes = shape.expanded(1, 1, 1);
  for (auto& size : sizes) size = 1;
  if (one_each) sizes[0] = batch.size();
  const auto options = query.options().dtype(at::kLong);
  const auto limits = std::numeric_limits<int64_t>();
  const Tensor seed = at::randint_symint(limits.min(), limits.max(), sizes, options);
  const Tensor offset = at::zeros_symint(sizes, options);
  const Tensor period = at::full_symint(sizes, heads.max(1), options);
  const Tensor state = at::cat({seed, offset, period}, -1);
  return one_each ? state : state.reshape({3});
}

// What is mapped into the forward. `mapped` is false if nothing is: then the call runs once, for all samples.
struct ForwardCall {
  Tensor query, key, value;
  std::optional<Tensor> attn_mask, rng_state;
  bool mapped;
  bool state_mapped;  // rng_state is one each
};

ForwardCall forward_call(const Batch& batch, ATTN_INPUTS_ARGS, ATTN_OPTIONS_ARGS,
                         const std::optional<Tensor>& rng_state) {
  batch.check_mask(attn_mask);
  const bool random = dropout_p > 0 && !rng_state;
  const bool different = random && batch.randomness() == RandomnessType::Different;
  TORCH_CHECK(!random || batch.randomness() != RandomnessType::Error, "vmap: attn::sdpa with dropout_p = ", dropout_p,
              " draws random numbers, but randomness is 'error'; call vmap with randomness='different' or 'same'");
  const bool inputs_mapped = batch.is_mapped(query) || batch.is_mapped(key) || batch.is_mapped(value);
  const bool mapped = inputs_mapped || batch.is_mapped(attn_mask) || batch.is_mapped(rng_state) || different;
  // the query carries the mapped dimension where neither key nor value does: the mask may not enlarge the scores
  ForwardCall call{mapped && !inputs_mapped ? batch.expanded(query) : batch.physical(query),
                   batch.physical(key),
                   batch.physical(value),
                   batch.physical(attn_mask),
                   batch.physical(rng_state),
                   mapped,
                   different || batch.is_mapped(rng_state)};
  if (random && mapped)
    call.rng_state = draw_rng_state(batch, different, call.query, call.key, call.value, call.attn_mask, ATTN_OPTIONS);
  return call;
}

// Of half types; for the others it is an empty tensor of one dimension.
Tensor logical_residual(const Batch& batch, const Tensor& residual) {
  return residual.dim() > 1 ? batch.logical_output(residual) : residual;
}

Tensor sdpa_vmap(ATTN_INPUTS_ARGS, ATTN_OPTIONS_ARGS) {
  const Batch batch({&query, &key, &value});
  const ForwardCall c = forward_call(batch, ATTN_INPUTS, ATTN_OPTIONS, std::nullopt);
  const Tensor output =
      c.rng_state ? std::get<0>(forward_op().call(c.query, c.key, c.value, c.attn_mask, ATTN_OPTIONS, c.rng_state))
                  : sdpa_op().call(c.query, c.key, c.value, c.attn_mask, ATTN_OPTIONS);
  return c.mapped ? batch.logical_output(output) : output;
}

Tensors4 forward_vmap(ATTN_INPUTS_ARGS, ATTN_OPTIONS_ARGS, const std::optional<Tensor>& rng_state) {
  const Batch batch({&query, &key, &value});
  const ForwardCall c = forward_call(batch, ATTN_INPUTS, ATTN_OPTIONS, rng_state);
  auto [output, logsumexp, state, residual] =
      forward_op().call(c.query, c.key, c.value, c.attn_mask, ATTN_OPTIONS, c.rng_state);
  if (!c.mapped) return {output, logsumexp, state, residual};
  return {batch.logical_output(output), batch.logical_output(logsumexp),
          c.state_mapped ? batch.logical(state, rng_state ? rng_state->dim() : 1) : state,
          logical_residual(batch, residual)};
}

Tensor mapped_residual(const Batch& batch, const Tensor& residual) {
  return residual.dim() > 1 ? batch.expanded(residual) : batch.physical(residual);
}

// The derivatives return something for every sample, so every tensor they take is mapped, if only by a view.
struct DerivativeCall {
  Tensor query, key, value;
  std::optional<Tensor> attn_mask;
  Tensor output, logsumexp, rng_state, residual;

  DerivativeCall(const Batch& batch, ATTN_INPUTS_ARGS, ATTN_SAVED_ARGS)
      : query(batch.expanded(query)),
        key(batch.expanded(key)),
        value(batch.expanded(value)),
        attn_mask(batch.expanded(attn_mask)),
        output(batch.expanded(output)),
        logsumexp(batch.expanded(logsumexp)),
        rng_state(batch.physical(rng_state)),
        residual(mapped_residual(batch, residual)) {}
};
#define ATTN_CALL(c) c.query, c.key, c.value, c.attn_mask, c.output, c.logsumexp, c.rng_state, c.residual

Tensors4 logical_gradients(const Batch& batch, const Tensors4& grads, ATTN_INPUTS_ARGS) {
  return {batch.logical(std::get<0>(grads), query.dim()), batch.logical(std::get<1>(grads), key.dim()),
          batch.logical(std::get<2>(grads), value.dim()),
          attn_mask ? batch.logical(std::get<3>(grads), attn_mask->dim()) : Tensor()};
}

Tensors4 backward_vmap(const Tensor& grad_output, ATTN_INPUTS_ARGS, ATTN_SAVED_ARGS, ATTN_OPTIONS_ARGS,
                       Wanted grad_input_mask) {
  const Batch batch({&query, &key, &value});
  const DerivativeCall c(batch, ATTN_INPUTS, ATTN_SAVED);
  return logical_gradients(
      batch, backward_op().call(batch.expanded(grad_output), ATTN_CALL(c), ATTN_OPTIONS, grad_input_mask), ATTN_INPUTS);
}

Tensors3 tangent_vmap(ATTN_INPUTS_ARGS, ATTN_SAVED_ARGS, ATTN_TANGENTS_ARGS, ATTN_OPTIONS_ARGS) {
  const Batch batch({&query, &key, &value});
  const DerivativeCall c(batch, ATTN_INPUTS, ATTN_SAVED);
  auto [tangent_output, tangent_logsumexp, tangent_residual] =
      tangent_op().call(ATTN_CALL(c), batch.expanded(tangent_query), batch.expanded(tangent_key),
                        batch.expanded(tangent_value), batch.expanded(tangent_mask), ATTN_OPTIONS);
  return {batch.logical_output(tangent_output), batch.logical_output(tangent_logsumexp),
          logical_residual(batch, tangent_residual)};
}

Tensors4 second_vmap(const Tensor& grad_output, ATTN_INPUTS_ARGS, ATTN_SAVED_ARGS, ATTN_TANGENTS_ARGS, ATTN_MOVED_ARGS,
                     ATTN_OPTIONS_ARGS, Wanted grad_input_mask) {
  const Batch batch({&query, &key, &value});
  const DerivativeCall c(batch, ATTN_INPUTS, ATTN_SAVED);
  const Tensors4 grads = second_op().call(
      batch.expanded(grad_output), ATTN_CALL(c), batch.expanded(tangent_query), batch.expanded(tangent_key),
      batch.expanded(tangent_value), batch.expanded(tangent_mask), batch.expanded(tangent_output),
      batch.expanded(tangent_logsumexp), mapped_residual(batch, tangent_residual), ATTN_OPTIONS, grad_input_mask);
  return logical_gradients(batch, grads, ATTN_INPUTS);
}

}  // namespace

TORCH_LIBRARY_IMPL(attn, FuncTorchBatched, m) {
  m.impl("sdpa", sdpa_vmap);
  m.impl("_sdpa_forward", forward_vmap);
  m.impl("_sdpa_backward", backward_vmap);
  m.impl("_sdpa_tangent", tangent_vmap);
  m.impl("_sdpa_second", second_vmap);
}

// Called inside vmap with nothing mapped: dropout must heed `randomness` all the same.
TORCH_LIBRARY_IMPL(attn, FuncTorchVmapMode, m) {
  m.impl("sdpa", sdpa_vmap);
  m.impl("_sdpa_forward", forward_vmap);
}

}  // namespace attn
