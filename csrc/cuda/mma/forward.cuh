// Computes the forward where uses_mma() says so: bfloat16 and float16 on tensor cores, up to head_dim 256. As in
// FlashAttention-2 (Dao, 2023), a warp owns rows, and their weights stay in registers between the two products. K and V
// are read once per kRows rows. kRows is at most 128, or 64 if head_dim exceeds 128, because registers have no room for
// the sums of more rows. While a tile of keys is in use, the tile of their values is copied. While the values are in
// use, the next tile of keys is copied. The tile of keys, the tile of values and the rows fill shared memory.
#pragma once

#include "cuda/kernels.h"
#include "cuda/launch.cuh"
#include "cuda/mma/eight_bits.cuh"
#include "cuda/mma/mask_tile.cuh"
#include "cuda/mma/online_softmax.cuh"

namespace attn::cuda {

// S: the type of the query, and of key and value of 16 bits. kDim: head_dim of key and value, padded. kTiles: tiles of
// 16 rows per warp. kGeneral: see is_general(). kPaged: whether keys and values are stored in pages. kStored: how; a
// tile of 8 bits is widened as it is loaded.
template <class S, int kDim, int kTiles, bool kGeneral, bool kPaged = false, Stored kStored = Stored::vectors>
struct ForwardMma {
  // Returns the number of blocks whose registers must fit into a multiprocessor at a time, or 0 if the compiler chooses
  // how many registers a thread has. On an H100 three blocks per multiprocessor are faster than two. For few rows with
  // head_dim 128, four blocks are faster than three, though each thread then spills up to four addresses from registers
  // to memory.
  static constexpr int blocks_at_a_time() {
    if (kGeneral) return 0;
    if (kDim == 128 && kTiles == 1) return 4;
    return kDim <= 64 && kTiles > 1 && !kPaged ? 3 : 0;
  }
  static constexpr int kThreads = kMmaThreads, kBlocks = blocks_at_a_time();
  static constexpr int kRows = kMmaThreads / 32 * 16 * kTiles;
  static constexpr int kKeys = kGeneral && kDim > 128 ? 32 : 64;  // of a tile: a mask's tile needs shared memory, too
  static_assert(kKeysPerTile % kKeys == 0);
  static constexpr bool kFewRegisters = kDim > 64 && kTiles > 1;
  static constexpr int kDropoutAtOnce = kFewRegisters ? 1 : kKeys / 16;  // see ScoresMma::dropout_mask()
  static constexpr bool kEight = kStored == Stored::eight_bits;
  using Number = std::conditional_t<kEight, uint8_t, S>;
  using Value = std::conditional_t<kEight, BFloat16, S>;  // see kSplitsWeights
  static_assert(kStored == Stored::vectors || kTiles == 1);

  struct Shared {
    MmaTile<S, kRows, kDim> query;
    MmaTile<S, kKeys, kDim> key;
    MmaTile<Value, kKeys, kDim> value;
    Task task;
    int64_t mask_base;  // where the batch entry begins in the mask
    Dropout dropout;
    const Number* key_data;  // of the batch entry and head
    const Number* value_data;
    RowTile<kRows> rows;
    // `maximum` and `sum` are read and written once per tile of keys, so registers need not keep them. `sum` holds one
    // number for each thread and row: the sum of the weights in the thread's own columns.
    float maximum[kRows];
    float sum[2 * kTiles][kMmaThreads];
    uint32_t head_number[kGeneral ? kRows : 1];                      // of dropout's counters
    alignas(16) const unsigned char* in_mask[kGeneral ? kRows : 1];  // where the row begins
    std::conditional_t<kGeneral, MaskTile<S, kRows, kKeys, !kFewRegisters>, Nothing> mask;
    std::conditional_t<kEight, ScaleTiles<kKeys>, Nothing> scales;
  };
  using Fragments = ScoresMma<S, kKeys / 8, false>;
  using Scores = typename Fragments::Scores[kTiles];
  using Output = float[kTiles][kDim / 8][4];
  using InPages = PagedRows<kKeys, kDim>;

