// Which instruction set the CPU kernels run with.
#pragma once

#include <string>
#include <vector>

#include "cpu/isa.h"

namespace attn {

// Returns the kernels of the best instruction set that this machine has, or of the set named in the environment
// variable ATTN_CPU_CAPABILITY=default|avx2|avx512|avx512_bf16|amx|neon. Throws c10::Error if this name is unknown or
// not supported here. An empty variable counts as unset.
const Kernels& kernels();

// Returns the kernels for `p` from the best table that supports `p`, as in kernels_for<&Kernels::forward>(p).
template <auto kPart, class Params>
const auto& kernels_for(const Params& p) {
  const Kernels* table = &kernels();
  while (!(table->*kPart)(p)) table = table->falls_back_to();
  return *(table->*kPart)(p);
}

std::string cpu_capability();

// The instruction sets that this machine can run, slowest first.
std::vector<std::string> cpu_capabilities();

// Switches the instruction set of the whole process, for tests and comparisons. Tasks under way finish with the old
// set.
void set_cpu_capability(const std::string& name);

}  // namespace attn
