// Tensors that are not dense: the dispatcher finds no kernel for them and would say so without naming the argument. The
// kernel here is the argument checker, which does.
#include <torch/library.h>

#include "validate.h"

namespace attn {
namespace {

template <class Result>
Result refuse(ATTN_INPUTS_ARGS, ATTN_OPTIONS_ARGS) {
  validate(ATTN_INPUTS, ATTN_OPTIONS);
  TORCH_CHECK(false, "attn::sdpa: query, key, value and attn_mask must be dense (strided) tensors");
}

Tensors4 refuse_forward(ATTN_INPUTS_ARGS, ATTN_OPTIONS_ARGS, const std::optional<at::Tensor>&) {
  return refuse<Tensors4>(ATTN_INPUTS, ATTN_OPTIONS);
}

// sdpa_with_weights, which is composed of other operators, is found for all but nested tensors, and checks by itself.
void refuse_all(torch::Library& m) {
  m.impl("sdpa", refuse<at::Tensor>);
  m.impl("_sdpa_forward", refuse_forward);
}
void refuse_nested(torch::Library& m) {
  refuse_all(m);
  m.impl("sdpa_with_weights", refuse<Tensors3>);
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
