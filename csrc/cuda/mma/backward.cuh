// Computes the gradients of simt/backward.cuh where uses_mma() says so: bfloat16 and float16 on tensor cores, up to
// head_dim 256. There are three kinds of blocks. A block that owns 64 keys sums dK, dV or both over all rows that read
// these keys. A block that owns 64 or 128 rows sums dQ over all keys. A block that owns a tile of a mask sums the
// tile's gradient over all heads and batch entries that share the mask. The registers of a block hold these sums, and
// therefore limit how many keys, rows or scores a block owns. Q and G are read once per 64 keys, and K and V once per
// 64 or 128 rows. A block reads what it does not own in tiles of 16 to 64 rows or keys (kOther). If kStages is 2, the
// next tile is copied while one tile is in use. Every product has one of two forms, where `own` is a tile that the
// block owns, and `other` is the tile in use:
//
//   form               if the block owns keys            otherwise
//   own other^T        x = K Q^T, dP = V G^T             x = Q K^T, dP = G V^T
//   (16-bit x) other   dV += (P * Z)^T G, dK += dS^T Q   dQ += dS K
//
// Therefore weights stay in registers from the first product to the second, and sums are added up in the order of the
// tiles.
#pragma once

#include <type_traits>

#include "cuda/kernels.h"
#include "cuda/launch.cuh"
#include "cuda/mma/gradients.cuh"
#include "cuda/mma/mask_tile.cuh"

namespace attn::cuda {

// The numbers of a row that the backward needs.
struct alignas(16) BackwardRow {
  float logsumexp, logsumexp_low;  // as a pair; +inf for a row that attends to no key, so that its weights are 0
  float delta;
  uint32_t head_number;  // of dropout's counters
};

// Up to kRows consecutive rows of a group of heads, in shared memory.
template <int kRows, bool kHasSlopes, bool kInRegisters>
struct BackwardRows {
  RowTile<kRows> rows;
  BackwardRow of_row[kInRegisters ? 1 : kRows];
  BackwardSlope alibi[kHasSlopes ? kRows : 1];
};

// The gradients of which a block computes a part. A block computes parts of two gradients only up to head_dim 128,
// because registers hold no more sums.
enum class MmaGradient { query, key, value, key_and_value, shared_mask };

// kFewRows: whether a block of dQ owns 64 rows where it would own 128 otherwise.
template <class S, int kDim, MmaGradient kOf, bool kGeneral, bool kFewRows = false>
struct BackwardMma {
  static constexpr bool kSumsMask = kOf == MmaGradient::shared_mask;
  static constexpr bool kOwnsKeys = kOf != MmaGradient::query && !kSumsMask;
  static constexpr bool kNeedsDs = kOf != MmaGradient::value;  // dQ = dS K or dK = dS^T Q
  static constexpr bool kSumsValue = kOf == MmaGradient::value || kOf == MmaGradient::key_and_value;  // dV = P^T G
  // The number of tiles of 16 keys or rows that a warp owns. The warp reads each fragment of `other` once for all its
  // tiles. Registers hold the sums of two tiles only if the block sums dQ, kGeneral is false, and head_dim is at most
  // 128.
  static constexpr int kTiles = kOf == MmaGradient::query && kDim <= 128 && !kGeneral && !kFewRows ? 2 : 1;
  static constexpr int kOwn = kMmaThreads / 32 * 16 * kTiles;
  // The number of keys or rows that a block visits at a time: as many as registers and shared memory allow.
  static constexpr int kOther = kDim <= (kSumsMask ? 128 : 64) ? 64 : kDim <= 128 ? 32 : 16;
  static constexpr int kKeys = kOwnsKeys ? kOwn : kOther, kRows = kOwnsKeys ? kOther : kOwn;  // of a tile of scores
  // The kernel of shared masks does not copy the next tile while one is in use. So it gains from four blocks per
  // multiprocessor, though each thread then spills ten numbers from registers to memory. On an H100 a backward with
  // four blocks took 0.87 times as long as with two blocks.
  static constexpr int kThreads = kMmaThreads, kBlocks = kSumsMask && kDim <= 64 ? 4 : 2;
  // The number of buffers for tiles that the block does not own. With two buffers, one tile is used while the next is
  // copied.
  static constexpr int kStages = kSumsMask || (kGeneral && kDim > 128) ? 1 : 2;
  static __device__ __forceinline__ int stage_after(int stage) { return kStages == 1 ? 0 : stage ^ 1; }

