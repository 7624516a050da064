// Compiles the strings that describe a score_mod or a mask_mod: text.h reads a string into a graph (graph.h), which
// derivatives.h differentiates and schedule.h turns into the lists that kernels evaluate (core/program.h).
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "operators/programs/schedule.h"
#include "operators/programs/text.h"

namespace attn {

// What a string reads, and the lists that it is compiled to (PairProgram).
struct Compiled : Reads {
  OwnList list;     // of a score_mod: the score; of a mask_mod: what is visible
  OwnList keeping;  // of a score_mod, like the lists below; has no results if the product is kept
  OwnList gradient, tangent, tangent_gradient;
  std::vector<const char*> applied;  // Graph::applied()
};

// Compiles the string of argument `name`, "score_mod" or "mask_mod". Throws as read_text() does. Results are cached.
std::shared_ptr<const Compiled> compile(const char* op_name, const char* name, const std::string& text);

// The functions of a call. A function that the call lacks is null.
struct Programs {
  std::shared_ptr<const Compiled> score_mod, mask_mod;
  Reads reads;  // what any of them reads
};

}  // namespace attn
