// The gradients of backward_simt.cuh for bfloat16 and float16 on tensor cores, up to head_dim 256. A block owns 64 keys
// (dK and dV, over all rows that read them) or 64 rows (dQ, over all keys); a warp owns 16 of those. Every product is
// one of
//
//   own other^T      x = K Q^T, dP = V G^T     or  x = Q K^T, dP = G V^T
//   (16-bit x) other  dV += (P * Z)^T G, dK += dS^T Q   or  dQ += dS K
//
// so that weights stay in registers from the first to the second, and sums are added up in the order of the tiles.
#pragma once

#include <type_traits>

#include "kernels.h"
#include "launch.cuh"
#include "scores_mma.cuh"

namespace attn::cuda {

// What the backward knows of up to kRows consecutive rows of a group of heads, in shared memory.
template <int kRows>
struct BackwardRows {
  RowTile<kRows> rows;
  float logsumexp[kRows];  // +inf for a row that attends to no key: its weights are 0
  float logsumexp_low[kRows];
  float delta[kRows];
  uint32_t head_number[kRows];  // of dropout's counters
  int count;
  Range positions;  // holds those of all rows

  // Called by all threads, followed by a barrier.
  __device__ __forceinline__ void set(const BackwardParams& p, const Dropout& dropout, int64_t n, int64_t first_head,
                                      int64_t first, int rows_there) {
    rows.set(p, n, first_head, first, rows_there);
    for (int i = thread_index(); i < kRows; i += kMmaThreads) {  // the rows that this thread has set
      const int64_t r = row_number(p, n, rows.head[i], rows.position[i]);
      const float* pair = static_cast<const float*>(p.logsumexp) + 2 * r;
      const bool empty = pair[0] == -infinity<float>();
      logsumexp[i] = empty ? infinity<float>() : pair[0];
      logsumexp_low[i] = empty ? 0 : pair[1];
      delta[i] = static_cast<const float*>(p.delta)[r];
      if (p.has_dropout) head_number[i] = dropout.head(p, n, rows.head[i]);
      if (i > 0) continue;
      count = rows_there;
      positions = positions_of_rows(p, n, first_head, first, rows_there);
    }
  }
};

// Keys of a block that owns keys, and rows of one that owns rows.
constexpr int kMmaOwn = 64;

// The gradients that a block computes a part of: two at once only up to head_dim 128, as registers hold no more sums.
enum class MmaGradient { query, key, value, key_and_value };

template <class S, int kDim, MmaGradient kOf, bool kGeneral>
struct BackwardMma {
  static constexpr bool kOwnsKeys = kOf != MmaGradient::query;
  static constexpr bool kNeedsDs = kOf != MmaGradient::value;  // dQ = dS K or dK = dS^T Q
  static constexpr bool kSumsValue = kOf == MmaGradient::value || kOf == MmaGradient::key_and_value;  // dV = P^T G
  static constexpr int kOwn = kMmaOwn;
  static constexpr int kOther = kDim <= 64 ? 64 : kDim <= 128 ? 32 : 16;  // as registers and shared memory allow
  static constexpr int kStages = 2;  // of the tiles that it does not own: one is used while the next is copied
  static constexpr float kLog2E = 1.4426950408889634f;

  using Own = MmaTile<S, kOwn, kDim>;
  using Other = MmaTile<S, kOther, kDim>;
  struct Shared {
    // Of the products K Q^T and V G^T, or Q K^T and G V^T, the left factors, which the block owns, and the right ones.
    Own own_score, own_dp;
    struct {
      Other score, dp;
    } other[kStages];
    BackwardRows<kOwnsKeys ? kOther : kOwn> rows[kOwnsKeys ? kStages : 1];
    Dropout dropout;
    int64_t n;
    int64_t first_key, last_key;  // the keys that the block owns, or that the rows see which it owns
    const S *query_data, *grad_output_data, *key_data, *value_data;  // of the batch entry, and of the keys' heads
    bool query_aligned, grad_output_aligned, key_aligned, value_aligned;
    int64_t mask_base, grad_mask_base;
  };
  static_assert(sizeof(Shared) <= 99 << 10, "the shared memory of a block on sm_86 and sm_89");
  using Fragments = ScoresMma<kOther / 8, kOwnsKeys>;
  using Scores = typename Fragments::Scores;
  using Kept = typename Fragments::Kept;
  using Sums = float[kDim / 8][4];

