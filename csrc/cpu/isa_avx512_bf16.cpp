// AVX-512 with VDPBF16PS (Zen 4, Cooper Lake and later). Two products a lane and step; it pays where the processor does
// them at the rate of FMAs, which AMD's do.
#include "isa.h"

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // false ones in the intrinsics of GCC 12 (bug 105593)
#endif
#define ATTN_ISA avx512_bf16
#define ATTN_VECTOR_BYTES 64
#define ATTN_BFLOAT16
#include "isa.inl"

const attn::Kernels* attn::kernels_avx512_bf16() { return &avx512_bf16::table; }

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
