// Attention as compositions of ATen operators: O(L S) memory, every device, differentiable to any order. Used where the
// scores themselves, or gradients through them, are asked for (a kernel computes them on the CPU), and for derivatives
// beyond the second.
#pragma once

#include <functional>
#include <vector>

#include "operators/ops.h"

namespace attn {

// An argument of a formula whose gradient does not run through the history of another argument.
at::Tensor independent(const at::Tensor& t);
template <Struct T>
T independent(const T& tensors) {
  return map_inputs(tensors, [](const at::Tensor& t) { return independent(t); });
}

// The inputs of all arguments in a row, undefined where absent.
std::vector<at::Tensor> list(const auto&... arguments) {
  const auto put = [](const auto&... t) { return std::vector{std::optional<at::Tensor>(t).value_or(at::Tensor())...}; };
  return std::apply(put, all_inputs_of(arguments...));
}

// The gradients of the sum of all <results, grads> with respect to those inputs that are wanted, by autograd. Undefined
// where none runs through. Results past the grads have none.
std::vector<at::Tensor> differentiate(const std::vector<at::Tensor>& results, const std::vector<at::Tensor>& grads,
                                      const std::vector<at::Tensor>& inputs,
                                      const std::function<bool(size_t)>& is_wanted, bool create_graph = true);

// Without dropout, and rounded to the query's type: scores are scaled and masked, weights their softmax, 0 in a fully
// masked row. dropout_p is ignored, and no output is computed.
WeightsAndScores weights_formula(const Call& call, const WantedWeights& wanted);

// _sdpa_tangent and _sdpa_second as formulas. Throw if dropout_p > 0.
TangentResults tangent_formula(const Direction& direction, const Call& call);
Gradients second_formula(const GradResults& u, const Direction& direction, const Call& call, Wanted wanted);

}  // namespace attn
