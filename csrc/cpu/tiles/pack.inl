// Copies rectangles of tensors to tiles of the workspace, and back. A tensor may have any dtype and strides. A tile is
// contiguous and has the compute type.
#pragma once

#include "cpu/simd/storage.inl"
#include "cpu/simd/transpose.inl"

namespace attn::ATTN_ISA {
struct Memory {
  void* at;
};
}  // namespace attn::ATTN_ISA

// Makes an object in given memory. The operator of <new> does the same, but the linker might take one copy of it for
// all instruction sets.
ATTN_INLINE void* operator new(__SIZE_TYPE__, attn::ATTN_ISA::Memory memory) noexcept { return memory.at; }

namespace attn::ATTN_ISA {

// Hands out 64-byte aligned pieces of the workspace. If the base is null, only adds up their sizes.
class Arena {
 public:
  explicit Arena(char* base) : base_(base) {}
  template <class T>
  T* take(int64_t count) {
    char* piece = base_ ? base_ + used_ : nullptr;
    used_ += round_up(count * static_cast<int64_t>(sizeof(T)), 64);
    return reinterpret_cast<T*>(piece);
  }
  // Makes `count` objects T(params, *this), which take memory for their pointers. If the base is null, makes temporary
  // objects, which only add up sizes.
  template <class T>
  T* make(int64_t count, const auto& params) {
    static_assert(std::is_trivially_destructible_v<T>);
    T* const objects = take<T>(count);
    for (int64_t i = 0; i < count; ++i)
      if (base_)
        new (Memory{objects + i}) T(params, *this);
      else
        (void)T(params, *this);
    return objects;
  }
  int64_t used() const { return used_; }

