// Keeps a tile of a mask in shared memory, because copies to shared memory take no registers.
#pragma once

#include "cuda/mma/scores.cuh"

namespace attn::cuda {

// A tile of [kRows, kKeys] numbers of a mask, which is boolean or of the type S. Each of four warps copies a quarter of
// the rows. If the block owns rows, each warp copies the rows of its own scores, so that no warp waits for another.
// kKeepsThread: whether values that are computed from the thread's number may stay in registers from one tile to the
// next. kOfGroup: whether the four warps are one of several warpgroups of a block.
template <class S, int kRows, int kKeys, bool kKeepsThread, bool kOfGroup = false>
struct MaskTile {
  static constexpr int kWarpRows = kRows / (kMmaThreads / 32);
  template <class Number>
  static constexpr int kNumbers = 16 / static_cast<int>(sizeof(Number));  // of a vector
  template <class Number>
  static constexpr int kVectors = kKeys / kNumbers<Number>;  // of a row
  template <class Number>
  static constexpr int kRowBytes = 16 * kVectors<Number>;

  // The tile consists of pieces of 128 bytes. The vectors of a piece are permuted by the index of the piece, so that
  // the lanes that read a fragment read different banks. Pieces whose distance is a multiple of 1024 bytes have the
  // same permutation.
  alignas(128) unsigned char bytes[kRows * kKeys * 2];

  static __device__ __forceinline__ MmaThread this_thread() {
    if constexpr (kOfGroup) return MmaThread(threadIdx.x % kMmaThreads);
    if constexpr (kKeepsThread)
      return MmaThread(threadIdx.x);
    else
      return MmaThread();
  }

  // Returns where a vector of a row of the mask is stored.
  template <class Number>
  static __device__ __forceinline__ unsigned offset(unsigned row, unsigned vector) {
    const unsigned byte = row * kRowBytes<Number> + 16 * vector;
    return byte ^ byte / 128 % 8 * 16;
  }

  // A lane's share of the copy. A lane copies rows in pairs of neighbouring rows, one vector of each row. It has kPairs
  // such pairs, and each pair begins kStep rows after the previous pair. If a warp has few rows, some lanes have no
  // share.
  template <class Number>
  struct Share {
    static constexpr int kStep = 64 / kVectors<Number>;
    static constexpr int kPairs = kWarpRows > kStep ? kWarpRows / kStep : 1;
    int row, vector;
    bool exists;

    __device__ __forceinline__ Share() {
      const MmaThread thread = this_thread();
      const unsigned lane = thread.lane, of_warp = 2 * (lane / kVectors<Number>);
      row = kWarpRows * thread.warp + of_warp;
      vector = lane % kVectors<Number>;
      exists = kWarpRows >= kStep || of_warp < kWarpRows;
    }
    __device__ __forceinline__ int first() const { return vector * kNumbers<Number>; }  // its first number, in a row
  };

  // Starts to copy the mask of the tile of keys that begins with `key`. Writes zeros for vectors beyond the last key.
  // from(i) returns where row i of the mask begins. After commit_copies() and wait_for_copies() a lane may read its own
  // share. After a further barrier it may read the whole tile.
  template <class Number, class From>
  __device__ __forceinline__ void copy(const Problem& p, From from, int64_t key) {
    const Share<Number> share;
    if (!share.exists) return;
    const unsigned char* begin[Share<Number>::kPairs][2];  // read first, because no read overtakes a started copy
#pragma unroll
    for (int k = 0; k < Share<Number>::kPairs; ++k)
#pragma unroll
      for (int r = 0; r < 2; ++r) begin[k][r] = from(share.row + k * Share<Number>::kStep + r);
    key += share.first();
    const int64_t byte = key * p.mask.col * static_cast<int64_t>(sizeof(Number));
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      unsigned char* const to = bytes + offset<Number>(share.row + r, share.vector);
#pragma unroll
      for (int k = 0; k < Share<Number>::kPairs; ++k) copy_async(to + k * 1024, begin[k][r] + byte, key < p.keys);
    }
  }

  // The same for kTiles tiles of neighbouring keys, by kThreads threads: of each warp, a lane finds where a row begins,
  // at number from(i) of the mask. Called by whole warps.
  template <class Number, int kThreads, int kTiles, class From>
  static __device__ __forceinline__ void copy_row_by_row(MaskTile (&to)[kTiles], const Problem& p, From from,
                                                         int64_t key) {
    constexpr int kOfRow = kTiles * kVectors<Number>, kAtOnce = 32 / kOfRow;  // vectors of a row, rows of a step
    static_assert(kRows % 32 == 0 && kOfRow <= 32);
    const int lane = thread_index() % 32, vector = lane % kOfRow;
    const int64_t first = key + vector * kNumbers<Number>;
    const bool there = first < p.keys;
    const auto* const numbers = static_cast<const Number*>(p.mask.data) + first * p.mask.col;
#pragma unroll 1
    for (int row = thread_index() % kThreads / 32 * 32; row < kRows; row += kThreads) {
      const int64_t mine = from(row + lane);
#pragma unroll
      for (int i = 0; i < 32; i += kAtOnce) {
        const int of_step = i + lane / kOfRow;
        const int64_t at = __shfl_sync(~0u, mine, of_step);
        MaskTile& tile = to[vector / kVectors<Number>];
        copy_async(tile.bytes + offset<Number>(row + of_step, vector % kVectors<Number>), numbers + at, there);
      }
    }
  }

