// Computes the gradients of simt/backward.cuh where uses_mma() says so: bfloat16 and float16 on tensor cores, up to
// head_dim 256. A block owns 64 keys (dK and dV, over all rows that read them) or 64 rows (dQ, over all keys), as many
// as four warps of 16 hold sums for. So Q and G are read once per 64 keys, and K and V once per 64 rows, 16 to 64 of
// them at a time (kOther), twice: one tile is in use while the next is copied. Every product is one of
//
//   own other^T      x = K Q^T, dP = V G^T     or  x = Q K^T, dP = G V^T
//   (16-bit x) other  dV += (P * Z)^T G, dK += dS^T Q   or  dQ += dS K
//
// so that weights stay in registers from the first to the second, and sums are added up in the order of the tiles.
#pragma once

#include <type_traits>

#include "cuda/kernels.h"
#include "cuda/launch.cuh"
#include "cuda/mma/scores.cuh"

namespace attn::cuda {

// What the backward knows of a row.
struct alignas(16) BackwardRow {
  float logsumexp, logsumexp_low;  // as a pair; +inf for a row that attends to no key: its weights are 0
  float delta;
  uint32_t head_number;  // of dropout's counters
};

// What ALiBi needs of a row: the slope of its head, and how far the row is ahead of the first key of the block.
struct alignas(8) BackwardSlope {
  float slope, ahead;
};

// Up to kRows consecutive rows of a group of heads, in shared memory.
template <int kRows, bool kHasMask, bool kHasSlopes>
struct BackwardRows {
  RowTile<kRows> rows;
  BackwardRow of_row[kRows];
  int64_t in_mask[kHasMask ? kRows : 1];  // where it begins in the mask
  BackwardSlope alibi[kHasSlopes ? kRows : 1];
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
  // The number of keys or rows that a block visits at a time: as many as registers and shared memory allow.
  static constexpr bool kCrowded = kGeneral && kOf == MmaGradient::key_and_value;
  static constexpr int kOther = kDim <= 64 ? 64 : kDim <= 128 && !kCrowded ? 32 : 16;
  static constexpr int kKeys = kOwnsKeys ? kOwn : kOther, kRows = kOwnsKeys ? kOther : kOwn;  // of a tile of scores
  static constexpr int kThreads = kMmaThreads, kBlocks = kDim <= 64 && !kOwnsKeys && !kGeneral ? 3 : 2;
  static constexpr int kStages = 2;  // of the tiles that it does not own: one is used while the next is copied

  using Own = MmaTile<S, kOwn, kDim>;
  using Other = MmaTile<S, kOther, kDim>;
  using Rows = BackwardRows<kRows, kGeneral, kGeneral && kOwnsKeys>;
  struct Shared {
    // The left factors of the products K Q^T and V G^T, or Q K^T and G V^T, which the block owns, and the right ones.
    Own own_score, own_dp;
    struct {
      Other score, dp;
    } other[kStages];
    Rows rows[kOwnsKeys ? kStages : 1];
    Dropout dropout;
    Task task;           // of a block that owns keys: their batch entry and they themselves
    int64_t own_head;    // of these keys
    Range rows_seen;     // the queries that see some of them
    int64_t first_head;  // of the group of heads
    int64_t first_row;   // of these, among all rows
    int64_t group_rows;  // of their list
    const S *query_data, *grad_output_data, *key_data, *value_data;  // of the batch entry, and of the keys' heads
    int64_t mask_base, grad_mask_base;
    bool mask_in_pairs;
    double exponent_per_score;
  };
  using Fragments = ScoresMma<S, kOther / 8, kOwnsKeys>;
  using Scores = typename Fragments::Scores;
  using Kept = typename Fragments::Kept;
  using Mask = typename Fragments::Mask;
  using Sums = float[kDim / 8][4];

  const BackwardParams& p;
  Shared& shared;

  ATTN_INLINE static constexpr int64_t blocks(const BackwardParams& p) {
    if (!kOwnsKeys) return blocks_of_rows(p, kOwn);
    return blocks_of_keys(p, kNeedsDs ? p.key_heads : p.value_heads, kOwn);
  }

