// What kernels on Hopper have in common whose tasks are rows: the forwards, and the gradient of the query. A task
// passes over the keys that its rows see.
#pragma once

#include "cuda/mma/online_softmax.cuh"
#include "cuda/wgmma/mask.cuh"

namespace attn::cuda {

// A task of kRows rows and its tiles of kKeys keys. Every row sees all keys of the tiles from first_seen to last_seen -
// 1.
template <class Params, int kRows, int kKeys, Extra kExtra>
struct RowWork {
  Task task;
  int tiles, first_seen, last_seen;
  std::conditional_t<kExtra == Extra::mask, Row, Nothing> first, last;  // of its rows
  std::conditional_t<kExtra == Extra::dropout, Dropout, Nothing> dropout;
  Begins<Params> begins;

  __device__ __forceinline__ void set(const Params& p, int64_t number) {
    task.set(p, number, kRows, kKeys);
    const int64_t keys = task.rows > 0 ? larger(0, task.last_key - task.first_key) : 0;
    tiles = static_cast<int>(divide_up(keys, kKeys));
    first_seen = last_seen = 0;
    if constexpr (kExtra == Extra::dropout) dropout.set(p, task.n);
    if (tiles == 0) return;
    if constexpr (kExtra == Extra::mask) {
      first = task.row_at();
      last = task.row_at(task.rows - 1);
    }
    const Range seen = task.seen_by_all;
    first_seen = static_cast<int>(divide_up(smaller(keys, larger(0, seen.first - task.first_key)), kKeys));
    last_seen = static_cast<int>(smaller(keys, larger(0, seen.last - task.first_key)) / kKeys);
  }
};

// Tiles of the kernels below: `Tiles`, and the barriers of the rows and of two rings of kStages tiles each, which the
// producer fills side by side. kReaders warps say that a tile has been read, and that the rows have been read.
// kFilling: how many threads fill a tile.
template <class Tiles, int kStages, int kReaders, int kFilling>
struct RowTiles : Tiles {
  RingBarriers<1, kGroupThreads, kReaders> queries;
  RingBarriers<kStages, kFilling, kReaders> keys, values;

  __device__ __forceinline__ void init_all() {
    Tiles::init_all();
    queries.init_all();
    keys.init_all();
    values.init_all();
  }
};

// What ALiBi needs of a thread's two rows, in numbers that are scores but for terms_left().
struct RowSlopes {
  float slope[2] = {};  // over terms_left()
  float ahead[2] = {};  // how far the row is ahead of the lane's first key of the task

  // row_at(half) returns a row.
  template <class RowAt>
  __device__ __forceinline__ RowSlopes(const Problem& p, const Task& task, RowAt row_at) {
    if (!p.alibi_slopes) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Row row = row_at(half);
      slope[half] = static_cast<const float*>(p.alibi_slopes)[head_number(p, row)] / terms_left(p);
      ahead[half] = static_cast<float>(row.position + task.sequence.offset - task.first_key - MmaThread().col(0));
    }
  }
  // Returns the distance between the row and the key of element i of fragment n. `key` is the tile's first key, counted
  // from the task's first key.
  __device__ __forceinline__ float distance(int n, int i, float key) const {
    return fabsf(ahead[i / 2] - key - static_cast<float>(8 * n + i % 2));
  }
  __device__ __forceinline__ float add(float x, int n, int i, float key) const {
    return fmaf(slope[i / 2], Alibi<float>::by_slope(distance(n, i, key)), x);
  }
};

// What dropout needs of a thread's two rows.
struct OwnDropout {
  const Dropout& dropout;  // of the task
  DropoutRow rows[2];

  // row_at(half) returns a row.
  template <class RowAt>
  __device__ __forceinline__ OwnDropout(const Problem& p, const Dropout& dropout, RowAt row_at) : dropout(dropout) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Row row = row_at(half);
      rows[half] = dropout.row(p, row.n, row.head, row.position);
    }
  }
};

// S: the type of query, key, value. With a mask, Tiles have WithMask. See RowWork, RowTiles and TasksWgmma.
template <class Params, class S, class Tiles, int kConsumers, int kTaskRows, int kKeys, int kStages, int kReaders,
          int kFilling, Extra kExtra>
