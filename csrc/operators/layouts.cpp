// Refuses tensors that are not dense by the argument checker, which names the argument: without a kernel for them the
// dispatcher's own error would not.
#include <torch/library.h>

#include "operators/validate.h"

namespace attn {
namespace {

[[noreturn]] void refuse_tensors(const char* op, const Inputs& inputs, const CallOptions& options, const char* names) {
  validate(op, inputs, options);
  TORCH_CHECK(false, op, ": ", names, " must be dense (strided) tensors");
}
template <class PublicOp, class Result, class Tensors, class Options, class... More>
Result refuse(const Tensors& inputs, const Options& options, const More&...) {
  refuse_tensors(PublicOp::name, inputs, options, "query, key, value and attn_mask");
}
Statistics refuse_stats(const QueryAndKey& inputs, const ScoreOptions& options, const HeadInputs& of_heads) {
  refuse_tensors(StatsOp::name, all_inputs(inputs, of_heads), options, "query, key and attn_mask");
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(attn, m) {
  using enum c10::DispatchKey;
  for (const auto key : {SparseCPU, SparseCUDA, SparseCsrCPU, SparseCsrCUDA, QuantizedCPU, QuantizedCUDA, MkldnnCPU,
                         NestedTensorCPU, NestedTensorCUDA}) {
    constexpr auto sdpa = refuse<SdpaOp, at::Tensor, BuiltinInputs, BuiltinOptions>;
    constexpr auto attention = refuse<AttentionOp, OutputAndRows, BuiltinInputs, CallOptions, HeadInputs>;
    constexpr auto forward = refuse<SdpaOp, ForwardResults, Inputs, CallOptions, std::optional<at::Tensor>, bool, bool>;
    constexpr auto weights = refuse<WeightsOp, OutputAndWeights, BuiltinInputs, DenseOptions, HeadInputs>;
    constexpr auto module = refuse<WeightsOp, OutputAndMean, BuiltinInputs, DenseOptions, HeadInputs, bool>;
    m.impl("sdpa", torch::dispatch(key, SdpaOp::kernel<sdpa>));
    m.impl("attention", torch::dispatch(key, AttentionOp::kernel<attention>));
    m.impl("_sdpa_forward", torch::dispatch(key, ForwardOp::kernel<forward>));
    m.impl("sdpa_stats", torch::dispatch(key, StatsOp::kernel<refuse_stats>));
    // sdpa_with_weights is composed of other operators: found for all but nested tensors, it checks by itself.
    if (key == NestedTensorCPU || key == NestedTensorCUDA) {
      m.impl("sdpa_with_weights", torch::dispatch(key, WeightsOp::kernel<weights>));
      m.impl("_sdpa_and_weights", torch::dispatch(key, ModuleOp::kernel<module>));
    }
  }
}

}  // namespace attn
