// Derivatives of the values of a graph.
//
// The code differentiates a list of operations, not the loop that evaluates the list. The only rules that it needs are
// the partial derivatives of each operation. Let the list compute s = f(z, terms). The reverse sweep makes a list that
// computes the gradients of z and of the terms. The forward sweep makes lists that compute derivatives along a
// direction: one list for s, and one for the gradients of the reverse sweep.
#pragma once

#include <unordered_map>
#include <vector>

#include "operators/programs/graph.h"

namespace attn {

// In the results of the functions below, kNone stands for a derivative that is always 0. Returns the value 0 for it.
int zero_if_none(Graph& g, int n);

// Returns the gradient of every value that g has so far, given the gradient of value `result`.
std::vector<int> gradients_of_values(Graph& g, int result, int grad);

// Returns the derivative of value n along a direction. The caller puts the derivatives of the leaves into `tangents`.
// This function inserts every derivative that it finds.
int tangent_of_value(Graph& g, int n, std::unordered_map<int, int>& tangents);

}  // namespace attn
