#include "operators/over_processes.h"

#include <torch/library.h>

#include <atomic>

namespace attn {
namespace {

std::atomic<int64_t> times_on = 0;  // times switched on minus times switched off

int64_t over_processes(int64_t change) { return times_on += change; }

}  // namespace

bool is_over_processes() { return times_on.load(std::memory_order_relaxed) > 0; }

void refuse_over_processes(const char* op) {
  TORCH_CHECK(!is_over_processes(), op,
              ": it is called within a context_parallel, which cannot spread it over processes; call it outside, with "
              "whole sequences");
}

TORCH_LIBRARY_FRAGMENT(attn, m) { m.impl("_over_processes", over_processes); }

}  // namespace attn
