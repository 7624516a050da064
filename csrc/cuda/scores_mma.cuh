// Scores (score.h) in the fragments of tensor cores, for forward and backward: the mask, hidden keys, what dropout
// keeps.
#pragma once

#include "mma.cuh"
#include "softmax.cuh"

namespace attn::cuda {

// Scores of a warp: 16 rows, from `own` of the block's tile, by 8 kFragments keys. Or, kOwnsKeys, 16 keys by 8
// kFragments rows.
template <int kFragments, bool kOwnsKeys>
struct ScoresMma {
  using Scores = float[kFragments][4];
  using Kept = uint32_t[2];  // bit 2 n + c of kept[half]: of element (half, c) of fragment n

  // Calls f(score, row, key, half, bit of Kept); row and key are those of the block's tiles.
  template <class F>
  static __device__ __forceinline__ void each(Scores& x, int own, F f) {
    const MmaThread thread;
#pragma unroll
    for (int n = 0; n < kFragments; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int mine = own + thread.group + 8 * half, other = thread.col(n) + c;
          f(x[n][2 * half + c], kOwnsKeys ? other : mine, kOwnsKeys ? mine : other, half, 2 * n + c);
        }
  }

  // The tile of keys begins with `key` and has `keys` of them. `base`: where the batch entry's mask begins.
  template <class Rows>
  static __device__ __forceinline__ void add_mask(Scores& x, int own, const Problem& p, int64_t base, const Rows& rows,
                                                  int64_t key, int keys) {
    base += key * p.mask.col;
    each(x, own, [&](float& score, int i, int j, int, int) {
      if (j >= keys) return;
      const float bias = read_mask<float>(p.mask, base + rows.offset(p.mask, i) + j * p.mask.col);
      score = bias == -infinity<float>() ? bias : score + bias;
    });
  }

  // -inf where there is no key or, with `hidden`, a row does not see it. Where others are rows, also where there is no
  // row, which must add nothing to sums over them.
  template <class Rows>
  static __device__ __forceinline__ void hide_keys(Scores& x, int own, const Problem& p, const Rows& rows, int count,
                                                   int64_t key, int keys, bool hidden) {
    const auto seen_by = [&](int i) {  // keys of the tile that row i sees
      const int64_t last = key + (kOwnsKeys && i >= count ? 0 : keys), position = rows.position[i];
      return TileRange(hidden ? visible_keys(p, {position, position + 1}, last) : Range{0, last}, key);
    };
    if constexpr (kOwnsKeys) {
      each(x, own,
           [&](float& score, int i, int j, int, int) { score = seen_by(i).contains(j) ? score : -infinity<float>(); });
      return;
    }
    const MmaThread thread;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const TileRange seen = seen_by(own + thread.group + 8 * half);
#pragma unroll
      for (int n = 0; n < kFragments; ++n)
#pragma unroll
        for (int c = 0; c < 2; ++c)
          if (!seen.contains(thread.col(n) + c)) x[n][2 * half + c] = -infinity<float>();
    }
  }

  // Which weights dropout keeps.
  template <class Rows>
  static __device__ __forceinline__ void dropout_mask(Kept& kept, int own, const Dropout& dropout, const Rows& rows,
                                                      const uint32_t* head_number, int64_t key) {
    const MmaThread thread;
    kept[0] = kept[1] = 0;
    if constexpr (kOwnsKeys) {
      // Four lanes, of one place and neighbouring groups, hold the keys of one counter: each computes that of one
      // element, and all get the bits of all.
      const int mine = thread.group % 4;
      const int64_t quad = (key + own + thread.group + 8 * (mine / 2)) / 4;
#pragma unroll
      for (int n = 0; n < kFragments; ++n) {
        const int i = thread.col(n) + mine % 2;
        uint32_t bits = dropout.kept(quad, rows.position[i], head_number[i]) << 4 * mine;
        bits |= __shfl_xor_sync(~0u, bits, 4);
        bits |= __shfl_xor_sync(~0u, bits, 8);
        bits >>= thread.group % 4;
#pragma unroll
        for (int c = 0; c < 4; ++c) kept[c / 2] |= (bits >> 4 * c & 1) << (2 * n + c % 2);
      }
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int i = own + thread.group + 8 * half;
        // Lanes 2 i and 2 i + 1 hold the columns of one counter: each computes that of every other fragment.
#pragma unroll
        for (int n = 0; n < kFragments; n += 2) {
          const int mine = n + thread.place % 2;
          const unsigned of_mine =
              dropout.kept((key + 8 * mine) / 4 + thread.place / 2, rows.position[i], head_number[i]);
          const unsigned of_other = __shfl_xor_sync(~0u, of_mine, 1);
#pragma unroll
          for (int m = 0; m < 2; ++m) {
            const unsigned bits = (m == thread.place % 2 ? of_mine : of_other) >> 2 * (thread.place % 2);
            kept[half] |= (bits & 3) << 2 * (n + m);
          }
        }
      }
    }
  }
};

}  // namespace attn::cuda
