// Switches of the whole process, because threads may share the work of a call. Each is on while it has been switched on
// more often than off.
#pragma once

#include <atomic>

#include "operators/ops.h"

namespace attn {

class Switch {
 public:
  constexpr Switch(int64_t times = 0) : times_(times) {}
  bool is_on() const { return times_.load(std::memory_order_relaxed) > 0; }
  // +1: on, -1: off, 0: no change. Returns the new sum of changes.
  int64_t change(int64_t times) { return times_ += times; }

 private:
  std::atomic<int64_t> times_;
};

// Behind attn::invariant().
bool is_invariant();

// While it is on, every call of sdpa and attention, from any code and with any tensors, is this process's part of a
// call over several processes. Python implements such calls (torch_attn/distributed/_context.py).
bool is_over_processes();
// Refuses an operator that cannot be part of such a call.
void refuse_over_processes(const char* op);
// Answers sdpa or attention while the switch is on; flex_attention is refused.
template <class Op>
auto attend_over_processes(const Call& call) {
  if constexpr (std::is_same_v<Op, FlexOp>) refuse_over_processes(Op::name);
  const auto [output, rows] = OverProcessesOp::call(call);
  return results_for<Op>(output, rows);
}

}  // namespace attn
