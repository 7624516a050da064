// The table of functions of one instruction set. Each file of cpu/isa has one; capability.cpp chooses.
#pragma once

// Everything with inline code comes before the target regions of cpu/isa/*.cpp: inside them it would be compiled for
// one instruction set, and the linker might use that copy everywhere.
#include <stddef.h>
#include <stdint.h>

#include <concepts>
#include <type_traits>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "core/params.h"

// Compiles what follows for a processor with these instructions, until ATTN_END_TARGET.
#define ATTN_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define ATTN_TARGET(instructions) \
  ATTN_PRAGMA(clang attribute push(__attribute__((target(instructions))), apply_to = function))
#define ATTN_END_TARGET ATTN_PRAGMA(clang attribute pop)
#else
#define ATTN_TARGET(instructions) ATTN_PRAGMA(GCC push_options) ATTN_PRAGMA(GCC target(instructions))
#define ATTN_END_TARGET ATTN_PRAGMA(GCC pop_options)
#endif

namespace attn {

// A tile of scores. Keys are its rows and queries its columns, the lanes of vectors. In float32 it takes 16 KiB, half
// of the smallest first cache, and leaves room there for the rows that a product reads.
constexpr int64_t kRowTile = kScoreTile;
constexpr int64_t kKeyTile = kScoreTile;

// A task of the statistics' second pass has at most as many tiles of keys.
constexpr int64_t kStatsKeyTiles = 4;

// A thread calls begin() before its first task and end() after its last one, unless they are null.
struct OnThread {
  void (*begin)() = nullptr;
  void (*end)() = nullptr;
};

// A kernel runs one task in a workspace of its own of at least workspace() bytes, 64-byte aligned. What a task computes
// depends on its number alone, so any thread may run it at any time. (Tasks of BackwardKernels wait for each other.)
// Functions that take rows [first, last) count them in the flat list [batch, heads, L].
struct ForwardKernels {
  int64_t (*workspace)(const ForwardParams&);
  void (*run)(const ForwardParams&, int64_t task, char* workspace);
  void (*merge)(const ForwardParams&, int64_t first, int64_t last, char* workspace);
  // packed_size() is the bytes of p.prepacked, 0 where tasks pack for themselves. pack() fills it in: there is a task
  // for each of p.batch entries, heads of keys or values (the larger number), and tiles of keys.
  int64_t (*packed_size)(const ForwardParams&);
  void (*pack)(const ForwardParams&, int64_t task);
  OnThread on_thread = {};  // around run()
};

// Waits until tasks of smaller numbers have brought *turn to `number`; then brings it to the next one.
void wait_for_turn(int32_t* turn, int32_t number);
void end_turn(int32_t* turn);

template <class Params>  // TangentParams or WeightsParams
struct OnePassKernels {
  int64_t (*workspace)(const Params&);
  void (*run)(const Params&, int64_t task, char* workspace);
  OnThread on_thread = {};
};

// Chunks of one span of heads wait for each other (BackwardParams::turns): threads take tasks one by one, in order.
template <class Params>
struct BackwardKernels {
  int64_t (*workspace)(const Params&);
  void (*run)(const Params&, int64_t task, char* workspace);
  void (*mask)(const Params&, int64_t task, char* workspace);
  void (*rows)(const Params&, int64_t task, char* workspace);  // grad_sinks and grad_mask_rows
  OnThread on_thread = {};                                     // around all three
};

struct StatsKernels {
  int64_t (*workspace)(const StatsParams&);
  void (*rows)(const StatsParams&, int64_t task, char* workspace);      // the first pass: writes p.partial, p.scores
  void (*finish)(const StatsParams&, int64_t first, int64_t last);      // its rows: writes the results and p.pairs
  void (*keys)(const StatsParams&, int64_t task, char* workspace);      // the second pass
  void (*add_chunks)(const StatsParams&, int64_t first, int64_t last);  // over the flat list [batch, heads, S]
  OnThread on_thread = {};                                              // around rows() and keys()
  bool keeps_scores = false;
};

struct Kernels {
  const Kernels* (*falls_back_to)();  // a function, as the other table is another file's, and no constant in this one
  void (*look_at_mask)(const Problem&, int64_t task);  // fills in p.mask_tiles
  // Fills in the tiles or the bits of a PairMask for a problem's query.dtype, for one of entries * heads * row_tiles
  // tasks, in a workspace of pair_workspace() bytes.
  void (*look_at_pairs)(const Problem&, const PairMask&, int64_t task, bool wants_bits, char* workspace);
  int64_t (*pair_workspace)(const Problem&, const PairMask&);
  // Each returns the kernels for a problem, or null where the set does not support it: then falls_back_to() is asked.
  const ForwardKernels* (*forward)(const ForwardParams&);
  const OnePassKernels<TangentParams>* (*tangent)(const TangentParams&);
  const BackwardKernels<BackwardParams>* (*backward)(const BackwardParams&);
  const BackwardKernels<SecondParams>* (*second)(const SecondParams&);
  const StatsKernels* (*stats)(const StatsParams&);
  const OnePassKernels<WeightsParams>* (*weights)(const WeightsParams&);
};

const Kernels* kernels_default();
const Kernels* kernels_avx2();
const Kernels* kernels_avx512();
const Kernels* kernels_avx512_bf16();
const Kernels* kernels_amx();
const Kernels* kernels_neon();

}  // namespace attn
