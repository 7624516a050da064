// Tensors that are not dense: the dispatcher finds no kernel for them and would say so without naming the argument. The
// kernel here is the argument checker, which does.
#include <torch/library.h>

#include "operators/validate.h"

namespace attn {
namespace {

[[noreturn]] void refuse_tensors(const Inputs& inputs, const PlainOptions& options, const char* names) {
  validate(inputs, options);
  TORCH_CHECK(false, "attn::sdpa: ", names, " must be dense (strided) tensors");
}
template <class Result, class... More>
Result refuse(const Inputs& inputs, const PlainOptions& options, const More&...) {
  refuse_tensors(inputs, options, "query, key, value and attn_mask");
}
Statistics refuse_stats(const QueryAndKey& inputs, const ScoreOptions& options) {
  refuse_tensors(inputs.inputs(), options.options(), "query, key and attn_mask");
}

// sdpa_with_weights, which is composed of other operators, is found for all but nested tensors, and checks by itself.
void refuse_all(torch::Library& m) {
  m.impl("sdpa", SdpaOp::kernel<refuse<at::Tensor>>);
  m.impl("_sdpa_forward", ForwardOp::kernel<refuse<Saved, std::optional<at::Tensor>>>);
  m.impl("sdpa_stats", StatsOp::kernel<refuse_stats>);
}
void refuse_nested(torch::Library& m) {
  refuse_all(m);
  m.impl("sdpa_with_weights", WeightsOp::kernel<refuse<OutputAndWeights>>);
}

}  // namespace

TORCH_LIBRARY_IMPL(attn, SparseCPU, m) { refuse_all(m); }
TORCH_LIBRARY_IMPL(attn, SparseCUDA, m) { refuse_all(m); }
TORCH_LIBRARY_IMPL(attn, SparseCsrCPU, m) { refuse_all(m); }
TORCH_LIBRARY_IMPL(attn, SparseCsrCUDA, m) { refuse_all(m); }
TORCH_LIBRARY_IMPL(attn, QuantizedCPU, m) { refuse_all(m); }
TORCH_LIBRARY_IMPL(attn, QuantizedCUDA, m) { refuse_all(m); }
TORCH_LIBRARY_IMPL(attn, MkldnnCPU, m) { refuse_all(m); }
TORCH_LIBRARY_IMPL(attn, NestedTensorCPU, m) { refuse_nested(m); }
TORCH_LIBRARY_IMPL(attn, NestedTensorCUDA, m) { refuse_nested(m); }

}  // namespace attn
