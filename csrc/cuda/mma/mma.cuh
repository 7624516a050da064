// Tiles of 16-bit numbers in shared memory, as tensor cores read them.
#pragma once

#include "cuda/kernels.h"
#include "cuda/shared/rows.cuh"

namespace attn::cuda {

constexpr int kMmaThreads = 128;  // four warps

// [kRows, kCols], row by row. The chunks of a row are permuted by the row's number, so that the eight rows of a matrix
// that a warp reads, and the columns that it writes, fall into different banks.
template <class S, int kRows, int kCols>
struct MmaTile {
  static constexpr int kChunks = kCols / kChunk;  // of a row
  static_assert(kChunks % 8 == 0);

  alignas(128) S numbers[kRows * kCols];

  // Unsigned, so that no sign needs care: what the row number of a fragment adds becomes part of an instruction.
  __device__ __forceinline__ S* at(unsigned row, unsigned chunk) {
    return numbers + row * kCols + (chunk ^ row % 8) * kChunk;
  }
  static constexpr unsigned kRowBytes = kCols * sizeof(S);
  // The address of chunk `first` + 2 k of a row, `first` being 0 or 1. As a tile begins at a multiple of 128 bytes, it
  // is that of chunk `first` but for a few bits: one instruction a k.
  __device__ __forceinline__ SharedAddress address(unsigned row, unsigned first, unsigned k) {
    const SharedAddress of_first = shared_address(numbers) + row * kRowBytes + (first ^ row % 8) * 16;
    return (of_first ^ k % 4 * 32) + k / 4 * 128;
  }
};

// Starts to fill a tile: `rows` rows of `cols` numbers (in_chunks(), launch.h); zeros elsewhere. A thread copies one
// chunk of row first_row + i for each i of a few: from(first_row, i) is called in that order and says where the row
// begins. Complete after commit_copies(), wait_for_copies() and a barrier.
template <class S, int kRows, int kCols, class From>
__device__ __forceinline__ void copy_tile(MmaTile<S, kRows, kCols>& tile, int rows, int64_t cols, From from) {
  constexpr int kChunks = kCols / kChunk;
  constexpr int kRowsAtOnce = kMmaThreads / kChunks;
  const unsigned thread = thread_index(), chunk = thread % kChunks, first_row = thread / kChunks;
  const int first = chunk * kChunk;
  const int left = (first < static_cast<int>(cols) ? rows : 0) - static_cast<int>(first_row);
  S* const to = tile.at(first_row, chunk);
#pragma unroll
  for (int i = 0; i < kRows; i += kRowsAtOnce)
    // The chunks of rows that are a multiple of 8 apart are permuted alike.
    copy_async(kRowsAtOnce % 8 == 0 ? to + i * kCols : tile.at(first_row + i, chunk), from(first_row, i) + first,
               i < left);
}
// Row i lies offset(i) numbers behind `data`.
template <class S, int kRows, int kCols, class Offset>
__device__ __forceinline__ void load_tile(MmaTile<S, kRows, kCols>& tile, const S* data, int rows, int64_t cols,
                                          Offset offset) {
  copy_tile(tile, rows, cols, [&](unsigned first_row, int i) { return data + offset(first_row + i); });
}
// Row i lies i * stride numbers behind `data`. What the rows of a thread are apart is the same for all threads.
template <class S, int kRows, int kCols>
__device__ __forceinline__ void load_tile(MmaTile<S, kRows, kCols>& tile, const S* data, int rows, int64_t cols,
                                          int64_t stride) {
  copy_tile(tile, rows, cols, [&](unsigned first_row, int i) { return data + first_row * stride + i * stride; });
}

// Where a thread's elements of fragments lie, see ptx.cuh.
struct MmaThread {
  int warp, lane, group, place;

  __device__ __forceinline__ MmaThread() : MmaThread(thread_index()) {}
  __device__ __forceinline__ explicit MmaThread(unsigned thread) {
    warp = thread / 32;
    lane = thread % 32;
    group = lane / 4;
    place = lane % 4;
  }
  // The columns of elements 0 and 2 (or 1 and 3, one further) of fragment n of a row of fragments.
  __device__ __forceinline__ int col(int n) const { return 8 * n + 2 * place; }
};

// The four lanes of a row exchange words: word i of lane `place` becomes word `place` of lane i. In two steps, each of
// which swaps what lies off the diagonal of blocks twice as large.
__device__ __forceinline__ void transpose(uint32_t (&words)[4], int place) {
#pragma unroll
  for (int step = 1; step < 4; step *= 2)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & step) continue;
      uint32_t &first = words[i], &second = words[i + step];
      const uint32_t got = __shfl_xor_sync(~0u, place & step ? first : second, step);
      (place & step ? first : second) = got;
    }
}

// Whether a row of results can be written in chunks.
__device__ __forceinline__ bool takes_chunks(const Problem& p, const Operand& to, int64_t cols) {
  return to.dtype != DType::f32 && in_chunks(p, to, cols);
}
// Writes a row, value(n, c) being what a lane has in column c of its two of fragment n. Called by all lanes of a warp;
// `there`: whether there is the row.
template <class S, int kFragments, class Value>
__device__ __forceinline__ void write_chunks(const Operand& to, int64_t base, int64_t cols, bool there, Value value) {
  struct alignas(16) Chunk {
    uint32_t words[4];
  };
  const MmaThread thread;
#pragma unroll
  for (int n = 0; n < kFragments; n += 4) {
    Chunk chunk;
#pragma unroll
    for (int i = 0; i < 4; ++i) chunk.words[i] = pack<S>(value(n + i, 0), value(n + i, 1));
    transpose(chunk.words, thread.place);
    const int col = 8 * (n + thread.place);
    if (there && col < cols) *reinterpret_cast<Chunk*>(static_cast<S*>(to.data) + base + col) = chunk;
  }
}

// Fragments of a warp. Where a row is said in two parts, the second, known to the compiler and a multiple of 8, becomes
// part of the instruction.
// A 16 x 16: rows from `row` + `further`, columns from 16 k.
template <class S, int kRows, int kCols>
__device__ __forceinline__ void load_a(uint32_t (&a)[4], MmaTile<S, kRows, kCols>& tile, int lane, int row, int further,
                                       int k) {
  load_matrices(a, tile.address(row + lane % 16, lane / 16, k) + further * tile.kRowBytes);
}
// Two B of 16 x 8 as the transpose of rows [row, row + 16), columns from 16 k: b[0], b[1] of the first eight rows,
// b[2], b[3] of the others.
template <class S, int kRows, int kCols>
__device__ __forceinline__ void load_b_transposed(uint32_t (&b)[4], MmaTile<S, kRows, kCols>& tile, int lane, int row,
                                                  int k) {
  load_matrices(b, tile.address(lane % 8 + lane / 16 * 8, lane / 8 % 2, k) + row * tile.kRowBytes);
}
// Two B of 16 x 8 as they lie: rows [row, row + 16), columns from 16 k: b[0], b[1] of the first eight columns.
template <class S, int kRows, int kCols>
__device__ __forceinline__ void load_b(uint32_t (&b)[4], MmaTile<S, kRows, kCols>& tile, int lane, int row, int k) {
  load_matrices_transposed(b, tile.address(lane % 16, lane / 16, k) + row * tile.kRowBytes);
}

}  // namespace attn::cuda
