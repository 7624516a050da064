// Turns values of a graph into a list, which kernels evaluate: fuses operations, orders them, and gives them slots.
#pragma once

#include <vector>

#include "operators/program_graph.h"

namespace attn {

struct OwnList {
  std::vector<Step> steps;
  std::vector<LeafOfList> leaves;
  std::vector<ResultOfList> results;
  int slots = 0, uniform_slots = 0, lookups = 0, in_product = 0;
  bool is_wide = false;

  List view() const;
};

struct Result {
  int value;
  LeafOfList of = {Leaf::number};
  int index = kNone;  // the value that is the index into table `of.column`
};

// Two operations become one if the second is the only one that reads the result of the first.
constexpr const char* kFuseLookup = "lookup + x * y";    // also lookup + x
constexpr const char* kFuseProduct = "x * y + z";        // also x * y - z and z - x * y
constexpr const char* kFuseTanh = "u * tanh(v * x)";     // also with u alone, or v alone; both are moderate
constexpr const char* kInProduct = "steps in products";  // List::in_product
constexpr const char* kFusions[] = {kFuseLookup, kFuseProduct, kFuseTanh, kInProduct};

// Returns the operations that `results` need, in order. A slot is reused when no later operation reads its value.
OwnList schedule(Graph& g, const std::vector<Result>& results, bool is_wide);

}  // namespace attn
