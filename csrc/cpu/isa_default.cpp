// What the compiler may assume anyway: SSE2 on x86-64.
#include "isa.h"

#define ATTN_ISA baseline
#define ATTN_VECTOR_BYTES 16
#include "isa.inl"

const attn::Kernels* attn::kernels_default() { return &baseline::table; }