  const BackwardParams& p;
  Shared& shared;

  // Called by one thread, followed by a barrier.
  __device__ void set(int64_t n) {
    shared.n = n;
    if (p.has_dropout) shared.dropout.set(p, n);
    shared.query_data = static_cast<const S*>(p.query.data) + batch_offset(p, p.query, n);
    shared.grad_output_data = static_cast<const S*>(p.grad_output.data) + batch_offset(p, p.grad_output, n);
    shared.query_aligned = chunks_are_aligned(p, p.query, p.head_dim);
    shared.grad_output_aligned = chunks_are_aligned(p, p.grad_output, p.value_dim);
    shared.key_aligned = chunks_are_aligned(p, p.key, p.head_dim);
    shared.value_aligned = chunks_are_aligned(p, p.value, p.value_dim);
    if (p.has_mask) shared.mask_base = batch_offset(p, p.mask, n);
    if (p.grad_mask.data) shared.grad_mask_base = batch_offset(p, p.grad_mask, n);
  }
  // The same, for the group of heads that begins with `head`.
  __device__ void set_key_heads(int64_t head) {
    shared.key_data =
        static_cast<const S*>(p.key.data) + batch_offset(p, p.key, shared.n) + key_head_of(p, head) * p.key.head;
    shared.value_data = static_cast<const S*>(p.value.data) + batch_offset(p, p.value, shared.n) +
                        value_head_of(p, head) * p.value.head;
  }

  template <class Tile>
  __device__ __forceinline__ void load_keys(Tile& key_tile, Tile& value_tile, int64_t key, int64_t last) {
    load_tile(key_tile, shared.key_data + key * p.key.row, p.key.col, shared.key_aligned, last - key, p.head_dim,
              [&](int j) { return j * p.key.row; });
    if constexpr (kNeedsDs)
      load_tile(value_tile, shared.value_data + key * p.value.row, p.value.col, shared.value_aligned, last - key,
                p.value_dim, [&](int j) { return j * p.value.row; });
  }
  // Called after rows.set() and a barrier.
  template <class Tile, class Rows>
  __device__ __forceinline__ void load_rows(Tile& query_tile, Tile& grad_output_tile, const Rows& rows) {
    load_tile(query_tile, shared.query_data, p.query.col, shared.query_aligned, rows.count, p.head_dim,
              [&](int i) { return rows.rows.offset(p.query, i); });
    load_tile(grad_output_tile, shared.grad_output_data, p.grad_output.col, shared.grad_output_aligned, rows.count,
              p.value_dim, [&](int i) { return rows.rows.offset(p.grad_output, i); });
  }

  __device__ __forceinline__ void run(int64_t number) {
    if constexpr (kOwnsKeys)
      run_keys(number);
    else
      run_query(number);
  }