  using Own = MmaTile<S, kOwn, kDim>;
  using Other = MmaTile<S, kOther, kDim>;
  // Whether each thread keeps the BackwardRow of each of its own rows in registers. With head_dim 128 and 128 rows per
  // block, shared memory has no room for these structs.
  static constexpr bool kInRegisters = !kOwnsKeys && !kGeneral;
  // The number of mask tiles in shared memory: one for the tile that is in use, one for the next tile, and one for the
  // tile in which the block looks for a visible key. The kernel of shared masks needs only one mask tile, because all
  // scores of a block share this tile.
  static constexpr int kMasks = kSumsMask ? 1 : 3;
  using Rows = BackwardRows<kRows, kGeneral && kOwnsKeys, kInRegisters>;
  struct Shared {
    // The block owns the left factors of the products. own_score is K of K Q^T, or Q of Q K^T. own_dp is V of V G^T, or
    // G of G V^T. `other` holds the right factors.
    Own own_score, own_dp;
    struct {
      Other score, dp;
    } other[kStages];
    std::conditional_t<kGeneral, MaskTile<S, kRows, kKeys, true>, Nothing> mask[kMasks];
    Rows rows[kOwnsKeys ? kStages : 1];
    Dropout dropout;
    Task task;           // if the block owns keys, their batch entry and the keys
    int64_t own_head;    // the head of these keys
    Range rows_seen;     // the queries that see some of these keys
    int64_t first_head;  // the first of the group of heads
    int64_t first_row;   // the first row of these heads, among all rows
    int64_t group_rows;  // how many rows these heads have
    const S *query_data, *grad_output_data, *key_data, *value_data;  // of the batch entry, and of the keys' heads
    int64_t mask_base, grad_mask_base;
    double exponent_per_score;
  };
  using Fragments = ScoresMma<S, kOther / 8, kOwnsKeys>;
  using Scores = typename Fragments::Scores[kTiles];
  using Kept = typename Fragments::Kept;
  using Mask = typename Fragments::Mask;
  using Sums = float[kTiles][(kSumsMask ? kOther : kDim) / 8][4];

  const BackwardParams& p;
  Shared& shared;
  BackwardRow own_rows[kInRegisters ? kTiles : 1][2];  // by tile and half
  float of_slopes[2] = {};  // by half: the sums of the slopes' gradient, of a block that owns rows
  // The block looks for a visible key in the mask tile shared.mask[looked_at]. The mask of the tile in use is
  // shared.mask[mask_after(looked_at)].
  int looked_at = 0;

  __device__ BackwardMma(const BackwardParams& p, Shared& shared) : p(p), shared(shared) {}

  ATTN_INLINE static constexpr int64_t blocks(const BackwardParams& p) {
    if (kSumsMask) return p.mask_slices * divide_up(p.queries, kOwn) * divide_up(p.keys, kOther);
    if (!kOwnsKeys) return blocks_of_rows(p, kOwn);
    return blocks_of_keys(p, kNeedsDs ? p.key_heads : p.value_heads, kOwn);
  }

  // Called by one thread after the task has been set, followed by a barrier.
  __device__ void set() {
    const int64_t n = shared.task.n;
    if (p.has_dropout) shared.dropout.set(p, n);
    shared.query_data = head_of<S>(p, p.query, n, 0);
    shared.grad_output_data = head_of<S>(p, p.grad_output, n, 0);
    if (p.has_mask) shared.mask_base = batch_offset(p, p.mask, n);
    if (p.grad_mask.data) shared.grad_mask_base = batch_offset(p, p.grad_mask, n);
    shared.group_rows = shared.task.rows_of_group(p);
    if constexpr (!kGeneral) shared.exponent_per_score = exponent_per_score(p);
  }
  // Sets the members that depend on the group of heads. The group begins with `head`. Called by one thread, followed by
  // a barrier.
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
  // Calls f(offset). For i < `count`, offset(i) is the distance in elements from row `first` to the i-th row after it.
  // In most tiles all rows belong to one head, and the distance between neighbouring rows is constant.
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

