// The vectors of one instruction set, and the few operations that GNU vector types cannot express. Every file of the
// kernels builds on this one.
//
// A file of cpu/isa begins a target region (ATTN_TARGET) and defines two macros. ATTN_ISA is the namespace of
// everything compiled in the region. ATTN_INSTRUCTIONS is the file with the operations of the instruction set. Neither
// macro is defined if an .inl file is included by itself. (The compiler's own macros, such as __AVX2__, do not depend
// on the target region, because g++ reads the whole file first.)
#pragma once

#include "cpu/isa.h"

#ifndef ATTN_ISA
#define ATTN_ISA baseline
#define ATTN_INSTRUCTIONS "cpu/isa/instructions_portable.inl"
#endif
#include ATTN_INSTRUCTIONS
// core/score.h is included in the target region, because the kernels call its functions with vectors. The object file
// contains no separate copies of these functions, because they are always inlined.
#include "core/score.h"
