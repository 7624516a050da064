// AVX2 with FMA and F16C (Haswell, Zen and later).
#include "cpu/isa.h"

#if defined(__x86_64__)
ATTN_TARGET("avx2,fma,f16c")
#define ATTN_ISA avx2
#define ATTN_INSTRUCTIONS "cpu/isa/instructions_avx2.inl"
#include "cpu/kernels/kernels.inl"

const attn::Kernels* attn::kernels_avx2() { return &avx2::KernelTable<avx2::SinglesOnly>::table; }
ATTN_END_TARGET
#endif
