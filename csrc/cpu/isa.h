// What one instruction set offers: a table of functions. One table per isa_*.cpp; dispatch.cpp chooses.
#pragma once

// Everything with inline code comes before the target regions of isa_*.cpp: inside them it would be compiled for one
// instruction set, and the linker might use that copy everywhere.
#include <stddef.h>
#include <stdint.h>

#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "../params.h"

namespace attn {

// A kernel runs one task in a workspace of its own of at least *_workspace() bytes, 64-byte aligned. Tasks are
// independent: what a task computes depends on its number alone, so any thread may run it at any time.
// The functions over rows [first, last) go over the flat list [batch, heads, L].
struct Kernels {
  int64_t (*forward_workspace)(const ForwardParams&);
  void (*forward)(const ForwardParams&, int64_t task, char* workspace);
  void (*forward_merge)(const ForwardParams&, int64_t first, int64_t last, char* workspace);

  int64_t (*backward_workspace)(const BackwardParams&);
  void (*backward)(const BackwardParams&, int64_t task, char* workspace);
  void (*backward_merge)(const BackwardParams&, int64_t first, int64_t last, char* workspace);
  void (*backward_delta)(const BackwardParams&, int64_t first, int64_t last, char* workspace);
  void (*backward_mask)(const BackwardParams&, int64_t task, char* workspace);
};

const Kernels* kernels_default();
const Kernels* kernels_avx2();
const Kernels* kernels_avx512();

}  // namespace attn
