// NEON, which every 64-bit ARM has.
#include "cpu/isa.h"

#if defined(__aarch64__)
#define ATTN_ISA neon
#define ATTN_INSTRUCTIONS "cpu/isa/instructions_neon.inl"
#include "cpu/kernels/kernels.inl"

const attn::Kernels* attn::kernels_neon() { return &neon::KernelTable<neon::SinglesOnly>::table; }
#endif
