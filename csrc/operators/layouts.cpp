// Refuses tensors that are not dense by the argument checker, which names the argument: without a kernel for them the
// dispatcher's own error would not.
#include <torch/library.h>

#include "operators/validate.h"

namespace attn {
namespace {

[[noreturn]] void refuse(const char* op, const Call& call, const char* names) {
  validate(op, call);
  TORCH_CHECK(false, op, ": ", names, " must be dense (strided) tensors");
}
template <class PublicOp, class Result>
constexpr auto refuse_call =
    [](const Call& call, const auto&...) -> Result { refuse(PublicOp::name, call, "query, key, value and attn_mask"); };
constexpr auto refuse_stats = [](const Call& scores) -> Statistics {
  refuse(StatsOp::name, with_key_as_value(scores), "query, key and attn_mask");
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(attn, m) {
  using enum c10::DispatchKey;
  for (const auto key : {SparseCPU, SparseCUDA, SparseCsrCPU, SparseCsrCUDA, QuantizedCPU, QuantizedCUDA, MkldnnCPU,
                         NestedTensorCPU, NestedTensorCUDA}) {
    m.impl("sdpa", torch::dispatch(key, SdpaOp::kernel<refuse_call<SdpaOp, at::Tensor>>));
    m.impl("attention", torch::dispatch(key, AttentionOp::kernel<refuse_call<AttentionOp, OutputAndRows>>));
    m.impl("_sdpa_forward", torch::dispatch(key, ForwardOp::kernel<refuse_call<SdpaOp, ForwardResults>>));
    m.impl("sdpa_stats", torch::dispatch(key, StatsOp::kernel<refuse_stats>));
    // sdpa_with_weights is composed of other operators: found for all but nested tensors, it checks by itself.
    if (key == NestedTensorCPU || key == NestedTensorCUDA) {
      m.impl("sdpa_with_weights", torch::dispatch(key, WeightsOp::kernel<refuse_call<WeightsOp, OutputAndWeights>>));
      m.impl("_sdpa_and_weights", torch::dispatch(key, ModuleOp::kernel<refuse_call<WeightsOp, OutputAndMean>>));
    }
  }
}

}  // namespace attn
