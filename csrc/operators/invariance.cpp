#include "operators/invariance.h"

#include <torch/library.h>

#include <atomic>
#include <cstdlib>
#include <string_view>

#include "attn/sdpa.h"

namespace attn {
namespace {

int64_t from_environment() {
  const char* const given = std::getenv("ATTN_INVARIANT");
  const std::string_view value = given ? given : "";
  TORCH_CHECK(value.empty() || value == "0" || value == "1", "ATTN_INVARIANT is \"", value, "\"; it must be 1 or 0");
  return value == "1";
}

// Times switched on minus times switched off.
std::atomic<int64_t>& invariances() {
  static std::atomic<int64_t> number{from_environment()};
  return number;
}

int64_t change_invariance(int64_t change) { return invariances() += change; }

}  // namespace

bool is_invariant() { return invariances().load(std::memory_order_relaxed) > 0; }

Invariance::Invariance() { change_invariance(+1); }
Invariance::~Invariance() { change_invariance(-1); }

TORCH_LIBRARY_FRAGMENT(attn, m) { m.impl("_invariant", change_invariance); }

}  // namespace attn