  // Called by one thread once the task is set, followed by a barrier.
  __device__ void set() {
    const int64_t n = shared.task.n;
    if (p.has_dropout) shared.dropout.set(p, n);
    shared.query_data = head_of<S>(p, p.query, n, 0);
    shared.grad_output_data = head_of<S>(p, p.grad_output, n, 0);
    if (p.has_mask) {
      shared.mask_base = batch_offset(p, p.mask, n);
      shared.mask_in_pairs = mask_in_units(p, 2);
    }
    if (p.grad_mask.data) shared.grad_mask_base = batch_offset(p, p.grad_mask, n);
    shared.group_rows = shared.task.rows_of_group(p);
    // What rounding changes in the slope of exponents is changed in the logsumexp too: large scores cancel.
    if constexpr (!kGeneral) shared.exponent_per_score = double{exponent_slope()} / slope();
  }
  // Sets what belongs to the group of heads that begins with `head`. Called by one thread, followed by a barrier.
  __device__ void set_heads(int64_t head) {
    const int64_t n = shared.task.n;
    shared.first_head = head;
    shared.first_row = row_number(p, n, head, 0);
    shared.key_data = head_of<S>(p, p.key, n, key_head_of(p, head));
    shared.value_data = head_of<S>(p, p.value, n, value_head_of(p, head));
  }

  template <class Tile>
  __device__ __forceinline__ void load_keys(Tile& key_tile, Tile& value_tile, int64_t key) {
    const int keys = keys_from(key);
    load_tile(key_tile, shared.key_data + key * p.key.row, keys, p.head_dim, p.key.row);
    if constexpr (kNeedsDs)
      load_tile(value_tile, shared.value_data + key * p.value.row, keys, p.value_dim, p.value.row);
  }
  // Calls f(offset), where row i of `count` from `first` on lies offset(i) elements behind the first: in most tiles
  // rows are of one head, as far apart as its rows are.
  template <class F>
  __device__ __forceinline__ void with_offsets(const Operand& x, Row first, int count, F f) const {
    if (first.position + count <= shared.task.sequence.queries) return f([&](int i) { return i * x.row; });
    f([&](int i) {
      const Row row = row_after(shared.task.sequence.queries, first, i);
      return (row.head - first.head) * x.head + (row.position - first.position) * x.row;
    });
  }
  template <class Tile>
  __device__ __forceinline__ void load_rows(Tile& query_tile, Tile& grad_output_tile, Row first, int count) const {
    const auto load = [&](Tile& tile, const S* data, const Operand& x, int64_t cols) {
      with_offsets(x, first, count, [&](auto offset) {
        load_tile(tile, data + first.head * x.head + first.position * x.row, count, cols, offset);
      });
    };
    load(query_tile, shared.query_data, p.query, p.head_dim);
    load(grad_output_tile, shared.grad_output_data, p.grad_output, p.value_dim);
  }

  // Whether the mask shows some of the tile of `count` rows from `first` on and the keys from `key` on.
  __device__ __forceinline__ bool mask_shows_some(Row first, int count, int64_t key) const {
    bool some = false;
    const int64_t base = shared.mask_base + first.head * p.mask.head + first.position * p.mask.row;
    with_offsets(p.mask, first, count, [&](auto offset) {
      Mask mask;
      read_mask(mask, key, [&](int i) { return base + offset(RowTile<kRows>::last_repeated(i, count)); });
      with_mask_number(p, [&]<class M>() { some = Fragments::template shows_some<M>(mask); });
    });
    return some;
  }
  // Row i begins offset(i) elements behind the mask's data.
  template <class Offset>
  __device__ __forceinline__ void read_mask(Mask& mask, int64_t key, Offset offset) const {
    with_mask_number(p, [&]<class M>() {
      Fragments::template read_mask<M>(mask, own(MmaThread()), p.mask, shared.mask_in_pairs, key, keys_from(key),
                                       offset);
    });
  }
  // Of the tile that begins with `key`.
  __device__ __forceinline__ int keys_from(int64_t key) const {
    return static_cast<int>(smaller(kKeys, shared.task.last_key - key));
  }
  // The first tile from this one on, or `end`, that the mask does not hide wholly: shows_some(tile), next(tile). Of the
  // others nothing else is read. A barrier: what was copied is there, and what is before it has been read.
  template <class Tile, class ShowsSome, class Next>
  __device__ __forceinline__ Tile first_shown(Tile tile, ShowsSome shows_some, Next next) const {
    if (kGeneral && p.has_mask)
      while (!__syncthreads_or(shows_some(tile))) tile = next(tile);
    else
      __syncthreads();
    return tile;
  }

