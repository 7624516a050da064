// The part of the operators of schema.cpp that is the same for every device. It checks arguments, allocates results and
// fills in the params. A device (cpu/device.cpp, cuda/device.cpp) adds its kernels.
#pragma once

#include <torch/library.h>

#include "operators/problem.h"
#include "operators/switches.h"

namespace attn {

// Chooses the plan (tasks, splits, chunks), allocates its workspaces by compute_options(query), and runs the kernels.
// The kernels write every element of every result that is not null. The caller has filled `p` by ProblemBuilder, merged
// the batch dimensions, and set the pointers named below. There is at least one row. There is at least one key, unless
// the function's comment says otherwise.
template <class Params>
using Run = void(Params& p, const at::Tensor& query);

// The functions of a device. Meta has no functions, because it only allocates the results.
struct Device {
  // Draws a seed and an offset from the device's default generator, and writes int64 (seed, offset, heads) to `state`.
  // `heads` counts the heads of all batch entries.
  void (*draw_rng_state)(const at::Tensor& state, int64_t heads);
  // Reads only the inputs. Writes output and, if not null, logsumexp, residual, row_logsumexp and max_score. Without
  // keys the output is 0.
  Run<ForwardParams>* forward;
  // Reads output, residual (may be null), logsumexp, grad_output and grad_logsumexp (may be null). Writes the gradients
  // whose data is not null. Writes grad_slopes, grad_sinks and grad_mask_rows if they are not null. grad_mask is 0 at
  // the call, and stays 0 where no key is visible. The caller has set mask_is_shared and the numbers of mask tasks
  // (plan_mask).
  Run<BackwardParams>* backward;
  // Reads output, residual and logsumexp as the backward does, and the direction `t`. A tensor of `t` that is zero has
  // null data. Writes tangent_output, tangent_logsumexp and, if its data is not null, tangent_residual. There may be no
  // keys.
  Run<TangentParams>* tangent;
  // Reads everything that the backward reads, and also `t` and the three results of the tangent. Writes what the
  // backward writes.
  Run<SecondParams>* second;
  // Writes the four statistics. There may be no keys.
  Run<StatsParams>* stats;
  WriteSequences* write_sequences;
  // Writes weights, scores and output, but none whose `data` is null. There is at least one key. Only the CPU has this
  // kernel.
  Run<WeightsParams>* weights;
};
// The device whose kernels take tensors of this type. Null if there is none.
const Device*& device_of(c10::DeviceType type);

// Without `for_derivatives`, Saved::logsumexp and Saved::residual are undefined.
ForwardResults compute_forward(const Device& device, bool for_derivatives, const Call& call,
                               const std::optional<at::Tensor>& given_state, bool exact_residual);
Gradients compute_backward(const Device& device, const GradResults& grads, const Saved& saved, const Call& call,
                           Wanted wanted);
TangentResults compute_tangent(const Device& device, const Saved& saved, const Direction& direction, const Call& call);
Gradients compute_second(const Device& device, const GradResults& grads, const Saved& saved, const Direction& direction,
                         const TangentResults& tangent, const Call& call, Wanted wanted);
Statistics compute_stats(const Device& device, const Call& scores);

// Computes the scores and weights of weights_formula() (formulas.h) by the device's kernel, which can also compute the
// output. That output has no derivative.
OutputAndWeights compute_weights(const Device& device, const Call& call, const WantedWeights& wanted);

// The kernel of sdpa, attention or flex_attention. It must ask is_over_processes() itself, because
// attend_autograd(), which also asks, does not run in inference mode.
template <class Op, const Device& device>
auto attend_on(Call call) {
  if (is_over_processes()) return attend_over_processes<Op>(call);
  call.with_rows = call.with_rows && kWithRows<Op>;
  const auto [saved, rows] = compute_forward(device, /*for_derivatives=*/false, call, /*given_state=*/std::nullopt,
                                             /*exact_residual=*/false);
  return results_for<Op>(saved.output, rows);
}

// Registers the kernels of a device. The TORCH_LIBRARY_IMPL of the device's dispatch key calls this function.
template <const Device& device>
void register_kernels(torch::Library& m) {
  constexpr auto forward = [](const auto&... a) { return compute_forward(device, /*for_derivatives=*/true, a...); };
  constexpr auto backward = [](const auto&... a) { return compute_backward(device, a...); };
  constexpr auto tangent = [](const auto&... a) { return compute_tangent(device, a...); };
  constexpr auto second = [](const auto&... a) { return compute_second(device, a...); };
  constexpr auto stats = [](const auto&... a) { return compute_stats(device, a...); };
  m.impl("sdpa", SdpaOp::kernel<attend_on<SdpaOp, device>>);
  m.impl("attention", AttentionOp::kernel<attend_on<AttentionOp, device>>);
  m.impl("flex_attention", FlexOp::kernel<attend_on<FlexOp, device>>);
  m.impl("_sdpa_forward", ForwardOp::kernel<forward>);
  m.impl("_sdpa_backward", BackwardOp::kernel<backward>);
  m.impl("_sdpa_tangent", TangentOp::kernel<tangent>);
  m.impl("_sdpa_second", SecondOp::kernel<second>);
  m.impl("sdpa_stats", StatsOp::kernel<stats>);
}

}  // namespace attn
