// Computes the forward of few rows, as in decoding, where uses_decode() says so. Reading keys and values takes nearly
// all the time, so that as much as possible must be under way: each warp owns every fourth tile of 16 or 32 keys,
// copies keys and values in turns into a ring of its own, and, once the query is there, waits for no other warp before
// the end. All warps have all rows, and add up their outputs at last. The block that writes the last split of a task
// merges them.
#pragma once

#include "cuda/kernels.h"
#include "cuda/launch.cuh"
#include "cuda/mma/eight_bits.cuh"
#include "cuda/mma/online_softmax.cuh"
#include "cuda/simt/merge.cuh"

namespace attn::cuda {

// S: the type of the query, and of key and value of 16 bits. kDim: head_dim of key and value, padded. kGeneral: see
// is_general(), but without dropout. kPaged: whether keys and values are stored in pages. kEight: whether they have 8
// bits; then a ring holds numbers of 8 bits.
template <class S, int kDim, bool kGeneral, bool kPaged, bool kEight = false>
struct DecodeMma {
  static constexpr int kThreads = kMmaThreads, kWarps = kThreads / 32;
  static constexpr int kBlocks = kDim > 128 ? 2 : 3;  // a multiprocessor of Hopper holds so many
  static constexpr int kRows = kDecodeRows;
  // The keys of a tile. Keys of 64 bytes arrive so fast that issuing instructions would take longer than reading them.
  // A tile of 32 keys takes fewer instructions than two of 16.
  static constexpr int kKeys = kEight && kDim == 64 ? 32 : 16;
  static constexpr int kStep = kWarps * kKeys;  // from a warp's tile to its next one
  static constexpr int kLookups = kKeys / 16;   // a lane looks up so many of the tile's keys and values
  static constexpr int kRingBytes = 16 << 10;   // of a warp
  static_assert(kRows == 16);

  using Tile = std::conditional_t<kEight, EightBitTile<S, kKeys, kDim>, MmaTile<S, kKeys, kDim>>;
  using Number = std::conditional_t<kEight, uint8_t, S>;
  static constexpr int kPerNumber = kEight ? 2 : 1;  // numbers of the key in the place of one of the tile
  struct Stage {
    Tile key, value;
  };
  static constexpr int kStages = kRingBytes / sizeof(Stage);
  // What a warp has summed up, lane by lane.
  struct Sums {
    Vec16<float> output[kDim / 8][32];
    float best[2][32], sum[2][32];
  };
  struct Shared {
    MmaTile<S, kRows, kDim> query;
    union {
      Stage ring[kWarps][kStages];
      Sums sums[kWarps - 1];
    };
    Task task;
    std::conditional_t<kEight, Scales, Nothing> scales;
    int64_t counter;  // the number of the task's counter
    bool is_last;     // all splits of the task are there
    RowTile<kRows> rows;
    const unsigned char* in_mask[kRows];  // where the row begins
  };
  using Fragments = ScoresMma<S, kKeys / 8, false>;
  using Softmax = OnlineSoftmax<1, kKeys / 8, kGeneral>;
  using Scores = typename Fragments::Scores[1];
  using Output = float[1][kDim / 8][4];

  const ForwardParams& p;
  Shared& shared;
  const Task& task;
  const Softmax softmax;
  const MmaThread thread{threadIdx.x};  // in registers, of which there are enough
  // Where keys and values of the next tile are. Lane i has numbers i and i + 32 of both, keys first.
  int64_t in_pages[kLookups] = {};

  __device__ DecodeMma(const ForwardParams& p, Shared& shared) : p(p), shared(shared), task(shared.task), softmax{p} {}

  ATTN_INLINE static constexpr int64_t blocks(const ForwardParams& p) { return p.splits * blocks_of_rows(p, kRows); }

  __device__ __forceinline__ void run(int64_t number) {
    if (threadIdx.x == 0) {
      shared.task.set(p, number, kRows, kKeysPerTile);
      const int64_t places = tiles_of_rows(p, kRows);
      const auto [list, place] = divide(number, places);
      shared.counter = divide(list, p.splits).quotient * places + place;
      if constexpr (kEight)
        if (task.rows > 0) shared.scales.set(p, task);
    }
    __syncthreads();
    if (task.rows == 0) return;
    if (const int i = threadIdx.x; i < kRows) {
      shared.rows.set(i, task.sequence, task.row_at(), task.rows);
      if (kGeneral && p.has_mask)
        shared.in_mask[i] = static_cast<const unsigned char*>(p.mask.data) +
                            mask_number_bytes(p) * (batch_offset(p, p.mask, task.n) + shared.rows.offset(p.mask, i));
    }
    __syncthreads();
    load_tile(shared.query, head_of<S>(p, p.query, task.n, 0), task.rows, p.head_dim,
              [&](int i) { return shared.rows.offset(p.query, i); });
    commit_copies();
    Output output = {};
    float best[2] = {-infinity<float>(), -infinity<float>()}, sum[2] = {};
    if constexpr (kGeneral) {
      if (p.has_mask)
        with_mask_number(p, [&]<class M>() { go_over_keys<M>(output, best, sum); });
      else
        go_over_keys<NoMask>(output, best, sum);
    } else {
      go_over_keys<NoMask>(output, best, sum);
    }
    add_up(output, best, sum);
    if (thread.warp == 0) write(output, best, sum);
    if (p.splits > 1) merge();
  }

