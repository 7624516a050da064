// The C++ API: calls the operators through the dispatcher, as Python does.
#include "api/options.h"

namespace attn {

using at::Tensor;

Tensor sdpa(const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& attn_mask,
            double dropout_p, bool is_causal, std::optional<double> scale, bool enable_gqa) {
  return SdpaOp::handle().call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa);
}

Tensor sdpa(const Tensor& query, const Tensor& key, const Tensor& value, const Options& o) {
  return attend(call_of(query, key, value, o));
}

OutputAndLogsumexp sdpa_with_logsumexp(const Tensor& query, const Tensor& key, const Tensor& value, const Options& o) {
  const auto [output, rows] = AttentionOp::call(call_of(query, key, value, o));
  return {output, rows.logsumexp, rows.max_score};
}

std::tuple<Tensor, Tensor, Tensor> sdpa_with_weights(const Tensor& query, const Tensor& key, const Tensor& value,
                                                     const Options& o) {
  const auto [output, weights, scores] = WeightsOp::call(call_of(query, key, value, o));
  return {output, weights, scores};
}

std::tuple<Tensor, Tensor, Tensor> sdpa_with_weights(const Tensor& query, const Tensor& key, const Tensor& value,
                                                     const std::optional<Tensor>& attn_mask, double dropout_p,
                                                     bool is_causal, std::optional<double> scale, bool enable_gqa) {
  return sdpa_with_weights(query, key, value, Options{attn_mask, dropout_p, is_causal, scale, enable_gqa});
}

Stats sdpa_stats(const Tensor& query, const Tensor& key, const Options& o) {
  TORCH_CHECK(o.dropout_p == 0, StatsOp::name, ": dropout_p is ", o.dropout_p,
              "; it must be 0, because statistics are of the weights before dropout");
  TORCH_CHECK(!o.key_scale && !o.value_scale, StatsOp::name, ": ", o.key_scale ? "key_scale" : "value_scale",
              " is given; statistics take no numbers of 8 bits");
  return StatsOp::call(call_of(query, key, {}, o));
}

Stats sdpa_stats(const Tensor& query, const Tensor& key, const std::optional<Tensor>& attn_mask, bool is_causal,
                 std::optional<double> scale, bool enable_gqa) {
  return sdpa_stats(query, key, Options{attn_mask, 0.0, is_causal, scale, enable_gqa});
}

}  // namespace attn