  static __device__ __forceinline__ int mask_after(int number) { return number + 1 < kMasks ? number + 1 : 0; }
  // Starts to copy the mask of `count` rows from `first` on and of the keys from `key` on, for mask_shows_some().
  __device__ __forceinline__ void start_mask(Row first, int count, int64_t key) {
    if constexpr (kGeneral) {
      if (!p.has_mask) return;
      const int64_t base = shared.mask_base + first.head * p.mask.head + first.position * p.mask.row;
      with_offsets(p.mask, first, count, [&](auto offset) {
        with_mask_number(p, [&]<class M>() {
          const auto row = [&](int i) {
            const int64_t number = base + offset(RowTile<kRows>::last_repeated(i, count));
            return static_cast<const unsigned char*>(p.mask.data) + number * static_cast<int64_t>(sizeof(M));
          };
          shared.mask[looked_at].template copy<M>(p, row, key);
        });
      });
      commit_copies();
    }
  }
  // Whether the mask that start_mask() has copied shows some key in this lane's share.
  __device__ __forceinline__ bool mask_shows_some() {
    bool some = false;
    if constexpr (kGeneral)
      with_mask_number(p, [&]<class M>() { some = shared.mask[looked_at].template shows_some<M>(); });
    return some;
  }
  // The number of keys of the tile that begins with `key`.
  __device__ __forceinline__ int keys_from(int64_t key) const {
    return static_cast<int>(smaller(kKeys, shared.task.last_key - key));
  }
  // Returns the first tile, from `tile` on, that the mask does not hide entirely, or a tile beyond the last. The caller
  // has copied the mask of `tile`. start(t) starts to copy the mask of tile t. shows_some(t) says whether this mask
  // shows some key, and is true beyond the last tile. next(t) returns the tile after t. Reads the masks of hidden
  // tiles, but not their rows or keys. Ends with a barrier, after which all copies are complete and the previous tile
  // has been read.
  template <class Tile, class Start, class ShowsSome, class Next>
  __device__ __forceinline__ Tile first_shown(Tile tile, Start start, ShowsSome shows_some, Next next) {
    if (kGeneral && p.has_mask)
      while (!__syncthreads_or(shows_some(tile))) {
        tile = next(tile);
        start(tile);
        wait_for_copies<0>();
      }
    else
      __syncthreads();
    return tile;
  }