  // --- copies ---

  // Starts to copy the keys or the values of the tile that begins with `key`, if the warp wants it.
  __device__ __forceinline__ void start(Tile& tile, const Operand& x, const Number* data, int64_t cols, int64_t key,
                                        int first_lookup, bool wanted) {
    if (wanted) {
      const int rows = static_cast<int>(smaller(kKeys, task.last_key - key));
      const auto* const first_row = reinterpret_cast<const S*>(kPaged ? data : data + key * x.row);
      if constexpr (kPaged) {
        const auto from = [&](unsigned first, int i) {
          const int lane = first_lookup % 32 + first + i;
          return first_row + __shfl_sync(~0u, in_pages[first_lookup / 32], lane) / kPerNumber;
        };
        copy_tile<32>(tile, rows, cols / kPerNumber, from, thread.lane);
      } else {
        load_tile<32>(tile, first_row, rows, cols / kPerNumber, x.row / kPerNumber, thread.lane);
      }
    }
    commit_copies();
  }
  __device__ __forceinline__ void start_keys(Stage& stage, const Number* data, int64_t key, bool wanted) {
    if constexpr (kPaged)
      for_lookups([&](int i, bool of_key, int row) {
        if (key + row < task.last_key)
          in_pages[i] = offset_in_pages(p, of_key ? p.key.page : p.value.page, of_key ? p.key.row : p.value.row, task.n,
                                        key + row);
      });
    start(stage.key, p.key, data, p.head_dim, key, 0, wanted);
  }
  __device__ __forceinline__ void start_values(Stage& stage, const Number* data, int64_t key, bool wanted) {
    start(stage.value, p.value, data, p.value_dim, key, kKeys, wanted);
  }

  // Calls f(i, of_key, row) for number i of those keys and values of a tile that this lane looks up.
  template <class F>
  __device__ __forceinline__ void for_lookups(F f) {
#pragma unroll
    for (int i = 0; i < kLookups; ++i) {
      const int number = 32 * i + thread.lane;
      f(i, number < kKeys, number % kKeys);
    }
  }

  // --- one warp ---

  struct NoMask {};
  // M: NoMask, or the type of the mask's numbers (with_mask_number()).
  template <class M>
  __device__ __forceinline__ void go_over_keys(Output& output, float (&best)[2], float (&sum)[2]) {
    constexpr bool kHasMask = !std::is_same_v<M, NoMask>;
    const Number* const keys = head_of<Number>(p, p.key, task.n, task.key_head);
    const Number* const values = head_of<Number>(p, p.value, task.n, task.value_head);
    Stage(&ring)[kStages] = shared.ring[thread.warp];
    int64_t key = task.first_key + kKeys * thread.warp;
    uint32_t wanted = 0;  // bit i: ring[i] gets a tile that shows some key
    const auto want = [&](int i, int64_t key) {
      const bool is_wanted = shows_some<M>(key);
      wanted = (wanted & ~(1u << i)) | static_cast<uint32_t>(is_wanted) << i;
      return is_wanted;
    };
    for (int i = 0; i < kStages; ++i) {
      const bool is_wanted = want(i, key + i * kStep);
      start_keys(ring[i], keys, key + i * kStep, is_wanted);
      start_values(ring[i], values, key + i * kStep, is_wanted);
    }
    // Each wait lets all copies but the oldest stay under way. The query's are older than all.
    wait_for_copies<2 * kStages>();
    __syncthreads();
    if constexpr (kEight) {
      reorder(shared.query);
      __syncthreads();
    }
    typename Fragments::Mask mask;
    if constexpr (kHasMask) read_mask<M>(mask, key);
    float scales[kLookups] = {};  // of the tile, as in_pages
    const auto read_scales = [&](int64_t key) {
      if constexpr (kEight)
        for_lookups([&](int i, bool of_key, int row) { scales[i] = shared.scales.of(p, task, of_key, key + row); });
    };
    read_scales(key);
    int at = 0;
#pragma unroll 1
    for (; key < task.last_key; key += kStep, at = at + 1 == kStages ? 0 : at + 1) {
      Stage& stage = ring[at];
      const int64_t ahead = key + kStages * kStep;
      const bool some_shown = wanted >> at & 1;
      wait_for_copies<2 * kStages - 1>();
      __syncwarp();  // all lanes have copied the keys
      Scores x = {};
      if (some_shown) add_products(x, stage.key);
      __syncwarp();  // all lanes have read the keys
      const bool some_ahead = want(at, ahead);
      start_keys(stage, keys, ahead, some_ahead);
      if (some_shown) {
        if constexpr (kEight) scale(x, scales, 0);
        make_scores<M>(x, mask, key);
        weigh(x, output, best, sum);
        if constexpr (kEight) scale(x, scales, kKeys);
      }
      read_scales(key + kStep);
      if constexpr (kHasMask) read_mask<M>(mask, key + kStep);
      wait_for_copies<2 * kStages - 1>();
      __syncwarp();  // all lanes have copied the values
      if (some_shown) add_values(output, x, stage.value);
      __syncwarp();  // all lanes have read the values
      start_values(stage, values, ahead, some_ahead);
    }
    wait_for_copies<0>();
    if constexpr (kEight) sort_columns(output[0]);
  }

