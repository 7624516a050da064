// Scaled dot-product attention, the C++ API of libattn.
//
//   find_package(attn REQUIRED)
//   target_link_libraries(program PRIVATE attn::attn)
//
//   at::Tensor output = attn::sdpa(query, key, value, {.attn_mask = mask, .dropout_p = 0.1});
//
// The functions call the operators torch.ops.attn.* through PyTorch's dispatcher, so that autograd, autocast and every
// device work as they do from Python. They may be called from several threads at once.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

#define ATTN_API __attribute__((visibility("default")))

namespace attn {

// What a call takes beside query, key and value, by name; what is left out has the operator's default.
struct Options {
  // Broadcasts to [B..., Hq, L, S], at least 2 dimensions. Boolean: true = attend. Floating, query's type or float32:
  // added to the scaled scores; it gets a gradient.
  std::optional<at::Tensor> attn_mask = std::nullopt;
  // Probability in [0, 1] that a weight is zeroed; the others are divided by 1 - dropout_p. Drawn from the default
  // generator of the device.
  double dropout_p = 0.0;
  // Query i attends to keys j <= i, for any L and S, within attn_mask if there is one.
  bool is_causal = false;
  // Factor of query key^T: any number but NaN. Absent: 1 / sqrt(E).
  std::optional<double> scale = std::nullopt;
  // Allows Hk and Hv that divide Hq: Hq / Hk consecutive query heads share a key head, Hq / Hv a value head.
  bool enable_gqa = false;
};

// softmax(scale * query key^T + attn_mask) value, with memory O(L + S) beside inputs and outputs, also in backward.
//
//   query   [B..., Hq, L, E]   float64, float32, bfloat16 or float16, one type for all three;
//   key     [B..., Hk, S, E]   at least 2 dimensions; leading ones broadcast
//   value   [B..., Hv, S, Ev]
//
// Returns [B..., Hq, L, Ev] in query's type. A query that may attend to no key gives a row of 0. Results and gradients
// have the same bits on every run and with any number of threads.
// No mask is std::nullopt or left out, not an undefined tensor; a call without options has three arguments, as {} could
// be either of the two forms.
// Throws c10::Error on input that does not fit; the message names the argument, what it was and what is allowed.
ATTN_API at::Tensor sdpa(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                         const std::optional<at::Tensor>& attn_mask, double dropout_p = 0.0, bool is_causal = false,
                         std::optional<double> scale = std::nullopt, bool enable_gqa = false);

inline at::Tensor sdpa(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                       const Options& options = {}) {
  return sdpa(query, key, value, options.attn_mask, options.dropout_p, options.is_causal, options.scale,
              options.enable_gqa);
}

// Returns (output, weights, scores): sdpa's output and the matrices it went through, all differentiable.
// scores are scaled and masked, before softmax. weights are after softmax, before dropout: a row sums to 1, or is 0
// where every key is masked. Both are [B..., Hq, L, S] in query's type: O(L S) memory.
ATTN_API std::tuple<at::Tensor, at::Tensor, at::Tensor> sdpa_with_weights(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const std::optional<at::Tensor>& attn_mask,
    double dropout_p = 0.0, bool is_causal = false, std::optional<double> scale = std::nullopt,
    bool enable_gqa = false);

inline std::tuple<at::Tensor, at::Tensor, at::Tensor> sdpa_with_weights(const at::Tensor& query, const at::Tensor& key,
                                                                        const at::Tensor& value,
                                                                        const Options& options = {}) {
  return sdpa_with_weights(query, key, value, options.attn_mask, options.dropout_p, options.is_causal, options.scale,
                           options.enable_gqa);
}

// What a call of sdpa_stats takes beside query and key; as in Options.
struct StatsOptions {
  std::optional<at::Tensor> attn_mask = std::nullopt;
  bool is_causal = false;
  std::optional<double> scale = std::nullopt;
  bool enable_gqa = false;
};

// Statistics of the scores and weights of every head, float32 (float64 for float64). Of a query that may attend to no
// key: -inf, 0 and -inf.
struct Stats {
  at::Tensor largest_score;    // [B..., Hq, L], of the scores, scaled and masked
  at::Tensor entropy;          // [B..., Hq, L], of the weights, in nats
  at::Tensor logsumexp;        // [B..., Hq, L], of the scores
  at::Tensor received_weight;  // [B..., Hq, S], the sum over the queries of the weight that a key receives
};

// In O(L + S) memory, for sequences whose weights cannot be stored. The results have no derivatives: of inputs that
// require a gradient they can be read, and a backward through them throws.
ATTN_API Stats sdpa_stats(const at::Tensor& query, const at::Tensor& key, const std::optional<at::Tensor>& attn_mask,
                          bool is_causal = false, std::optional<double> scale = std::nullopt, bool enable_gqa = false);

inline Stats sdpa_stats(const at::Tensor& query, const at::Tensor& key, const StatsOptions& options = {}) {
  return sdpa_stats(query, key, options.attn_mask, options.is_causal, options.scale, options.enable_gqa);
}

}  // namespace attn
