// Turns values of a graph into a list, which kernels evaluate: fuses operations, orders them, and gives them slots.
#pragma once

#include <vector>

#include "operators/programs/graph.h"

namespace attn {

// A list and its memory.
struct OwnList : List {
  std::vector<Step> own_steps;
  std::vector<LeafOfList> own_leaves;
  std::vector<ResultOfList> own_results;

  OwnList() : List{} {}
  OwnList(OwnList&&) = default;
  OwnList& operator=(OwnList&&) = default;
};

struct Result {
  int value;
  LeafOfList of = {Leaf::number};
  int index = kNone;  // the value that is the index into table `of.column`
};

// Two operations become one if the second is the only one that reads the result of the first.
constexpr const char* kFuseLookup = "lookup + x * y";  // also lookup + x
constexpr const char* kFuseProduct = "x * y + z";      // also x * y - z and z - x * y
constexpr const char* kFuseTanh = "u * tanh(v * x)";   // also with u alone, or v alone; both are moderate
constexpr const char* kFusions[] = {kFuseLookup, kFuseProduct, kFuseTanh};

// Returns the operations that `results` need, in order.
OwnList schedule(Graph& g, const std::vector<Result>& results, bool is_wide);

}  // namespace attn
