// Addresses and sizes in a problem, for the kernels of every device.
#pragma once

#include "core/params.h"

namespace attn {

ATTN_INLINE constexpr int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
ATTN_INLINE constexpr int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
ATTN_INLINE constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
ATTN_INLINE constexpr int64_t round_up(int64_t n, int64_t multiple) { return divide_up(n, multiple) * multiple; }

// The size of a number in bytes.
ATTN_INLINE constexpr int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::f64:
    case DType::i64:
      return 8;
    case DType::f32:
      return 4;
    case DType::bf16:
    case DType::f16:
      return 2;
    case DType::i8:
    case DType::e4m3:
    case DType::boolean:
      return 1;
  }
  __builtin_unreachable();
}

// Returns the offset of batch entry n of an operand, in elements.
ATTN_INLINE constexpr int64_t batch_offset(const Problem& p, const Operand& x, int64_t n) {
  const int64_t* const starts = x.axis == Axis::none ? nullptr : (x.axis == Axis::keys ? p.key_starts : p.query_starts);
  int64_t offset = starts ? starts[n] * x.row : 0;
  for (int d = p.batch_dims - 1; d >= 0; --d) {
    offset += n % p.batch_size[d] * x.batch[d];
    n /= p.batch_size[d];
  }
  return offset;
}

// Returns the offset of row `row` of batch entry n in a pool of pages. On a GPU page numbers are not validated, because
// validating would synchronise. Therefore this function clamps page numbers, so that nothing outside the pool is read.
ATTN_INLINE constexpr int64_t offset_in_pages(const Problem& p, int64_t page_stride, int64_t row_stride, int64_t n,
                                              int64_t row) {
  const auto [table, is_wide, per_entry, per_page, page_size, pages] = p.paging;
  const int64_t number = row / page_size, at = n * per_entry + number * per_page;
  const int64_t page = is_wide ? static_cast<const int64_t*>(table)[at] : static_cast<const int32_t*>(table)[at];
  return larger(0, smaller(page, pages - 1)) * page_stride + (row - number * page_size) * row_stride;
}
// Returns the offset of row `row` of the keys or values of batch entry n.
ATTN_INLINE constexpr int64_t key_row_offset(const Problem& p, const Operand& x, int64_t n, int64_t row) {
  if (!p.paging.table) return batch_offset(p, x, n) + row * x.row;
  return offset_in_pages(p, x.page, x.row, n, row);
}

// Whether dimension d of the batch counts packed sequences.
ATTN_INLINE constexpr bool counts_sequences(const Problem& p, int d) {
  return p.sequences > 1 && d == p.batch_dims - 1;
}

// Describes a contiguous tensor [*batch, heads, L, cols].
ATTN_INLINE constexpr Operand operand_of_rows(const Problem& p, void* data, DType dtype, int64_t cols) {
  Operand x;
  x.data = data;
  x.dtype = dtype;
  x.col = 1;
  x.row = cols;
  x.head = cols * p.queries;
  int64_t stride = x.head * p.heads;
  for (int d = p.batch_dims - 1; d >= 0; --d) {
    x.batch[d] = stride;
    stride *= p.batch_size[d];
  }
  return x;
}

// The queries and keys of one batch entry, the same for all of its heads. If no mask hides key j, query i sees this key
// if first <= j - i < last and j < keys.
struct Sequence {
  int64_t queries;
  int64_t keys;
  int64_t offset;  // query i stands at position i + offset among the keys
  int64_t first, last;
};
// A distance larger than any distance between a query and a key. Distances are clamped to kFar, so that sums of
// distances do not overflow.
constexpr int64_t kFar = int64_t{1} << 61;
ATTN_INLINE constexpr int64_t length_of(const int64_t* lengths, int64_t n, int64_t most) {
  return lengths ? larger(0, smaller(lengths[n], most)) : most;
}
// Returns the lengths of batch entry n and the alignment of its queries and keys, for every kernel. On a GPU offsets
// and lengths are not validated, because validating would synchronise. Therefore this function clamps offsets and
// lengths, so that no key out of bounds is read.
ATTN_INLINE constexpr Sequence sequence_of(const Problem& p, int64_t n) {
  const auto [left, right, offsets, key_lengths, query_lengths] = p.visibility;
  const int64_t offset = offsets ? larger(-2 * kFar, smaller(offsets[n], 2 * kFar)) : 0;
  return {length_of(query_lengths, n, p.queries), length_of(key_lengths, n, p.keys), offset,
          left < 0 || left > offset + kFar ? -kFar : offset - left,
          right < 0 || right >= kFar - offset ? kFar : offset + right + 1};
}
// Returns an upper bound on the number of keys that `queries` neighbouring queries see, for a sequence of any offset
// and length.
ATTN_INLINE constexpr int64_t most_keys(const Problem& p, int64_t queries) {
  const auto [left, right, offsets, key_lengths, query_lengths] = p.visibility;
  const bool bounded = left >= 0 && right >= 0 && left < kFar && right < kFar;
  return bounded ? smaller(p.keys, queries + left + right) : p.keys;
}

