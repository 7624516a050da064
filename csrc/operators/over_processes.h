// While it is switched on, calls of sdpa and attention are a process's part of one over several, which Python makes of
// them (torch_attn/distributed/_context.py): whoever calls, from wherever, with tensors of any kind.
#pragma once

#include "operators/ops.h"

namespace attn {

bool is_over_processes();

// Refuses an operator that cannot be part of such a call.
void refuse_over_processes(const char* op);

}  // namespace attn