  __device__ __forceinline__ void add_products(Scores& x, Tile& key) {
    if constexpr (kEight)
      with_eight_bits(p.key, [&]<bool kE4m3>() { add_dots_8<kE4m3>(x[0], shared.query, key); });
    else
      add_dots<1>(x, shared.query, 0, key);
  }
  // Multiplies products or weights by the scales of their keys (first_lookup = 0) or values (kKeys).
  __device__ __forceinline__ void scale(Scores& x, const float (&scales)[kLookups], int first_lookup) {
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float of_key = __shfl_sync(~0u, scales[first_lookup / 32], first_lookup % 32 + thread.col(n) + c);
        x[0][n][c] *= of_key, x[0][n][2 + c] *= of_key;
      }
  }

  // Reads the mask of the scores of the tile that begins with `key`, as add_mask() takes it: two keys at a time, whose
  // first one is even, because only tasks without keys begin anywhere else.
  template <class M>
  __device__ __forceinline__ void read_mask(typename Fragments::Mask& mask, int64_t key) {
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int64_t first = key + thread.col(n);
        const unsigned char* const from =
            shared.in_mask[thread.group + 8 * half] + first * p.mask.col * static_cast<int64_t>(sizeof(M));
        using Two = std::conditional_t<sizeof(M) == 1, uint16_t, uint32_t>;
        mask[n][half] = first < task.last_key ? *reinterpret_cast<const Two*>(from) : kHidden<S, M>;
      }
  }
  // Whether the tile that begins with `key` has keys, and the mask shows some of them to some row. Keys and values of
  // other tiles are not read.
  template <class M>
  __device__ __forceinline__ bool shows_some(int64_t key) {
    if (key >= task.last_key) return false;
    if constexpr (std::is_same_v<M, NoMask>) {
      return true;
    } else {
      typename Fragments::Mask mask;
      read_mask<M>(mask, key);
      uint32_t some = 0;
#pragma unroll
      for (const auto& of_rows : mask)
#pragma unroll
        for (const uint32_t two : of_rows) some |= two ^ kHidden<S, M>;
      return !__all_sync(~0u, some == 0);
    }
  }

  template <class M>
  __device__ __forceinline__ void make_scores(Scores& x, const typename Fragments::Mask& mask, int64_t key) {
    constexpr bool kHasMask = !std::is_same_v<M, NoMask>;
    float slope = ScoreFunction<float>::of(p).slope();
    if (kGeneral && (!kHasMask || has_terms(p))) {
      slope = 1;
      Fragments::add_terms(
          x[0], 0, p, [](float, int, int) {},
          [&](int i) { return static_cast<float>(shared.rows.position[i] + task.sequence.offset - key); },
          [&](int i) { return static_cast<const float*>(p.alibi_slopes)[task.n * p.heads + shared.rows.head[i]]; });
    }
    if constexpr (kHasMask)
      Fragments::template choose_add<M>([&] { return Fragments::all_finite(x); },
                                        [&]<auto kHow>() { Fragments::template add_mask<kHow>(x[0], mask, slope); });
    if (!task.all_visible(key, kKeys)) Fragments::hide_keys(x[0], 0, task.sequence, shared.rows, kRows, key);
  }

  __device__ __forceinline__ void weigh(Scores& x, Output& output, float (&best)[2], float (&sum)[2]) {
    const float old[2] = {best[0], best[1]};
    float shift[2], factor[2];
    softmax.raise(best, x);
    softmax.find_shift(x, old, best, shift, factor);
#pragma unroll
    for (int r = 0; r < 2; ++r) sum[r] = sum[r] * factor[r] + softmax.weigh(x, r, shift[r]);
    if (__all_sync(~0u, factor[0] == 1 && factor[1] == 1)) return;  // the largest scores are still the same
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (auto& four : output[0])
#pragma unroll
        for (int c = 0; c < 2; ++c) four[2 * r + c] *= factor[r];
  }

  __device__ __forceinline__ void add_values(Output& output, const Scores& x, Tile& value) {
    const auto weight = [&](int, int n, int half, int c) { return x[0][n][2 * half + c]; };
    if constexpr (kEight) {
      with_eight_bits(p.value, [&]<bool kE4m3>() {
#pragma unroll
        for (int key = 0; key < kKeys; key += 16)
          add_weighted_8<kE4m3, kSplitsWeights<S>, kDim>(
              output[0], value, key, [&](int n, int half, int c) { return weight(0, key / 8 + n, half, c); });
      });
    } else {
      add_weighted<1, Factor::as_it_is>(output, value, weight);
      if constexpr (kGeneral)  // see ForwardMma
        if (p.alibi_slopes && p.exact_residual)
          add_weighted<1, Factor::finite>(output, value, [&](int t, int n, int half, int c) {
            return weight(t, n, half, c) - to_float(from_float<S>(weight(t, n, half, c)));
          });
    }
  }

  // --- all warps ---

  // Adds the sums of the other warps to those of warp 0, in the order of the warps, so the bits are always the same.
  __device__ __forceinline__ void add_up(Output& output, float (&best)[2], float (&sum)[2]) {
    __syncthreads();  // the rings have been read
    if (thread.warp > 0) {
      Sums& mine = shared.sums[thread.warp - 1];
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) mine.output[n][thread.lane].at[i] = output[0][n][i];
#pragma unroll
      for (int r = 0; r < 2; ++r) mine.best[r][thread.lane] = best[r], mine.sum[r][thread.lane] = sum[r];
    }
    __syncthreads();
    if (thread.warp > 0) return;
    float factor[kWarps][2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float own = best[r];
      for (const Sums& other : shared.sums) best[r] = max_or_nan(other.best[r][thread.lane], best[r]);
      const float shift = shift_of(best[r]);
      factor[0][r] = softmax.factor(own, shift);
      sum[r] *= factor[0][r];
#pragma unroll
      for (int w = 1; w < kWarps; ++w) {
        const Sums& other = shared.sums[w - 1];
        factor[w][r] = softmax.factor(other.best[r][thread.lane], shift);
        sum[r] += factor[w][r] * other.sum[r][thread.lane];
      }
    }
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& total = output[0][n][i];
        total *= factor[0][i / 2];