// Return the key head and the value head that a query head reads.
ATTN_INLINE constexpr int64_t key_head_of(const Problem& p, int64_t head) {
  return divide(head, divide(p.heads, p.key_heads).quotient).quotient;
}
ATTN_INLINE constexpr int64_t value_head_of(const Problem& p, int64_t head) {
  return divide(head, divide(p.heads, p.value_heads).quotient).quotient;
}

// A row: one query of one batch entry and head. Rows are numbered in the order of a contiguous [batch, heads, L].
struct Row {
  int64_t n, head, position;
};
ATTN_INLINE constexpr int64_t number_of_rows(const Problem& p) {
  return p.sequences > 0 ? divide(p.batch, p.sequences).quotient * p.heads * p.tokens : p.batch * p.heads * p.queries;
}
ATTN_INLINE constexpr int64_t row_number(const Problem& p, int64_t n, int64_t head, int64_t position) {
  if (p.tokens == 0) return (n * p.heads + head) * p.queries + position;
  if (p.sequences == 0) return head * p.tokens + position;  // there is one entry
  return (divide(n, p.sequences).quotient * p.heads + head) * p.tokens + p.query_starts[n] + position;
}
// Returns the number of a row within `p`. On a CPU, `p` may be a single entry of a call (first_entry).
ATTN_INLINE constexpr int64_t own_row_number(const Problem& p, int64_t n, int64_t head, int64_t position) {
  return (n * p.heads + head) * p.queries + position;
}
// Returns the row that comes `count` >= 0 places after `at` in the list of rows of a group of heads (Problem::group).
// Each head has `queries` rows.
ATTN_INLINE constexpr Row row_after(int64_t queries, Row at, int64_t count) {
  at.position += count;
  if (at.position >= queries) {  // seldom: divisions take long
    at.head += at.position / queries;
    at.position %= queries;
  }
  return at;
}
ATTN_INLINE constexpr Row row_after(const Problem& p, Row at, int64_t count) { return row_after(p.queries, at, count); }
// The inverse of own_row_number().
ATTN_INLINE constexpr Row row_of_number(const Problem& p, int64_t number) {
  const auto [row_of_heads, position] = divide(number, p.queries);
  const auto [n, head] = divide(row_of_heads, p.heads);
  return {n, head, position};
}

// `sharer` is a flat index over the dimensions along which the mask is shared, and `slice` is a flat index over all
// other dimensions. Removes the innermost dimension, which has size `extent`, from `sharer` if `shared`, else from
// `slice`. Returns the coordinate along this dimension.
ATTN_INLINE constexpr int64_t take_coordinate(int64_t extent, bool shared, int64_t& slice, int64_t& sharer) {
  const int64_t from = shared ? sharer : slice;
  if (shared)
    sharer = from / extent;
  else
    slice = from / extent;
  return from % extent;
}
// A slice of a mask is its part [L, S] for one batch entry and head. If the mask broadcasts, several batch entries and
// heads share a slice. The slices are numbered, and so are the pairs (batch entry, head) that share a slice. Returns
// pair number `sharer` of slice number `slice`, with position 0.
ATTN_INLINE constexpr Row sharer_of_mask(const Problem& p, const Operand& mask, int64_t slice, int64_t sharer) {
  Row place{0, take_coordinate(p.heads, mask.head == 0, slice, sharer), 0};
  int64_t step = 1;
  for (int d = p.batch_dims - 1; d >= 0; --d) {
    const bool shared = mask.batch[d] == 0 && !counts_sequences(p, d);  // each sequence has its own part
    place.n += take_coordinate(p.batch_size[d], shared, slice, sharer) * step;
    step *= p.batch_size[d];
  }
  return place;
}

// Returns how many different slices p.mask has.
ATTN_INLINE constexpr int64_t number_of_slices(const Problem& p) {
  int64_t slices = p.mask.head == 0 ? 1 : p.heads;
  for (int d = 0; d < p.batch_dims; ++d) slices *= p.mask.batch[d] == 0 ? 1 : p.batch_size[d];
  return slices;
}

// Sets the strides of p.mask_tiles. Returns how many bytes all its slices have together.
inline int64_t set_mask_tiles(Problem& p) {
  const int64_t row_tiles = p.mask.row == 0 ? 1 : divide_up(p.queries, kScoreTile);
  Operand& tiles = p.mask_tiles;
  tiles.dtype = DType::boolean;
  tiles.col = 1;
  tiles.row = p.mask.row == 0 ? 0 : divide_up(p.keys, kScoreTile);
  int64_t size = row_tiles * divide_up(p.keys, kScoreTile);
  const auto stride = [&](int64_t extent, int64_t stride_of_mask) {
    const int64_t before = size;
    if (stride_of_mask != 0) size *= extent;
    return stride_of_mask == 0 ? 0 : before;
  };
  tiles.head = stride(p.heads, p.mask.head);
  for (int d = p.batch_dims - 1; d >= 0; --d) tiles.batch[d] = stride(p.batch_size[d], p.mask.batch[d]);
  return size;
}

}  // namespace attn
