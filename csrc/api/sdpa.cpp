// The C++ API: calls the operators through the dispatcher, as Python does.
#include "operators/ops.h"

namespace attn {

using at::Tensor;

Tensor sdpa(const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& attn_mask,
            double dropout_p, bool is_causal, std::optional<double> scale, bool enable_gqa) {
  return SdpaOp::handle().call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa);
}

std::tuple<Tensor, Tensor, Tensor> sdpa_with_weights(const Tensor& query, const Tensor& key, const Tensor& value,
                                                     const std::optional<Tensor>& attn_mask, double dropout_p,
                                                     bool is_causal, std::optional<double> scale, bool enable_gqa) {
  const auto [output, weights, scores] =
      WeightsOp::call({{query, key, value, attn_mask}}, {dropout_p, is_causal, scale, enable_gqa}, {});
  return {output, weights, scores};
}

Stats sdpa_stats(const Tensor& query, const Tensor& key, const std::optional<Tensor>& attn_mask, bool is_causal,
                 std::optional<double> scale, bool enable_gqa) {
  return StatsOp::call({query, key, attn_mask}, {{.is_causal = is_causal, .scale = scale, .enable_gqa = enable_gqa}},
                       {});
}

}  // namespace attn
