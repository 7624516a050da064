// The operators of schema.cpp as far as they are the same for every device: arguments checked, results allocated,
// params filled in. A device adds its kernels.
#pragma once

#include <torch/library.h>

#include "operators/problem.h"

namespace attn {

// Runs kernels, given params that are complete but for the plan and its workspaces. Is not called for tensors without
// elements, whose results are known.
template <class Params>
using Run = void(Params& p, const at::Tensor& query);

// What a device brings.
struct Device {
  at::Tensor (*draw_rng_state)(const at::Tensor& query, int64_t heads);  // of dropout; all heads of the batch
  Run<ForwardParams>* forward;
  Run<BackwardParams>* backward;
  Run<TangentParams>* tangent;
  Run<SecondParams>* second;
  Run<StatsParams>* stats;
};

// Without `for_derivatives`, logsumexp and residual are undefined.
Saved compute_forward(const Device& device, bool for_derivatives, const Inputs& inputs, const PlainOptions& options,
                      const std::optional<at::Tensor>& given_state);
Gradients compute_backward(const Device& device, const at::Tensor& grad_output, const Inputs& inputs,
                           const Saved& saved, const PlainOptions& options, Wanted wanted);
TangentResults compute_tangent(const Device& device, const Inputs& inputs, const Saved& saved,
                               const Direction& direction, const PlainOptions& options);
Gradients compute_second(const Device& device, const at::Tensor& grad_output, const Inputs& inputs, const Saved& saved,
                         const Direction& direction, const TangentResults& tangent, const PlainOptions& options,
                         Wanted wanted);

Statistics compute_stats(const Device& device, const QueryAndKey& inputs, const ScoreOptions& options);

// Weights and scores, before dropout, of the query's type: those of attention_formula() (formulas.h).
std::array<at::Tensor, 2> compute_weights(const Device& device, const Inputs& inputs, const PlainOptions& options);

// The device that has a kernel for them, which is the CPU; null in a library without its kernels (tests/stand_in).
inline const Device* device_of_weights = nullptr;

// For TORCH_LIBRARY_IMPL of the device's key.
template <const Device& device>
void register_kernels(torch::Library& m) {
  constexpr auto sdpa = [](const auto&... a) { return compute_forward(device, false, a..., std::nullopt).output; };
  constexpr auto forward = [](const auto&... a) { return compute_forward(device, true, a...); };
  constexpr auto backward = [](const auto&... a) { return compute_backward(device, a...); };
  constexpr auto tangent = [](const auto&... a) { return compute_tangent(device, a...); };
  constexpr auto second = [](const auto&... a) { return compute_second(device, a...); };
  constexpr auto stats = [](const auto&... a) { return compute_stats(device, a...); };
  m.impl("sdpa", SdpaOp::kernel<sdpa>);
  m.impl("_sdpa_forward", ForwardOp::kernel<forward>);
  m.impl("_sdpa_backward", BackwardOp::kernel<backward>);
  m.impl("_sdpa_tangent", TangentOp::kernel<tangent>);
  m.impl("_sdpa_second", SecondOp::kernel<second>);
  m.impl("sdpa_stats", StatsOp::kernel<stats>);
}

}  // namespace attn
