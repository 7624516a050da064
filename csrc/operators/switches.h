// Switches that hold for the whole process, because threads may share the work of a call. A switch is on while it has
// been switched on more often than off.
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

// Whether attn::invariant() is on.
bool is_invariant();

// Whether calls are spread over several processes. If so, every call of sdpa and attention in this process, from any
// code and with any tensors, is a part of a call over several processes. Python implements such calls
// (torch_attn/distributed/_context.py).
bool is_over_processes();
// Throws if is_over_processes(), because `op` cannot be part of a call over several processes.
void refuse_over_processes(const char* op);
// Answers a call of sdpa or attention while is_over_processes() is true. Refuses flex_attention.
template <class Op>
auto attend_over_processes(const Call& call) {
  if constexpr (std::is_same_v<Op, FlexOp>) refuse_over_processes(Op::name);
  const auto [output, rows] = OverProcessesOp::call(call);
  return results_for<Op>(output, rows);
}

}  // namespace attn