  // The tile that begins with row `number` of a group's list of rows.
  struct TileOfRows {
    int64_t number;
    Row first;
  };
  // The row of a tile that this thread reads and stores, if there is one. Read early, as that takes long, and stored
  // when it is there.
  static_assert(kRows <= kMmaThreads);
  __device__ __forceinline__ BackwardRow read_row(const TileOfRows& tile, int count) const {
    BackwardRow row{};
    const int i = thread_index();
    if (i >= kRows) return row;
    const int at = RowTile<kRows>::last_repeated(i, count);
    int64_t r = shared.first_row + tile.number + at;
    if (p.sequences > 0) {  // between the heads of one lie the rows of others
      const int64_t queries = shared.task.sequence.queries;
      r += (row_after(queries, tile.first, at).head - shared.first_head) * (p.tokens - queries);
    }
    const auto pair = static_cast<const Pair<float>*>(p.logsumexp)[r];
    row.logsumexp = pair.high;
    row.logsumexp_low = pair.low;
    row.delta = static_cast<const float*>(p.delta)[r];
    return row;
  }
  // Followed by a barrier.
  __device__ __forceinline__ void store_row(Rows& rows, Row first, int count, BackwardRow row) const {
    const int i = thread_index();
    if (i >= kRows) return;
    rows.rows.set(i, shared.task.sequence, first, count);
    if (row.logsumexp == -infinity<float>()) {
      row.logsumexp = infinity<float>();
      row.logsumexp_low = 0;
    } else if constexpr (!kGeneral) {  // as an exponent of 2
      const double exponent = (double{row.logsumexp} + row.logsumexp_low) * shared.exponent_per_score;
      row.logsumexp = static_cast<float>(exponent);
      row.logsumexp_low = static_cast<float>(exponent - row.logsumexp);
    }
    if (p.has_dropout) row.head_number = shared.dropout.head(p, shared.task.n, rows.rows.head[i]);
    rows.of_row[i] = row;
    if (kGeneral && p.has_mask) rows.in_mask[i] = shared.mask_base + rows.rows.offset(p.mask, i);
    if constexpr (kGeneral && kOwnsKeys)
      if (p.terms.alibi_slopes) rows.alibi[i] = {slope_of(rows, i), ahead_of(rows, i, shared.task.first_key)};
  }

  __device__ __forceinline__ float slope_of(const Rows& rows, int i) const {
    return static_cast<const float*>(p.terms.alibi_slopes)[shared.task.n * p.heads + rows.rows.head[i]];
  }
  __device__ __forceinline__ float ahead_of(const Rows& rows, int i, int64_t key) const {
    return static_cast<float>(rows.rows.position[i] + shared.task.sequence.offset - key);
  }

  __device__ __forceinline__ void run(int64_t number) {
    if constexpr (kOwnsKeys)
      run_keys(number);
    else
      run_query(number);
  }

  __device__ __forceinline__ void run_keys(int64_t number) {
    const int64_t heads = kNeedsDs ? p.key_heads : p.value_heads, readers = p.heads / heads;
    const Task& task = shared.task;
    if (thread_index() == 0) {
      shared.own_head = shared.task.set_own_keys(p, number, heads, kOwn);
      const Range keys{task.first_key, task.last_key};
      if (!keys.empty()) {
        set();
        shared.rows_seen = visible_rows(task.sequence, keys);
      }
    }
    __syncthreads();
    if (task.first_key >= task.last_key) return;
    Sums of_ds = {}, of_weights = {};
    for (int64_t reader = 0; reader < readers; reader += p.group) {
      if (thread_index() == 0) set_heads(shared.own_head * readers + reader);
      __syncthreads();  // the last group's tiles have been read
      const int64_t head = shared.own_head * readers + reader;
      TileOfRows tile = first_shown_rows(visible_from({0, {task.n, head, 0}}));
      if (tile.number >= shared.group_rows) continue;
      load_keys(shared.own_score, shared.own_dp, task.first_key);
      load_rows(shared.other[0].score, shared.other[0].dp, tile.first, count_of(tile));
      commit_copies();
      store_row(shared.rows[0], tile.first, count_of(tile), read_row(tile, count_of(tile)));
      bool more = true;
      for (int stage = 0; more; stage ^= 1) {
        const int count = count_of(tile);
        wait_for_copies<0>();
        tile = first_shown_rows(visible_from(after(tile, kOther)));  // these are there, those before have been read
        more = tile.number < shared.group_rows;
        BackwardRow next;
        if (more) {
          load_rows(shared.other[stage ^ 1].score, shared.other[stage ^ 1].dp, tile.first, count_of(tile));
          commit_copies();
          next = read_row(tile, count_of(tile));
        }
        add_tile(of_ds, of_weights, stage, count, task.first_key);
        if (more) store_row(shared.rows[stage ^ 1], tile.first, count_of(tile), next);
      }
    }
    if constexpr (kNeedsDs) write_keys(p.grad_key, p.head_dim, of_ds, slope());
    if constexpr (kSumsValue) write_keys(p.grad_value, p.value_dim, of_weights, static_cast<float>(p.keep_scale));
  }

