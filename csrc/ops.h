// The operators as C++ calls through the dispatcher. Their schemas, and what they compute, stand in schema.cpp.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <array>
#include <optional>
#include <tuple>

// The operators share long lists of arguments. Each list has a name: ATTN_x_ARGS declares it, ATTN_x passes it on.

#define ATTN_INPUTS_ARGS \
  const at::Tensor &query, const at::Tensor &key, const at::Tensor &value, const std::optional<at::Tensor>&attn_mask
#define ATTN_INPUTS query, key, value, attn_mask

// The options of the built-in, not differentiated.
#define ATTN_OPTIONS_ARGS double dropout_p, bool is_causal, std::optional<double> scale, bool enable_gqa
#define ATTN_OPTIONS dropout_p, is_causal, scale, enable_gqa

// The results of the forward that derivatives use.
#define ATTN_SAVED_ARGS \
  const at::Tensor &output, const at::Tensor &logsumexp, const at::Tensor &rng_state, const at::Tensor &residual
#define ATTN_SAVED output, logsumexp, rng_state, residual

// A direction in the space of inputs; absent where it is zero.
#define ATTN_TANGENTS_ARGS                                                                    \
  const std::optional<at::Tensor>&tangent_query, const std::optional<at::Tensor>&tangent_key, \
      const std::optional<at::Tensor>&tangent_value, const std::optional<at::Tensor>&tangent_mask
#define ATTN_TANGENTS tangent_query, tangent_key, tangent_value, tangent_mask

// The derivative of the forward's results along that direction.
#define ATTN_MOVED_ARGS \
  const at::Tensor &tangent_output, const at::Tensor &tangent_logsumexp, const at::Tensor &tangent_residual
#define ATTN_MOVED tangent_output, tangent_logsumexp, tangent_residual

namespace attn {

using Tensors3 = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
using Tensors4 = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using Wanted = std::array<bool, 4>;  // which gradients: query, key, value, attn_mask

using SdpaOp = at::Tensor(ATTN_INPUTS_ARGS, ATTN_OPTIONS_ARGS);
using WeightsOp = Tensors3(ATTN_INPUTS_ARGS, ATTN_OPTIONS_ARGS);
using ForwardOp = Tensors4(ATTN_INPUTS_ARGS, ATTN_OPTIONS_ARGS, const std::optional<at::Tensor>& rng_state);
using BackwardOp = Tensors4(const at::Tensor& grad_output, ATTN_INPUTS_ARGS, ATTN_SAVED_ARGS, ATTN_OPTIONS_ARGS,
                            Wanted grad_input_mask);
using TangentOp = Tensors3(ATTN_INPUTS_ARGS, ATTN_SAVED_ARGS, ATTN_TANGENTS_ARGS, ATTN_OPTIONS_ARGS);
using SecondOp = Tensors4(const at::Tensor& grad_output, ATTN_INPUTS_ARGS, ATTN_SAVED_ARGS, ATTN_TANGENTS_ARGS,
                          ATTN_MOVED_ARGS, ATTN_OPTIONS_ARGS, Wanted grad_input_mask);

const c10::TypedOperatorHandle<SdpaOp>& sdpa_op();
const c10::TypedOperatorHandle<WeightsOp>& weights_op();
const c10::TypedOperatorHandle<ForwardOp>& forward_op();
const c10::TypedOperatorHandle<BackwardOp>& backward_op();
const c10::TypedOperatorHandle<TangentOp>& tangent_op();
const c10::TypedOperatorHandle<SecondOp>& second_op();

}  // namespace attn
