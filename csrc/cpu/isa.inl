// Everything an instruction set compiles. Included once by each isa_*.cpp, which sets ATTN_ISA and the target.
#include "simd.inl"
// (order matters: each file uses those above)
#include "tile.inl"
#include "operands.inl"
#include "gemm.inl"
#include "scores.inl"
#include "forward.inl"
#include "decode.inl"
#include "tangent.inl"
#include "backward.inl"
#ifdef ATTN_BF16_PAIRS
#include "kernels_bf16.inl"
#else
#include "kernels.inl"
#endif