  __device__ __forceinline__ void run_keys(int64_t number) {
    const int64_t heads = kNeedsDs ? p.key_heads : p.value_heads;
    const int64_t key_tasks = divide_up(p.keys, kOwn);
    const int64_t readers = p.heads / heads;
    const int64_t first_head = number / key_tasks % heads * readers;
    if (thread_index() == 0) {
      set(number / key_tasks / heads);
      shared.first_key = number % key_tasks * kOwn;
      shared.last_key = smaller(shared.first_key + kOwn, key_length(p, shared.n, first_head));
    }
    Sums of_ds = {}, of_weights = {};
    for (int64_t head = first_head; head < first_head + readers; head += p.group) {
      if (thread_index() == 0) set_key_heads(head);
      __syncthreads();  // the last group's tiles have been read
      int64_t row = visible_row(0);
      if (row >= p.rows()) continue;
      load_keys(shared.own_score, shared.own_dp, shared.first_key, shared.last_key);
      set_rows(head, row, 0);
      __syncthreads();
      load_rows(shared.other[0].score, shared.other[0].dp, shared.rows[0]);
      commit_copies();
      for (int stage = 0; row < p.rows(); stage ^= 1) {
        wait_for_copies<0>();
        __syncthreads();  // the rows are there, and those before have been read
        row = visible_row(row + kOther);
        if (row < p.rows()) {
          set_rows(head, row, stage ^ 1);
          __syncthreads();  // it is known where the next rows lie
          load_rows(shared.other[stage ^ 1].score, shared.other[stage ^ 1].dp, shared.rows[stage ^ 1]);
          commit_copies();
        }
        add_tile(of_ds, of_weights, stage, shared.first_key);
      }
    }
    if constexpr (kNeedsDs)
      if (p.grad_key.data) write_keys(p.grad_key, first_head / readers, p.head_dim, of_ds, slope());
    if constexpr (kSumsValue)
      if (p.grad_value.data)
        write_keys(p.grad_value, first_head / readers, p.value_dim, of_weights, static_cast<float>(p.keep_scale));
  }

  __device__ __forceinline__ void set_rows(int64_t head, int64_t row, int stage) {
    shared.rows[stage].set(p, shared.dropout, shared.n, head, row, static_cast<int>(smaller(kOther, p.rows() - row)));
  }

  // The first tile of rows from `row` on, a multiple of kOther, that sees one of the block's keys.
  __device__ __forceinline__ int64_t visible_row(int64_t row) const {
    const int64_t length = query_length(p, shared.n, 0);  // of every head of the list of rows
    const Range seen = visible_rows(p, {shared.first_key, shared.last_key}, length);
    if (seen.empty()) return p.rows();
    const int64_t first = row % length, last = first + kOther;  // positions of the tile, of whose rows some may be
    if (last > length || last > seen.first) return row;         // the next head's, which begin with 0 again
    return row + divide_up(seen.first + 1 - last, kOther) * kOther;
  }

  __device__ __forceinline__ void run_query(int64_t number) {
    const int64_t row_tasks = divide_up(p.rows(), kOwn);
    const int64_t row = (row_tasks - 1 - number % row_tasks) * kOwn;  // those with most keys under causality first
    const int64_t head = number / row_tasks % p.groups() * p.group;
    const int count = static_cast<int>(smaller(kOwn, p.rows() - row));
    if (thread_index() == 0) {
      set(number / row_tasks / p.groups());
      set_key_heads(head);
      const Range positions = positions_of_rows(p, shared.n, head, row, count);
      const Range seen = in_tiles(visible_keys(p, positions, key_length(p, shared.n, head)), kOther);
      shared.first_key = seen.first;
      shared.last_key = seen.last;
    }
    __syncthreads();
    shared.rows[0].set(p, shared.dropout, shared.n, head, row, count);
    __syncthreads();
    Sums of_ds = {}, of_weights = {};
    if (shared.first_key < shared.last_key) {
      load_rows(shared.own_score, shared.own_dp, shared.rows[0]);
      load_keys(shared.other[0].score, shared.other[0].dp, shared.first_key, shared.last_key);
      commit_copies();
    }
    int stage = 0;
    for (int64_t key = shared.first_key; key < shared.last_key; key += kOther, stage ^= 1) {
      wait_for_copies<0>();
      __syncthreads();  // the keys are there, and those before have been read
      if (key + kOther < shared.last_key) {
        load_keys(shared.other[stage ^ 1].score, shared.other[stage ^ 1].dp, key + kOther, shared.last_key);
        commit_copies();
      }
      add_tile(of_ds, of_weights, stage, key);
    }
    if (!p.grad_query.data) return;
    const MmaThread thread;
    const int64_t base = batch_offset(p, p.grad_query, shared.n);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = own(thread, half);
      if (i < count)
        write(p.grad_query, base + shared.rows[0].rows.offset(p.grad_query, i), p.head_dim, of_ds, half, slope());
    }
  }

