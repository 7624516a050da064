// Turns the options of the C++ API into a call of the operators.
#pragma once

#include <ATen/ATen.h>

#include "operators/ops.h"

namespace attn {

// Turns one number into a tensor of these sizes, on query's device. Returns a given tensor as it is.
inline std::optional<at::Tensor> as_tensor(const std::optional<Integers>& numbers, at::IntArrayRef sizes,
                                           const at::Tensor& query) {
  if (!numbers) return std::nullopt;
  if (const auto* given = std::get_if<at::Tensor>(&*numbers)) return *given;
  const at::Device device = query.defined() ? query.device() : at::Device(at::kCPU);
  return at::full(sizes, std::get<int64_t>(*numbers), at::TensorOptions(at::kLong).device(device));
}

// `named` is an Options or a VarlenOptions. In a call for statistics, the tensor `value` is undefined. If query_offset
// or key_lengths is one number, the number becomes a tensor of sizes `entries`.
Call call_of(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const auto& named,
             at::IntArrayRef entries = {}) {
  Call call{.query = query,
            .key = key,
            .value = value,
            .attn_mask = named.attn_mask,
            .scale = named.scale,
            .enable_gqa = named.enable_gqa,
            .softcap = named.softcap,
            .window_size = named.window_size,
            .query_offset = as_tensor(named.query_offset, entries, query),
            .alibi_slopes = named.alibi_slopes,
            .sinks = named.sinks,
            .key_scale = named.key_scale,
            .value_scale = named.value_scale};
  if constexpr (requires { named.dropout_p; }) call.dropout_p = named.dropout_p;
  if constexpr (requires { named.is_causal; }) call.is_causal = named.is_causal;
  if constexpr (requires { named.key_lengths; }) call.key_lengths = as_tensor(named.key_lengths, entries, query);
  if constexpr (requires { named.seqused_k; }) call.key_lengths = named.seqused_k;
  if constexpr (requires { named.block_table; }) call.block_table = named.block_table;
  return call;
}

}  // namespace attn
