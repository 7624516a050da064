// Autocast as for the built-in: floating arguments (also a floating mask) go to the autocast dtype, float64 stays.
// Casts the fields that are named here and no others: one that is to stay in float32 is simply not named.
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include "operators/ops.h"

namespace attn {
namespace {

template <class Op, at::DeviceType device, c10::DispatchKey key, class Tensors, class... More>
auto cast_and_call(const Tensors& inputs, const More&... more) {
  const c10::impl::ExcludeDispatchKeyGuard guard(key);
  const auto dtype = at::autocast::get_lower_precision_fp_from_device_type(device);
  const auto cast = [&](auto& t) { t = at::autocast::cached_cast(dtype, t, device); };
  Tensors x = inputs;
  cast(x.query);
  cast(x.key);
  if constexpr (requires { x.value; }) cast(x.value);
  cast(x.attn_mask);
  return Op::call(x, more...);
}

template <at::DeviceType device, c10::DispatchKey key>
void register_autocast(torch::Library& m) {
  m.impl("sdpa", SdpaOp::kernel<cast_and_call<SdpaOp, device, key, BuiltinInputs, BuiltinOptions>>);
  m.impl("attention",
         AttentionOp::kernel<cast_and_call<AttentionOp, device, key, BuiltinInputs, CallOptions, HeadInputs>>);
  m.impl("sdpa_with_weights",
         WeightsOp::kernel<cast_and_call<WeightsOp, device, key, BuiltinInputs, DenseOptions, HeadInputs>>);
  m.impl("_sdpa_and_weights",
         ModuleOp::kernel<cast_and_call<ModuleOp, device, key, BuiltinInputs, DenseOptions, HeadInputs, bool>>);
  m.impl("sdpa_stats", StatsOp::kernel<cast_and_call<StatsOp, device, key, QueryAndKey, ScoreOptions, HeadInputs>>);
}

}  // namespace

TORCH_LIBRARY_IMPL(attn, AutocastCPU, m) { register_autocast<at::kCPU, c10::DispatchKey::AutocastCPU>(m); }
TORCH_LIBRARY_IMPL(attn, AutocastCUDA, m) { register_autocast<at::kCUDA, c10::DispatchKey::AutocastCUDA>(m); }

}  // namespace attn
