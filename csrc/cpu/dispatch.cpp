#include "dispatch.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>

namespace attn {

namespace {

struct Capability {
  const char* name;
  const Kernels* (*kernels)();
  bool (*supported)();  // all that the file is compiled for
  bool (*preferred)();  // to those above, where supported
};

bool always() { return true; }

#if defined(__x86_64__)
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

constexpr Capability kCapabilities[] = {
    {"default", kernels_default, always, always},
#if defined(__x86_64__)
    {"avx2", kernels_avx2, has_avx2, always},
    {"avx512", kernels_avx512, has_avx512, always},
    {"avx512_bf16", kernels_avx512_bf16, [] { return has_avx512() && __builtin_cpu_supports("avx512bf16"); },
     [] { return __builtin_cpu_is("amd") != 0; }},
#endif
};

const Capability& find(const std::string& name, const char* source) {
  for (const Capability& c : kCapabilities)
    if (name == c.name && c.supported()) return c;
  TORCH_CHECK(false, source, " is \"", name, "\"; on this machine it must be one of ",
              c10::Join(", ", cpu_capabilities()));
}

const Capability& initial() {
  if (const char* name = std::getenv("ATTN_CPU_CAPABILITY")) return find(name, "ATTN_CPU_CAPABILITY");
  const Capability* best = &kCapabilities[0];
  for (const Capability& c : kCapabilities)
    if (c.supported() && c.preferred()) best = &c;
  return *best;
}

std::atomic<const Capability*>& current() {
  static std::atomic<const Capability*> chosen{&initial()};
  return chosen;
}

}  // namespace

const Kernels& kernels() { return *current().load(std::memory_order_relaxed)->kernels(); }

std::string cpu_capability() { return current().load()->name; }

std::vector<std::string> cpu_capabilities() {
  std::vector<std::string> names;
  for (const Capability& c : kCapabilities)
    if (c.supported()) names.emplace_back(c.name);
  return names;
}

void set_cpu_capability(const std::string& name) { current() = &find(name, "_set_cpu_capability: name"); }

TORCH_LIBRARY_FRAGMENT(attn, m) {
  m.impl("_cpu_capability", cpu_capability);
  m.impl("_cpu_capabilities", cpu_capabilities);
  m.impl("_set_cpu_capability", [](const std::string& name) { set_cpu_capability(name); });
}

}  // namespace attn
