#include "cpu/capability.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace attn {

namespace {

struct Capability {
  const char* name;
  const Kernels* (*kernels)();
  bool (*supported)();  // whether this machine has every instruction that the file is compiled for
  bool (*preferred)();  // whether it is chosen, if supported, before the sets above it
};

bool always() { return true; }

#if defined(__x86_64__)
// __builtin_cpu_supports also checks that the operating system saves the registers (XGETBV). Some versions of clang do
// not know "f16c" as an argument of __builtin_cpu_supports, so has_avx2() looks F16C up in CPUID. CPUID suffices,
// because F16C uses only registers that AVX2 uses too.
bool has_avx2() {
  unsigned eax, ebx, ecx, edx;
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __get_cpuid(1, &eax, &ebx, &ecx, &edx) &&
         (ecx & bit_F16C);
}
#ifdef ATTN_STAND_IN
bool has_avx512() { return false; }
bool has_avx512_bf16() { return false; }
bool has_amx() { return has_avx2(); }  // software, on vectors that AVX2 holds in halves
#else
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
bool has_avx512_bf16() {
  return has_avx512() && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi");
}

// Whether the processor has tiles, and the operating system saves them and lets this process use them.
bool has_amx() {
#if defined(__linux__)
  unsigned eax, ebx, ecx, edx;
  if (!has_avx512_bf16() || !__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
  constexpr unsigned kBFloat16 = 1u << 22, kTile = 1u << 24;
  if (!(edx & kBFloat16) || !(edx & kTile)) return false;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM of <asm/prctl.h>
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}
#endif
#endif

constexpr Capability kCapabilities[] = {
    {"default", kernels_default, always, always},
#if defined(__x86_64__)
    {"avx2", kernels_avx2, has_avx2, always},
    {"avx512", kernels_avx512, has_avx512, always},
    {"avx512_bf16", kernels_avx512_bf16, has_avx512_bf16, [] { return __builtin_cpu_is("amd") != 0; }},
    {"amx", kernels_amx, has_amx, always},
#elif defined(__aarch64__)
    {"neon", kernels_neon, always, always},
#endif
};

const Capability& find(const std::string& name, const char* source) {
  for (const Capability& c : kCapabilities)
    if (name == c.name && c.supported()) return c;
  TORCH_CHECK(false, source, " is \"", name, "\"; on this machine it must be one of ",
              c10::Join(", ", cpu_capabilities()));
}

const Capability& initial() {
  const char* name = std::getenv("ATTN_CPU_CAPABILITY");
  if (name && *name) return find(name, "ATTN_CPU_CAPABILITY");
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
