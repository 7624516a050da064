// Tiles of 16-bit numbers in shared memory, as tensor cores read them.
#pragma once

#include "rows.cuh"

namespace attn::cuda {

constexpr int kMmaThreads = 128;  // four warps
constexpr int kChunk = 8;         // numbers of 16 bytes, the unit of copies

// [kRows, kCols], row by row. The chunks of a row are permuted by the row's number, so that the eight rows of a matrix
// that a warp reads, and the columns that it writes, fall into different banks.
template <class S, int kRows, int kCols>
struct MmaTile {
  static constexpr int kChunks = kCols / kChunk;  // of a row
  static_assert(kChunks % 8 == 0);

  alignas(128) S numbers[kRows * kCols];

  __device__ __forceinline__ S* at(int row, int chunk) { return numbers + row * kCols + (chunk ^ row % 8) * kChunk; }
};

// Whether every row of `cols` numbers may be copied in chunks: neighbours in memory, aligned to 16 bytes.
__device__ inline bool chunks_are_aligned(const Problem& p, const Operand& x, int64_t cols) {
  bool aligned = (x.col == 1 || cols <= 1) && reinterpret_cast<uintptr_t>(x.data) % 16 == 0;
  for (int d = 0; d < p.batch_dims; ++d) aligned &= x.batch[d] % kChunk == 0;
  return aligned && x.head % kChunk == 0 && x.row % kChunk == 0;
}

// Starts to fill a tile: row i from `data` + offset(i), i < rows, of `cols` numbers; zeros elsewhere. Complete after
// commit_copies(), wait_for_copies() and a barrier. What cannot be copied in chunks is written number by number.
template <class S, int kRows, int kCols, class Offset>
__device__ __forceinline__ void load_tile(MmaTile<S, kRows, kCols>& tile, const S* data, int64_t col, bool aligned,
                                          int64_t rows, int64_t cols, Offset offset) {
  constexpr int kChunks = kCols / kChunk;
  constexpr int kRowsAtOnce = kMmaThreads / kChunks;
  const int thread = thread_index();
  const int chunk = thread % kChunks;
  const int64_t first = chunk * kChunk;
  const int64_t left = smaller(kChunk, cols - first);
  const int there = left > 0 ? static_cast<int>(left) : 0;  // numbers of the chunk
  if (aligned) {
#pragma unroll 4
    for (int i = thread / kChunks; i < kRows; i += kRowsAtOnce) {
      const bool inside = i < rows && there > 0;
      copy_async(tile.at(i, chunk), inside ? data + offset(i) + first : data,
                 inside ? there * static_cast<int>(sizeof(S)) : 0);
    }
    return;
  }
#pragma unroll 1
  for (int i = thread / kChunks; i < kRows; i += kRowsAtOnce) {
    const S* from = data + offset(i) + first * col;
    S* to = tile.at(i, chunk);
    for (int k = 0; k < kChunk; ++k) to[k] = i < rows && k < there ? from[k * col] : S{0};
  }
}

// Where a thread's elements of fragments lie, see ptx.cuh.
struct MmaThread {
  int warp, lane, group, place;

  __device__ __forceinline__ MmaThread() {
    const int thread = thread_index();
    warp = thread / 32;
    lane = thread % 32;
    group = lane / 4;
    place = lane % 4;
  }
  // The columns of elements 0 and 2 (or 1 and 3, one further) of fragment n of a row of fragments.
  __device__ __forceinline__ int col(int n) const { return 8 * n + 2 * place; }
};

// Fragments of a warp. A 16 x 16: rows from `row`, columns from 16 k.
template <class S, int kRows, int kCols>
__device__ __forceinline__ void load_a(uint32_t (&a)[4], MmaTile<S, kRows, kCols>& tile, int lane, int row, int k) {
  load_matrices(a, tile.at(row + lane % 16, 2 * k + lane / 16));
}
// Two B of 16 x 8 as the transpose of rows [row, row + 16), columns from 16 k: b[0], b[1] of the first eight rows,
// b[2], b[3] of the others.
template <class S, int kRows, int kCols>
__device__ __forceinline__ void load_b_transposed(uint32_t (&b)[4], MmaTile<S, kRows, kCols>& tile, int lane, int row,
                                                  int k) {
  load_matrices(b, tile.at(row + lane % 8 + lane / 16 * 8, 2 * k + lane / 8 % 2));
}
// Two B of 16 x 8 as they lie: rows [row, row + 16), columns from 8 chunk: b[0], b[1] of the first eight columns.
template <class S, int kRows, int kCols>
__device__ __forceinline__ void load_b(uint32_t (&b)[4], MmaTile<S, kRows, kCols>& tile, int lane, int row, int chunk) {
  load_matrices_transposed(b, tile.at(row + lane % 16, chunk + lane / 16));
}

}  // namespace attn::cuda
