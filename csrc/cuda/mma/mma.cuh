// Tiles of 16-bit numbers in shared memory, as tensor cores read them.
#pragma once

#include <type_traits>

#include "cuda/kernels.h"
#include "cuda/shared/rows.cuh"

namespace attn::cuda {

constexpr int kMmaThreads = 128;  // four warps

// A tile [kRows, kCols], stored row by row. The vectors of a row are permuted by the row's number. So the eight rows of
// a matrix that a warp reads are in different banks. The columns that a warp writes are in different banks, too.
template <class S, int kRows, int kCols>
struct MmaTile {
  static constexpr int kVectors = kCols / kVector;  // of a row
  static_assert(kVectors % 8 == 0);

  alignas(128) S numbers[kRows * kCols];

  // The arguments are unsigned, so that the part of the address that depends on the number of a fragment becomes a
  // constant in the instruction.
  __device__ __forceinline__ S* at(unsigned row, unsigned vector) {
    return numbers + row * kCols + (vector ^ row % 8) * kVector;
  }
  static constexpr unsigned kRowBytes = kCols * sizeof(S);
  // Returns the address of vector `first` + 2 k of a row, where `first` is 0 or 1. Because a tile begins at a multiple
  // of 128 bytes, this address differs from the address of vector `first` in a few bits only. So one instruction is
  // enough to compute the address for each k.
  __device__ __forceinline__ SharedAddress address(unsigned row, unsigned first, unsigned k) {
    const SharedAddress of_first = shared_address(numbers) + row * kRowBytes + (first ^ row % 8) * 16;
    return (of_first ^ k % 4 * 32) + k / 4 * 128;
  }
};

// How keys and values are stored: in rows of vectors, in rows of any 16-bit numbers (reads_numbers()), or with 8 bits.
enum class Stored { vectors, numbers, eight_bits };

// Copy a vector to a tile: columns `first` to first + 7 of a row, or zeros if they are not `there`.
struct CopyAsync {
  template <class S>
  __device__ __forceinline__ void operator()(S* to, const S* row, int first, bool there) const {
    copy_async(to, row + first, there);
  }
};
struct CopyNumbers {
  int64_t cols, stride;  // of the row

  template <class S>
  __device__ __forceinline__ void operator()(S* to, const S* row, int first, bool there) const {
    Vec16<S> numbers{};
#pragma unroll
    for (int i = 0; i < kVector; ++i)
      if (there && first + i < cols) numbers.at[i] = row[(first + i) * stride];
    *reinterpret_cast<Vec16<S>*>(to) = numbers;
  }
};

// Starts to fill a tile with `rows` rows of `cols` numbers, and with zeros elsewhere. The rows must be vectors
// (in_vectors(), launch.h). A thread copies one vector of each of its rows. These are the rows first_row + i, in the
// order of i. from(first_row, i) returns where row first_row + i begins. The tile is complete after commit_copies(),
// wait_for_copies() and a barrier. Called by kThreads threads, of which this one is `thread`. Copy: CopyAsync,
// CopyNumbers, whose rows need not be vectors, or Widen for numbers of 8 bits.
template <int kThreads = kMmaThreads, class S, int kRows, int kCols, class From, class Copy = CopyAsync>
__device__ __forceinline__ void copy_tile(MmaTile<S, kRows, kCols>& tile, int rows, int64_t cols, From from,
                                          unsigned thread = thread_index(), Copy copy = {}) {
  constexpr int kVectors = kCols / kVector;
  constexpr int kRowsAtOnce = kThreads / kVectors;
  const unsigned vector = thread % kVectors, first_row = thread / kVectors;
  const int first = vector * kVector;
  const int left = (first < static_cast<int>(cols) ? rows : 0) - static_cast<int>(first_row);
  S* const to = tile.at(first_row, vector);
#pragma unroll
  for (int i = 0; i < kRows; i += kRowsAtOnce)
    // If the distance of two rows is a multiple of 8, their vectors are permuted in the same way.
    copy(kRowsAtOnce % 8 == 0 ? to + i * kCols : tile.at(first_row + i, vector), from(first_row, i), first, i < left);
}
// Row i begins offset(i) numbers behind `data`.
template <class S, int kRows, int kCols, class N, class Offset>
__device__ __forceinline__ void load_tile(MmaTile<S, kRows, kCols>& tile, const N* data, int rows, int64_t cols,
                                          Offset offset) {
  copy_tile(tile, rows, cols, [&](unsigned first_row, int i) { return data + offset(first_row + i); });
}
// Row i begins i * stride numbers behind `data`. The address of row first_row + i is computed from two products,
// because the second product, i * stride, is the same for all threads.
template <int kThreads = kMmaThreads, class S, int kRows, int kCols, class N, class Copy = CopyAsync>
__device__ __forceinline__ void load_tile(MmaTile<S, kRows, kCols>& tile, const N* data, int rows, int64_t cols,
                                          int64_t stride, unsigned thread = thread_index(), Copy copy = {}) {
  const auto from = [&](unsigned first_row, int i) { return data + first_row * stride + i * stride; };
  copy_tile<kThreads>(tile, rows, cols, from, thread, copy);
}

// Finds out where the rows of kKeys keys and of their values are stored in pages. The threads that copy the same rows
// (see copy_tile()) look up one row each and exchange the offsets by shuffles. Shuffles need no barrier. They need no
// shared memory either, and with large heads none is left.
template <int kKeys, int kCols>
struct PagedRows {
  static constexpr int kVectors = kCols / kVector, kRowsAtOnce = kMmaThreads / kVectors;
  static constexpr int kOfKeys = 0, kOfValues = kKeys / kRowsAtOnce;  // the first thread that knows their offsets
  static_assert(2 * kOfValues <= kVectors && kVectors <= 32);