  __device__ __forceinline__ float slope() const { return ScoreFunction<float>::of(p).slope(); }

  // The first of the 16 rows or keys of the warp; and that of a thread's elements 0, 1 (half 0) or 2, 3 (half 1).
  static __device__ __forceinline__ int own(const MmaThread& thread) { return 16 * thread.warp; }
  static __device__ __forceinline__ int own(const MmaThread& thread, int half) {
    return own(thread) + thread.group + 8 * half;
  }
  template <class F>
  static __device__ __forceinline__ void each(Scores& x, F f) {
    Fragments::each(x, own(MmaThread()), f);
  }

  // Adds what the tile of rows or keys of a stage contributes; `key` is the first of the tile of keys.
  __device__ __forceinline__ void add_tile(Sums& of_ds, Sums& of_weights, int stage, int64_t key) {
    auto& other = shared.other[stage];
    const auto& rows = shared.rows[kOwnsKeys ? stage : 0];
    Scores x = {};
    multiply(x, shared.own_score, other.score);
    const bool finite = all_finite(x);
    make_scores(x, rows, key);
    recompute_weights(x, rows);
    Kept kept = {~0u, ~0u};
    if constexpr (kGeneral)
      if (p.has_dropout)
        Fragments::dropout_mask(kept, own(MmaThread()), shared.dropout, rows.rows, rows.head_number, key);
    if constexpr (kSumsValue)
      if (p.grad_value.data) {
        uint32_t a[kOther / 16][4];
        pack_kept(a, x, kept);
        accumulate<false>(of_weights, a, other.dp);
      }
    if constexpr (kNeedsDs) {
      if (kOwnsKeys && !p.grad_key.data) return;
      Scores dx = {};
      multiply(dx, shared.own_dp, other.dp);
      compute_ds(x, dx, rows, kept);
      if constexpr (!kOwnsKeys)
        if (p.grad_mask.data && !p.mask_is_shared) write_mask(x, rows, key);
      if (!kOwnsKeys && !p.grad_query.data) return;
      uint32_t a[kOther / 16][4];
      const Kept all = {~0u, ~0u};
      pack_kept(a, x, all);
      if (finite)
        accumulate<false>(of_ds, a, other.score);
      else
        accumulate<true>(of_ds, a, other.score);
    }
  }