  // The tile that begins with row `number` of a group's list of rows.
  struct TileOfRows {
    int64_t number;
    Row first;
  };
  // Reads row i of a tile that has `count` rows. Rows from `count` on repeat the last row, and rows from kRows on are
  // not read. Callers read a row long before they need it, because reading takes long. By default i is the number of
  // the thread, because store_row() stores the row with this number.
  static_assert(kRows <= kMmaThreads);
  __device__ __forceinline__ BackwardRow read_row(const TileOfRows& tile, int count, int i = thread_index()) const {
    BackwardRow row{};
    if (i >= kRows) return row;
    const int at = RowTile<kRows>::last_repeated(i, count);
    int64_t r = shared.first_row + tile.number + at;
    if (p.sequences > 0) {  // rows of other sequences are between the heads of this sequence
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
    if constexpr (kInRegisters) return;
    make_shift(row);
    if (p.has_dropout) row.head_number = shared.dropout.head(p, shared.task.n, rows.rows.head[i]);
    rows.of_row[i] = row;
    if constexpr (kGeneral && kOwnsKeys)
      if (p.alibi_slopes) rows.alibi[i] = {slope_of(rows, i), ahead_of(rows, i, shared.task.first_key)};
  }

  // Turns the logsumexp into the number that is subtracted from scores (with kGeneral) or from exponents (without).
  __device__ __forceinline__ void make_shift(BackwardRow& row) const {
    if constexpr (!kGeneral) {
      const Pair<float> shift = exponent_shift({row.logsumexp, row.logsumexp_low}, shared.exponent_per_score);
      row.logsumexp = shift.high;
      row.logsumexp_low = shift.low;
    } else if (row.logsumexp == -infinity<float>()) {
      row.logsumexp = infinity<float>();
      row.logsumexp_low = 0;
    }
  }
  // Row i of the tile; `t` and `half` say which of the thread's own rows it is.
  __device__ __forceinline__ const BackwardRow& row_of(const Rows& rows, int i, int t, int half) const {
    if constexpr (kInRegisters)
      return own_rows[t][half];
    else
      return rows.of_row[i];
  }

  __device__ __forceinline__ float slope_of(const Rows& rows, int i) const {
    return static_cast<const float*>(p.alibi_slopes)[shared.task.n * p.heads + rows.rows.head[i]];
  }
  __device__ __forceinline__ float ahead_of(const Rows& rows, int i, int64_t key) const {
    return static_cast<float>(rows.rows.position[i] + shared.task.sequence.offset - key);
  }

  __device__ __forceinline__ void run(int64_t number) {
    if constexpr (kOwnsKeys)
      run_keys(number);
    else if constexpr (kSumsMask)
      run_mask(number);
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
      const int64_t head = shared.own_head * readers + reader;
      TileOfRows tile = visible_from({0, {task.n, head, 0}});
      start_mask_of(tile);
      wait_for_copies<0>();
      tile = first_shown_rows(tile);
      if (tile.number >= shared.group_rows) continue;
      load_keys(shared.own_score, shared.own_dp, task.first_key);
      load_rows(shared.other[0].score, shared.other[0].dp, tile.first, count_of(tile));
      commit_copies();
      store_row(shared.rows[0], tile.first, count_of(tile), read_row(tile, count_of(tile)));
      look_at_rows_after(tile);
      bool more = true;
      for (int stage = 0; more; stage = stage_after(stage)) {
        const int count = count_of(tile);
        wait_for_copies<0>();
        tile = first_shown_rows(next_rows(tile));  // this stage is copied, and the previous stage has been read
        more = tile.number < shared.group_rows;
        BackwardRow next;
        const auto load_next = [&] {
          if (!more) return;
          auto& to = shared.other[stage_after(stage)];
          load_rows(to.score, to.dp, tile.first, count_of(tile));
          commit_copies();
          next = read_row(tile, count_of(tile));
        };
        if constexpr (kStages > 1) load_next();
        look_at_rows_after(tile);
        add_tile(of_ds, of_weights, stage, count, task.first_key);
        if constexpr (kStages == 1) {
          __syncthreads();  // the stage has been read
          load_next();
        }
        if (more) store_row(shared.rows[stage_after(stage)], tile.first, count_of(tile), next);
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
  // Returns the first tile, from `tile` on, in which some row sees some key of the block.
  __device__ __forceinline__ TileOfRows visible_from(const TileOfRows& tile) const {
    const Range seen = shared.rows_seen;
    if (seen.empty()) return {shared.group_rows, tile.first};
    return after(tile, rows_until(seen, tile.first.position, shared.task.sequence.queries,
                                  shared.group_rows - tile.number, kOther));
  }

  __device__ __forceinline__ TileOfRows next_rows(const TileOfRows& tile) const {
    return visible_from(after(tile, kOther));
  }
  __device__ __forceinline__ void start_mask_of(const TileOfRows& tile) {
    if (tile.number < shared.group_rows) start_mask(tile.first, count_of(tile), shared.task.first_key);
  }
  __device__ __forceinline__ void look_at_rows_after(const TileOfRows& tile) {
    if (!kGeneral || !p.has_mask) return;
    looked_at = mask_after(looked_at);
    start_mask_of(next_rows(tile));
  }
  __device__ __forceinline__ TileOfRows first_shown_rows(const TileOfRows& tile) {
    return first_shown(
        tile, [&](const TileOfRows& t) { start_mask_of(t); },
        [&](const TileOfRows& t) { return t.number >= shared.group_rows || mask_shows_some(); },
        [&](const TileOfRows& t) { return next_rows(t); });
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
    const TileOfRows tile{task.first_row, first};
    store_row(shared.rows[0], first, count, kInRegisters ? BackwardRow{} : read_row(tile, count));
    if constexpr (kInRegisters)
      each_own([&](int t, int half, int i) { make_shift(own_rows[t][half] = read_row(tile, count, i)); });
    Sums of_ds = {}, none;
    const auto start_mask_from = [&](int64_t key) {
      if (key < task.last_key) start_mask(first, count, key);
    };
    const auto look_at_keys_after = [&](int64_t key) {
      looked_at = mask_after(looked_at);
      start_mask_from(key + kOther);
    };
    const auto first_shown_key = [&](int64_t key) {
      return first_shown(
          key, start_mask_from, [&](int64_t k) { return k >= task.last_key || mask_shows_some(); },
          [](int64_t k) { return k + kOther; });
    };
    start_mask_from(task.first_key);
    wait_for_copies<0>();
    int64_t key = first_shown_key(task.first_key);
    if (key < task.last_key) {
      load_rows(shared.own_score, shared.own_dp, first, count);
      load_keys(shared.other[0].score, shared.other[0].dp, key);
      commit_copies();
      look_at_keys_after(key);
    }
    for (int stage = 0; key < task.last_key; stage = stage_after(stage)) {
      const int64_t these = key;
      wait_for_copies<0>();
      key = first_shown_key(key + kOther);  // these keys are copied, and the previous keys have been read
      const auto load_next = [&] {
        if (key >= task.last_key) return;
        load_keys(shared.other[stage_after(stage)].score, shared.other[stage_after(stage)].dp, key);
        commit_copies();
      };
      if constexpr (kStages > 1) load_next();
      look_at_keys_after(key);
      if (own() < count) add_tile(of_ds, none, stage, count, these);  // else the warp has no rows, and only copies
      if constexpr (kStages == 1) {
        __syncthreads();  // the stage has been read
        load_next();
      }
    }
    if constexpr (kGeneral)
      if (p.grad_slopes)
        each_own([&](int, int half, int i) {
          write_of_row(p.grad_slopes, shared.rows[0].rows.number(p, task.n, i), of_slopes[half], i < count);
        });
    if (!p.grad_query.data) return;
    const int64_t base = batch_offset(p, p.grad_query, task.n);
    each_own([&](int t, int half, int i) {
      write_gradient<S>(p, p.grad_query, base + shared.rows[0].rows.offset(p.grad_query, i), p.head_dim, of_ds[t], half,
                        slope(), i < count);
    });
  }

  // A block owns the scores of some rows and keys, and passes over the batch entries and heads that share this part of
  // the mask.
  __device__ __forceinline__ void run_mask(int64_t number) {
    const Task& task = shared.task;
    const int64_t key = number % divide_up(p.keys, kOther) * kOther;
    number /= divide_up(p.keys, kOther);
    const int64_t slice = number / divide_up(p.queries, kOwn), first_row = number % divide_up(p.queries, kOwn) * kOwn;
    Sums sum = {};
    bool mask_is_read = false;  // once for all turns, because they share the mask
    for (int64_t turn = 0; turn < p.batch * p.heads / p.mask_slices; ++turn) {
      __syncthreads();  // the previous tiles have been read
      if (thread_index() == 0) {
        const Row at = sharer_of_mask(p, p.grad_mask, slice, turn);
        shared.task.set_rows(p, at.n, at.head, first_row, smaller(kOwn, sequence_of(p, at.n).queries - first_row));
        if (task.rows > 0) {
          shared.task.last_key = task.sequence.keys;
          shared.rows_seen = common(visible_keys(task.sequence, task.positions), {key, key + keys_from(key)});
          if (!shared.rows_seen.empty()) {
            set();
            set_heads(at.head);
          }
        }
      }
      __syncthreads();
      const int count = task.rows;
      if (count == 0 || shared.rows_seen.empty()) continue;
      const Row first = task.row_at();
      if (!mask_is_read) {
        start_mask(first, count, key);
        wait_for_copies<0>();
        if (!__syncthreads_or(mask_shows_some())) break;
        mask_is_read = true;
      }
      load_rows(shared.own_score, shared.own_dp, first, count);
      load_keys(shared.other[0].score, shared.other[0].dp, key);
      commit_copies();
      store_row(shared.rows[0], first, count, read_row({first_row, first}, count));
      wait_for_copies<0>();
      __syncthreads();
      Sums none;
      add_tile(sum, none, 0, count, key);
    }
    const Row at = sharer_of_mask(p, p.grad_mask, slice, 0);
    const Operand& to = p.grad_mask;
    const int64_t base = batch_offset(p, to, at.n) + at.head * to.head + first_row * to.row + key * to.col;
    const int64_t rows = sequence_of(p, at.n).queries - first_row, keys = p.keys - key;
    each(sum, [&](float& gradient, int i, int j, int, int, int) {
      if (i < rows && j < keys) store_rounded(to, base + i * to.row + j * to.col, gradient);
    });
  }

  __device__ __forceinline__ float slope() const { return ScoreFunction<float>::of(p).slope(); }

  // The first row or key of the warp.
  static __device__ __forceinline__ int own() { return 16 * kTiles * MmaThread().warp; }
  // Calls f(t, half, i) for each row or key i that the thread owns. Two elements of each fragment in the thread's tile
  // t belong to row or key i: elements 0 and 1 if `half` is 0, or elements 2 and 3 if `half` is 1.
  template <class F>
  static __device__ __forceinline__ void each_own(F f) {
    const int first = own() + MmaThread().group;
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int half = 0; half < 2; ++half) f(t, half, first + 16 * t + 8 * half);
  }
  // Calls f(score, row, key, t, half, bit of Kept) for all scores of a thread. The outer loop goes over the rows or
  // keys that the block does not own, the inner loop over those that the thread owns.
  template <class F>
  static __device__ __forceinline__ void each(Scores& x, F f) {
    const MmaThread thread;
#pragma unroll
    for (int bit = 0; bit < kOther / 4; ++bit) {
      const int other = thread.col(bit / 2) + bit % 2;
      each_own([&](int t, int half, int i) {
        f(Fragments::at(x[t], half, bit), kOwnsKeys ? other : i, kOwnsKeys ? i : other, t, half, bit);
      });
    }
  }

  // Adds the contribution of one tile of scores, which has `count` rows and begins with key `key`. The rows or keys
  // that the block does not own are in buffer `stage`.
  __device__ __forceinline__ void add_tile(Sums& of_ds, Sums& of_weights, int stage, int count, int64_t key) {
    auto& other = shared.other[stage];
    const auto& rows = shared.rows[kOwnsKeys ? stage : 0];
    const Range positions = positions_of_rows(shared.task.sequence, {0, 0, rows.rows.position[0]}, count);
    const bool hides = (kOwnsKeys && count < kOther) ||  // rows beyond the last one are hidden too
                       !all_visible(shared.task.sequence, positions, {key, key + kKeys});
    Scores x = {};
    add_dots<kTiles>(x, shared.own_score, own(), other.score);
    const bool finite = Fragments::template all_finite<kTiles>(x);
    Scores capped;  // SoftCap's arguments
    make_exponents(x, capped, rows, finite, key);
    if (hides)
#pragma unroll
      for (int t = 0; t < kTiles; ++t)
        Fragments::hide_keys(x[t], own() + 16 * t, shared.task.sequence, rows.rows, count, key);
    each(x, [&](float& exponent, int, int, int, int, int) { exponent = exp2_approx(exponent); });
    Kept kept = {~0u, ~0u};
    if constexpr (kGeneral)
      if (p.has_dropout)
        Fragments::dropout_mask(
            kept, own(), shared.dropout,
            [&](int i, int) {
              return DropoutRow{static_cast<uint32_t>(rows.rows.position[i]), rows.of_row[i].head_number};
            },
            key);
    if constexpr (kSumsValue)
      add_weighted<kTiles, Factor::as_it_is>(of_weights, other.dp, [&](int t, int n, int half, int c) {
        const float weight = x[t][n][2 * half + c];
        return kGeneral ? weight * static_cast<float>(kept[half] >> (2 * n + c) & 1) : weight;
      });
    if constexpr (kNeedsDs) {
      Scores dx = {};  // dP, or dP - delta at once, which saves subtractions
      if constexpr (kOwnsKeys && !kGeneral)
        each(dx, [&](float& dp, int i, int, int, int, int) { dp = -rows.of_row[i].delta; });
      add_dots<kTiles>(dx, shared.own_dp, own(), other.dp);
      compute_ds(x, dx, rows, kept, hides);
      if constexpr (kSumsMask)
        each(x, [&](float& ds, int, int, int t, int half, int bit) { Fragments::at(of_ds[t], half, bit) += ds; });
      else
        add_ds(of_ds, x, capped, finite, other.score, rows, count, key);
    }
  }
  // Adds dS K to dQ, or dS^T Q to dK, where x holds dS.
  __device__ __forceinline__ void add_ds(Sums& of_ds, Scores& x, Scores& capped, bool finite, Other& factors,
                                         const Rows& rows, int count, int64_t key) {
    if constexpr (!kOwnsKeys)
      if (p.grad_mask.data && !p.mask_is_shared) write_mask(x, rows, count, key);
    if constexpr (!kOwnsKeys && kGeneral)
      if (p.grad_slopes)
        each(x, [&](float& ds, int i, int j, int, int half, int) {
          of_slopes[half] += ds * Alibi<float>::by_slope(fabsf(ahead_of(rows, i, key) - static_cast<float>(j)));
        });
    if (!kOwnsKeys && !p.grad_query.data) return;
    if (kGeneral && p.softcap > 0)  // 0 where dS is 0, even if a hidden product is NaN
      each(x, [&](float& ds, int, int, int t, int half, int bit) {
        ds = ds == 0 ? 0 : ds * SoftCap<float>::slope(Fragments::at(capped[t], half, bit));
      });
    // NaNs and infinities in K and Q count as 0. So a NaN reaches dQ and dK only through dS, and only where a row
    // attends to the key.
    const auto ds = [&](int t, int n, int half, int c) { return x[t][n][2 * half + c]; };
    if (finite)
      add_weighted<kTiles, Factor::as_it_is>(of_ds, factors, ds);
    else
      add_weighted<kTiles, Factor::finite>(of_ds, factors, ds);
  }

  // Turns products into exponents of 2, log2(e) (score - logsumexp). The exponent is -inf where the mask hides a key.
  // `finite`: whether all products are finite.
  __device__ __forceinline__ void make_exponents(Scores& x, Scores& capped, const Rows& rows, bool finite,
                                                 int64_t key) {
    if constexpr (kGeneral) {
      static_assert(kTiles == 1);
      const bool terms = has_terms(p);
      if (terms || !p.has_mask)
        Fragments::add_terms(
            x[0], own(), p, [&](float y, int half, int bit) { Fragments::at(capped[0], half, bit) = y; },
            [&](int i) { return kOwnsKeys ? rows.alibi[i].ahead : ahead_of(rows, i, key); },
            [&](int i) { return kOwnsKeys ? rows.alibi[i].slope : slope_of(rows, i); });
      if (p.has_mask)
        with_mask_number(p, [&]<class M>() {
          Mask mask;
          if constexpr (kOwnsKeys)
            shared.mask[mask_after(looked_at)].template read_transposed<M>(mask);
          else
            shared.mask[mask_after(looked_at)].template read<M>(mask, 0);
          const auto add = [&]<auto kHow>() { Fragments::template add_mask<kHow>(x[0], mask, terms ? 1 : slope()); };
          Fragments::template choose_add<M>([&] { return terms ? Fragments::all_finite(x) : finite; }, add);
        });
      each(x, [&](float& score, int i, int, int t, int half, int) {
        const BackwardRow& row = row_of(rows, i, t, half);
        const float shifted = (score - row.logsumexp) - row.logsumexp_low;
        score = score == -infinity<float>() ? score : shifted * kLog2E<float>;
      });
    } else {
      const float slope = exponent_slope(p);
      each(x, [&](float& product, int i, int, int t, int half, int) {
        const BackwardRow& row = row_of(rows, i, t, half);
        product = exponent_of(product, slope, {row.logsumexp, row.logsumexp_low});
      });
    }
  }

  // Turns the weights in x into dS = P (Z dP - delta), where Z is the dropout factor. If kOwnsKeys is true and kGeneral
  // is false, dx holds dP - delta, else dP. If kGeneral or `hides` is true, some keys may be hidden. Then dS is set to
  // 0 where the weight is 0, because a NaN in a hidden key or in its value must not reach a gradient.
  __device__ __forceinline__ void compute_ds(Scores& x, Scores& dx, const Rows& rows, const Kept& kept, bool hides) {
    if constexpr (kGeneral) {
      const float keep_scale = p.has_dropout ? static_cast<float>(p.keep_scale) : 1.f;
      each(dx, [&](float& dp, int, int, int, int half, int bit) { dp *= kept[half] >> bit & 1 ? keep_scale : 0.f; });
    }
    if constexpr (!kOwnsKeys || kGeneral)
      each(dx, [&](float& dp, int i, int, int t, int half, int) { dp -= row_of(rows, i, t, half).delta; });
    if (kGeneral || hides)
      each(dx, [&](float& dp, int, int, int t, int half, int bit) {
        if (Fragments::at(x[t], half, bit) == 0) dp = 0;
      });
    each(x, [&](float& weight, int, int, int t, int half, int bit) { weight *= Fragments::at(dx[t], half, bit); });
  }

  __device__ __forceinline__ void write_mask(Scores& ds, const Rows& rows, int count, int64_t key) {
    const Operand& to = p.grad_mask;
    const int64_t base = shared.grad_mask_base + key * to.col, keys = shared.task.last_key - key;
    each(ds, [&](float& gradient, int i, int j, int, int, int) {
      if (i < count && j < keys) store_rounded(to, base + rows.rows.offset(to, i) + j * to.col, gradient);
    });
  }

  // Writes the gradient of the block's keys. operators/run.cpp has already set the gradients of keys beyond the length
  // of their sequence to 0.
  __device__ __forceinline__ void write_keys(const Operand& to, int64_t cols, Sums& sum, float scale) {
    const int64_t base = batch_offset(p, to, shared.task.n) + shared.own_head * to.head;
    each_own([&](int t, int half, int i) {
      const int64_t key = shared.task.first_key + i;
      write_gradient<S>(p, to, base + key * to.row, cols, sum[t], half, scale, key < shared.task.last_key);
    });
  }
};

template <class S, int kDim>
Error launch_backward_mma(const BackwardParams& p, Stream stream) {
  const auto run = [&]<MmaGradient kOf>() {
    return is_general(p) ? launch_blocks<BackwardMma<S, kDim, kOf, true>>(p, stream)
                         : launch_blocks<BackwardMma<S, kDim, kOf, false>>(p, stream);
  };
  const auto run_query = [&] {
    if constexpr (kDim <= 128)
      if (p.few_rows && !is_general(p))
        return launch_blocks<BackwardMma<S, kDim, MmaGradient::query, false, true>>(p, stream);
    return run.template operator()<MmaGradient::query>();
  };
  if (p.grad_query.data || (p.grad_mask.data && !p.mask_is_shared) || p.grad_slopes)
    if (Error error = run_query()) return error;
  if (sums_mask(p))
    if (Error error = launch_blocks<BackwardMma<S, kDim, MmaGradient::shared_mask, true>>(p, stream)) return error;
  if constexpr (kDim <= 128)
    if (p.key_heads == p.value_heads && p.grad_key.data && p.grad_value.data)
      return run.template operator()<MmaGradient::key_and_value>();
  if (p.grad_key.data)
    if (Error error = run.template operator()<MmaGradient::key>()) return error;
  return p.grad_value.data ? run.template operator()<MmaGradient::value>() : nullptr;
}

}  // namespace attn::cuda
