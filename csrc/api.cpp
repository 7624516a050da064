// The C++ API: calls the operators through the dispatcher, as Python does.
#include "attn/sdpa.h"

#include "ops.h"

namespace attn {

at::Tensor sdpa(ATTN_INPUTS_ARGS, ATTN_OPTIONS_ARGS) { return sdpa_op().call(ATTN_INPUTS, ATTN_OPTIONS); }

std::tuple<at::Tensor, at::Tensor, at::Tensor> sdpa_with_weights(ATTN_INPUTS_ARGS, ATTN_OPTIONS_ARGS) {
  return weights_op().call(ATTN_INPUTS, ATTN_OPTIONS);
}

}  // namespace attn
