// Attention as compositions of ATen operators: O(L S) memory, every device, differentiable to any order. Used where the
// scores themselves, or gradients through them, are asked for (a kernel computes them on the CPU), and for derivatives
// beyond the second.
#pragma once

#include "operators/ops.h"

namespace attn {

// Without dropout, and rounded to the query's type: scores are scaled and masked, weights their softmax, 0 in a fully
// masked row. dropout_p is ignored.
WeightsAndScores weights_formula(const Inputs& inputs, const PlainOptions& options);

// _sdpa_tangent and _sdpa_second as formulas. Throw if dropout_p > 0.
TangentResults tangent_formula(const Inputs& inputs, const Direction& direction, const PlainOptions& options);
Gradients second_formula(const at::Tensor& grad_output, const Inputs& inputs, const Direction& direction,
                         const PlainOptions& options, Wanted wanted);

}  // namespace attn
