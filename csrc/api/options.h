// The options of a call as C++ programs name them, in the form that the operators take.
#pragma once

#include <ATen/ATen.h>

#include "operators/ops.h"

namespace attn {

// One number becomes a tensor of it of these sizes, on query's device.
inline std::optional<at::Tensor> as_tensor(const std::optional<Integers>& numbers, at::IntArrayRef sizes,
                                           const at::Tensor& query) {
  if (!numbers) return std::nullopt;
  if (const auto* given = std::get_if<at::Tensor>(&*numbers)) return *given;
  const at::Device device = query.defined() ? query.device() : at::Device(at::kCPU);
  return at::full(sizes, std::get<int64_t>(*numbers), at::TensorOptions(at::kLong).device(device));
}

// Of Options or StatsOptions.
CallOptions call_options(const auto& named, const at::Tensor& query) {
  CallOptions options{.is_causal = named.is_causal,
                      .scale = named.scale,
                      .enable_gqa = named.enable_gqa,
                      .softcap = named.softcap,
                      .window = named.window_size,
                      .query_offset = as_tensor(named.query_offset, {}, query),
                      .key_lengths = as_tensor(named.key_lengths, {}, query),
                      .packing = {}};
  if constexpr (requires { named.dropout_p; }) options.dropout_p = named.dropout_p;
  return options;
}

HeadInputs head_inputs(const auto& named) { return {named.alibi_slopes, named.sinks}; }

}  // namespace attn