  // x += own other^T
  static __device__ __forceinline__ void multiply(Scores& x, Own& own_tile, Other& other) {
    const MmaThread thread;
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
      uint32_t a[4];
      load_a(a, own_tile, thread.lane, own(thread), k);
#pragma unroll
      for (int n = 0; n < kOther / 8; n += 2) {
        uint32_t b[4];
        load_b_transposed(b, other, thread.lane, 8 * n, k);
        multiply_add<S>(x[n], a, b[0], b[1]);
        multiply_add<S>(x[n + 1], a, b[2], b[3]);
      }
    }
  }

  // Whether all products of the warp are finite: those of a query or key that holds a NaN or an infinity are not.
  static __device__ __forceinline__ bool all_finite(Scores& x) {
    float zeros = 0;
    each(x, [&](float& product, int, int, int, int) { zeros += product * 0; });
#pragma unroll
    for (int lane = 1; lane < 32; lane *= 2) zeros += __shfl_xor_sync(~0u, zeros, lane);
    return zeros == 0;
  }

  // Products become scores; -inf where a key is masked or there is no row or key.
  template <class Rows>
  __device__ __forceinline__ void make_scores(Scores& x, const Rows& rows, int64_t key) {
    constexpr int kKeys = kOwnsKeys ? kOwn : kOther;
    const int first = own(MmaThread()), keys = static_cast<int>(smaller(kKeys, shared.last_key - key));
    const auto score_of = ScoreFunction<float>::of(p);
    each(x, [&](float& score, int, int, int, int) { score = score_of(score); });
    if constexpr (kGeneral)
      if (p.has_mask) Fragments::add_mask(x, first, p, shared.mask_base, rows.rows, key, keys);
    const bool hidden = !all_visible(p, rows.positions, {key, key + kKeys});
    const bool whole = kOwnsKeys ? rows.count == kOther : keys == kOther;
    if (hidden || !whole) Fragments::hide_keys(x, first, p, rows.rows, rows.count, key, keys, hidden);
  }

  // Scores become weights, exp(score - logsumexp).
  template <class Rows>
  static __device__ __forceinline__ void recompute_weights(Scores& x, const Rows& rows) {
    each(x, [&](float& score, int i, int, int, int) {
      const float shifted = (score - rows.logsumexp[i]) - rows.logsumexp_low[i];
      score = score == -infinity<float>() ? 0 : exp2_approx(shifted * kLog2E);
    });
  }

  // Weights in x become dS = P (Z dP - delta); 0, by selection, where the weight is: nothing of a masked key or its
  // value may come through, not even a NaN. dx holds dP.
  template <class Rows>
  __device__ __forceinline__ void compute_ds(Scores& x, Scores& dx, const Rows& rows, const Kept& kept) {
    if constexpr (kGeneral) {
      const float keep_scale = p.has_dropout ? static_cast<float>(p.keep_scale) : 1.f;
      each(dx, [&](float& slope, int, int, int half, int bit) { slope *= kept[half] >> bit & 1 ? keep_scale : 0.f; });
    }
    each(dx, [&](float& slope, int i, int, int, int) { slope -= rows.delta[i]; });
#pragma unroll
    for (int n = 0; n < kOther / 8; ++n)
#pragma unroll
      for (int c = 0; c < 4; ++c) x[n][c] = x[n][c] == 0 ? 0 : x[n][c] * dx[n][c];
  }

  template <class Rows>
  __device__ __forceinline__ void write_mask(Scores& ds, const Rows& rows, int64_t key) {
    const Operand& to = p.grad_mask;
    const int64_t base = shared.grad_mask_base + key * to.col, keys = shared.last_key - key;
    each(ds, [&](float& gradient, int i, int j, int, int) {
      if (i < rows.count && j < keys)
        store_rounded(to.data, to.dtype, base + rows.rows.offset(to, i) + j * to.col, gradient);
    });
  }

  // The C of two products, [16 x 8] each, is the A [16 x 16] of the next; 0 where dropped.
  static __device__ __forceinline__ void pack_kept(uint32_t (&a)[kOther / 16][4], const Scores& x, const Kept& kept) {
#pragma unroll
    for (int n = 0; n < kOther / 8; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float pair[2];
#pragma unroll
        for (int c = 0; c < 2; ++c)
          pair[c] =
              kGeneral ? x[n][2 * half + c] * static_cast<float>(kept[half] >> (2 * n + c) & 1) : x[n][2 * half + c];
        a[n / 2][2 * (n % 2) + half] = pack<S>(pair[0], pair[1]);
      }
  }

  // 0 in place of infinities and NaNs.
  static __device__ __forceinline__ uint32_t make_finite(uint32_t two) {
    constexpr uint32_t kExponent = std::is_same_v<S, Half> ? 0x7c00 : 0x7f80;
    const uint32_t low = (two & kExponent) == kExponent ? 0 : two & 0xffffu;
    const uint32_t high = (two >> 16 & kExponent) == kExponent ? 0 : two & 0xffff0000u;
    return low | high;
  }

  // sum += a other. kFinite: with 0 in place of infinities and NaNs in `other`. A NaN reaches dQ and dK through dS, and
  // only where a row attends to the key.
  template <bool kFinite>
  static __device__ __forceinline__ void accumulate(Sums& sum, const uint32_t (&a)[kOther / 16][4], Other& other) {
    const MmaThread thread;
#pragma unroll
    for (int k = 0; k < kOther / 16; ++k)
#pragma unroll
      for (int n = 0; n < kDim / 8; n += 2) {
        uint32_t b[4];
        load_b(b, other, thread.lane, 16 * k, n);
        if constexpr (kFinite)
#pragma unroll
          for (uint32_t& two : b) two = make_finite(two);
        multiply_add<S>(sum[n], a[k], b[0], b[1]);
        multiply_add<S>(sum[n + 1], a[k], b[2], b[3]);
      }
  }

  __device__ __forceinline__ void write_keys(const Operand& to, int64_t head, int64_t cols, const Sums& sum,
                                             float scale) {
    const MmaThread thread;
    const int64_t base = batch_offset(p, to, shared.n) + head * to.head;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t key = shared.first_key + own(thread, half);
      if (key < shared.last_key) write(to, base + key * to.row, cols, sum, half, scale);
    }
  }

  static __device__ __forceinline__ void write(const Operand& to, int64_t base, int64_t cols, const Sums& sum, int half,
                                               float scale) {
    const MmaThread thread;
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c)
        if (thread.col(n) + c < cols)
          store_rounded(to.data, to.dtype, base + (thread.col(n) + c) * to.col, sum[n][2 * half + c] * scale);
  }
};

