// The vectors of one instruction set, and the few operations that GNU vector types cannot express. Every file of the
// kernels builds on this one.
//
// A file of cpu/isa opens a target region and defines ATTN_ISA, the namespace of everything compiled in it, and
// ATTN_INSTRUCTIONS, the file with the set's instructions. Neither is defined if an .inl file is included by itself.
// (The compiler's own macros, __AVX2__ and so on, do not follow the target region: g++ reads the whole file first.)
#pragma once

#include "cpu/isa.h"

#ifndef ATTN_ISA
#define ATTN_ISA baseline
#define ATTN_INSTRUCTIONS "cpu/isa/instructions_portable.inl"
#endif
#include ATTN_INSTRUCTIONS
// Included in the target region, because its functions are used with vectors. They are always inlined, so they leave
// nothing in the object file.
#include "core/score.h"
