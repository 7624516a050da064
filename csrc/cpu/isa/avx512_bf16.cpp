// AVX-512 with VDPBF16PS (Zen 4, Cooper Lake and later), an instruction that computes two products per lane. The
// instruction saves time on processors that run it at the rate of FMAs, as AMD's do.
#include "cpu/isa.h"

#if defined(__x86_64__)
ATTN_TARGET("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")
#define ATTN_ISA avx512_bf16
#define ATTN_INSTRUCTIONS "cpu/isa/instructions_avx512.inl"
#include "cpu/kernels/kernels.inl"
#include "cpu/tiles/formats_bf16.inl"

namespace attn::avx512_bf16 {

struct Formats {  // see kernels.inl
  static constexpr OnThread kOnThread = {};
  static bool takes(const Problem& p) { return p.factor_bits <= 8; }
  template <class Function>
  static ATTN_INLINE auto with(const Problem&, Function f) {
    return f(Pairs());
  }
  static constexpr bool kDecodes = false;
  static constexpr auto falls_back_to = kernels_avx512;
};

}  // namespace attn::avx512_bf16

const attn::Kernels* attn::kernels_avx512_bf16() { return &avx512_bf16::KernelTable<avx512_bf16::Formats>::table; }
ATTN_END_TARGET
#endif
