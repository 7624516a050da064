// Every operator of the library: the table of contents.
#include <torch/library.h>

#include "ops.h"

#define ATTN_OPTIONS                                                                            \
  "Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, float dropout_p=0.0, "       \
  "bool is_causal=False, *, float? scale=None, bool enable_gqa=False"

TORCH_LIBRARY(attn, m) {
  const std::vector<at::Tag> plain = {at::Tag::pt2_compliant_tag};
  const std::vector<at::Tag> random = {at::Tag::pt2_compliant_tag, at::Tag::nondeterministic_seeded};

  // The built-in's schema.                                        autograd, cpu, meta, autocast
  m.def("sdpa(" ATTN_OPTIONS ") -> Tensor", random);
  // The same with what it went through, O(L S) by definition.     weights
  m.def("sdpa_with_weights(" ATTN_OPTIONS ") -> (Tensor output, Tensor weights, Tensor scores)", random);

  // sdpa with what its backward needs: the logsumexp of every row of scores [*, H, L] (float32; float64 for float64)
  // and the state of the dropout generator, int64 (seed, offset), empty without dropout.
  m.def("_sdpa_forward(" ATTN_OPTIONS ") -> (Tensor output, Tensor logsumexp, Tensor rng_state)", random);
  // Gradients of query, key, value and attn_mask; those not asked for in grad_input_mask are undefined.
  m.def(
      "_sdpa_backward(Tensor grad_output, Tensor query, Tensor key, Tensor value, Tensor? attn_mask, Tensor output, "
      "Tensor logsumexp, Tensor rng_state, float dropout_p, bool is_causal, *, float? scale, bool enable_gqa, "
      "bool[4] grad_input_mask) -> (Tensor, Tensor, Tensor, Tensor)",
      plain);

  // Which instruction set the CPU kernels run with; see cpu/dispatch.h.
  m.def("_cpu_capability() -> str");
  m.def("_cpu_capabilities() -> str[]");
  m.def("_set_cpu_capability(str name) -> ()");
}

namespace attn {

const c10::TypedOperatorHandle<SdpaOp>& sdpa_op() {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("attn::sdpa", "").typed<SdpaOp>();
  return op;
}
const c10::TypedOperatorHandle<ForwardOp>& forward_op() {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("attn::_sdpa_forward", "").typed<ForwardOp>();
  return op;
}
const c10::TypedOperatorHandle<BackwardOp>& backward_op() {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("attn::_sdpa_backward", "").typed<BackwardOp>();
  return op;
}

}  // namespace attn
