// Scaled dot-product attention, the C++ API of libattn.
//
//   find_package(attn REQUIRED)
//   target_link_libraries(program PRIVATE attn::attn)
//
// Both functions call the operators torch.ops.attn.* through PyTorch's dispatcher, so that
// autograd, autocast and every device work as they do from Python.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

#define ATTN_API __attribute__((visibility("default")))

namespace attn {

// softmax(scale * query key^T + attn_mask) value, with memory O(L + S) beside inputs and outputs,
// also in backward.
//
//   query       [B..., Hq, L, E]   float64, float32, bfloat16 or float16, one type for all three;
//   key         [B..., Hk, S, E]   at least 2 dimensions; leading ones broadcast
//   value       [B..., Hv, S, Ev]
//   attn_mask   broadcasts to [B..., Hq, L, S], at least 2 dimensions. Boolean: true = attend.
//               Floating, query's type or float32: added to the scaled scores; it gets a gradient
//   dropout_p   probability in [0, 1] that a weight is zeroed; the others are divided by
//               1 - dropout_p. Drawn from the default generator of the device
//   is_causal   query i attends to keys j <= i, for any L and S, within attn_mask if there is one
//   scale       any number; absent: 1 / sqrt(E)
//   enable_gqa  allows Hk and Hv that divide Hq: Hq / Hk consecutive query heads share a key head,
//               Hq / Hv a value head
//
// Returns [B..., Hq, L, Ev] in query's type. A query that may attend to no key gives a row of 0.
// Results and gradients have the same bits on every run and with any number of threads.
// Throws c10::Error on input that does not fit; the message names the argument.
ATTN_API at::Tensor sdpa(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                         const std::optional<at::Tensor>& attn_mask = std::nullopt, double dropout_p = 0.0,
                         bool is_causal = false, std::optional<double> scale = std::nullopt, bool enable_gqa = false);

// The same, with the matrices it went through: (output, weights, scores), all differentiable.
// scores are scaled and masked, before softmax. weights are after softmax, before dropout: a row
// sums to 1, or is 0 where every key is masked. Both are [B..., Hq, L, S]: O(L S) memory.
ATTN_API std::tuple<at::Tensor, at::Tensor, at::Tensor> sdpa_with_weights(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const std::optional<at::Tensor>& attn_mask = std::nullopt, double dropout_p = 0.0, bool is_causal = false,
    std::optional<double> scale = std::nullopt, bool enable_gqa = false);

}  // namespace attn
