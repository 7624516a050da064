// What kernels on Hopper that read a mask have in common. A kernel looks at the mask first and writes a byte a tile, so
// that producers leave out tiles that the mask hides, and consumers read no mask where it changes nothing.
#pragma once

#include "cuda/mma/mask_tile.cuh"
#include "cuda/wgmma/tasks.cuh"

namespace attn::cuda {

// What the producer tells consumers of a tile, if there is a mask: it leaves out tiles that the mask hides.
struct ShownTile {
  int tile;      // its number; -1 behind the last one, where there are no keys
  bool changes;  // whether the mask hides some score or adds a number to it
};

// Tiles of a kernel whose consumers own 64 rows each, with the mask of a tile of each consumer and where its rows begin
// in the mask.
template <class Tiles, class S, int kConsumers, int kKeys, int kStages>
struct WithMask : Tiles {
  MaskTile<S, 64, kKeys, true, true> mask[kConsumers];
  const unsigned char* in_mask[kConsumers][64];
  ShownTile shown[kStages];
};

// What a mask does to some rows and kKeys keys. Bit i: it shows some of the keys from number i kScoreTile on. Bit
// divide_up(kKeys, kScoreTile): see ShownTile. The keys are those from `key` to `last_key` - 1, of which there may be
// more. The rows are those from `first` to `last` of heads with `queries` rows each.
template <int kKeys>
__device__ __forceinline__ unsigned effect_of_mask(const Problem& p, int64_t n, const Row& first, const Row& last,
                                                   int64_t queries, int64_t key, int64_t last_key) {
  constexpr int kChanges = divide_up(kKeys, kScoreTile);
  const int64_t first_col = key / kScoreTile;
  const int cols = static_cast<int>(divide_up(smaller(kKeys, last_key - first_col * kScoreTile), kScoreTile));
  const Operand& x = p.mask_tiles;
  const auto* const bytes = static_cast<const uint8_t*>(x.data) + batch_offset(p, x, n) + first_col;
  unsigned effect = 0;
  for (int64_t head = first.head; head <= last.head; ++head) {
    const int64_t begin = head == first.head ? first.position : 0;
    const int64_t end = head == last.head ? last.position : queries - 1;
    for (int64_t row = begin / kScoreTile; row <= end / kScoreTile; ++row)
      for (int col = 0; col < cols; ++col) {
        const unsigned of_tile = bytes[head * x.head + row * x.row + col];
        effect |= (of_tile & kSomeVisible ? 1u << col : 0) | (of_tile & kSomeChanged ? 1u << kChanges : 0);
      }
  }
  return effect;
}

// The effects of a mask on 32 tiles. The lanes of a warp look at one of them each, because a look takes long.
template <int kKeys>
struct MaskWindow {
  static constexpr int kParts = divide_up(kKeys, kScoreTile);

  unsigned shown[kParts] = {}, changed = 0;  // a bit a tile

  // `effect`: of the lane's tile. Called by all lanes.
  __device__ __forceinline__ void set(unsigned effect) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) shown[part] = __ballot_sync(~0u, effect >> part & 1);
    changed = __ballot_sync(~0u, effect >> kParts & 1);
  }
  // Takes out the first tile that the mask shows, and returns its number among the 32; -1 if there is none left.
  // Writes the part of its keys that the mask shows to `part`, and ShownTile::changes.
  __device__ __forceinline__ int take(Range& part, bool& changes) {
    unsigned left = 0;
#pragma unroll
    for (const unsigned of_part : shown) left |= of_part;
    if (left == 0) return -1;
    const int tile = __ffs(static_cast<int>(left)) - 1;
    int first = kParts, last = 0;
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      if (shown[i] >> tile & 1) first = first < i ? first : i, last = i + 1;
      shown[i] &= ~(1u << tile);
    }
    part = {first * kScoreTile, last * kScoreTile};
    changes = changed >> tile & 1;
    return tile;
  }
};

// Writes Problem::mask_tiles of a mask that is boolean or of type S. A block looks at a tile, a thread at one of its
// rows.
template <class S>
struct LookAtMask {
  static constexpr int kThreads = kScoreTile, kBlocks = 0;
  using Shared = Nothing;

  const Problem& p;
  Shared& shared;

  ATTN_INLINE static constexpr int64_t key_tiles(const Problem& p) { return divide_up(p.keys, kScoreTile); }
  ATTN_INLINE static constexpr int64_t row_tiles(const Problem& p) {
    return p.mask_tiles.row == 0 ? 1 : divide_up(p.queries, kScoreTile);
  }
  ATTN_INLINE static constexpr int64_t blocks(const Problem& p) {
    return number_of_slices(p) * row_tiles(p) * key_tiles(p);
  }

  __device__ __forceinline__ void run(int64_t number) {
    with_mask_number(p, [&]<class M>() { look<M>(number); });
  }
  template <class M>
  __device__ __forceinline__ void look(int64_t number) {
    const auto [in_slices, key_tile] = divide(number, key_tiles(p));
    const auto [slice, row_tile] = divide(in_slices, row_tiles(p));
    const Row at = sharer_of_mask(p, p.mask, slice, 0);
    const int64_t row = row_tile * kScoreTile + threadIdx.x, key = key_tile * kScoreTile;
    bool shows = false, changes = false;
    if (row < (p.mask.row == 0 ? 1 : p.queries)) {
      const int64_t first = batch_offset(p, p.mask, at.n) + at.head * p.mask.head + row * p.mask.row + key * p.mask.col;
      const auto* const vectors = reinterpret_cast<const Vec16<uint32_t>*>(static_cast<const M*>(p.mask.data) + first);
      const int64_t keys = p.mask.col == 0 ? 1 : smaller(kScoreTile, p.keys - key);
      constexpr int kOfWord = 4 / sizeof(M);
      for (int64_t i = 0; i * 4 * kOfWord < keys; ++i)
        for (int w = 0; w < 4; ++w) {
          const int64_t left = keys - (4 * i + w) * kOfWord;  // numbers, of which a word may have fewer than kOfWord
          const uint32_t there = left >= kOfWord ? ~0u : left <= 0 ? 0 : (1u << 8 * sizeof(M) * left) - 1;
          const uint32_t word = vectors[i].at[w];
          shows |= ((word ^ kHidden<S, M>)&there) != 0;
          changes |= ((sizeof(M) == 1 ? word ^ 0x01010101 : word & 0x7fff7fff) & there) != 0;
        }
    }
    const int effect = (__syncthreads_or(shows) ? kSomeVisible : 0) | (__syncthreads_or(changes) ? kSomeChanged : 0);
    const Operand& to = p.mask_tiles;
    if (threadIdx.x == 0)
      static_cast<uint8_t*>(to.data)[batch_offset(p, to, at.n) + at.head * to.head + row_tile * to.row + key_tile] =
          static_cast<uint8_t>(effect);
  }
};

}  // namespace attn::cuda
