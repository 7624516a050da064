#include "operators/invariance.h"

#include <torch/library.h>

#include <cstdlib>
#include <string_view>

#include "attn/sdpa.h"
#include "operators/switch.h"

namespace attn {
namespace {

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

TORCH_LIBRARY_FRAGMENT(attn, m) {
  m.impl("_invariant", [](int64_t change) { return invariance().change(change); });
}

}  // namespace attn
