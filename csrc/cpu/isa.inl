// Everything an instruction set compiles. Included once by each isa_*.cpp, which sets ATTN_ISA and the target.
#include "simd.inl"
// (order matters: each file uses those above)
#include "gemm.inl"
#include "tile.inl"
#include "scores.inl"
#include "forward.inl"
#include "decode.inl"
#include "tangent.inl"
#include "backward.inl"
#include "kernels.inl"
