#include "operators/switches.h"

#include <torch/library.h>

#include <cstdlib>

namespace attn {
namespace {

Switch over_processes;

Switch& invariance() {
  static Switch own = [] {
    const char* const given = std::getenv("ATTN_INVARIANT");
    const std::string_view value = given ? given : "";
    TORCH_CHECK(value.empty() || value == "0" || value == "1", "ATTN_INVARIANT is \"", value, "\"; it must be 1 or 0");
    return value == "1";
  }();
  return own;
}

}  // namespace

bool is_invariant() { return invariance().is_on(); }
Invariance::Invariance() { invariance().change(+1); }
Invariance::~Invariance() { invariance().change(-1); }

bool is_over_processes() { return over_processes.is_on(); }
void refuse_over_processes(const char* op) {
  TORCH_CHECK(!is_over_processes(), op,
              ": it is called within a context_parallel, which cannot spread it over processes; call it outside, with "
              "whole sequences");
}

TORCH_LIBRARY_FRAGMENT(attn, m) {
  m.impl("_invariant", [](int64_t change) { return invariance().change(change); });
  m.impl("_over_processes", [](int64_t change) { return over_processes.change(change); });
}

}  // namespace attn
