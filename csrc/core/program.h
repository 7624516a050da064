// A function of a pair (a query and a key), such as a score_mod, in the form that kernels evaluate: a list of
// operations on tiles.
//
// The operators check the caller's string, differentiate it and turn it into lists (operators/programs/). A kernel only
// evaluates lists. A value is a number of the compute dtype, a whole number of the same size, or a boolean. In a
// boolean, either all bits are set or none.
#pragma once

#include "core/params.h"

namespace attn {

enum class Op : uint8_t {
  leaf,
#define ATTN_OPERATION(op, ...) op,
#include "core/operations.inl"
  lookup,          // number x of a table, plus y * z
  lookup_tangent,  // likewise, of the table's derivative along a direction
};

// The number of operands in a signature, such as "ff>f".
constexpr int operand_count(const char* signature) {
  int count = 0;
  while (signature[count] != '>') ++count;
  return count;
}

// What a list reads.
enum class Leaf : uint8_t {
  number,        // a constant
  whole_number,  // likewise, or a boolean
  scale,         // Problem::scale
  score,         // scale * product; lists contain `scale` and `product` instead of this leaf
  product,       // <q, k> of the pair; in lists of derivatives, the value that `keeping` stored
  grad,          // the gradient of the score
  tangent,       // the derivative of scale * product along t
  tangent_grad,  // the derivative of `grad` along t
  pair_term,     // Problem::mask at the pair, and the mask's derivative along t
  pair_tangent,
  // a column of one of PairProgram::terms
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
// The kinds of leaves that tensors hold, from 0 to kTermKinds - 1. PairProgram::terms has a tensor for each kind, in
// the order of Leaf. Other leaves have numbers outside of this range.
ATTN_INLINE constexpr int kind_of(Leaf leaf) { return static_cast<int>(leaf) - static_cast<int>(Leaf::row_term); }
constexpr int kTermKinds = kind_of(Leaf::query);

struct LeafOfList {
  Leaf leaf = Leaf::number;
  int column = 0;           // the column of the tensor in PairProgram::terms
  double number = 0;        // a constant
  int64_t whole = 0;        // likewise, of type i; of a boolean -1 or 0
  bool only_index = false;  // whether operations read it only as the index of a table
};

// An operation. Operand k >= 0 is slot k, which holds the result of an earlier step. Operand k < 0 is leaf -1 - k.
struct Step {
  Op op;
  int16_t to;
  int16_t from[3] = {};
  int8_t table = 0;   // which table a lookup reads
  int8_t lookup = 0;  // which of the list's lookups it is
};
struct ResultOfList {
  int16_t from;
  LeafOfList of;  // if this is a gradient, the leaf whose gradient it is; Leaf::score stands for scale * product
  // If `table` is not -1, the result is the gradient of a number of this table, and `of` is unused. The operand `index`
  // says which number it is.
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
  // The number of slots. The first `uniform_slots` steps write to the first slots. The results of these steps are the
  // same for all pairs.
  int slots;
  int uniform_slots;
  int lookups;
  bool reads_pairs;    // pair_term or pair_tangent
  bool reads_product;  // or the value that `keeping` stored
  bool is_wide;        // whether whole numbers need 64 bits; else they need 32
};

// One tensor of leaves, [batch, heads, n, columns], where n is L, S or L + S - 1. Its dtype is the compute dtype, or
// int32 if the leaves are whole numbers. Strides count elements, and are 0 where the tensor is broadcast.
template <class Data>
struct TermsOf {
  Data* data = nullptr;
  int64_t entry = 0, head = 0, row = 0, col = 0;
};
using Terms = TermsOf<const void>;
using GradTerms = TermsOf<void>;  // which kernels add to

// A table of numbers, [batch, heads, n, size] in the compute dtype. n is 1, or L if each query has its own numbers, or
// S if each key has its own numbers. A lookup reads one number of the last dimension, which is contiguous. The index in
// this dimension is a function of the pair.
enum class TableOf : int8_t { all, queries, keys };
template <class Number>
ATTN_INLINE constexpr Number rows_of(TableOf of, const Number& queries, const Number& keys) {
  return of == TableOf::queries ? queries : of == TableOf::keys ? keys : Number(1);
}
struct Table {
  Terms numbers, tangent;  // null data: there is none
  int64_t size = 0;
  TableOf of = TableOf::all;
  // Kernels may keep a transposed copy of the numbers of a tile of queries, [size, kScoreTile], so that a vector holds
  // the numbers of neighbouring queries. The copies of all tables lie one after the other, and this table's copy begins
  // here. -1: kernels read the table as it is.
  int64_t transposed_at = -1;
};
constexpr int kMostTables = 16;

// The gradients of terms, in the compute dtype; null if not wanted. Each chunk of keys has its own sums of the
// gradients of distance terms. These sums are added in order afterwards.
struct TermGradients {
  void* rows = nullptr;       // [batch, heads, L, columns]
  void* keys = nullptr;       // [batch, heads, S, columns]
  void* distances = nullptr;  // [chunks, batch, heads, columns, L + S - 1]
  // Several tasks may add to the gradient of the same number of a table. Therefore tasks wait in lines. Task t is in
  // line t % lines, and begins once turns[line] says that all earlier tasks of the line have ended. There may be
  // several copies of the gradients. The tasks of a line add to the copy with the index line / lines_of_copy. Lines
  // that share a copy add to different numbers of the copy. If `turns` is null, no two tasks add to the same number.
  GradTerms tables[kMostTables];  // in the first copy; shaped as Table::numbers, contiguous
  bool has_tables = false;
  int64_t lines = 1, lines_of_copy = 1, copy = 0;  // `copy`: numbers from one copy to the next
  int32_t* turns = nullptr;
};
constexpr TermGradients kNoTermGradients;
ATTN_INLINE const TermGradients& gradients_of_terms(const BackwardParams& p) {
  return p.grad_terms ? *p.grad_terms : kNoTermGradients;
}

// The data that all kernels of a call share if the call has a program. Pair (i, j) has distance i - j + keys - 1.
struct PairProgram {
  int64_t batch = 1, heads = 1, queries = 0, keys = 0;  // of the whole call: entries, H, L and S
  int columns[kTermKinds] = {};
  Terms terms[kTermKinds];
  Table tables[kMostTables];
  int64_t size_transposed = 0;  // of all tables with Table::transposed_at
  // Three numbers that describe the first pair whose index is outside of its table: i * S + j, the index and the size
  // of the table. The first number is -1 if there is no such pair.
  int64_t* wrong = nullptr;
  // Null if there is no score_mod, or if the kernel does not need it.
  const List* score = nullptr;
  PairMask* mask = nullptr;  // null if there is no mask_mod
  // Computes the score, and a value that the lists of derivatives read in place of the product. Null if the lists of
  // derivatives read the product itself.
  const List* keeping = nullptr;
  const List* gradient = nullptr;          // turns dS into the gradients of scale * product and of leaves
  const List* tangent = nullptr;           // the derivative of the score along t
  const List* tangent_gradient = nullptr;  // the derivatives along t of the results of `gradient`, in their order
};

ATTN_INLINE int64_t size_transposed(const Problem& p) { return p.program ? p.program->size_transposed : 0; }

// The pairs that a mask_mod shows, in tiles of kScoreTile queries and kScoreTile keys. For each tile, `tiles` holds
// kNoPair, kAllPairs or the tile's index in `bits`. Word j of a tile in `bits` belongs to key j, and has a bit for each
// query of the tile.
//
// The caller may also give blocks of any size. A block is hidden, shown or partial. `list` decides which pairs of a
// partial block are shown.
constexpr int32_t kNoPair = -1, kAllPairs = -2;
constexpr uint8_t kHiddenBlock = 0, kPartialBlock = 1, kFullBlock = 2;
struct PairMask {
  const List* list = nullptr;  // null: all pairs of partial blocks are visible
  // What the list reads. If the list is wide, it is evaluated in float64, with whole numbers of 64 bits, whatever the
  // dtype of the call is. Its terms and tables are then float64.
  const PairProgram* program = nullptr;
  Terms blocks;  // uint8 [batch, heads, blocks of queries, blocks of keys]; null data: all are partial
  int64_t block_rows = 0, block_keys = 0;
  int64_t entries = 1, heads = 1;  // the numbers of different entries and heads
  int64_t row_tiles = 0, key_tiles = 0;
  int32_t* tiles = nullptr;  // [entries, heads, row_tiles, key_tiles]
  uint64_t* bits = nullptr;  // [tiles with bits, kScoreTile]
};

}  // namespace attn
