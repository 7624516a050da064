// Reads, checks and differentiates the strings that describe a score_mod or a mask_mod.
//
// A string has a line for each value, "%3 f add %1 %2": its number, its type (f: a number, i: a whole number, b: a
// boolean), the operation and its operands, which are earlier values. It begins with "attn.program 1" and ends with
// "return %3". torch_attn/_programs.py writes it, and docs/flex.md lists the operations.
//
// A list is differentiated, not the loop that evaluates it: each operation has one rule, its partial derivatives. From
// s = f(z, terms), the reverse sweep makes the list of the gradients of z and of the terms, and the forward sweep the
// list of the derivative of s, or of those gradients, along a direction.
#pragma once

#include <memory>
#include <string>

#include "core/program.h"

namespace attn {

// The lists of a string. They live as long as this does.
class Compiled {
 public:
  virtual ~Compiled() = default;
  List list{};     // of a score_mod: the score; of a mask_mod: what is visible
  List keeping{};  // of a score_mod, as the lists below; without results if the product is kept
  List gradient{};
  List tangent{};
  List tangent_gradient{};
  int columns[kTermKinds] = {};                   // that each tensor of leaves must have at least
  int8_t tables[kMostTables] = {-1, -1, -1, -1};  // whose numbers each has, a TableOf; -1: it reads none
};

// Reads the string of argument `name`, "score_mod" or "mask_mod". Throws c10::Error, which begins with `op` and names
// the line, if the string is not valid. Results are cached.
std::shared_ptr<const Compiled> compile(const char* op, const char* name, const std::string& text);

}  // namespace attn
