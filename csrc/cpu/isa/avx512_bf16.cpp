// AVX-512 with VDPBF16PS, an instruction that computes two products per lane, and VBMI, which looks bytes up in tables
// (Zen 4, Sapphire Rapids and later). VDPBF16PS saves time on processors that run it at the rate of FMAs, as AMD's do.
#include "cpu/isa.h"

#if defined(__x86_64__)
ATTN_TARGET("prfchw,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vbmi,avx2,fma,f16c")
#define ATTN_ISA avx512_bf16
#define ATTN_INSTRUCTIONS "cpu/isa/instructions_avx512.inl"
#include "cpu/kernels/kernels.inl"
#include "cpu/tiles/words.inl"

namespace attn::avx512_bf16 {

struct Formats {  // see kernels.inl
  static constexpr OnThread kOnThread = {};
  static bool takes(const Problem& p) { return p.factor_bits <= 8; }
  template <class Function>
  static ATTN_INLINE auto with(const Problem&, Function f) {
    return f(WordPairs());
  }
  static constexpr bool kDecodes = true;
  static constexpr auto falls_back_to = kernels_avx512;
};

}  // namespace attn::avx512_bf16

const attn::Kernels* attn::kernels_avx512_bf16() { return &avx512_bf16::KernelTable<avx512_bf16::Formats>::table; }
ATTN_END_TARGET
#endif