  int64_t offset = 0;  // of this thread's row, from the start of the head

  // Looks up the rows of the tile that begins with `key`. Reads the table of pages only for keys before last_key.
  __device__ __forceinline__ void find(const Problem& p, int64_t n, int64_t key, int64_t last_key) {
    const int thread = thread_index(), number = thread % kVectors;
    key += thread / kVectors + number % kOfValues * kRowsAtOnce;
    if (key >= last_key) return;  // 2 kOfValues threads know the rows; further threads look the same rows up again
    const bool of_key = number / kOfValues % 2 == 0;
    offset = offset_in_pages(p, of_key ? p.key.page : p.value.page, of_key ? p.key.row : p.value.row, n, key);
  }
  // Starts to fill a tile as load_tile() does. Called by all threads.
  template <class S, class N, class Copy>
  __device__ __forceinline__ void load(MmaTile<S, kKeys, kCols>& tile, const N* data, int rows, int64_t cols, int first,
                                       Copy copy) const {
    copy_tile(
        tile, rows, cols,
        [&](unsigned, int i) { return data + __shfl_sync(~0u, offset, first + i / kRowsAtOnce, kVectors); },
        thread_index(), copy);
  }
};

// Says which elements of fragments a thread holds (see ptx.cuh).
struct MmaThread {
  int warp, lane, group, place;

