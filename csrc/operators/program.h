// Reads, checks and differentiates the strings that describe a score_mod or a mask_mod.
//
// A string has a line for each value, "%3 f add %1 %2": its number, its type (f: a number, i: a whole number, b: a
// boolean), the operation and its operands, which are earlier values. The string begins with "attn.program 1", or with
// "attn.program 1 wide" if its whole numbers need 64 bits, and ends with "return %3". torch_attn/_programs.py writes
// such strings, and docs/flex.md lists the operations.
//
// The code differentiates a list of operations, not the loop that evaluates the list. The only rules that it needs are
// the partial derivatives of each operation. Let the list compute s = f(z, terms). The reverse sweep makes a list that
// computes the gradients of z and of the terms. The forward sweep makes lists that compute derivatives along a
// direction: one list for s, and one for the gradients of the reverse sweep.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "core/program.h"

namespace attn {

// The lists that a string is compiled to. The lists live as long as this object.
class Compiled {
 public:
  virtual ~Compiled() = default;
  List list{};     // of a score_mod: the score; of a mask_mod: what is visible
  List keeping{};  // of a score_mod, like the lists below; has no results if the product is kept
  List gradient{};
  List tangent{};
  List tangent_gradient{};
  int columns[kTermKinds] = {};                // the least number of columns of each tensor of leaves
  std::optional<TableOf> tables[kMostTables];  // of the tables that are read
  bool is_wide = false;                        // whether whole numbers need 64 bits
};

// Reads the string of argument `name`, "score_mod" or "mask_mod". Throws c10::Error if the string is not valid. The
// error begins with `op` and names the line. Results are cached.
std::shared_ptr<const Compiled> compile(const char* op, const char* name, const std::string& text);

}  // namespace attn
