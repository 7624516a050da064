// The table of an instruction set's functions. Each .cpp file of cpu/isa has a table, and capability.cpp chooses among
// the tables.
#pragma once

// These headers are included before the target regions of cpu/isa/*.cpp begin (ATTN_TARGET). Inside a region, the
// inline code of the headers would be compiled for one instruction set, and the linker might use that copy everywhere.
#include <math.h>
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

// Begins a target region: the code from here to ATTN_END_TARGET is compiled for a processor with these instructions.
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

// The size of a tile of scores. Its rows are keys, and its columns are queries, which are the lanes of vectors. In
// float32 a tile takes 16 KiB, half of the smallest L1 cache. The other half is left for the rows that a product reads.
constexpr int64_t kRowTile = kScoreTile;
constexpr int64_t kKeyTile = kScoreTile;

// The largest number of tiles of keys in a task of the statistics' second pass.
constexpr int64_t kStatsKeyTiles = 4;

// A thread calls begin() before its first task and end() after its last one, unless they are null.
struct OnThread {
  void (*begin)() = nullptr;
  void (*end)() = nullptr;
};

// A kernel runs a task in a workspace of at least workspace() bytes, which is 64-byte aligned and which no other thread
// uses. The result of a task depends on the task's number alone, so any thread may run it at any time. (But a task of
// BackwardKernels may wait for earlier tasks.) Functions with arguments `first` and `last` take the rows [first, last)
// of the flat list [batch, heads, L].
struct ForwardKernels {
  int64_t (*workspace)(const ForwardParams&);
  void (*run)(const ForwardParams&, int64_t task, char* workspace);
  void (*merge)(const ForwardParams&, int64_t first, int64_t last, char* workspace);
  // packed_size() returns the size of p.prepacked in bytes, or 0 if each task packs keys and values for itself. pack()
  // fills in p.prepacked, in p.batch * max(p.key_heads, p.value_heads) * (tiles of keys) tasks.
  int64_t (*packed_size)(const ForwardParams&);
  void (*pack)(const ForwardParams&, int64_t task);
  OnThread on_thread = {};  // around run()
};

// A task calls wait_for_turn(), which waits until earlier tasks have raised *turn to `number`. At its end the task
// calls end_turn(), which raises *turn by 1.
void wait_for_turn(int32_t* turn, int32_t number);
void end_turn(int32_t* turn);

template <class Params>  // TangentParams or WeightsParams
struct OnePassKernels {
  int64_t (*workspace)(const Params&);
  void (*run)(const Params&, int64_t task, char* workspace);
  OnThread on_thread = {};
};

// Tasks that compute chunks of the same span of heads wait for each other (BackwardParams::turns), and tasks that add
// to the same copy of tables wait for each other (TermGradients::turns). So a thread takes only one task at a time, the
// next in the order of task numbers (Take::one). No task then waits for a task that has not begun.
template <class Params>
struct BackwardKernels {
  int64_t (*workspace)(const Params&);
  void (*run)(const Params&, int64_t task, char* workspace);
  void (*mask)(const Params&, int64_t task, char* workspace);
  void (*rows)(const Params&, int64_t task, char* workspace);  // grad_sinks and grad_mask_rows
  OnThread on_thread = {};                                     // around run(), mask() and rows()
};

struct StatsKernels {
  int64_t (*workspace)(const StatsParams&);
  void (*rows)(const StatsParams&, int64_t task, char* workspace);      // the first pass: writes p.partial, p.scores
  void (*finish)(const StatsParams&, int64_t first, int64_t last);      // writes the results of the rows, and p.pairs
  void (*keys)(const StatsParams&, int64_t task, char* workspace);      // the second pass
  void (*add_chunks)(const StatsParams&, int64_t first, int64_t last);  // over the flat list [batch, heads, S]
  OnThread on_thread = {};                                              // around rows() and keys()
  bool keeps_scores = false;
};

struct Kernels {
  const Kernels* (*falls_back_to)();                   // a function, because another file's table is no constant here
  void (*look_at_mask)(const Problem&, int64_t task);  // fills in p.mask_tiles
  // Fills in the tiles of a PairMask or, if `wants_bits`, their bits. Evaluates the mask in the compute type of
  // query.dtype. There are entries * heads * row_tiles tasks, each with a workspace of pair_workspace() bytes.
  void (*look_at_pairs)(const Problem&, const PairMask&, int64_t task, bool wants_bits, char* workspace);
  int64_t (*pair_workspace)(const Problem&, const PairMask&);
  // Each of these functions returns the kernels for a problem, or null if the instruction set does not support the
  // problem. kernels_for() then asks the table that falls_back_to() returns.
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
