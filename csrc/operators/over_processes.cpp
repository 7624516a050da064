#include "operators/over_processes.h"

#include <torch/library.h>

#include "operators/switch.h"

namespace attn {
namespace {

Switch over_processes;

}  // namespace

bool is_over_processes() { return over_processes.is_on(); }

void refuse_over_processes(const char* op) {
  TORCH_CHECK(!is_over_processes(), op,
              ": it is called within a context_parallel, which cannot spread it over processes; call it outside, with "
              "whole sequences");
}

TORCH_LIBRARY_FRAGMENT(attn, m) {
  m.impl("_over_processes", [](int64_t change) { return over_processes.change(change); });
}

}  // namespace attn