  __device__ __forceinline__ int count_of(const TileOfRows& tile) const {
    return static_cast<int>(smaller(kOther, shared.group_rows - tile.number));
  }
  __device__ __forceinline__ TileOfRows after(const TileOfRows& tile, int64_t rows) const {
    return {tile.number + rows, row_after(shared.task.sequence.queries, tile.first, rows)};
  }
  // The tile with the first row, from the first of this tile on, that sees one of the block's keys.
  __device__ __forceinline__ TileOfRows visible_from(const TileOfRows& tile) const {
    const Range seen = shared.rows_seen;
    if (seen.empty()) return {shared.group_rows, tile.first};
    return after(tile, rows_until(seen, tile.first.position, shared.task.sequence.queries,
                                  shared.group_rows - tile.number, kOther));
  }

  __device__ __forceinline__ TileOfRows first_shown_rows(const TileOfRows& tile) const {
    return first_shown(
        tile,
        [&](const TileOfRows& t) {
          return t.number >= shared.group_rows || mask_shows_some(t.first, count_of(t), shared.task.first_key);
        },
        [&](const TileOfRows& t) { return visible_from(after(t, kOther)); });
  }

  __device__ __forceinline__ void run_query(int64_t number) {
    const Task& task = shared.task;
    if (thread_index() == 0) {
      shared.task.set(p, number, kOwn, kOther);
      if (task.rows > 0) {
        set();
        set_heads(task.first_head);
      }
    }
    __syncthreads();
    const int count = task.rows;
    if (count == 0) return;
    const Row first = task.row_at();
    store_row(shared.rows[0], first, count, read_row({task.first_row, first}, count));
    Sums of_ds = {}, none;
    const auto first_shown_key = [&](int64_t key) {
      return first_shown(
          key, [&](int64_t k) { return k >= task.last_key || mask_shows_some(first, count, k); },
          [](int64_t k) { return k + kOther; });
    };
    int64_t key = first_shown_key(task.first_key);
    if (key < task.last_key) {
      load_rows(shared.own_score, shared.own_dp, first, count);
      load_keys(shared.other[0].score, shared.other[0].dp, key);
      commit_copies();
    }
    for (int stage = 0; key < task.last_key; stage ^= 1) {
      const int64_t these = key;
      wait_for_copies<0>();
      key = first_shown_key(key + kOther);  // these keys are there, and those before have been read
      if (key < task.last_key) {
        load_keys(shared.other[stage ^ 1].score, shared.other[stage ^ 1].dp, key);
        commit_copies();
      }
      add_tile(of_ds, none, stage, count, these);
    }
    if (!p.grad_query.data) return;
    const MmaThread thread;
    const int64_t base = batch_offset(p, p.grad_query, task.n);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = own(thread, half);
      write(p.grad_query, base + shared.rows[0].rows.offset(p.grad_query, i), p.head_dim, of_ds, half, slope(),
            i < count);
    }
  }

  __device__ __forceinline__ float slope() const { return ScoreFunction<float>::of(p).slope(); }
  // Of the exponent of 2, per product.
  __device__ __forceinline__ float exponent_slope() const { return slope() * kLog2E<float>; }

  // The first of the 16 rows or keys of the warp; and that of a thread's elements 0, 1 (half 0) or 2, 3 (half 1).
  static __device__ __forceinline__ int own(const MmaThread& thread) { return 16 * thread.warp; }
  static __device__ __forceinline__ int own(const MmaThread& thread, int half) {
    return own(thread) + thread.group + 8 * half;
  }
  template <class F>
  static __device__ __forceinline__ void each(Scores& x, F f) {
    Fragments::each(x, own(MmaThread()), f);
  }

