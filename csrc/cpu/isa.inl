// Everything an instruction set compiles. Included once by each isa_*.cpp, which sets ATTN_ISA and the target.
#include "simd.inl"
// (order matters: each file uses those above)
#include "tile.inl"
#include "operands.inl"
#ifdef ATTN_BFLOAT16
#include "pairs.inl"
#endif
#include "gemm.inl"
#ifdef ATTN_AMX
#include "cpu/amx.inl"  // by the include path: tests/stand_in has one in software
#include "gemm_tiles.inl"
#endif
#include "scores.inl"
#include "forward.inl"
#include "decode.inl"
#include "tangent.inl"
#include "backward.inl"
#ifdef ATTN_BFLOAT16
#include "kernels_bf16.inl"
#else
#include "kernels.inl"
#endif