#pragma unroll
        for (int w = 1; w < kWarps; ++w) total += factor[w][i / 2] * shared.sums[w - 1].output[n][thread.lane].at[i];
      }
  }

  // If this block has written the last split of its task, it merges all of them. They are added in the order of their
  // numbers, so the bits do not depend on which block is the last.
  __device__ __forceinline__ void merge() {
    if (thread.warp == 0) {
      __syncwarp();  // all lanes have written
      if (thread.lane == 0) shared.is_last = take_ticket(p.counters + shared.counter) == p.splits - 1;
    }
    __syncthreads();
    if (!shared.is_last) return;
    for (int i = thread.warp; i < task.rows; i += kWarps)
      for (int64_t part = 0; part < MergeManyRows::parts(p); ++part)
        merge_row<float, MergeManyRows>(p, shared.rows.at(task.n, i), part, 0, thread.lane);
  }

  __device__ __forceinline__ void write(const Output& output, const float (&best)[2], float (&sum)[2]) {
    const int64_t output_base = batch_offset(p, p.output, task.n);
    const int64_t residual_base = p.residual.data ? batch_offset(p, p.residual, task.n) : 0;
    const bool vectors = softmax.writes_vectors(p);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
      sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
      const int i = thread.group + 8 * r;
      const OutputRow<float> to(p, output_base, residual_base, shared.rows.at(task.n, i), task.split);
      softmax.template write<S>(to, vectors, i < task.rows, output, r, best[r], sum[r]);
    }
  }
};

template <class S, int kDim, bool kPaged, bool kEight>
Error launch_decode(const ForwardParams& p, Stream stream) {
  if (Error error = clear_counters(p.counters, p.counter_count, stream)) return error;
  return is_general(p) ? launch_blocks<DecodeMma<S, kDim, true, kPaged, kEight>>(p, stream)
                       : launch_blocks<DecodeMma<S, kDim, false, kPaged, kEight>>(p, stream);
}

template <class S, int kDim, bool kPaged>
Error launch_decode_mma(const ForwardParams& p, Stream stream) {
  return launch_decode<S, kDim, kPaged, false>(p, stream);
}
template <class S, int kDim, bool kPaged>
Error launch_decode_eight_bits(const ForwardParams& p, Stream stream) {
  return launch_decode<S, kDim, kPaged, true>(p, stream);
}

}  // namespace attn::cuda
