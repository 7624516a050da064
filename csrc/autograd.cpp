// Derivatives, written as torch's own generated code writes them: a Node per operator under the Autograd key.
//
// sdpa has none of its own: where a derivative is wanted it calls _sdpa_forward, whose backward is _sdpa_backward.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/library.h>

#include "compat.h"
#include "ops.h"

namespace attn {
namespace {

using at::Tensor;
using torch::autograd::collect_next_edges;
using torch::autograd::compute_requires_grad;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

bool has_tangent(const Tensor& t) { return t.defined() && t._fw_grad(/*level=*/0).defined(); }

Tensor or_undefined(const std::optional<Tensor>& t) { return t.value_or(Tensor()); }

// Arguments that are not differentiated.
struct Options {
  double dropout_p;
  bool is_causal;
  std::optional<double> scale;
  bool enable_gqa;
};

struct SdpaBackward : torch::autograd::Node {
  SavedVariable query, key, value, attn_mask, output, logsumexp, rng_state;
  Options options;

  std::string name() const override { return "SdpaBackward"; }

  void release_variables() override {
    for (SavedVariable* v : {&query, &key, &value, &attn_mask, &output, &logsumexp, &rng_state}) v->reset_data();
  }

  variable_list apply(variable_list&& grads) override {
    if (!grads[0].defined()) return variable_list(4);
    const Tensor mask = attn_mask.unpack();
    const std::array<bool, 4> wanted = {task_should_compute_output(0), task_should_compute_output(1),
                                        task_should_compute_output(2), task_should_compute_output(3)};
    auto [grad_query, grad_key, grad_value, grad_mask] = backward_op().call(
        grads[0], query.unpack(), key.unpack(), value.unpack(), mask.defined() ? std::optional(mask) : std::nullopt,
        output.unpack(pointer_to(this)), logsumexp.unpack(), rng_state.unpack(),
        options.dropout_p, options.is_causal, options.scale, options.enable_gqa, wanted);
    return {grad_query, grad_key, grad_value, grad_mask};
  }
};

Tensor sdpa_autograd(c10::DispatchKeySet keys, ATTN_ARGUMENTS) {
  const Tensor mask = or_undefined(attn_mask);
  if (compute_requires_grad(query, key, value, mask) || has_tangent(query) || has_tangent(key) || has_tangent(value) ||
      has_tangent(mask))
    return std::get<0>(forward_op().call(ATTN_PASS));
  at::AutoDispatchBelowADInplaceOrView guard;
  return sdpa_op().redispatch(keys & c10::after_autograd_keyset, ATTN_PASS);
}

Tensors3 forward_autograd(c10::DispatchKeySet keys, ATTN_ARGUMENTS) {
  const Tensor mask = or_undefined(attn_mask);
  TORCH_CHECK(!(has_tangent(query) || has_tangent(key) || has_tangent(value) || has_tangent(mask)),
              "attn::sdpa: forward-mode derivatives are not supported");
  Tensors3 result;
  auto& [output, logsumexp, rng_state] = result;
  const auto forward = [&] {
    at::AutoDispatchBelowADInplaceOrView guard;
    return forward_op().redispatch(keys & c10::after_autograd_keyset, ATTN_PASS);
  };
  if (!compute_requires_grad(query, key, value, mask)) return forward();

  auto node = make_node<SdpaBackward>();
  node->set_next_edges(collect_next_edges(query, key, value, mask));
  node->query = SavedVariable(query, /*is_output=*/false);
  node->key = SavedVariable(key, false);
  node->value = SavedVariable(value, false);
  node->attn_mask = SavedVariable(mask, false);
  node->options = {dropout_p, is_causal, scale, enable_gqa};
  result = forward();
  torch::autograd::set_history(output, node);
  node->output = SavedVariable(output, /*is_output=*/true);
  node->logsumexp = SavedVariable(logsumexp, false);
  node->rng_state = SavedVariable(rng_state, false);
  return result;
}

Tensors4 backward_autograd(c10::DispatchKeySet keys, ATTN_BACKWARD_ARGUMENTS) {
  TORCH_CHECK(!compute_requires_grad(grad_output, query, key, value, or_undefined(attn_mask)),
              "attn::sdpa: derivatives of the backward are not supported");
  at::AutoDispatchBelowADInplaceOrView guard;
  return backward_op().redispatch(keys & c10::after_autograd_keyset, ATTN_BACKWARD_PASS);
}

}  // namespace

TORCH_LIBRARY_IMPL(attn, Autograd, m) {
  m.impl("sdpa", sdpa_autograd);
  m.impl("_sdpa_forward", forward_autograd);
  m.impl("_sdpa_backward", backward_autograd);
}

}  // namespace attn
