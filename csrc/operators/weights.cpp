// sdpa_with_weights and _sdpa_and_weights. The CPU has a kernel that computes weights and scores. Elsewhere, and for
// tensors that are not plain, they come from a formula.
#include <ATen/ATen.h>
#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/library.h>

#include "operators/autograd.h"
#include "operators/formulas.h"

namespace attn {
namespace {

using at::Tensor;

// Returns the device whose kernel of weights can serve the call, or null. All tensors must be plain tensors on the CPU.
// Samples of vmap, symbolic tensors of a compiler and dual tensors are not plain.
const Device* device_for_weights(const Call& call) {
  const Device* const device = device_of(c10::kCPU);
  if (!device || !device->weights || at::tracer::impl::is_dispatch_enabled()) return nullptr;
  const auto plain = [](const std::optional<Tensor>& t) {
    return !t || (t->key_set().has(c10::DispatchKey::CPU) && !at::isTensorSubclassLike(*t) && !t->is_neg() &&
                  !t->_is_zerotensor() && !t->_fw_grad(/*level=*/0).defined());
  };
  return any_of([&](const auto& t) { return !plain(t); }, tensors_of(call)) ? nullptr : device;
}

bool learns(const Call& call) {
  const auto requires_grad = [](const std::optional<Tensor>& t) { return t && t->requires_grad(); };
  return at::GradMode::is_enabled() && any_of(requires_grad, inputs_of(call));
}

// Computes weights first, so that errors about the arguments name the operator that the user called. If scores are
// wanted, the output is bitwise equal to the output of sdpa.
OutputAndWeights weights_and_output(const Call& call, WantedWeights wanted) {
  OutputAndWeights results;
  if (const Device* const device = device_for_weights(call)) {
    wanted.output = !wanted.scores && call.dropout_p == 0 && !learns(call);
    Call x = call;
    x.value = x.value.detach();  // weights do not depend on its numbers
    results = weights_by_kernel(*device, x, wanted);
  } else {
    results = weights_formula(call, wanted);
  }
  if (!wanted.output) results.output = attend(call);
  return results;
}

OutputAndWeights sdpa_with_weights(const Call& call) {
  refuse_over_processes(WeightsOp::name);
  return weights_and_output(call, {});
}
std::tuple<Tensor, Tensor> sdpa_and_weights(const Call& call, bool mean) {
  refuse_over_processes(WeightsOp::name);
  const OutputAndWeights results = weights_and_output(call, {mean, /*scores=*/false});
  return {results.output, results.weights};
}

void register_both(torch::Library& m) {
  m.impl("sdpa_with_weights", WeightsOp::kernel<sdpa_with_weights>);
  m.impl("_sdpa_and_weights", ModuleOp::kernel<sdpa_and_weights>);
}

}  // namespace

TORCH_LIBRARY_IMPL(attn, CompositeImplicitAutograd, m) { register_both(m); }

// sdpa_with_weights and _sdpa_and_weights are decomposed under vmap too, because torch 2.15 would otherwise call them
// once for each sample. They are also decomposed for nested tensors, so that validate() refuses these tensors.
TORCH_LIBRARY_IMPL(attn, FuncTorchBatchedDecomposition, m) { register_both(m); }
TORCH_LIBRARY_IMPL(attn, NestedTensorCPU, m) { register_both(m); }
TORCH_LIBRARY_IMPL(attn, NestedTensorCUDA, m) { register_both(m); }

}  // namespace attn
