// The C++ API: calls the operators through the dispatcher, as Python does.
#include "attn/sdpa.h"

#include "ops.h"

namespace attn {

at::Tensor sdpa(ATTN_ARGUMENTS) { return sdpa_op().call(ATTN_PASS); }

std::tuple<at::Tensor, at::Tensor, at::Tensor> sdpa_with_weights(ATTN_ARGUMENTS) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("attn::sdpa_with_weights", "").typed<ForwardOp>();
  return op.call(ATTN_PASS);
}

}  // namespace attn
