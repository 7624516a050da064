// Attention composed of ATen operators. These formulas take O(L S) memory, run on every device, and are differentiable
// to any order. They are used if the caller asks for scores and weights (but on the CPU a kernel computes these), for
// gradients through scores or weights, or for derivatives beyond the second.
#pragma once

#include <functional>
#include <vector>

#include "operators/ops.h"

namespace attn {

// Returns an alias of `t`, an argument of a formula. A gradient with respect to the alias does not run through the
// history of another argument, even if that history contains `t`.
at::Tensor independent(const at::Tensor& t);
template <Struct T>
T independent(const T& tensors) {
  return map_inputs(tensors, [](const at::Tensor& t) { return independent(t); });
}

// Returns the inputs of all arguments in one list. An absent input becomes an undefined tensor.
std::vector<at::Tensor> list(const auto&... arguments) {
  std::vector<at::Tensor> all;
  all.reserve((kInputs<decltype(arguments)> + ...));
  const auto put = [&](size_t, const std::optional<at::Tensor>& t) { all.push_back(t.value_or(at::Tensor())); };
  for_each_tensor(put, all_inputs_of(arguments...));
  return all;
}

// Differentiates the sum of all <result, grad> by autograd, and returns the gradients with respect to the wanted
// inputs. A gradient is undefined if the results do not depend on its input. `grads` may be shorter than `results`, and
// the results beyond its end are ignored.
std::vector<at::Tensor> differentiate(const std::vector<at::Tensor>& results, const std::vector<at::Tensor>& grads,
                                      const std::vector<at::Tensor>& inputs,
                                      const std::function<bool(size_t)>& is_wanted, bool create_graph = true);

// Returns the scores, scaled and masked, and the weights. The weights are the softmax of the scores, or 0 in a fully
// masked row. Scores and weights are rounded to the query's type. Ignores dropout_p. Results that are not wanted are
// undefined. The formula computes no output.
OutputAndWeights weights_formula(const Call& call, const WantedWeights& wanted);

// _sdpa_tangent and _sdpa_second as formulas. They throw if dropout_p > 0.
TangentResults tangent_formula(const Direction& direction, const Call& call);
Gradients second_formula(const GradResults& u, const Direction& direction, const Call& call, Wanted wanted);

}  // namespace attn
