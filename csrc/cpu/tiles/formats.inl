// Formats of the operands of a matrix product. An operand is stored in slots. A slot has the size of T, the type of the
// result. In one step, each lane multiplies one slot. A slot holds one number (Singles), or two numbers that are
// neighbours along the dimension that a product sums over (formats_bf16.inl). Everything else about products is the
// same for all formats.
//
// An operand is packed in a way that depends on its place in C = A B:
//   A  [row][slots along the columns]         along_columns    keys, values, weights for dK and dV
//   A' [columns of A][rows], read transposed  along_rows       V of O^T = V^T P^T, K of dQ^T = K^T dS^T
//   B  [slots along the columns][row]         pack_transposed  queries, gradients of the output
//   B  [slots along the rows][column]         pack_along_rows  the same, for dK and dV
//                                             vectors_along_rows  V of O = P V
#pragma once

#include "cpu/simd/exp.inl"
#include "cpu/tiles/pack.inl"

namespace attn::ATTN_ISA {

// The rows of an operand of a product, in place or packed. Row i begins `i * ld` slots after `data`.
template <class T>
struct Rows {
  const T* data;
  int64_t ld;
};

// What a format offers. Functions named pack_... always pack. The other functions pack a block only if it cannot be
// used in place, because it has another dtype or a column stride, or because its rows are so far apart that a column
// would use only few sets of the cache. A block has `rows` x `cols` numbers. The rows of `tile` are `ld` slots apart.
template <class F>
concept Format =
    requires(const Block& block, int64_t n, DType dtype, const typename F::Number* a, typename F::Number* tile,
             Vec<typename F::Number> v, Vec<typename F::Number> (&weights)[F::kNumbers]) {
      F::kNumbers;      // numbers in a slot
      F::kStep;         // slots that a product sums over at a time
      F::kSummands;     // slots that add up to a number
      F::kTiles;        // whether products go through the processor's tiles
      F::holds(dtype);  // whether the format holds every number of this type exactly

      // In one step of a product, each lane multiplies one slot. `a` points to a slot that all lanes read.
      F::multiply(a, v);
      F::multiply_add(v, a, v);
      F::multiply_add(v, v, v);

      // (block, rows, cols): whether along_columns() uses a block in place.
      { F::in_place(block, n, n) } -> std::same_as<bool>;
      { F::as_it_lies(block) } -> std::same_as<Rows<typename F::Number>>;
      // (block, rows, cols, tile, ld): along_columns() makes slots along the columns. The other three make slots along
      // the rows. A product reads the tile of vectors_along_rows() by rows, in whole vectors. It reads the tile of
      // along_rows() by columns. finite_along_rows() does what along_rows() does, but always packs, with 0 in place of
      // infinities and NaNs.
      { F::along_columns(block, n, n, tile, n) } -> std::same_as<Rows<typename F::Number>>;
      { F::along_rows(block, n, n, tile, n) } -> std::same_as<Rows<typename F::Number>>;
      { F::vectors_along_rows(block, n, n, tile, n) } -> std::same_as<Rows<typename F::Number>>;
      { F::finite_along_rows(block, n, n, tile, n) } -> std::same_as<Rows<typename F::Number>>;
      // (block, first, rows, cols, tile, ld): writes rows [first, first + rows) of a tile. May also overwrite row
      // first + rows, which is written later.
      F::pack_along_rows(block, n, n, n, tile, n);
      // (block, rows, cols, tile, width): writes row i of the block to tile[slot * kRowTile + i], where `slot` counts
      // slots along the columns. Writes zeros for rows <= i < width.
      F::pack_transposed(block, n, n, tile, n);

      F::kWeightsInPlace;  // whether weights [slot of keys][lane] may take the place of the tile [key][lane]
      // (tile, key, weights): stores weights of keys [key, key + kNumbers) in the lanes at `tile`.
      F::store_along_keys(tile, n, weights);
      // (tile, keys, lanes): writes zeros after the last key, so that the keys fill whole steps of a product.
      F::end_along_keys(tile, n, n);
      // Both functions take (x, keys, lanes, tile), and convert the tile x[key][lane]. The result is in `x` itself or
      // in `tile`. A slot of along_keys() holds neighbouring keys of one lane. A slot of along_lanes(), [key][slot],
      // holds neighbouring lanes of one key. If a slot holds lanes with a row and lanes without one, the lanes without
      // a row become 0.
      { F::along_keys(tile, n, n, tile) } -> std::convertible_to<const typename F::Number*>;
      { F::along_lanes(a, n, n, tile) } -> std::same_as<Rows<typename F::Number>>;

      { F::slot(n, n) } -> std::same_as<int64_t>;  // (i, part): the index of the slot that holds `part` of number i
      F::number(v, n);                             // (slots, k): the k-th number of every slot
      F::make_finite(tile, n);                     // (tile, slots): infinities and NaNs become 0
      F::exp2(weights);                            // 2^x in place of every x, as accurate as numbers of the format
    };

// Returns how many slots `numbers` neighbouring numbers take, rounded up to whole steps of a product. A step has kStep
// slots for each summand of a number.
template <class F>
constexpr int64_t slots_of(int64_t numbers) {
  constexpr int64_t kStep = F::kNumbers * F::kStep;
  return (numbers + kStep - 1) / kStep * (F::kStep * F::kSummands);
}

// Returns the length of a packed row. A row has room for `columns` numbers, or for their slots if these are more.
template <class F>
ATTN_INLINE int64_t row_of(int64_t columns) {
  return round_up(larger(columns, slots_of<F>(columns)), kLanes<typename F::Number>);
}

// The format in which a slot is one number.
template <class T>
struct Singles {
  using Number = T;
  static constexpr int64_t kNumbers = 1;
  static constexpr int64_t kStep = 1;
  static constexpr int64_t kSummands = 1;
  static constexpr bool kTiles = false;