struct RowTasks : TasksWgmma<Params, RowWork<Params, kTaskRows, kKeys, kExtra>,
                             RowTiles<Tiles, kStages, kReaders, kFilling>, kConsumers> {
  static constexpr bool kMasked = kExtra == Extra::mask;
  using Work = RowWork<Params, kTaskRows, kKeys, kExtra>;
  using Tasks = TasksWgmma<Params, Work, RowTiles<Tiles, kStages, kReaders, kFilling>, kConsumers>;
  using Tasks::kCopying, Tasks::p, Tasks::shared;
  using Operands = TaskOperands<Params>;
  static constexpr int kRows = kTaskRows;

  int first_key = 0;  // of a consumer's task, if there is a mask

  ATTN_INLINE static constexpr int64_t blocks(const Params& p) {
    if constexpr (requires { p.splits; }) return p.splits * blocks_of_rows(p, kRows);
    return blocks_of_rows(p, kRows);
  }

  // start_rows(work) starts to copy the rows of a task. Then copy(work, stage) copies its keys and values, and waits
  // for the rows. consume(number) is the part of a consumer.
  template <int kProducerRegisters, int kConsumerRegisters, class StartRows, class Copy, class Consume>
  __device__ __forceinline__ void run(int64_t number, StartRows start_rows, Copy copy, Consume consume) {
    Ring<1> queries;
    Ring<kStages> stage;  // of keys or of values, whichever this thread copies
    Tasks::template run<kProducerRegisters, kConsumerRegisters>(
        number, blocks(p),
        [&](const Work& work) {
          if (work.tiles == 0) return;
          wait(shared.queries.empty[0], queries.parity ^ 1);
          start_rows(work);
          commit_copies();
          copy(work, stage);
          queries = queries.after();
        },
        consume);
  }
  // Calls attend(work) for each task that has rows.
  template <class Attend>
  __device__ __forceinline__ void consume(Attend attend) {
    Tasks::consume([&](const Work& work) {
      if (uniform(work.task.rows) > 0) attend(work);
    });
  }

  // --- the producer ---

  // Starts to copy `cols` numbers of each row of the task's batch entry in `x`, from number `col` on.
  template <int kCols>
  __device__ __forceinline__ void start_rows(PanelTile<S, kRows, kCols>& tile, const Work& work,
                                             typename Operands::Name name, int col, int64_t cols) {
    const Task& task = work.task;
    const Operand& x = Operands::at(p, name);
    const S* const data = static_cast<const S*>(x.data) + work.begins.of[name] + col;
    PanelCopy<S, kRows, kCols, kGroupThreads>{thread_index() % kGroupThreads}.start_scattered(
        tile, data, task.rows, cols, [&](int i) {
          const Row row = task.row_at(i);
          return row.head * x.head + row.position * x.row;
        });
  }

  // The next tile that the mask does not hide from all rows. Writes the part of the tile that it shows to `part`.
  // `first`: the first tile of the window.
  __device__ __forceinline__ ShownTile next_shown(const Work& work, MaskWindow<kKeys>& window, int& first,
                                                  Range& part) const {
    const Task& task = work.task;
    bool changes = false;
#pragma unroll 1
    for (;;) {
      if (const int tile = window.take(part, changes); tile >= 0) return {first + tile, changes};
      first += 32;
      if (first >= work.tiles) return {-1, false};
      const int own = first + thread_index() % 32;
      window.set(own < work.tiles ? effect_of_mask<kKeys>(p, task.n, work.first, work.last, task.sequence.queries,
                                                          task.first_key + int64_t{own} * kKeys, task.last_key)
                                  : 0);
    }
  }

  // Fills one of the two rings with a task's keys, tile by tile: start(stage, key, keys) starts to copy `keys` keys
  // from `key` on. The copies of the rows have been started before: their barrier is arrived at as soon as they are
  // there.
  template <class Barriers, class Start>
  __device__ __forceinline__ void fill(const Work& work, Barriers& barriers, Ring<kStages>& stage, Start start) {
    const Task& task = work.task;
    const int64_t last = task.last_key;
    Filling filling{&shared.queries.full[0]};
    if constexpr (kMasked) {
      MaskWindow<kKeys> window;
      int tile, first = -32;
      do {
        Range part{};
        const ShownTile shown = next_shown(work, window, first, part);
        filling.fill(barriers, stage, [&](int i) {
          if (thread_index() % kGroupThreads == 0) shared.shown[i] = shown;
          const int64_t key = task.first_key + int64_t{shown.tile} * kKeys;
          if (shown.tile >= 0)
            start(i, key, static_cast<int>(smaller(part.last, last - key)), static_cast<int>(part.first));
        });
        tile = shown.tile;
      } while (tile >= 0);
    } else {
#pragma unroll 1
      for (int64_t key = task.first_key; key < last; key += kKeys)
        filling.fill(barriers, stage, [&](int i) { start(i, key, static_cast<int>(smaller(kKeys, last - key))); });
    }
    filling.finish();
  }
  // Starts to copy `keys` keys, or their values, from `key` on, of which the first `hidden` ones count as 0. `cols`:
  // the numbers of a row behind `data`.
  template <bool kPaged, int kCols>
  __device__ __forceinline__ void start_keys(const PanelCopy<S, kKeys, kCols, kCopying>& copy,
                                             PanelTile<S, kKeys, kCols>& tile, const Task& task, const Operand& x,
                                             const S* data, int64_t key, int keys, int64_t cols, int hidden = 0) {
    if constexpr (kPaged)
      copy.start_scattered(tile, data, keys, cols,
                           [&](int j) { return offset_in_pages(p, x.page, x.row, task.n, key + j); });
    else
      copy.start(tile, data + key * x.row, x.row, keys, cols, hidden);
  }
  // Fills both rings, whose tiles are `key` and `value`.
  template <bool kPaged, int kDim>
  __device__ __forceinline__ void copy_keys(const Work& work, Ring<kStages>& stage,
                                            PanelTile<S, kKeys, kDim> (&key)[kStages],
                                            PanelTile<S, kKeys, kDim> (&value)[kStages]) {
    const Task& task = work.task;
    if (Tasks::part() == 0)
      copy_keys<kPaged>(work, p.key, work.begins.of[Operands::kKey] + task.key_head * p.key.head, p.head_dim, key,
                        shared.keys, stage);
    else
      copy_keys<kPaged>(work, p.value, work.begins.of[Operands::kValue] + task.value_head * p.value.head, p.value_dim,
                        value, shared.values, stage);
  }
  template <bool kPaged, int kDim, class Barriers>
  __device__ __forceinline__ void copy_keys(const Work& work, const Operand& x, int64_t begin, int64_t cols,
                                            PanelTile<S, kKeys, kDim> (&tiles)[kStages], Barriers& barriers,
                                            Ring<kStages>& stage) {
    const Task& task = work.task;
    const S* const data = static_cast<const S*>(x.data) + begin;
    const PanelCopy<S, kKeys, kDim, kCopying> c{static_cast<int>(thread_index()) % kCopying};
    fill(work, barriers, stage, [&](int i, int64_t key, int keys, int hidden = 0) {
      start_keys<kPaged>(c, tiles[i], task, x, data, key, keys, cols, hidden);
    });
  }

  // --- the consumers ---

  static __device__ __forceinline__ Row row_of(const Task& task, int i) {
    return task.row_at(RowTile<kRows>::last_repeated(i, task.rows));
  }

  // What an option needs of the rows of a thread, in a warp whose first row is `own`: their slopes, if there may be
  // some, or their counters of dropout.
  using RowOptions = std::conditional_t<takes_terms(kExtra), RowSlopes,
                                        std::conditional_t<kExtra == Extra::dropout, OwnDropout, Nothing>>;
  static __device__ __forceinline__ RowOptions row_options(const Problem& p, const Work& work, int own) {
    const auto row_at = [&](int half) { return row_of(work.task, own + MmaThread().group + 8 * half); };
    if constexpr (takes_terms(kExtra))
      return {p, work.task, row_at};
    else if constexpr (kExtra == Extra::dropout)
      return {p, work.dropout, row_at};
    else
      return {};
  }

  // Writes the number of the next tile to `shown`, waits for its keys, and starts to copy its mask if reads_mask().
  // Returns false if there is no further tile.
  __device__ __forceinline__ bool next_tile(ShownTile& shown, int tiles, int consumer, const Ring<kStages>& stage) {
    if (!kMasked && ++shown.tile >= tiles) return false;
    wait(shared.keys.full[stage.stage], stage.parity);
    if constexpr (kMasked) {
      shown = {uniform(shared.shown[stage.stage].tile), uniform(shared.shown[stage.stage].changes) != 0};
      if (shown.tile < 0) return false;
      if (reads_mask(shown)) start_mask(consumer, shown.tile);
    }
    return true;
  }

  // Finds out where the warp's rows begin in the mask.
  __device__ __forceinline__ void find_mask(const Work& work, int consumer) {
    if (const int lane = MmaThread().lane; lane < 16) {
      const int i = 16 * MmaThread().warp + lane;
      const Row row = row_of(work.task, i);
      const int64_t at = batch_offset(p, p.mask, row.n) + row.head * p.mask.head + row.position * p.mask.row;
      shared.in_mask[consumer][i % 64] = static_cast<const unsigned char*>(p.mask.data) + mask_number_bytes(p) * at;
    }
    __syncwarp();
    first_key = uniform(static_cast<int>(work.task.first_key));
  }
  // Whether consumers read the mask of a tile. The gradients have no faster way beside a cap or ALiBi.
  __device__ __forceinline__ bool reads_mask(const ShownTile& shown) const {
    return shown.changes || (!std::is_same_v<Params, ForwardParams> && has_terms(p));
  }
  __device__ __forceinline__ void start_mask(int consumer, int tile) {
    with_mask_number(p, [&]<class M>() {
      shared.mask[consumer].template copy<M>(
          p, [&](int i) { return shared.in_mask[consumer][i]; }, first_key + int64_t{tile} * kKeys);
    });
    commit_copies();
  }
  static __device__ __forceinline__ void wait_for_mask() {
    wait_for_copies<0>();
    __syncwarp();  // all lanes have copied
  }
  // Passes over what the producer has filled behind the last tile.
  __device__ __forceinline__ void pass_end(Ring<kStages>& stage) {
    wait(shared.values.full[stage.stage], stage.parity);
    __syncwarp();  // all lanes have read that it is the end
    arrive_once(shared.keys.empty[stage.stage]);
    arrive_once(shared.values.empty[stage.stage]);
    stage = stage.after();
  }

  // Hides keys that rows of a warp do not see.
  struct Hiding {
    // The positions of a warp's 16 rows, as ScoresMma::hide_keys() asks for them: by lane % 16.
    struct OwnRows {
      struct {
        int64_t of_lane;
        __device__ __forceinline__ int64_t operator[](int) const { return of_lane; }
      } position;
    };

    const Work& work;
    int own;  // the warp's first row
    int first_seen, last_seen;
    OwnRows rows;

    __device__ __forceinline__ Hiding(const Work& work, int own)
        : work(work),
          own(own),
          first_seen(uniform(work.first_seen)),
          last_seen(uniform(work.last_seen)),
          rows{{row_of(work.task, own + thread_index() % 16).position}} {}

    // Whether some row does not see some key of the tile.
    __device__ __forceinline__ bool hides(int tile) const { return tile < first_seen || tile >= last_seen; }
    // Gives them the number `hidden`.
    __device__ __forceinline__ void hide(float (&x)[kKeys / 8][4], int tile, float hidden = -infinity<float>()) const {
      ScoresMma<S, kKeys / 8, false>::hide_keys(x, own, work.task.sequence, rows, kRows,
                                                work.task.first_key + int64_t{tile} * kKeys, hidden);
    }
  };
};