 private:
  char* base_;
  int64_t used_ = 0;
};

// A matrix inside a tensor. Element (i, d) is at data + i * row + d * col, counted in elements of dtype.
struct Block {
  char* data;
  DType dtype;
  int64_t row;
  int64_t col;
  const char* next = nullptr;  // the rows of the next tile, if they do not follow in memory
};

template <class T>  // float or double
constexpr DType dtype_of = sizeof(T) == 8 ? DType::f64 : DType::f32;

// Returns the rows of operand `x` at batch entry `n` and head `h`, from row `row` and column `col` on.
ATTN_INLINE Block block_of(const Problem& p, const Operand& x, int64_t n, int64_t h, int64_t row, int64_t col = 0) {
  const int64_t offset = batch_offset(p, x, n) + h * x.head + row * x.row + col * x.col;
  return {static_cast<char*>(x.data) + offset * size_of(x.dtype), x.dtype, x.row, x.col};
}

// Returns how many bytes key_block() needs for its copy of rows of up to `cols` numbers, or 0 if it makes no copy.
ATTN_INLINE int64_t bytes_of_copy(const Problem& p, int64_t cols) {
  return p.paging.table && p.paging.page_size % kKeyTile != 0 ? kKeyTile * cols * 8 + kVectorBytes : 0;
}
// Returns a tile of keys or values, which begins at row `first` and has at most kKeyTile rows. The tile is used in
// place, or copied to `copy` if tiles may span several pages.
inline Block key_block(const Problem& p, const Operand& x, int64_t n, int64_t h, int64_t first, int64_t count,
                       int64_t cols, char* copy) {
  const int64_t size = size_of(x.dtype), bytes = cols * size;
  char* const head = static_cast<char*>(x.data) + h * x.head * size;
  const auto row_at = [&](int64_t row)
                          __attribute__((always_inline)) { return head + key_row_offset(p, x, n, row) * size; };
  Block block{row_at(first), x.dtype, x.row, x.col};
  if (!p.paging.table) return block;
  const int64_t last = p.keys, behind = first + kKeyTile;
  if (bytes_of_copy(p, cols) == 0) {
    block.next = row_at(behind < last ? behind : first);
    return block;
  }
  // Copies the rows of one page after the other. Prefetches the rows of the next tile, because processors cannot
  // foresee where the next pages are.
  for (int64_t i = 0; i < count;) {
    const int64_t in_page = smaller(p.paging.page_size - (first + i) % p.paging.page_size, count - i);
    const char* const from = row_at(first + i);
    for (int64_t r = 0; r < in_page; ++r) {
      const char* const row = from + r * x.row * size;
      char* const to = copy + (i + r) * bytes;
      if (x.col == 1) {
        int64_t b = 0;
        for (; b + kVectorBytes <= bytes; b += kVectorBytes) __builtin_memcpy(to + b, row + b, kVectorBytes);
        for (; b < bytes; b += size) __builtin_memcpy(to + b, row + b, static_cast<size_t>(size));
      } else {
        for (int64_t d = 0; d < cols; ++d)
          __builtin_memcpy(to + d * size, row + d * x.col * size, static_cast<size_t>(size));
      }
    }
    if (x.col == 1 && behind + i < last) {
      const char* const ahead = row_at(behind + i);
      for (int64_t r = 0; r < in_page; ++r)
        for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(ahead + r * x.row * size + b, 0, 2);
    }
    i += in_page;
  }
  return {copy, x.dtype, cols, 1, copy};
}

// A tile of keys or values, cut into pieces of kPiece contiguous rows. (Pages of most sizes consist of such pieces.)
// `at` holds the pieces of the tile, and then the pieces of the next kAhead rows, which are prefetched but never read.
constexpr int64_t kPiece = 16, kAhead = 32;
struct Pieces {
  Block block;
  const char* at[(kKeyTile + kAhead) / kPiece];
};
// Does what key_block() does, but makes no copy if rows can be read in place. In pages, rows that end within a vector
// can be read in place only if each page holds whole tiles. The reason is that the kernels read past the end of every
// row of a tile except the last row (few_rows.inl), and that memory may end where a page ends.
template <class T>
Pieces key_pieces(const Problem& p, const Operand& x, int64_t n, int64_t h, int64_t first, int64_t count, int64_t cols,
                  bool in_place, char* copy) {
  const int64_t size = size_of(x.dtype), page = p.paging.page_size;
  const bool in_pages = p.paging.table && in_place && page % (cols % kLanes<T> == 0 ? kPiece : kKeyTile) == 0;
  Pieces found{in_pages ? Block{nullptr, x.dtype, x.row, x.col} : key_block(p, x, n, h, first, count, cols, copy), {}};
  const char* next = found.block.data;
  int64_t row = 0, in_page = 0;
  for (const char*& at : found.at) {
    if (in_pages && in_page == 0) {
      const int64_t from = first + row < p.keys ? first + row : first;
      next = static_cast<const char*>(x.data) + (h * x.head + key_row_offset(p, x, n, from)) * size;
      in_page = page - from % page;
    }
    at = next;
    next += kPiece * found.block.row * size;
    in_page -= kPiece;
    row += kPiece;
  }
  return found;
}

// While the functions below transpose or write rows, they prefetch the next rows, because processors do not foresee
// accesses that jump from row to row.
//
// If the numbers left over do not fill the last vector, this vector begins earlier, and some numbers are copied twice.
// (A part of a vector would be copied number by number.) In a row of less than a vector, the vector cannot begin
// earlier.

// A row has `count` numbers. Returns the index at which the vector begins that copies the number with index `first`.
// `first` is a multiple of kLanes.
template <class T>
ATTN_INLINE int64_t vector_at(int64_t first, int64_t count) {
  return count < kLanes<T> ? first : smaller(first, count - kLanes<T>);
}

// tile[o * ld + i] = source[o * outer + i * inner] for o < outers and i < inners.
template <class T, class S>
void pack_from(T* tile, int64_t ld, const S* source, int64_t outer, int64_t inner, int64_t outers, int64_t inners) {
  constexpr int W = kLanes<T>;
  if (inners == 1) inner = 1;
  if (inner == 1) {
    for (int64_t o = 0; o < outers; ++o) {
      const S* from = source + o * outer;
      T* to = tile + o * ld;
      int64_t i = 0;
      for (; i + W <= inners; i += W) store<T>(to + i, load_as<T>(from + i));
      if (i == inners) continue;
      i = vector_at<T>(i, inners);
      if (inners >= W)
        store<T>(to + i, load_as<T>(from + i));
      else
        store_some<T>(to + i, load_some<T>(from + i, inners), inners);
    }
  } else if (inner == 0) {
    for (int64_t o = 0; o < outers; ++o) {
      const T value = load_some<T>(source + o * outer, 1)[0];
      for (int64_t i = 0; i < inners; ++i) tile[o * ld + i] = value;
    }
  } else if (outer == 1) {
    for (int64_t next_i = 0; next_i < inners; next_i += W) {
      const int64_t i = vector_at<T>(next_i, inners), count = smaller(W, inners - i);
      for (int64_t next_o = 0; next_o < outers; next_o += W) {
        const int64_t o = vector_at<T>(next_o, outers), depth = smaller(W, outers - o);
        Vec<T> rows[W];
        const S* from = source + o + i * inner;
        if (count == W && depth == W) {
#pragma GCC unroll 16
          for (int x = 0; x < W; ++x) rows[x] = load_as<T>(from + x * inner);
#pragma GCC unroll 16
          for (int x = 0; x < W; ++x) __builtin_prefetch(from + (x + 2 * W) * inner, 0, 2);
          transpose<T>(rows);
#pragma GCC unroll 16
          for (int y = 0; y < W; ++y) store<T>(tile + (o + y) * ld + i, rows[y]);
        } else {
          for (int x = 0; x < W; ++x) {
            if (x >= count)
              rows[x] = Vec<T>{};
            else if (depth == W)
              rows[x] = load_as<T>(from + x * inner);
            else
              rows[x] = load_some<T>(from + x * inner, depth);
          }
          transpose<T>(rows);
          for (int y = 0; y < depth; ++y) store_some<T>(tile + (o + y) * ld + i, rows[y], count);
        }
      }
    }
  } else {
    for (int64_t o = 0; o < outers; ++o)
      for (int64_t i = 0; i < inners; ++i) tile[o * ld + i] = load_some<T>(source + o * outer + i * inner, 1)[0];
  }
}

// Does what pack_from() does, for a source of any dtype. Also writes zeros for inners <= i < width.
template <class T>
void pack(T* tile, int64_t ld, const void* source, DType dtype, int64_t outer, int64_t inner, int64_t outers,
          int64_t inners, int64_t width) {
  if (dtype == DType::f32)
    pack_from<T>(tile, ld, static_cast<const float*>(source), outer, inner, outers, inners);
  else if (dtype == DType::boolean)
    pack_from<T>(tile, ld, static_cast<const Boolean*>(source), outer, inner, outers, inners);
  else if constexpr (sizeof(T) == 8)
    pack_from<T>(tile, ld, static_cast<const double*>(source), outer, inner, outers, inners);
  else if (dtype == DType::bf16)
    pack_from<T>(tile, ld, static_cast<const BFloat16*>(source), outer, inner, outers, inners);
  else if (dtype == DType::i8)
    pack_from<T>(tile, ld, static_cast<const Int8*>(source), outer, inner, outers, inners);
  else if (dtype == DType::e4m3)
    pack_from<T>(tile, ld, static_cast<const Float8*>(source), outer, inner, outers, inners);
  else
    pack_from<T>(tile, ld, static_cast<const Half*>(source), outer, inner, outers, inners);
  if (inners < width)
    for (int64_t o = 0; o < outers; ++o)
      __builtin_memset(tile + o * ld + inners, 0, static_cast<size_t>(width - inners) * sizeof(T));
}

// tile[i * ld + d] = block(i, d), with zeros up to a whole vector. A vector holds neighbouring columns of one row.
template <class T>
void pack_rows(T* tile, int64_t ld, const Block& block, int64_t rows, int64_t cols) {
  pack<T>(tile, ld, block.data, block.dtype, block.row, block.col, rows, cols, round_up(cols, kLanes<T>));
}

// tile[d * ld + i] = block(i, d), with zeros for rows <= i < width. A vector holds one column of neighbouring rows.
template <class T>
void pack_transposed(T* tile, int64_t ld, const Block& block, int64_t rows, int64_t cols, int64_t width) {
  pack<T>(tile, ld, block.data, block.dtype, block.col, block.row, cols, rows, width);
}

// target[o * outer + i * inner] = tile[o * ld + i]
template <class T, class S>
void unpack_to(S* target, const T* tile, int64_t ld, int64_t outer, int64_t inner, int64_t outers, int64_t inners) {
  constexpr int W = kLanes<T>;
  if (inners == 1) inner = 1;
  if (inner == 1) {
    for (int64_t o = 0; o < outers; ++o) {
      int64_t i = 0;
      for (; i + W <= inners; i += W) {
        store_as(target + o * outer + i, load<T>(tile + o * ld + i));
        __builtin_prefetch(target + (o + outers) * outer + i, 1, 2);
      }
      if (i == inners) continue;
      i = vector_at<T>(i, inners);
      if (inners >= W)
        store_as(target + o * outer + i, load<T>(tile + o * ld + i));
      else
        store_some<T>(target + o * outer + i, load_some<T>(tile + o * ld + i, inners), inners);
    }
  } else if (outer == 1) {
    for (int64_t next_i = 0; next_i < inners; next_i += W) {
      const int64_t i = vector_at<T>(next_i, inners), count = smaller(W, inners - i);
      for (int64_t next_o = 0; next_o < outers; next_o += W) {
        const int64_t o = vector_at<T>(next_o, outers), depth = smaller(W, outers - o);
        Vec<T> rows[W];
        if (count == W && depth == W) {
#pragma GCC unroll 16
          for (int y = 0; y < W; ++y) rows[y] = load<T>(tile + (o + y) * ld + i);
          transpose<T>(rows);
#pragma GCC unroll 16
          for (int x = 0; x < W; ++x) store_as(target + o + (i + x) * inner, rows[x]);
#pragma GCC unroll 16
          for (int x = 0; x < W; ++x) __builtin_prefetch(target + o + (i + x + W) * inner, 1);
        } else {
          for (int y = 0; y < W; ++y) rows[y] = y < depth ? load_some<T>(tile + (o + y) * ld + i, count) : Vec<T>{};
          transpose<T>(rows);
          for (int x = 0; x < count; ++x) store_some<T>(target + o + (i + x) * inner, rows[x], depth);
        }
      }
    }
  } else {
    for (int64_t o = 0; o < outers; ++o)
      for (int64_t i = 0; i < inners; ++i) store_some<T>(target + o * outer + i * inner, splat<T>(tile[o * ld + i]), 1);
  }
}

template <class T>
void unpack(const Block& to, const T* tile, int64_t ld, int64_t outer, int64_t inner, int64_t outers, int64_t inners) {
  if (to.dtype == DType::f32)
    unpack_to<T>(reinterpret_cast<float*>(to.data), tile, ld, outer, inner, outers, inners);
  else if constexpr (sizeof(T) == 8)
    unpack_to<T>(reinterpret_cast<double*>(to.data), tile, ld, outer, inner, outers, inners);
  else if (to.dtype == DType::bf16)
    unpack_to<T>(reinterpret_cast<BFloat16*>(to.data), tile, ld, outer, inner, outers, inners);
  else
    unpack_to<T>(reinterpret_cast<Half*>(to.data), tile, ld, outer, inner, outers, inners);
}

template <class T>
void unpack_rows(const Block& block, const T* tile, int64_t ld, int64_t rows, int64_t cols) {
  unpack<T>(block, tile, ld, block.row, block.col, rows, cols);
}
template <class T>
void unpack_transposed(const Block& block, const T* tile, int64_t ld, int64_t rows, int64_t cols) {
  unpack<T>(block, tile, ld, block.col, block.row, cols, rows);
}

template <class T>
void fill_zero(T* p, int64_t count) {
  __builtin_memset(p, 0, static_cast<size_t>(count) * sizeof(T));
}

template <class T>
void scale_tile(T* tile, int64_t count, T factor) {
  if (factor == 1) return;
  for (int64_t i = 0; i < count; i += kLanes<T>) store<T>(tile + i, load<T>(tile + i) * factor);
}

// Copies the scales of the keys or values [first, first + count) of head h, for the tile that begins at row `first`.
template <class T>
void read_scales(const Problem& p, const Operand& x, DType dtype, int64_t n, int64_t h, int64_t first, int64_t count,
                 T* scales) {
  const float* const head = static_cast<const float*>(x.data) + h * x.head;
  for (int64_t j = 0; j < count;) {
    const int64_t page = p.paging.page_size, row = first + j;
    const int64_t together = p.paging.table ? smaller(page - row % page, count - j) : count;
    pack_from<T>(scales + j, 0, head + key_row_offset(p, x, n, row), 0, x.row, 1, together);
    j += together;
  }
  fill_zero(scales + count, kKeyTile - count);
  if (dtype == DType::e4m3) scale_tile<T>(scales, kKeyTile, kFloat8);
}

}  // namespace attn::ATTN_ISA