  const ForwardParams& p;
  Shared& shared;
  const Task& task;
  const OnlineSoftmax<kTiles, kKeys / 8, kGeneral> softmax;
  // Knows where the pages hold the next tile of keys and the values of these keys.
  std::conditional_t<kPaged, InPages, Nothing> in_pages;

  __device__ ForwardMma(const ForwardParams& p, Shared& shared) : p(p), shared(shared), task(shared.task), softmax{p} {}

  ATTN_INLINE static constexpr int64_t blocks(const ForwardParams& p) { return p.splits * blocks_of_rows(p, kRows); }

  // Called by one thread, followed by a barrier.
  __device__ void set(int64_t number) {
    shared.task.set(p, number, kRows, kKeys);
    if (task.rows == 0) return;
    const int64_t n = task.n;
    if (p.has_dropout) shared.dropout.set(p, n);
    shared.key_data = head_of<Number>(p, p.key, n, task.key_head);
    shared.value_data = head_of<Number>(p, p.value, n, task.value_head);
    if (p.has_mask) shared.mask_base = batch_offset(p, p.mask, n);
    if constexpr (kEight) shared.scales.set(p, task);
  }

  // Both functions count rows from the start of the block's tile. The first function returns the first row of a warp's
  // tile t. The second function returns the row of a thread's elements in tile t: of elements 0 and 1 if `half` is 0,
  // or of elements 2 and 3 if `half` is 1.
  __device__ static __forceinline__ int row(const MmaThread& thread, int t) { return 16 * (kTiles * thread.warp + t); }
  __device__ static __forceinline__ int row(const MmaThread& thread, int t, int half) {
    return row(thread, t) + thread.group + 8 * half;
  }

  // Where registers are fewest, the address of each row is computed by a multiplication, because an addition would keep
  // the previous row's address in registers. `place`: see PagedRows.
  template <class Tile>
  __device__ __forceinline__ void load_rows(Tile& tile, const Operand& x, const Number* data, int64_t key, int keys,
                                            int64_t cols, int place) {
    const auto load = [&](auto copy) {
      if constexpr (kPaged)
        in_pages.load(tile, data, keys, cols, place, copy);
      else if constexpr (kGeneral && kFewRegisters)
        load_tile(tile, data + key * x.row, keys, cols, [&](int j) { return j * x.row; });
      else
        load_tile(tile, data + key * x.row, keys, cols, x.row, thread_index(), copy);
    };
    if constexpr (kEight)
      with_eight_bits(x, [&]<bool kE4m3>() { load(Widen<kE4m3>{}); });
    else if constexpr (kStored == Stored::numbers)
      load(CopyNumbers{cols, x.col});
    else
      load(CopyAsync{});
  }
  __device__ __forceinline__ void find_in_pages(int64_t key) {
    if constexpr (kPaged) in_pages.find(p, task.n, key, task.last_key);
  }
  // The number of keys of the tile that begins with `key`; 0 or less beyond the last tile.
  __device__ __forceinline__ int keys_from(int64_t key) const {
    return static_cast<int>(smaller(kKeys, task.last_key - key));
  }

  __device__ __forceinline__ void run(int64_t number) {
    if (threadIdx.x == 0) set(number);
    __syncthreads();
    if (task.rows == 0) return;
    Output output = {};
    for (int i = threadIdx.x; i < kRows; i += kMmaThreads) shared.maximum[i] = -infinity<float>();
    for (auto& sums : shared.sum) sums[threadIdx.x] = 0;
    for (int i = threadIdx.x; i < kRows; i += kMmaThreads) shared.rows.set(i, task.sequence, task.row_at(), task.rows);
    if constexpr (kGeneral)
      for (int i = threadIdx.x; i < kRows; i += kMmaThreads) {  // the rows that this thread has set
        if (p.has_dropout) shared.head_number[i] = shared.dropout.head(p, task.n, shared.rows.head[i]);
        if (p.has_mask)
          shared.in_mask[i] = static_cast<const unsigned char*>(p.mask.data) +
                              mask_number_bytes(p) * (shared.mask_base + shared.rows.offset(p.mask, i));
      }
    __syncthreads();
    if constexpr (kGeneral)
      if (p.has_mask) with_mask_number(p, [&]<class M>() { go_over_keys<M>(output); });
    if (!p.has_mask) go_over_keys<NoMask>(output);
    write(output);
  }

