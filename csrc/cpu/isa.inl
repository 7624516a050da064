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
#ifdef ATTN_STAND_IN
#include "stand_in/amx.inl"
#else
#include "amx.inl"
#endif
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
