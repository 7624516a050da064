// Autocast as for the built-in: casts query, key, value and a floating mask to the autocast dtype. Does not cast
// float64 tensors, keys and values of 8 bits, or any other argument, such as slopes and sinks.
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include "operators/ops.h"

namespace attn {
namespace {

template <class Op, at::DeviceType device>
constexpr auto cast_and_call = [](Call call, const auto&... more) {
  const c10::impl::ExcludeDispatchKeyGuard guard(at::autocast::get_autocast_dispatch_key_from_device_type(device));
  const auto dtype = at::autocast::get_lower_precision_fp_from_device_type(device);
  const auto cast = [&](size_t i, auto& t) {
    const About& about = Inputs::about(i);
    // The attn_mask of flex_attention, which a score_mod reads, keeps its type.
    const bool is_read = std::is_same_v<Op, FlexOp> && about.kind == Kind::mask;
    if (about.has(kCast) && !is_read && !is_8_bit(t)) t = at::autocast::cached_cast(dtype, t, device);
  };
  for_each_input(cast, call);
  return Op::call(call, more...);
};

template <at::DeviceType device>
void register_autocast(torch::Library& m) {
  m.impl("sdpa", SdpaOp::kernel<cast_and_call<SdpaOp, device>>);
  m.impl("attention", AttentionOp::kernel<cast_and_call<AttentionOp, device>>);
  m.impl("flex_attention", FlexOp::kernel<cast_and_call<FlexOp, device>>);
  m.impl("sdpa_with_weights", WeightsOp::kernel<cast_and_call<WeightsOp, device>>);
  m.impl("_sdpa_and_weights", ModuleOp::kernel<cast_and_call<ModuleOp, device>>);
  m.impl("sdpa_stats", StatsOp::kernel<cast_and_call<StatsOp, device>>);
}

}  // namespace

TORCH_LIBRARY_IMPL(attn, AutocastCPU, m) { register_autocast<at::kCPU>(m); }
TORCH_LIBRARY_IMPL(attn, AutocastCUDA, m) { register_autocast<at::kCUDA>(m); }

}  // namespace attn
