// AVX-512 with VDPBF16PS (Zen 4, Cooper Lake and later): two products a lane and step. It pays where the processor does
// them at the rate of FMAs, as AMD's do.
#include "cpu/isa.h"

#if defined(__x86_64__)
ATTN_TARGET("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")
#define ATTN_ISA avx512_bf16
#define ATTN_INSTRUCTIONS "cpu/instructions_avx512.inl"
#include "cpu/kernels_bf16.inl"

namespace attn::avx512_bf16 {

struct Formats {  // see kernels_bf16.inl
  static const Kernels& falls_back_to() { return *kernels_avx512(); }
  struct Unit {
    Unit() {}
  };
  static bool hold(const Problem& p) { return p.factor_bits <= 8; }
  template <class Function>
  static ATTN_INLINE auto with(const Problem&, Function f) {
    return f(Pairs());
  }
};

}  // namespace attn::avx512_bf16

const attn::Kernels* attn::kernels_avx512_bf16() { return &avx512_bf16::Bf16Kernels<avx512_bf16::Formats>::table; }
ATTN_END_TARGET
#endif