  struct NoMask {};
  // M: NoMask, or the type of the mask's numbers (with_mask_number()).
  template <class M>
  __device__ __forceinline__ void go_over_keys(Output& output) {
    constexpr bool kHasMask = !std::is_same_v<M, NoMask>;
    int64_t key = task.first_key;
    int keys = keys_from(key);
    if constexpr (kHasMask) {
      start_mask<M>(key, keys);
      wait_for_copies<0>();
      find_shown<M>(key, keys);
    }
    if (keys > 0) {
      load_tile(shared.query, head_of<S>(p, p.query, task.n, 0), task.rows, p.head_dim,
                [&](int i) { return shared.rows.offset(p.query, i); });
      find_in_pages(key);
      start_key(key, keys);
    }
    while (keys > 0) {
      wait_for_copies<0>();
      __syncthreads();  // the keys are copied, and the previous values have been read
      load_rows(shared.value, p.value, shared.value_data, key, keys, p.value_dim, InPages::kOfValues);
      commit_copies();
      if constexpr (!kHasMask) find_in_pages(key + kKeys);  // is copied during the products
      Scores x = {};
      if (has_rows()) add_dots<kTiles>(x, shared.query, row(MmaThread(), 0), shared.key);
      if constexpr (!kHasMask) {
        wait_for_copies<0>();
        __syncthreads();  // the values are copied, and the keys have been read
        start_key(key + kKeys, keys_from(key + kKeys));
      }
      if (has_rows()) make_scores<M>(x, key);
      if constexpr (kHasMask) start_mask<M>(key + kKeys, keys_from(key + kKeys));  // is copied during the softmax
      if (has_rows()) {
        weigh(x, output);
        if constexpr (kEight) scale(x, shared.scales.of_values(key));
        if constexpr (kGeneral)
          if (p.has_dropout) drop(x, key);
      }
      key += kKeys;
      keys = keys_from(key);
      if constexpr (kHasMask) {
        wait_for_copies<0>();
        find_shown<M>(key, keys);
        find_in_pages(key);
        start_key(key, keys);
      }
      const auto weight = [&](int t, int n, int half, int c) { return x[t][n][2 * half + c]; };
      constexpr bool kSplits = kEight && kSplitsWeights<S>;
      if (has_rows())
        add_weighted<kTiles, Factor::as_it_is>(output, shared.value, [&](int t, int n, int half, int c) {
          return kSplits ? high_part(weight(t, n, half, c)) : weight(t, n, half, c);
        });
      if constexpr (kSplits)
        if (has_rows())
          add_weighted<kTiles, Factor::as_it_is>(
              output, shared.value, [&](int t, int n, int half, int c) { return low_part(weight(t, n, half, c)); });
      // Also adds the products of the values with the rounding errors of the weights. Gradients of slopes need these
      // products, because such a gradient multiplies dS by distances. Infinite values count as 0 here, because the
      // products above include them already, and a rounding error of 0 times infinity would be NaN.
      if constexpr (kGeneral && !kEight)
        if (p.alibi_slopes && (p.exact_residual || p.invariant) && has_rows())
          add_weighted<kTiles, Factor::finite>(output, shared.value, [&](int t, int n, int half, int c) {
            return weight(t, n, half, c) - to_float(from_float<S>(weight(t, n, half, c)));
          });
    }
  }

