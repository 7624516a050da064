// The C++ API: calls the operators through the dispatcher, as Python does.
#include "attn/sdpa.h"

#include <ATen/core/dispatch/Dispatcher.h>

namespace attn {

at::Tensor sdpa(
    const at::Tensor& query,
    const at::Tensor& key,
    const at::Tensor& value,
    const std::optional<at::Tensor>& attn_mask,
    double dropout_p,
    bool is_causal,
    std::optional<double> scale,
    bool enable_gqa) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("attn::sdpa", "").typed<decltype(sdpa)>();
  return op.call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> sdpa_with_weights(
    const at::Tensor& query,
    const at::Tensor& key,
    const at::Tensor& value,
    const std::optional<at::Tensor>& attn_mask,
    double dropout_p,
    bool is_causal,
    std::optional<double> scale,
    bool enable_gqa) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("attn::sdpa_with_weights", "")
                             .typed<decltype(sdpa_with_weights)>();
  return op.call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa);
}

} // namespace attn
