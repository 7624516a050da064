// AVX-512 (Skylake-X, Zen 4 and later). See CONTRIBUTING.md, "Add an instruction set".
#include "isa.h"

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#endif
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // false ones in the intrinsics of GCC 12 (bug 105593)
#endif
#define ATTN_ISA avx512
#define ATTN_VECTOR_BYTES 64
#include "isa.inl"

const attn::Kernels* attn::kernels_avx512() { return &avx512::table; }

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