// Blocks of a gradient.
template <MmaGradient kOf>
__host__ __device__ int64_t backward_mma_tasks(const BackwardParams& p) {
  if (kOf == MmaGradient::query) return p.batch * p.groups() * divide_up(p.rows(), kMmaOwn);
  return p.batch * (kOf == MmaGradient::value ? p.value_heads : p.key_heads) * divide_up(p.keys, kMmaOwn);
}

template <class S, int kDim, MmaGradient kOf, bool kGeneral>
__global__ void __launch_bounds__(kMmaThreads, kDim <= 64 && kOf == MmaGradient::query && !kGeneral ? 3 : 2)
    backward_mma(const __grid_constant__ BackwardParams p) {
  using Kernel = BackwardMma<S, kDim, kOf, kGeneral>;
  const int64_t number = block_number();
  if (number >= backward_mma_tasks<kOf>(p)) return;
  Kernel{p, *reinterpret_cast<typename Kernel::Shared*>(shared_memory())}.run(number);
}

template <class S, int kDim, MmaGradient kOf>
Error launch_gradient_mma(const BackwardParams& p, Stream stream) {
  const auto run = [&](auto kernel, size_t shared_bytes) {
    return launch(kernel, p, backward_mma_tasks<kOf>(p), kMmaThreads, shared_bytes, stream);
  };
  if (p.has_mask || p.has_dropout)
    return run(backward_mma<S, kDim, kOf, true>, sizeof(typename BackwardMma<S, kDim, kOf, true>::Shared));
  return run(backward_mma<S, kDim, kOf, false>, sizeof(typename BackwardMma<S, kDim, kOf, false>::Shared));
}

template <class S, int kDim>
Error launch_backward_mma(const BackwardParams& p, Stream stream) {
  if (p.grad_query.data || (p.grad_mask.data && !p.mask_is_shared))
    if (Error error = launch_gradient_mma<S, kDim, MmaGradient::query>(p, stream)) return error;
  BackwardParams of_key = p, of_value = p;  // where one block can't have both
  of_key.grad_value.data = of_value.grad_key.data = nullptr;
  if constexpr (kDim <= 128) {
    constexpr auto kBoth = MmaGradient::key_and_value;
    if (p.key_heads == p.value_heads && p.grad_key.data && p.grad_value.data)
      return launch_gradient_mma<S, kDim, kBoth>(p, stream);
  }
  if (p.grad_key.data)
    if (Error error = launch_gradient_mma<S, kDim, MmaGradient::key>(of_key, stream)) return error;
  if (p.grad_value.data) return launch_gradient_mma<S, kDim, MmaGradient::value>(of_value, stream);
  return nullptr;
}

}  // namespace attn::cuda
