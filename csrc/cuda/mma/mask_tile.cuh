// Keeps the forward's tile of a mask in shared memory, because copies to it take no registers. Above head_dim 128
// query, key and value take 96 of 99 KiB. The mask's 8 KiB do not fit then, and ScoresMma::read_mask() reads it to
// registers.
#pragma once

#include "cuda/mma/scores.cuh"

namespace attn::cuda {

// [kRows, kKeys] numbers of a mask that is boolean or of the type S. Each warp copies the 16 kTiles rows of its own
// scores and reads no others, so that no warp waits for another. kKeepsThread: registers may keep, from one tile to the
// next, what is computed from a thread's number.
template <class S, int kTiles, bool kKeepsThread>
struct MaskTile {
  static constexpr int kKeys = kKeysPerTile;
  static constexpr int kWarpRows = 16 * kTiles;
  using Fragments = ScoresMma<S, kKeys / 8, false>;
  template <class Number>
  static constexpr int kNumbers = 16 / static_cast<int>(sizeof(Number));  // of a vector
  template <class Number>
  static constexpr int kVectors = kKeys / kNumbers<Number>;  // of a row
  template <class Number>
  static constexpr int kRowBytes = 16 * kVectors<Number>;

  // A row of this tile holds one row of 16-bit numbers or two rows of boolean ones. Either way lanes that read a
  // fragment read different banks.
  MmaTile<uint16_t, kMmaThreads / 32 * kWarpRows, kKeys> tile;

  static __device__ __forceinline__ MmaThread this_thread() {
    if constexpr (kKeepsThread)
      return MmaThread(threadIdx.x);
    else
      return MmaThread();
  }

  // Returns where a vector of a row of the mask is stored.
  template <class Number>
  __device__ __forceinline__ void* at(unsigned row, unsigned vector) {
    return sizeof(Number) == 2 ? tile.at(row, vector) : tile.at(row / 2, row % 2 * kVectors<Number> + vector);
  }

  // A lane's share of the copy: one vector of each row in kPairs pairs of neighbouring rows, kStep rows apart.
  template <class Number>
  struct Share {
    static constexpr int kStep = 64 / kVectors<Number>;
    static constexpr int kPairs = kWarpRows / kStep;
    int row, vector;

    __device__ __forceinline__ Share() {
      const MmaThread thread = this_thread();
      const unsigned lane = thread.lane;
      row = kWarpRows * thread.warp + 2 * (lane / kVectors<Number>);
      vector = lane % kVectors<Number>;
    }
    __device__ __forceinline__ int first() const { return vector * kNumbers<Number>; }  // its first number, in a row
  };

  // Starts to copy the mask of `keys` keys from `key` on; columns beyond repeat the last key's. Row i begins at
  // in_mask[i], and its numbers are `stride` apart. in_vectors: see mask_in_units(). After commit_copies() and
  // wait_for_copies() a lane may read its own share, after a further barrier the warp's.
  template <class Number>
  __device__ __forceinline__ void copy(int64_t stride, const unsigned char* const* in_mask, bool in_vectors,
                                       int64_t key, int keys) {
    const Share<Number> share;
    if (!in_vectors || share.first() + kNumbers<Number> > keys)
      return gather(share, key * stride, stride, in_mask, keys);
    struct alignas(16) Pair {
      const unsigned char* row[2];
    } begin[Share<Number>::kPairs];  // read first, because no read may overtake a copy that has started
#pragma unroll
    for (int k = 0; k < Share<Number>::kPairs; ++k)
      begin[k] = *reinterpret_cast<const Pair*>(in_mask + share.row + k * Share<Number>::kStep);
    const int64_t offset = (key + share.first()) * static_cast<int64_t>(sizeof(Number));
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      auto* const to = static_cast<unsigned char*>(at<Number>(share.row + r, share.vector));
#pragma unroll
      for (int k = 0; k < Share<Number>::kPairs; ++k)  // rows a multiple of 8 apart are permuted alike
        copy_async(to + k * Share<Number>::kStep * kRowBytes<Number>, begin[k].row[r] + offset, true);
    }
  }
  // Copies number by number, few at a time, so that it takes no more registers than the rest of a kernel.
  template <class Number>
  __device__ __forceinline__ void gather(const Share<Number>& share, int64_t offset, int64_t stride,
                                         const unsigned char* const* in_mask, int keys) {
    constexpr int kOfWord = 4 / sizeof(Number), kWords = 4 * 2 * Share<Number>::kPairs;
#pragma unroll 1
    for (int i = 0; i < kWords; ++i) {
      const int row = share.row + i / 8 * Share<Number>::kStep + i / 4 % 2, first = share.first() + i % 4 * kOfWord;
      const auto* from = reinterpret_cast<const Number*>(in_mask[row]) + offset;
      uint32_t word = 0;
#pragma unroll
      for (int j = 0; j < kOfWord; ++j) {
        const int at_most = first + j < keys ? first + j : keys - 1;
        word |= static_cast<uint32_t>(from[at_most * stride]) << 8 * sizeof(Number) * j;
      }
      static_cast<uint32_t*>(at<Number>(row, share.vector))[i % 4] = word;
    }
  }

  // Whether a lane's share shows a key to a row.
  template <class Number>
  __device__ __forceinline__ bool shows_some() {
    const Share<Number> share;
    const void* const numbers[2] = {at<Number>(share.row, share.vector), at<Number>(share.row + 1, share.vector)};
    const auto pair_shows_some = [&](int k) {
      uint32_t some = 0;
#pragma unroll
      for (const void* of_row : numbers) {
        const auto vector = static_cast<const Vec16<uint32_t>*>(of_row)[k * Share<Number>::kStep * kVectors<Number>];
#pragma unroll
        for (const uint32_t word : vector.at) some |= word ^ Fragments::template kHidden<Number>;
      }
      return some != 0;
    };
#pragma unroll 1  // the first pair often shows some: further pairs are then not read
    for (int k = 0; k < Share<Number>::kPairs; ++k)
      if (pair_shows_some(k)) return true;
    return false;
  }

  // Reads the mask of the scores of tile t of the warp.
  template <class Number>
  __device__ __forceinline__ void read(typename Fragments::Mask& mask, int t) {
    const MmaThread thread = this_thread();
    const int own = kWarpRows * thread.warp;
    if constexpr (sizeof(Number) == 1) {
      const auto* const numbers = reinterpret_cast<const unsigned char*>(tile.numbers);
      const auto* const of_first = static_cast<const unsigned char*>(at<uint8_t>(own + thread.group, 0));
      const unsigned first = static_cast<unsigned>(of_first - numbers) + 2 * thread.place;
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          // As in MmaTile::address(): the vector is n / 2, and eight rows further the permutation differs.
          const unsigned offset = (first ^ (n / 2 * 16 | half * 64)) + (16 * t + 8 * half) * kKeys + n % 2 * 8;
          mask[n][half] = *reinterpret_cast<const uint16_t*>(numbers + offset);
        }
    } else {
#pragma unroll
      for (int k = 0; k < kKeys / 16; ++k) {
        uint32_t a[4];
        load_a(a, tile, thread.lane, own, 16 * t, k);
#pragma unroll
        for (int i = 0; i < 4; ++i) mask[2 * k + i / 2][i % 2] = a[i];
      }
    }
  }
};

}  // namespace attn::cuda