  __device__ __forceinline__ void start_key(int64_t key, int keys) {
    if (keys <= 0) return;
    load_rows(shared.key, p.key, shared.key_data, key, keys, p.head_dim, InPages::kOfKeys);
    if constexpr (kEight) shared.scales.load(p, task, key);
    commit_copies();
  }

  template <class M>
  __device__ __forceinline__ void start_mask(int64_t key, int keys) {
    if (keys <= 0) return;
    __syncwarp();  // the previous mask has been read
    shared.mask.template copy<M>(p, [&](int i) { return shared.in_mask[i]; }, key);
    commit_copies();
  }
  // Moves `key` on to the first tile that the mask does not hide entirely, which may be the tile at `key` itself. The
  // caller has copied the mask of the tile at `key`. Does not read keys and values of hidden tiles. Ends with a
  // barrier, after which pending copies are complete and the previous keys have been read.
  template <class M>
  __device__ __forceinline__ void find_shown(int64_t& key, int& keys) {
    while (!__syncthreads_or(keys <= 0 || shared.mask.template shows_some<M>())) {
      key += kKeys;
      keys = keys_from(key);
      start_mask<M>(key, keys);
      wait_for_copies<0>();
    }
  }

  // If there are few rows, the first warps have all rows, and further warps only copy.
  __device__ __forceinline__ bool has_rows() const { return kTiles > 1 || row(MmaThread(), 0) < task.rows; }

  // With kGeneral, turns products into scores. Without kGeneral, leaves products as they are, and weight() scales them
  // later. Sets a number of x to -inf if its key is hidden from its row or does not exist.
  template <class M>
  __device__ __forceinline__ void make_scores(Scores& x, int64_t key) {
    constexpr bool kHasMask = !std::is_same_v<M, NoMask>;
    if constexpr (kEight) scale(x, shared.scales.of_keys(key));
    float slope = ScoreFunction<float>::of(p).slope();
    if (kGeneral && (!kHasMask || has_terms(p))) {
      slope = 1;
#pragma unroll
      for (int t = 0; t < kTiles; ++t)
        Fragments::add_terms(
            x[t], row(MmaThread(), t), p, [](float, int, int) {},
            [&](int i) { return static_cast<float>(shared.rows.position[i] + task.sequence.offset - key); },
            [&](int i) { return static_cast<const float*>(p.alibi_slopes)[task.n * p.heads + shared.rows.head[i]]; });
    }
    if constexpr (kHasMask) {
      const auto finite = [&] { return Fragments::template all_finite<kTiles>(x); };
      const auto add = [&]<auto kHow>() {
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          typename Fragments::Mask of_tile;
          shared.mask.template read<M>(of_tile, t);
          Fragments::template add_mask<kHow>(x[t], of_tile, slope);
        }
      };
      Fragments::template choose_add<M>(finite, add);
    }
    if (task.all_visible(key, kKeys)) return;
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
      Fragments::hide_keys(x[t], row(MmaThread(), t), task.sequence, shared.rows, kRows, key);
  }

  // Multiplies products or weights by the scales of the tile's keys or values.
  __device__ __forceinline__ void scale(Scores& x, const float* scales) {
#pragma unroll
    for (auto& of_tile : x)
      Fragments::each(of_tile, 0, [&](float& number, int, int j, int, int) { number *= scales[j]; });
  }