  // Adds what a tile contributes, whose rows or keys are those of a stage: `count` rows, and the keys from `key` on.
  __device__ __forceinline__ void add_tile(Sums& of_ds, Sums& of_weights, int stage, int count, int64_t key) {
    auto& other = shared.other[stage];
    const auto& rows = shared.rows[kOwnsKeys ? stage : 0];
    const Range positions = positions_of_rows(shared.task.sequence, {0, 0, rows.rows.position[0]}, count);
    const bool hides = (kOwnsKeys && count < kOther) ||  // rows beyond the last one are hidden too
                       !all_visible(shared.task.sequence, positions, {key, key + kKeys});
    Mask mask;  // read before products are computed, and for the second time
    if (kGeneral && p.has_mask) read_mask(mask, key, [&](int i) { return rows.in_mask[i]; });
    Scores x = {};
    add_dots<1>(&x, shared.own_score, own(MmaThread()), other.score);
    const bool finite = Fragments::all_finite(&x);
    Scores capped;  // what SoftCap takes
    make_exponents(x, capped, rows, mask, finite, key);
    if (hides) Fragments::hide_keys(x, own(MmaThread()), shared.task.sequence, rows.rows, count, key);
    each(x, [&](float& exponent, int, int, int, int) { exponent = exp2_approx(exponent); });
    Kept kept = {~0u, ~0u};
    if constexpr (kGeneral)
      if (p.has_dropout)
        Fragments::dropout_mask(
            kept, own(MmaThread()), shared.dropout, rows.rows, [&](int i) { return rows.of_row[i].head_number; }, key);
    if constexpr (kSumsValue)
      add_weighted<1, Factor::as_it_is>(&of_weights, other.dp, [&](int, int n, int half, int c) {
        const float weight = x[n][2 * half + c];
        return kGeneral ? weight * static_cast<float>(kept[half] >> (2 * n + c) & 1) : weight;
      });
    if constexpr (kNeedsDs) {
      Scores dx = {};  // dP; or at once dP - delta, which saves subtractions
      if constexpr (kOwnsKeys && !kGeneral)
        each(dx, [&](float& slope, int i, int, int, int) { slope = -rows.of_row[i].delta; });
      add_dots<1>(&dx, shared.own_dp, own(MmaThread()), other.dp);
      compute_ds(x, dx, rows, kept, hides);
      if constexpr (!kOwnsKeys)
        if (p.grad_mask.data && !p.mask_is_shared) write_mask(x, rows, count, key);
      if (!kOwnsKeys && !p.grad_query.data) return;
      if (kGeneral && p.softcap > 0)  // 0, by selection, where it was: a hidden product may be a NaN
        each(x, [&](float& ds, int, int, int half, int bit) {
          ds = ds == 0 ? 0 : ds * SoftCap<float>::slope(Fragments::at(capped, half, bit));
        });
      // A NaN reaches dQ and dK through dS, and only where a row attends to the key.
      const auto ds = [&](int, int n, int half, int c) { return x[n][2 * half + c]; };
      if (finite)
        add_weighted<1, Factor::as_it_is>(&of_ds, other.score, ds);
      else
        add_weighted<1, Factor::finite>(&of_ds, other.score, ds);
    }
  }

  // Products become exponents of 2, log2(e) (score - logsumexp); -inf where the mask hides a key.
  // `finite`: whether all products are.
  __device__ __forceinline__ void make_exponents(Scores& x, Scores& capped, const Rows& rows, const Mask& mask,
                                                 bool finite, int64_t key) {
    if constexpr (kGeneral) {
      const bool terms = has_terms(p);
      if (terms || !p.has_mask)
        Fragments::add_terms(
            x, own(MmaThread()), p, [&](float y, int half, int bit) { Fragments::at(capped, half, bit) = y; },
            [&](int i) { return kOwnsKeys ? rows.alibi[i].ahead : ahead_of(rows, i, key); },
            [&](int i) { return kOwnsKeys ? rows.alibi[i].slope : slope_of(rows, i); });
      if (p.has_mask)
        with_mask_number(p, [&]<class M>() {
          const auto add = [&]<auto kHow>() { Fragments::template add_mask<kHow>(x, mask, terms ? 1 : slope()); };
          Fragments::template choose_add<M>([&] { return terms ? Fragments::all_finite(&x) : finite; }, add);
        });
      each(x, [&](float& score, int i, int, int, int) {
        const BackwardRow& row = rows.of_row[i];
        const float shifted = (score - row.logsumexp) - row.logsumexp_low;
        score = score == -infinity<float>() ? score : shifted * kLog2E<float>;
      });
    } else {
      const float slope = exponent_slope();
      each(x, [&](float& product, int i, int, int, int) {
        const BackwardRow& row = rows.of_row[i];
        product = fmaf(product, slope, -row.logsumexp) - row.logsumexp_low;
      });
    }
  }

