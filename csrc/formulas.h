// Attention as compositions of ATen operators: O(L S) memory, every device, differentiable to any order. Used where the
// scores themselves are asked for, and for derivatives beyond the second.
#pragma once

#include "ops.h"

namespace attn {

// (output, weights, scores) without dropout: scores are scaled and masked, weights their softmax, 0 in a fully masked
// row. Half types are computed, and returned, in float32.
Tensors3 attention_formula(ATTN_INPUTS_ARGS, ATTN_OPTIONS_ARGS);

// _sdpa_tangent and _sdpa_second as formulas. Throw if dropout_p > 0.
Tensors3 tangent_formula(ATTN_INPUTS_ARGS, ATTN_TANGENTS_ARGS, ATTN_OPTIONS_ARGS);
Tensors4 second_formula(const at::Tensor& grad_output, ATTN_INPUTS_ARGS, ATTN_TANGENTS_ARGS, ATTN_OPTIONS_ARGS,
                        Wanted wanted);

}  // namespace attn
