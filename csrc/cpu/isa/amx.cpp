// AMX with bfloat16 (Sapphire Rapids and later). Its vector code is AVX-512 with VDPBF16PS. In long sequences, each
// float16 number is split into two bfloat16 numbers, so a product of two numbers becomes four products.
#include "cpu/isa.h"

#if defined(__x86_64__)
ATTN_TARGET("prfchw,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")
#define ATTN_ISA amx
#define ATTN_INSTRUCTIONS "cpu/isa/instructions_avx512.inl"
#include "cpu/tiles/gemm_amx.inl"  // first, because the kernels use its products

#include "cpu/kernels/kernels.inl"

namespace attn::amx {

struct Formats {  // see kernels.inl
  static constexpr OnThread kOnThread = {configure_tiles, release_tiles};
  static bool takes(const Problem& p) {
    const bool is_long = p.queries >= kLongInTwoParts && p.keys >= kLongInTwoParts && !p.invariant;
    return p.factor_bits <= 8 || (p.factor_bits <= 16 && is_long);
  }
  template <class Function>
  static ATTN_INLINE auto with(const Problem& p, Function f) {
    return p.factor_bits <= 8 ? f(Tiles<1>()) : f(Tiles<2>());
  }
  static constexpr bool kDecodes = false;
  static constexpr auto falls_back_to = kernels_avx512;
};

}  // namespace attn::amx

const attn::Kernels* attn::kernels_amx() { return &amx::KernelTable<amx::Formats>::table; }
ATTN_END_TARGET
#endif