  // Weights in x become dS = P (Z dP - delta); 0, by selection, where the weight is, if some key of the tile is hidden:
  // nothing of it or its value may come through, not even a NaN. dx holds dP.
  __device__ __forceinline__ void compute_ds(Scores& x, Scores& dx, const Rows& rows, const Kept& kept, bool hides) {
    if constexpr (kGeneral) {
      const float keep_scale = p.has_dropout ? static_cast<float>(p.keep_scale) : 1.f;
      each(dx, [&](float& slope, int, int, int half, int bit) { slope *= kept[half] >> bit & 1 ? keep_scale : 0.f; });
    }
    if constexpr (!kOwnsKeys || kGeneral)
      each(dx, [&](float& slope, int i, int, int, int) { slope -= rows.of_row[i].delta; });
    if (kGeneral || hides)
      each(dx, [&](float& slope, int, int, int half, int bit) {
        if (Fragments::at(x, half, bit) == 0) slope = 0;
      });
    each(x, [&](float& weight, int, int, int half, int bit) { weight *= Fragments::at(dx, half, bit); });
  }

  __device__ __forceinline__ void write_mask(Scores& ds, const Rows& rows, int count, int64_t key) {
    const Operand& to = p.grad_mask;
    const int64_t base = shared.grad_mask_base + key * to.col, keys = shared.task.last_key - key;
    each(ds, [&](float& gradient, int i, int j, int, int) {
      if (i < count && j < keys) store_rounded(to, base + rows.rows.offset(to, i) + j * to.col, gradient);
    });
  }

  // Not of keys beyond the length, where gradients are 0 before.
  __device__ __forceinline__ void write_keys(const Operand& to, int64_t cols, Sums& sum, float scale) {
    const MmaThread thread;
    const int64_t base = batch_offset(p, to, shared.task.n) + shared.own_head * to.head;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t key = shared.task.first_key + own(thread, half);
      write(to, base + key * to.row, cols, sum, half, scale, key < shared.task.last_key);
    }
  }

  // Writes a row of a gradient, if it is `there`. Called by all lanes.
  __device__ __forceinline__ void write(const Operand& to, int64_t base, int64_t cols, const Sums& sum, int half,
                                        float scale, bool there) const {
    const MmaThread thread;
    const auto value = [&](int n, int c) { return sum[n][2 * half + c] * scale; };
    if (takes_vectors(p, to, cols)) return write_vectors<S, kDim / 8>(to, base, cols, there, value);
    if (!there) return;
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c)
        if (thread.col(n) + c < cols) store_rounded(to, base + (thread.col(n) + c) * to.col, value(n, c));
  }
};

template <class S, int kDim>
Error launch_backward_mma(const BackwardParams& p, Stream stream) {
  const auto run = [&]<MmaGradient kOf>() {
    return is_general(p) ? launch_blocks<BackwardMma<S, kDim, kOf, true>>(p, stream)
                         : launch_blocks<BackwardMma<S, kDim, kOf, false>>(p, stream);
  };
  if (p.grad_query.data || (p.grad_mask.data && !p.mask_is_shared))
    if (Error error = run.template operator()<MmaGradient::query>()) return error;
  if constexpr (kDim <= 128)
    if (p.key_heads == p.value_heads && p.grad_key.data && p.grad_value.data)
      return run.template operator()<MmaGradient::key_and_value>();
  if (p.grad_key.data)
    if (Error error = run.template operator()<MmaGradient::key>()) return error;
  return p.grad_value.data ? run.template operator()<MmaGradient::value>() : nullptr;
}

}  // namespace attn::cuda
