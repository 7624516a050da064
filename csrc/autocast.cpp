// Autocast as for the built-in: floating arguments (also a floating mask) go to the autocast dtype, float64 stays.
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include "ops.h"

namespace attn {
namespace {

template <at::DeviceType device, c10::DispatchKey autocast_key>
struct Autocast {
  static std::optional<at::Tensor> cast(const std::optional<at::Tensor>& t) {
    return at::autocast::cached_cast(at::autocast::get_lower_precision_fp_from_device_type(device), t, device);
  }

  template <const auto& (*op)(), class Result>
  static Result call(ATTN_INPUTS_ARGS, ATTN_OPTIONS_ARGS) {
    c10::impl::ExcludeDispatchKeyGuard guard(autocast_key);
    return op().call(*cast(query), *cast(key), *cast(value), cast(attn_mask), dropout_p, is_causal, scale, enable_gqa);
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(attn, AutocastCPU, m) {
  using Cpu = Autocast<at::kCPU, c10::DispatchKey::AutocastCPU>;
  m.impl("sdpa", Cpu::call<sdpa_op, at::Tensor>);
  m.impl("sdpa_with_weights", Cpu::call<weights_op, Tensors3>);
}

TORCH_LIBRARY_IMPL(attn, AutocastCUDA, m) {
  using Cuda = Autocast<at::kCUDA, c10::DispatchKey::AutocastCUDA>;
  m.impl("sdpa", Cuda::call<sdpa_op, at::Tensor>);
  m.impl("sdpa_with_weights", Cuda::call<weights_op, Tensors3>);
}

}  // namespace attn
