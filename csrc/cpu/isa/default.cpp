// The instructions that every processor has: SSE2 on x86-64, NEON on 64-bit ARM.
#include "cpu/kernels/kernels.inl"

const attn::Kernels* attn::kernels_default() { return &baseline::KernelTable<baseline::SinglesOnly>::table; }