  __device__ __forceinline__ MmaThread() : MmaThread(thread_index()) {}
  __device__ __forceinline__ explicit MmaThread(unsigned thread) {
    warp = thread / 32;
    lane = thread % 32;
    group = lane / 4;
    place = lane % 4;
  }
  // Returns the column of the thread's elements 0 and 2 of fragment n, if fragments lie side by side. Elements 1 and 3
  // are one column further.
  __device__ __forceinline__ int col(int n) const { return 8 * n + 2 * place; }
};

// Transposes the 4 x 4 matrix of the words that the four lanes of a row hold: word i of lane `place` becomes word
// `place` of lane i. Step 1 swaps the two words off the diagonal in each 2 x 2 block of the matrix. Step 2 swaps the
// two blocks off the diagonal of the matrix.
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

// Whether a row of results can be written in vectors.
__device__ __forceinline__ bool takes_vectors(const Problem& p, const Operand& to, int64_t cols) {
  return to.dtype != DType::f32 && in_vectors(p, to, cols);
}
// Writes a row, if it exists (`there`). A lane holds two neighbouring columns of fragment n. value(n, c) returns the
// lane's number in the first of these columns (c = 0) or in the second (c = 1). Called by all lanes of a warp.
template <class S, int kFragments, class Value>
__device__ __forceinline__ void write_vectors(const Operand& to, int64_t base, int64_t cols, bool there, Value value) {
  const MmaThread thread;
#pragma unroll
  for (int n = 0; n < kFragments; n += 4) {
    Vec16<uint32_t> vector;
#pragma unroll
    for (int i = 0; i < 4; ++i) vector.at[i] = pack<S>(value(n + i, 0), value(n + i, 1));
    transpose(vector.at, thread.place);
    const int col = 8 * (n + thread.place);
    if (there && col < cols) *reinterpret_cast<Vec16<uint32_t>*>(static_cast<S*>(to.data) + base + col) = vector;
  }
}

// A warp reads the fragment A [16 x 16] that begins at row `row` + `further` and column 16 * k of the tile. `further`
// is a multiple of 8 that is known at compile time, so that it becomes a constant in the instruction.
template <class S, int kRows, int kCols>
__device__ __forceinline__ void load_a(uint32_t (&a)[4], MmaTile<S, kRows, kCols>& tile, int lane, int row, int further,
                                       int k) {
  load_matrices(a, tile.address(row + lane % 16, lane / 16, k) + further * tile.kRowBytes);
}

// x[t] += A_t B^T, where A_t are the 16 rows of `a_rows` from row `row` + 16 t on, and B are all rows of `b_rows`.
template <int kTiles, class S, int kRows, int kOthers, int kDim>
__device__ __forceinline__ void add_dots(float (*x)[kOthers / 8][4], MmaTile<S, kRows, kDim>& a_rows, int row,
                                         MmaTile<S, kOthers, kDim>& b_rows) {
  const int lane = MmaThread().lane;
#pragma unroll
  for (int k = 0; k < kDim / 16; ++k) {
    uint32_t a[kTiles][4];
#pragma unroll
    for (int t = 0; t < kTiles; ++t) load_a(a[t], a_rows, lane, row, 16 * t, k);
#pragma unroll
    for (int n = 0; n < kOthers / 8; n += 2) {
      uint32_t b[4];  // two B of 16 x 8, from rows 8 n to 8 n + 7 and from the next eight rows
      load_matrices(b, b_rows.address(lane % 8 + lane / 16 * 8, lane / 8 % 2, k) + 8 * n * b_rows.kRowBytes);
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        multiply_add<S>(x[t][n], a[t], b[0], b[1]);
        multiply_add<S>(x[t][n + 1], a[t], b[2], b[3]);
      }
    }
  }
}

// Returns two numbers of a factor, with 0 in place of infinities and NaNs.
template <class S>
__device__ __forceinline__ uint32_t make_finite(uint32_t two) {
  constexpr uint32_t kExponent = std::is_same_v<S, Half> ? 0x7c00 : 0x7f80;
  const uint32_t low = (two & kExponent) == kExponent ? 0 : two & 0xffffu;
  const uint32_t high = (two >> 16 & kExponent) == kExponent ? 0 : two & 0xffff0000u;
  return low | high;
}

// sum[t] += X_t B, where B are all rows of `others`. X_t consists of fragments C [16 x 8], and weight(t, n, half, c)
// returns element 2 half + c of fragment n. add_weighted() rounds this number to S. Two fragments C [16 x 8] together
// have the layout of an A [16 x 16].
template <int kTiles, Factor kFactor, class S, int kOthers, int kDim, class Weight>
__device__ __forceinline__ void add_weighted(float (*sum)[kDim / 8][4], MmaTile<S, kOthers, kDim>& others,
                                             Weight weight) {
  const int lane = MmaThread().lane;
#pragma unroll
  for (int k = 0; k < kOthers / 16; ++k) {
    uint32_t a[kTiles][4];
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int n = 2 * k + i / 2, half = i % 2;
        a[t][i] = pack<S>(weight(t, n, half, 0), weight(t, n, half, 1));
      }
#pragma unroll
    for (int n = 0; n < kDim / 8; n += 2) {
      uint32_t b[4];  // two B of 16 x 8, from columns 8 n to 8 n + 7 and from the next eight columns
      load_matrices_transposed(b, others.address(lane % 16, lane / 16, n / 2) + 16 * k * others.kRowBytes);
      if constexpr (kFactor == Factor::finite)
#pragma unroll
        for (uint32_t& two : b) two = make_finite<S>(two);
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        multiply_add<S>(sum[t][n], a[t], b[0], b[1]);
        multiply_add<S>(sum[t][n + 1], a[t], b[2], b[3]);
      }
    }
  }
}

}  // namespace attn::cuda
