// The options of a call as C++ programs name them, in the form that the operators take.
#pragma once

#include "operators/ops.h"

namespace attn {

// Of Options or StatsOptions.
CallOptions call_options(const auto& named, const at::Tensor& query) {
  const auto tensor = [&](const std::optional<Integers>& numbers) -> std::optional<at::Tensor> {
    if (!numbers) return std::nullopt;
    if (const auto* given = std::get_if<at::Tensor>(&*numbers)) return *given;
    const at::Device device = query.defined() ? query.device() : at::Device(at::kCPU);
    return at::full({}, std::get<int64_t>(*numbers), at::TensorOptions(at::kLong).device(device));
  };
  CallOptions options{.is_causal = named.is_causal,
                      .scale = named.scale,
                      .enable_gqa = named.enable_gqa,
                      .softcap = named.softcap,
                      .window = named.window_size,
                      .query_offset = tensor(named.query_offset),
                      .key_lengths = tensor(named.key_lengths),
                      .packing = {}};
  if constexpr (requires { named.dropout_p; }) options.dropout_p = named.dropout_p;
  return options;
}

HeadInputs head_inputs(const auto& named) { return {named.alibi_slopes, named.sinks}; }

}  // namespace attn