  static constexpr bool holds(DType) { return true; }

  static ATTN_INLINE Vec<T> multiply(const T* a, Vec<T> b) { return *a * b; }
  static ATTN_INLINE Vec<T> multiply_add(Vec<T> sum, const T* a, Vec<T> b) { return sum + *a * b; }
  static ATTN_INLINE Vec<T> multiply_add(Vec<T> sum, Vec<T> a, Vec<T> b) { return sum + a * b; }

  // Packs rows that are far apart, because a column of such rows would use only few sets of the cache. If `once`, a
  // product reads each row only once, so the distance between rows does not matter.
  static bool in_place(const Block& block, int64_t rows, int64_t) {
    constexpr int64_t kFarApart = 256;
    return block.dtype == dtype_of<T> && block.col == 1 && (block.row <= kFarApart || rows == 1);
  }
  static Rows<T> as_it_lies(const Block& block) { return {reinterpret_cast<const T*>(block.data), block.row}; }
  static Rows<T> along_columns(const Block& block, int64_t rows, int64_t cols, T* tile, int64_t ld, bool once = false) {
    if (in_place(block, once ? 1 : rows, cols)) return as_it_lies(block);
    pack_along_columns(block, rows, cols, tile, ld);
    return {tile, ld};
  }
  static void pack_along_columns(const Block& block, int64_t rows, int64_t cols, T* tile, int64_t ld) {
    pack_rows<T>(tile, ld, block, rows, cols);
  }
  static Rows<T> along_rows(const Block& block, int64_t rows, int64_t cols, T* tile, int64_t ld) {
    return along_columns(block, rows, cols, tile, ld);
  }
  static Rows<T> vectors_along_rows(const Block& block, int64_t rows, int64_t cols, T* tile, int64_t ld) {
    if (block.dtype == dtype_of<T> && block.col == 1 && cols % kLanes<T> == 0) return as_it_lies(block);
    pack_rows<T>(tile, ld, block, rows, cols);
    return {tile, ld};
  }
  static Rows<T> finite_along_rows(const Block& block, int64_t rows, int64_t cols, T* tile, int64_t ld) {
    pack_rows<T>(tile, ld, block, rows, cols);
    make_finite(tile, rows * ld);
    return {tile, ld};
  }
  static void pack_along_rows(const Block& block, int64_t first, int64_t rows, int64_t cols, T* tile, int64_t ld) {
    pack_rows<T>(tile + first * ld, ld, block, rows, cols);
  }
  static void pack_transposed(const Block& block, int64_t rows, int64_t cols, T* tile, int64_t width) {
    ATTN_ISA::pack_transposed<T>(tile, kRowTile, block, rows, cols, width);
  }

  static constexpr bool kWeightsInPlace = true;
  static ATTN_INLINE void store_along_keys(T* tile, int64_t key, Vec<T> (&weights)[1]) {
    store<T>(tile + key * kRowTile, weights[0]);
  }
  static void end_along_keys(T*, int64_t, int64_t) {}
  static const T* along_keys(T* x, int64_t, int64_t, T*) { return x; }
  static Rows<T> along_lanes(const T* x, int64_t, int64_t, T*) { return {x, kRowTile}; }

  static ATTN_INLINE int64_t slot(int64_t i, int64_t) { return i; }
  static ATTN_INLINE Vec<T> number(Vec<T> slots, int64_t) { return slots; }
  static void make_finite(T* tile, int64_t slots) {
    for (int64_t i = 0; i < slots; i += kLanes<T>) {
      const Vec<T> v = load<T>(tile + i);
      store<T>(tile + i, (v - v) != Vec<T>{} ? Vec<T>{} : v);
    }
  }

  template <int N>
  static ATTN_INLINE void exp2(Vec<T> (&x)[N]) {
    ATTN_ISA::exp2<T>(x);
  }
};
static_assert(Format<Singles<float>> && Format<Singles<double>>);

}  // namespace attn::ATTN_ISA