  // Whether the mask in a lane's share shows some key to some row.
  template <class Number>
  __device__ __forceinline__ bool shows_some() {
    const Share<Number> share;
    if (!share.exists) return false;
    const unsigned char* const numbers[2] = {bytes + offset<Number>(share.row, share.vector),
                                             bytes + offset<Number>(share.row + 1, share.vector)};
    const auto pair_shows_some = [&](int k) {
      uint32_t some = 0;
#pragma unroll
      for (const unsigned char* of_row : numbers) {
        const auto vector = *reinterpret_cast<const Vec16<uint32_t>*>(of_row + k * 1024);
#pragma unroll
        for (const uint32_t word : vector.at) some |= word ^ kHidden<S, Number>;
      }
      return some != 0;
    };
#pragma unroll 1  // the first pair often shows some key, and then further pairs are not read
    for (int k = 0; k < Share<Number>::kPairs; ++k)
      if (pair_shows_some(k)) return true;
    return false;
  }

  // Reads the mask of the scores in tile t of a warp that owns rows.
  template <class Number>
  __device__ __forceinline__ void read(uint32_t (&mask)[kKeys / 8][2], int t) {
    each<Number>(t, [&](int n, int half, uint32_t two) { mask[n][half] = two; });
  }
  // Calls f(fragment n, half, two neighbouring numbers) for all of them.
  template <class Number, class F>
  __device__ __forceinline__ void each(int t, F f) {
    const MmaThread thread = this_thread();
    const int own = kWarpRows * thread.warp;
    if constexpr (sizeof(Number) == 1) {
      const unsigned first = offset<uint8_t>(own + thread.group, 0) + 2 * thread.place;
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          // As in MmaTile::address(), an XOR yields the address. Here it is the address of vector n / 2. If `half` is
          // 1, the vector is eight rows further on than if `half` is 0. The permutations of these two rows differ by an
          // XOR with kKeys, unless a row is a piece.
          const unsigned at = (first ^ (n / 2 * 16 | half * (kKeys % 128))) + (16 * t + 8 * half) * kKeys + n % 2 * 8;
          f(n, half, *reinterpret_cast<const uint16_t*>(bytes + at));
        }
    } else {
      const SharedAddress of_first = shared_address(bytes) + offset<uint16_t>(own + thread.lane % 16, thread.lane / 16);
#pragma unroll
      for (int k = 0; k < kKeys / 16; ++k) {
        uint32_t a[4];
        // The second piece of a row is permuted by another index.
        load_matrices(a, (of_first ^ (k * 32 ^ k / 4 * 16)) + 16 * t * kRowBytes<Number>);
#pragma unroll
        for (int i = 0; i < 4; ++i) f(2 * k + i / 2, i % 2, a[i]);
      }
    }
  }
  // Reads the mask of the scores of a warp that owns 16 keys; see each_transposed().
  template <class Number>
  __device__ __forceinline__ void read_transposed(uint32_t (&mask)[kRows / 8][2]) {
    each_transposed<Number>([&](int n, int half, uint32_t two) { mask[n][half] = two; });
  }
  // Calls f(fragment n, half, the numbers of two neighbouring rows) for all of them. Booleans are in 16 bits each.
  template <class Number, class F>
  __device__ __forceinline__ void each_transposed(F f) {
    static_assert(kKeys == 64);
    const MmaThread thread = this_thread();
    if constexpr (sizeof(Number) == 1) {
      const unsigned char* const first = bytes + offset<uint8_t>(2 * thread.place, thread.warp) + thread.group;
#pragma unroll
      for (int n = 0; n < kRows / 8; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          // Rows 8 n + 2 `place` and 8 n + 2 `place` + 1 are both in the piece of 128 bytes with index 4 n + `place`.
          // If n is odd, the permutation of the piece swaps the two rows.
          const unsigned char* const of_two = first + n * 512 + half * 8;
          f(n, half, of_two[n % 2 * 64] | of_two[64 - n % 2 * 64] << 16);
        }
    } else {
      const int lane = thread.lane;
      const SharedAddress of_first =
          shared_address(bytes) + offset<uint16_t>(lane % 8 + lane / 16 * 8, 2 * thread.warp + lane / 8 % 2);
#pragma unroll
      for (int n = 0; n < kRows / 8; n += 2) {
        uint32_t four[4];
        load_matrices_transposed(four, of_first + n * 1024);
#pragma unroll
        for (int i = 0; i < 4; ++i) f(n + i / 2, i % 2, four[i]);
      }
    }
  }
};

}  // namespace attn::cuda
