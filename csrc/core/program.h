// A function of the pair, such as a score_mod, as kernels evaluate it: a list of operations on tiles.
//
// The caller's string is checked, differentiated and turned into lists on the host (operators/program.h). A kernel only
// evaluates lists. A value is a number of the compute dtype, a whole number of the same size, or a boolean: all bits
// set, or none.
#pragma once

#include "core/params.h"

namespace attn {

enum class Op : uint8_t {
  leaf,
  // numbers
  add,
  sub,
  mul,
  div,
  neg,
  abs,
  minimum,
  maximum,
  clamp,  // x, least, most
  sqrt,
  exp,
  exp2,
  log,
  log1p,
  tanh,  // z * tanh(x * y), with y and z the same for all pairs
  floor,
  times,  // x * y, but 0 if x is 0, whatever y is
  fma,    // x * y + z
  fms,    // x * y - z
  fnma,   // z - x * y
  // whole numbers
  add_whole,
  sub_whole,
  mul_whole,
  minimum_whole,
  maximum_whole,
  floor_divide,  // rounds down; by 0: 0
  remainder,     // has the sign of the divisor; by 0: 0
  // all bits of whole numbers and booleans
  bit_and,
  bit_or,
  bit_xor,
  bit_not,
  // booleans
  eq,
  ne,
  lt,
  le,
  eq_whole,
  ne_whole,
  lt_whole,
  le_whole,
  // of any kind
  where,
  lookup,          // number x of a table, plus z
  lookup_tangent,  // of its derivative along a direction
  float_of,        // of a whole number
  whole_of,        // of a number, rounded towards 0
};

// What a list reads.
enum class Leaf : uint8_t {
  number,        // a constant
  whole_number,  // likewise
  boolean,       // likewise
  scale,         // Problem::scale
  score,         // scale * product; lists have these two leaves instead
  product,       // <q, k> of the pair; in lists of derivatives, the value that `keeping` stored
  grad,          // the gradient of the score
  tangent,       // of scale * product, along a direction
  tangent_grad,  // of the gradient
  pair_term,     // Problem::mask at the pair, and its derivative along a direction
  pair_tangent,
  // a column of the tensors of leaves (PairProgram)
  row_term,
  key_term,
  distance_term,
  row_tangent,
  key_tangent,
  distance_tangent,
  row_number,
  key_number,
  distance_number,
  query,  // i
  key,    // j
};
// The leaves in tensors, in the order of Leaf.
constexpr int kTermKinds = static_cast<int>(Leaf::query) - static_cast<int>(Leaf::row_term);

struct LeafOfList {
  Leaf leaf = Leaf::number;
  int column = 0;     // of its tensor
  double number = 0;  // a constant
};

// An operation. An operand is the number of a slot, which holds the result of an earlier step, or -1 - the number of a
// leaf.
struct Step {
  Op op;
  int16_t to;
  int16_t from[3] = {};
  int8_t table = 0;   // of a lookup
  int8_t lookup = 0;  // which of the list's lookups it is
};
struct ResultOfList {
  int16_t from;
  LeafOfList of;  // a gradient: what it is the gradient of; score stands for scale * product
  // The gradient of number `index` of this table, if it is not -1. `of` then means nothing.
  int8_t table = -1;
  int16_t index = 0;
};

struct List {
  const Step* steps;
  int step_count;
  const LeafOfList* leaves;
  int leaf_count;
  const ResultOfList* results;
  int result_count;
  // The number of slots. The first `uniform_slots` steps write to the first slots; their results are the same for all
  // pairs.
  int slots;
  int uniform_slots;
  int lookups;
  bool reads_pairs;  // pair_term or pair_tangent
};

// One tensor of leaves, [batch, heads, L or S or L + S - 1, columns], of the compute dtype or, with whole numbers,
// int32. Strides in elements, 0 where it is broadcast.
struct Terms {
  const void* data = nullptr;
  int64_t entry = 0, head = 0, row = 0, col = 0;
};

// A table, [batch, heads, n, size] in the compute dtype, whose index is of the pair. n is 1, or each query or each key
// has its own numbers, which are contiguous.
enum class TableOf : int8_t { all, queries, keys };
struct Table {
  Terms numbers, tangent;  // no data: none
  int64_t size = 0;
  TableOf of = TableOf::all;
};
constexpr int kMostTables = 4;

// The gradients of terms, in the compute dtype; null if not wanted. Those of the distances are a sum for each chunk of
// keys, added in order afterwards.
struct TermGradients {
  void* rows = nullptr;       // [batch, heads, L, columns]
  void* keys = nullptr;       // [batch, heads, S, columns]
  void* distances = nullptr;  // [chunks, batch, heads, columns, L + S - 1]
  // Task t stands in line t % lines, and adds to a copy of the tables once turns[line] says that the tasks before it
  // have. The lines of a copy add to different numbers. Without turns, all tasks do.
  Terms tables[kMostTables];  // as Table::numbers, contiguous; the first copy
  bool has_tables = false;
  int64_t lines = 1, lines_of_copy = 1, copy = 0;  // `copy`: from one copy to the next, in numbers
  int32_t* turns = nullptr;
};
constexpr TermGradients kNoTermGradients;
ATTN_INLINE const TermGradients& gradients_of_terms(const BackwardParams& p) {
  return p.grad_terms ? *p.grad_terms : kNoTermGradients;
}

// What the kernels of a call with a program share. Pair (i, j) has distance i - j + keys - 1.
struct PairProgram {
  int64_t batch = 1, heads = 1, queries = 0, keys = 0;  // of the whole call: entries, H, L and S
  int columns[kTermKinds] = {};
  Terms terms[kTermKinds];
  Table tables[kMostTables];
  // An index outside of its table, of the least pair that has one: i * S + j, the index and the size of the table; -1
  // if there is none.
  int64_t* wrong = nullptr;
  // Null if there is no score_mod, or the kernel needs none.
  const List* score = nullptr;
  PairMask* mask = nullptr;  // null if there is no mask_mod
  // The score and, as a second result, the one value that derivatives need; null if that value is the product.
  const List* keeping = nullptr;
  const List* gradient = nullptr;          // of dS: its results are the gradients of scale * product and of leaves
  const List* tangent = nullptr;           // of the score, along a direction
  const List* tangent_gradient = nullptr;  // of the results of `gradient`, in their order
};

// What a mask_mod shows, tile by tile of kScoreTile queries and keys: kNoPair, kAllPairs, or where its bits begin.
// Word j of a tile has a bit for each of its queries. Strides in tiles, 0 where the mask is shared.
//
// Blocks of a caller's own size may be hidden, shown, or left to the list.
constexpr int32_t kNoPair = -1, kAllPairs = -2;
constexpr uint8_t kHiddenBlock = 0, kPartialBlock = 1, kFullBlock = 2;
struct PairMask {
  const List* list = nullptr;  // null: all pairs are visible
  Terms blocks;                // uint8 [batch, heads, blocks of queries, blocks of keys]; null data: all are partial
  int64_t block_rows = 0, block_keys = 0;
  int64_t entries = 1, heads = 1;  // different ones
  int64_t row_tiles = 0, key_tiles = 0;
  int32_t* tiles = nullptr;  // [entries, heads, row_tiles, key_tiles]
  uint64_t* bits = nullptr;  // [tiles with bits, kScoreTile]
};

}  // namespace attn
