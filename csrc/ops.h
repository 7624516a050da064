// The operators as C++ calls through the dispatcher. Their schemas stand in schema.cpp.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <array>
#include <optional>
#include <tuple>

namespace attn {

// What every operator takes, in the order of the built-in.
#define ATTN_ARGUMENTS                                                                          \
  const at::Tensor &query, const at::Tensor &key, const at::Tensor &value,                      \
      const std::optional<at::Tensor>&attn_mask, double dropout_p, bool is_causal,              \
      std::optional<double> scale, bool enable_gqa
#define ATTN_PASS query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa

// What the backward takes besides: the forward's results, and which gradients are wanted.
#define ATTN_BACKWARD_ARGUMENTS                                                                 \
  const at::Tensor &grad_output, const at::Tensor &query, const at::Tensor &key,                \
      const at::Tensor &value, const std::optional<at::Tensor>&attn_mask,                       \
      const at::Tensor &output, const at::Tensor &logsumexp, const at::Tensor &rng_state,       \
      double dropout_p, bool is_causal, std::optional<double> scale, bool enable_gqa,           \
      std::array<bool, 4> grad_input_mask
#define ATTN_BACKWARD_PASS                                                                      \
  grad_output, query, key, value, attn_mask, output, logsumexp, rng_state, dropout_p, is_causal, \
      scale, enable_gqa, grad_input_mask

using Tensors3 = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
using Tensors4 = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

using SdpaOp = at::Tensor(ATTN_ARGUMENTS);
using ForwardOp = Tensors3(ATTN_ARGUMENTS);
using BackwardOp = Tensors4(ATTN_BACKWARD_ARGUMENTS);

const c10::TypedOperatorHandle<SdpaOp>& sdpa_op();
const c10::TypedOperatorHandle<ForwardOp>& forward_op();
const c10::TypedOperatorHandle<BackwardOp>& backward_op();

}  // namespace attn
