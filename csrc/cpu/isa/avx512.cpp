// AVX-512 (Skylake-X, Zen 4 and later).
#include "cpu/isa.h"

#if defined(__x86_64__)
ATTN_TARGET("prfchw,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#define ATTN_ISA avx512
#define ATTN_INSTRUCTIONS "cpu/isa/instructions_avx512.inl"
#include "cpu/kernels/kernels.inl"

const attn::Kernels* attn::kernels_avx512() { return &avx512::KernelTable<avx512::SinglesOnly>::table; }
ATTN_END_TARGET
#endif
