// AVX2 with FMA and F16C (Haswell, Zen and later).
#include "isa.h"

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif
#define ATTN_ISA avx2
#define ATTN_VECTOR_BYTES 32
#include "isa.inl"

const attn::Kernels* attn::kernels_avx2() { return &avx2::table; }

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
