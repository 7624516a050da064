// A switch of the whole process. It is on while it has been switched on more often than off.
#pragma once

#include <atomic>
#include <cstdint>

namespace attn {

class Switch {
 public:
  constexpr Switch() = default;
  Switch(int64_t times) : times_(times) {}
  bool is_on() const { return times_.load(std::memory_order_relaxed) > 0; }
  // +1: on, -1: off, 0: no change. Returns the new sum of changes.
  int64_t change(int64_t times) { return times_ += times; }

 private:
  std::atomic<int64_t> times_ = 0;
};

}  // namespace attn
