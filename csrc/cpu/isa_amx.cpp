// AMX with bfloat16 (Sapphire Rapids and later), its vector code that of AVX-512 with bfloat16. float16 and float32 are
// sums of two and three bfloat16, multiplied in four and six products.
#include "isa.h"

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // false ones in the intrinsics of GCC 12 (bug 105593)
#endif
#define ATTN_ISA amx
#define ATTN_VECTOR_BYTES 64
#define ATTN_BFLOAT16
#define ATTN_AMX
#include "isa.inl"

const attn::Kernels* attn::kernels_amx() { return &amx::table; }

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
