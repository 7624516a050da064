// Refuses tensors that are not dense by the argument checker, which names the argument: without a kernel for them the
// dispatcher's own error would not.
#include <torch/library.h>

#include "operators/validate.h"

namespace attn {
namespace {

[[noreturn]] void refuse_tensors(const char* op, const Inputs& inputs, const PlainOptions& options, const char* names) {
  validate(op, inputs, options);
  TORCH_CHECK(false, op, ": ", names, " must be dense (strided) tensors");
}
template <class PublicOp, class Result, class... More>
Result refuse(const Inputs& inputs, const PlainOptions& options, const More&...) {
  refuse_tensors(PublicOp::name, inputs, options, "query, key, value and attn_mask");
}
Statistics refuse_stats(const QueryAndKey& inputs, const ScoreOptions& options) {
  refuse_tensors(StatsOp::name, inputs.inputs(), options.options(), "query, key and attn_mask");
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(attn, m) {
  using enum c10::DispatchKey;
  for (const auto key : {SparseCPU, SparseCUDA, SparseCsrCPU, SparseCsrCUDA, QuantizedCPU, QuantizedCUDA, MkldnnCPU,
                         NestedTensorCPU, NestedTensorCUDA}) {
    m.impl("sdpa", torch::dispatch(key, SdpaOp::kernel<refuse<SdpaOp, at::Tensor>>));
    m.impl("_sdpa_forward", torch::dispatch(key, ForwardOp::kernel<refuse<SdpaOp, Saved, std::optional<at::Tensor>>>));
    m.impl("sdpa_stats", torch::dispatch(key, StatsOp::kernel<refuse_stats>));
    // sdpa_with_weights is composed of other operators: found for all but nested tensors, it checks by itself.
    if (key == NestedTensorCPU || key == NestedTensorCUDA) {
      m.impl("sdpa_with_weights", torch::dispatch(key, WeightsOp::kernel<refuse<WeightsOp, OutputAndWeights>>));
      m.impl("_sdpa_and_weights", torch::dispatch(key, ModuleOp::kernel<refuse<WeightsOp, OutputAndMean, bool>>));
    }
  }
}

}  // namespace attn