  // Turns scores into weights. Rescales the sums and the output of earlier tiles to the new maximum.
  __device__ __forceinline__ void weigh(Scores& x, Output& output) {
    const MmaThread thread;
    float old[2 * kTiles], best[2 * kTiles], shift[2 * kTiles], factor[2 * kTiles];
#pragma unroll
    for (int r = 0; r < 2 * kTiles; ++r) old[r] = best[r] = shared.maximum[row(thread, r / 2, r % 2)];
    softmax.raise(best, x);
    __syncwarp();  // all lanes of a row have read its maximum; shuffles wait for lanes, but do not order memory
    softmax.find_shift(x, old, best, shift, factor);
#pragma unroll
    for (int r = 0; r < 2 * kTiles; ++r) {
      if (thread.place == 0) shared.maximum[row(thread, r / 2, r % 2)] = best[r];
      const float total = softmax.weigh(x, r, shift[r]);
      float& sum = shared.sum[r][32 * thread.warp + thread.lane];
      sum = sum * factor[r] + total;
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n)
#pragma unroll
        for (int c = 0; c < 2; ++c) output[r / 2][n][2 * (r % 2) + c] *= factor[r];
    }
  }

  __device__ __forceinline__ void drop(Scores& x, int64_t key) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const int own = row(MmaThread(), t);
      typename Fragments::Kept kept;
      Fragments::template dropout_mask<kDropoutAtOnce>(
          kept, own, shared.dropout,
          [&](int i, int) { return DropoutRow{static_cast<uint32_t>(shared.rows.position[i]), shared.head_number[i]}; },
          key);
      Fragments::each(x[t], own, [&](float& weight, int, int, int half, int bit) {
        if (!(kept[half] >> bit & 1)) weight *= 0;  // so that a NaN remains
      });
    }
  }

  __device__ __forceinline__ void write(const Output& output) {
    __syncwarp();  // the maxima are written
    const MmaThread thread;
    const int64_t output_base = batch_offset(p, p.output, task.n);
    const int64_t residual_base = p.residual.data ? batch_offset(p, p.residual, task.n) : 0;
    const bool vectors = softmax.writes_vectors(p);
#pragma unroll
    for (int r = 0; r < 2 * kTiles; ++r) {
      float total = shared.sum[r][threadIdx.x];
      total += __shfl_xor_sync(~0u, total, 1);
      total += __shfl_xor_sync(~0u, total, 2);
      const int i = row(thread, r / 2, r % 2);
      if (i >= task.rows && !vectors) continue;
      const OutputRow<float> to(p, output_base, residual_base, shared.rows.at(task.n, i), task.split);
      softmax.template write<S>(to, vectors, i < task.rows, output, r, shared.maximum[i], total);
    }
  }
};

// Calls with kGeneral and pages are rare. Only blocks of few rows are instantiated for these calls, which saves compile
// time. The splits are already planned, so these smaller blocks change no bits.
template <class S, int kDim, bool kPaged>
Error launch_forward_mma(const ForwardParams& p, Stream stream) {
  if constexpr (kPaged)
    if (is_general(p)) {
      ForwardParams of_few_rows = p;
      of_few_rows.rows_per_task = forward_mma_rows(1);
      return launch_blocks<ForwardMma<S, kDim, 1, true, kPaged>>(of_few_rows, stream);
    }
  const auto run = [&]<int kTiles>() {
    if constexpr (!kPaged)
      if (is_general(p)) return launch_blocks<ForwardMma<S, kDim, kTiles, true>>(p, stream);
    return launch_blocks<ForwardMma<S, kDim, kTiles, false, kPaged>>(p, stream);
  };
  constexpr int kMostTiles = forward_mma_tiles(kDim);
  return p.rows_per_task == forward_mma_rows(kMostTiles) ? run.template operator()<kMostTiles>()
                                                         : run.template operator()<1>();
}

// Other ways to store keys and values are rare here, too. For them only blocks of few rows with kGeneral are
// instantiated, which saves compile time.
template <class S, int kDim>
Error launch_forward_numbers(const ForwardParams& p, Stream stream) {
  return launch_blocks<ForwardMma<S, kDim, 1, true, true, Stored::numbers>>(p, stream);
}
template <class S, int kDim, bool kPaged>
Error launch_forward_eight_bits(const ForwardParams& p, Stream stream) {
  return launch_blocks<ForwardMma<S, kDim, 1, true, kPaged, Stored::eight_bits>>(p, stream);
}

}  // namespace attn::cuda
