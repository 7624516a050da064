// While the switch is on, every call of sdpa and attention, from any code and with any tensors, is this process's part
// of a call over several processes. Python implements such calls (torch_attn/distributed/_context.py).
#pragma once

#include "operators/ops.h"

namespace attn {

bool is_over_processes();

// Refuses an operator that cannot be part of such a call.
void refuse_over_processes(const char* op);

}  // namespace attn
