// Autocast as for the built-in: floating arguments (also a floating mask) go to the autocast dtype, float64 stays.
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include "operators/ops.h"

namespace attn {
namespace {

template <class Op, at::DeviceType device, c10::DispatchKey key, class Tensors, class Options>
auto cast_and_call(const Tensors& inputs, const Options& options) {
  const c10::impl::ExcludeDispatchKeyGuard guard(key);
  const auto dtype = at::autocast::get_lower_precision_fp_from_device_type(device);
  const auto cast = [&](const at::Tensor& t) { return at::autocast::cached_cast(dtype, t, device); };
  return Op::call(map_tensors(inputs, cast), options);
}

template <at::DeviceType device, c10::DispatchKey key>
void register_autocast(torch::Library& m) {
  m.impl("sdpa", SdpaOp::kernel<cast_and_call<SdpaOp, device, key, Inputs, PlainOptions>>);
  m.impl("sdpa_with_weights", WeightsOp::kernel<cast_and_call<WeightsOp, device, key, Inputs, PlainOptions>>);
  m.impl("sdpa_stats", StatsOp::kernel<cast_and_call<StatsOp, device, key, QueryAndKey, ScoreOptions>>);
}

}  // namespace

TORCH_LIBRARY_IMPL(attn, AutocastCPU, m) { register_autocast<at::kCPU, c10::DispatchKey::AutocastCPU>(m); }
TORCH_LIBRARY_IMPL(attn, AutocastCUDA, m) { register_autocast<at::kCUDA, c10::DispatchKey::AutocastCUDA>(m); }

}  // namespace attn
