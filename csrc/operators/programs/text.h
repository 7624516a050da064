// Reads the strings that describe a score_mod or a mask_mod, and checks them.
//
// A string has a line for each value, "%3 f add %1 %2": its number, its type (f: a number, i: a whole number, b: a
// boolean), the operation and its operands, which are earlier values. The string begins with "attn.program 1", or with
// "attn.program 1 wide" if its whole numbers need 64 bits, and ends with "return %3". torch_attn/_programs/ writes
// such strings, and docs/flex.md lists the operations.
#pragma once

#include <optional>
#include <string>

#include "operators/programs/graph.h"

namespace attn {

// What functions of the pair read.
struct Reads {
  int columns[kTermKinds] = {};                // the least number of columns of each tensor of leaves
  std::optional<TableOf> tables[kMostTables];  // of the tables that are read
  bool is_wide = false;                        // whether whole numbers need 64 bits
};

// Reads the string of argument `name`, "score_mod" or "mask_mod", into the graph, and returns the value that the string
// returns. Throws c10::Error if the string is not valid. The error begins with `op_name` and names the line.
int read_text(const char* op_name, const char* name, const std::string& text, Graph& g, Reads& reads);

}  // namespace attn