// The forwards, dense and latent.
template <class S, class Tiles, int kConsumers, int kTaskRows, int kKeys, int kStages, int kReaders, int kFilling,
          Extra kExtra = Extra::none>
struct ForwardTasks
    : RowTasks<ForwardParams, S, Tiles, kConsumers, kTaskRows, kKeys, kStages, kReaders, kFilling, kExtra> {
  using Rows = RowTasks<ForwardParams, S, Tiles, kConsumers, kTaskRows, kKeys, kStages, kReaders, kFilling, kExtra>;
  using Rows::p;
  using typename Rows::Hiding, typename Rows::Operands, typename Rows::Work;

  static constexpr bool kHasTerms = takes_terms(kExtra);
  using Softmax = OnlineSoftmax<1, kKeys / 8, kHasTerms>;
  // Whether numbers are left that are scores but for terms_left(). Masks of numbers are added to scores, because a mask
  // may hold the least number of its dtype, which divided by terms_left() would be -inf and hide keys.
  static __device__ __forceinline__ bool is_left(const ForwardParams& p) {
    if constexpr (kExtra == Extra::mask) return Tiles::kMayLeave && p.mask.dtype == DType::boolean;
    return true;
  }
  static __device__ __forceinline__ Softmax softmax_of(const ForwardParams& p) {
    return {p, is_left(p) ? terms_left(p) : 1};
  }

  // The softmax of a thread's two rows.
  struct Weighing : Hiding {
    Softmax softmax;
    typename Rows::RowOptions options;
    float best[2] = {-infinity<float>(), -infinity<float>()}, sum[2] = {}, factor[2];
    float x[1][kKeys / 8][4];  // the products of a tile, then its weights

    __device__ __forceinline__ Weighing(const ForwardParams& p, const Work& work, int own)
        : Hiding(work, own), softmax(softmax_of(p)), options(Rows::row_options(p, work, own)) {}

    // Turns the products of a tile into weights. With a mask x already holds scores.
    __device__ __forceinline__ void weigh(int tile) {
      if constexpr (kExtra == Extra::terms) add_terms(static_cast<float>(tile * kKeys));
      if (this->hides(tile)) this->hide(x[0], tile);
      float shift[2];
      const float old[2] = {best[0], best[1]};
      softmax.raise(best, x);
      softmax.find_shift(x, old, best, shift, factor);
#pragma unroll
      for (int r = 0; r < 2; ++r) sum[r] = sum[r] * factor[r] + softmax.weigh(x, r, shift[r]);
    }
    template <Cap kCap>
    __device__ __forceinline__ void turn_into_tanh() {
      const auto tanh = Tanh<kCap>::of(softmax.p);
#pragma unroll
      for (auto& four : x[0])
#pragma unroll
        for (float& number : four) number = tanh(number);
    }
    // `key`: see RowSlopes.
    __device__ __forceinline__ void add_terms(float key) {
      const Problem& p = softmax.p;
      const Cap cap = cap_of(p);
      if (cap == Cap::small)
        turn_into_tanh<Cap::small>();
      else if (cap == Cap::large)
        turn_into_tanh<Cap::large>();
      if (p.alibi_slopes)
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) x[0][n][i] = options.add(x[0][n][i], n, i, key);
    }
    // Clears the packed weights of a tile that dropout does not keep. A counter gives the random numbers of four keys,
    // of which two neighbouring lanes hold two each. One of the lanes computes the counters of even fragments, the
    // other one those of odd fragments. Each sends the other what it needs.
    __device__ __forceinline__ void drop(uint32_t (&weights)[kKeys / 16][4], int tile) const {
      const MmaThread thread;
      const bool odd = thread.place % 2;
      const auto first = static_cast<uint32_t>(this->work.task.first_key / 4 + int64_t{tile} * (kKeys / 4));
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int k = 0; k < kKeys / 16; ++k) {
          uint32_t kept[2] = {};  // of two keys each
          options.dropout.template each_of_quad<10>(
              first + 4 * k + 2 * odd + thread.place / 2, options.rows[half],
              [&](int w, bool is_kept) { kept[w / 2] |= is_kept ? 0xffffu << 16 * (w % 2) : 0; });
          const uint32_t own = odd ? kept[1] : kept[0], others = __shfl_xor_sync(~0u, odd ? kept[0] : kept[1], 1);
          weights[k][half] &= odd ? others : own;
          weights[k][2 + half] &= odd ? own : others;
        }
    }
    // Adds the sums of the four lanes of a row.
    __device__ __forceinline__ void add_lanes() {
#pragma unroll
      for (float& of_row : sum) {
        of_row += __shfl_xor_sync(~0u, of_row, 1);
        of_row += __shfl_xor_sync(~0u, of_row, 2);
      }
    }
  };

  // Writes `output`, which begins with column `col` of the task's rows from `own` on: a warp's 16 rows.
  template <int kOutputs>
  __device__ __forceinline__ void write(const Work& work, const float (*output)[kOutputs][4], int own,
                                        const float (&best)[2], const float (&sum)[2], int col = 0) {
    const auto softmax = softmax_of(p);
    const bool vectors = softmax.writes_vectors(p);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int i = own + MmaThread().group + 8 * r;
      const OutputRow<float> to(p, work.begins.of[Operands::kOutput], work.begins.of[Operands::kResidual],
                                Rows::row_of(work.task, i), work.task.split);
      softmax.template write<S>(to, vectors, i < work.task.rows, output, r, best[r], sum[r], col);
    }
  }
};

}  // namespace attn::cuda
