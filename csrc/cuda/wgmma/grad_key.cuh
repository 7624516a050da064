// Sums dK and dV over rows. A block owns keys.
#pragma once

#include "cuda/wgmma/gradients.cuh"

namespace attn::cuda {

// A task of kKeys keys.
template <int kKeys>
struct KeyWork {
  Task task;  // the batch entry, the head and its keys
  int keys;
  Dropout dropout;   // if there is dropout
  int64_t rows;      // of the heads that read these keys
  Range rows_seen;   // positions
  double per_score;  // see exponent_per_score()
  Begins<BackwardTaskParams> begins;

  __device__ __forceinline__ void set(const BackwardTaskParams& p, int64_t number) {
    if (p.turns) {  // in one pass the last keys come first
      const int64_t tasks = tiles_of_keys(p, kKeys);
      const auto [list, task_of_list] = divide(number, tasks);
      number = list * tasks + tasks - 1 - task_of_list;
    }
    task.key_head = task.set_own_keys(p, number, p.key_heads, kKeys);
    keys = static_cast<int>(larger(0, task.last_key - task.first_key));
    rows = task.rows_of_group(p);
    per_score = exponent_per_score(p);
    if (p.has_dropout) dropout.set(p, task.n);
    rows_seen = keys > 0 ? visible_rows(task.sequence, {task.first_key, task.last_key}) : Range{};
  }
};

// A tile of rows that see some of the keys of a task.
template <int kRows, Extra kExtra>
struct SeeingRows {
  alignas(16) Pair<float> shift[kRows];
  alignas(8) float delta[kRows];
  TileRange seen[kRows];                                 // of the task's keys; none for a row that is not there
  BackwardSlope alibi[takes_terms(kExtra) ? kRows : 1];  // see RowSlopes
  DropoutRow dropout[kExtra == Extra::dropout ? kRows : 1];
  bool is_over;  // the task has no more tiles, and nothing else is set
  bool hides;    // some row does not see some key, whatever the mask says
  bool changes;  // if there is a mask, see ShownTile
};

struct alignas(16) TwoShifts {
  Pair<float> of[2];
};

// The parts of the producer: rows, the gradient of their output and, in one pass, a warp that adds to dQ.
template <bool kOnePass>
constexpr int kGradKeyParts = kOnePass ? 4 : 2;

// What one pass needs beside: dS of a tile for the products of all consumers, and what these give.
template <class S, int kKeys, int kDim, int kRows, int kReaders>
struct QuerySums {
  static constexpr int kConsumers = kKeys / 64, kCols = kDim / kConsumers;  // the columns of dQ of a consumer

  PanelTile<S, kKeys, kDim> finite_key;                   // with 0 in place of infinities and NaNs
  PanelTile<S, kKeys, kRows> ds;                          // a row for each key
  alignas(128) float of_tile[kConsumers][kRows * kCols];  // four numbers of each thread for each fragment
  RingBarriers<1, kGroupThreads * kConsumers, kReaders> slopes;
  RingBarriers<1, kGroupThreads, 1> sums[kConsumers];

  __device__ __forceinline__ void init_all() {
    slopes.init_all();
    for (auto& of_consumer : sums) of_consumer.init_all();
  }
};

template <class S, int kKeys, int kDim, int kRows, int kStages, int kReaders, Extra kExtra, bool kOnePass>
struct GradKeyTiles {
  using Mask = MaskTile<S, kRows, 64, true, true>;  // of a consumer
  PanelTile<S, kKeys, kDim> key, value;
  PanelTile<S, kRows, kDim> query[kStages], grad_output[kStages];
  std::conditional_t<kExtra == Extra::mask, Mask, Nothing> mask[kStages][kKeys / 64];
  std::conditional_t<kOnePass, QuerySums<S, kKeys, kDim, kRows, kReaders>, Nothing> query_sums;
  SeeingRows<kRows, kExtra> rows[kStages];
  RingBarriers<1, kGroupThreads, kReaders> keys;
  RingBarriers<kStages, kGroupThreads / kGradKeyParts<kOnePass>, kReaders> queries, grad_outputs;

  __device__ __forceinline__ void init_all() {
    keys.init_all();
    queries.init_all();
    grad_outputs.init_all();
    if constexpr (kOnePass) query_sums.init_all();
  }
};
template <class S, int kDim, int kRows, int kStages, Extra kExtra, bool kOnePass, int kConsumers = 2>
using GradKeyTasks =
    TasksWgmma<BackwardTaskParams, KeyWork<64 * kConsumers>,
               GradKeyTiles<S, 64 * kConsumers, kDim, kRows, kStages, 4 * kConsumers, kExtra, kOnePass>, kConsumers,
               kGradKeyParts<kOnePass>>;

// kRows: of a tile. kOnePass: whether the block also adds its share to dQ (see one_pass.cuh).
template <class S, int kDim, int kRows, int kStages, Extra kExtra = Extra::none, bool kOnePass = false>
struct GradKeyWgmma : GradKeyTasks<S, kDim, kRows, kStages, kExtra, kOnePass> {
  static constexpr int kProducerRegisters = kDim <= 64 ? 56 : 40, kConsumerRegisters = kDim <= 64 ? 224 : 232;
  static constexpr bool kHasTerms = takes_terms(kExtra), kMasked = kExtra == Extra::mask,
                        kDrops = kExtra == Extra::dropout;
  using Rows = SeeingRows<kRows, kExtra>;
  using Tasks = GradKeyTasks<S, kDim, kRows, kStages, kExtra, kOnePass>;
  using Tasks::kConsumerThreads, Tasks::kCopying, Tasks::p, Tasks::shared;
  static constexpr int kKeys = kConsumerThreads / 2;  // a warpgroup owns 64
  static constexpr int kConsumers = kConsumerThreads / kGroupThreads, kQueryCols = kDim / kConsumers;
  using Work = KeyWork<kKeys>;
  using Operands = TaskOperands<BackwardTaskParams>;
  using Fragments = ScoresMma<S, kRows / 8, true>;
  using Scores = float[kRows / 8][4];
  using Sum = float[kDim / 8][4];
  using Packed = uint32_t[kRows / 16][4];
  struct Place {
    Ring<kStages> stage;
    Ring<1> keys, query_sums;
  };

  ATTN_INLINE static constexpr int64_t blocks(const BackwardTaskParams& p) {
    return blocks_of_keys(p, p.key_heads, kKeys);
  }

  __device__ __forceinline__ void run(int64_t number) {
    Place place;
    if constexpr (!kHasSm90)
      trap();
    else
      Tasks::template run<kProducerRegisters, kConsumerRegisters, kOnePass>(
          number, blocks(p), [&](const Work& work) { copy(work, place); },
          [&](int consumer) { Tasks::consume([&](const Work& work) { attend(work, consumer, place); }); });
  }

  // --- the producer ---

  __device__ __forceinline__ void copy(const Work& work, Place& place) {
    if (work.keys == 0 || work.rows_seen.empty()) return;
    wait(shared.keys.empty[0], place.keys.parity ^ 1);
    start_own(shared.key, work, p.key, Operands::kKey, p.head_dim);
    start_own(shared.value, work, p.value, Operands::kValue, p.value_dim);
    commit_copies();
    place.keys = place.keys.after();
    if (Tasks::part() == 0) {
      copy_rows(work, place.stage, p.query, Operands::kQuery, p.head_dim, shared.query, shared.queries,
                [&](int stage, const Row& first, int count, bool changes) {
                  set_rows(shared.rows[stage], work, first, count, changes);
                  if constexpr (kMasked)
                    if (changes) start_mask(stage, work, first, count);
                });
    } else if (Tasks::part() == 1) {
      copy_rows(work, place.stage, p.grad_output, Operands::kGradOutput, p.value_dim, shared.grad_output,
                shared.grad_outputs, [](int, const Row&, int, bool) {});
    } else {
      Filling{&shared.keys.full[0]}.finish();
      if constexpr (kOnePass)
        if (Tasks::part() == 2) add_to_queries(work, place.query_sums);
    }
  }
  // Adds what the consumers have computed of each tile's dQ, when it is the turn of these keys.
  __device__ __forceinline__ void add_to_queries(const Work& work, Ring<1>& at) {
    const Task& task = work.task;
    const int64_t list = (task.n * p.key_heads + task.key_head) * divide_up(p.rows(), kRows);
    const bool is_first_lane = thread_index() % 32 == 0;
#pragma unroll 1
    for (int64_t first = first_seeing(work, 0); first < work.rows; first = first_seeing(work, first + kRows)) {
      const int64_t tile = list + first / kRows, count = smaller(kRows, work.rows - first);
      const Range seen = visible_keys(task.sequence, positions_of_rows(task.sequence, row_at(work, first), count));
      const int turn = static_cast<int>((seen.last - 1) / kKeys - task.first_key / kKeys);  // the last keys have turn 0
      if (is_first_lane) wait_for_turn(&p.turns[tile], turn);
      __syncwarp();
      float* to = static_cast<float*>(p.grad_query_sum.data) + tile * kRows * kDim;
#pragma unroll 1
      for (int consumer = 0; consumer < kConsumers; ++consumer, to += kRows * kQueryCols) {
        auto& [full, empty] = shared.query_sums.sums[consumer];
        wait(full[0], at.parity);
        if (is_first_lane) {
          const SharedAddress from = shared_address(shared.query_sums.of_tile[consumer]);
          constexpr uint32_t kBytes = kRows * kQueryCols * sizeof(float);
          if (turn == 0)
            store_bulk(to, from, kBytes);
          else
            add_bulk(to, from, kBytes);
          commit_bulk();
          wait_for_bulk_reads();
        }
        __syncwarp();
        arrive_once(empty[0]);
      }
      if (is_first_lane) {
        wait_for_bulk();
        store_release(&p.turns[tile], turn + 1);
      }
      at = at.after();
    }
  }
  __device__ __forceinline__ void start_own(PanelTile<S, kKeys, kDim>& tile, const Work& work, const Operand& x,
                                            int name, int64_t cols) {
    const S* const data = static_cast<const S*>(x.data) + work.begins.of[name];
    PanelCopy<S, kKeys, kDim, kGroupThreads>{static_cast<int>(thread_index()) % kGroupThreads}.start(
        tile, data + work.task.key_head * x.head + work.task.first_key * x.row, x.row, work.keys, cols);
  }
  // The producer has few registers. So it finds rows by their numbers, and reads again what is in shared memory.
  __device__ __forceinline__ Row row_at(const Work& work, int64_t number) const {
    return row_after(work.task.sequence.queries, Row{work.task.n, work.task.key_head * p.group, 0}, number);
  }
  // The first tile of rows from row `number` on, of which some see a key if no mask hides it.
  __device__ __forceinline__ int64_t first_seeing(const Work& work, int64_t number) const {
    return number + rows_until(work.rows_seen, row_at(work, number).position, work.task.sequence.queries,
                               work.rows - number, kRows);
  }
  // Returns the first row of the tile behind the one that begins with row `first`. With a mask, leaves out tiles in
  // which it hides all keys, and sets `changes` to whether consumers read the mask. `begin`: the window's first row.
  __device__ __forceinline__ int64_t next_shown(const Work& work, int64_t first, MaskWindow<kKeys>& window,
                                                int64_t& begin, bool& changes) const {
    if constexpr (kMasked) {
      Range part;
#pragma unroll 1
      for (;;) {
        if (const int tile = window.take(part, changes); tile >= 0) {
          changes |= has_terms(p);
          return begin + tile * kRows;
        }
        begin = first_seeing(work, begin + 32 * kRows);
        if (begin >= work.rows) return begin;
        const int64_t own = begin + thread_index() % 32 * kRows;
        const bool sees = own < work.rows && first_seeing(work, own) == own;
        window.set(sees ? effect_of_mask<kKeys>(p, work.task.n, row_at(work, own),
                                                row_at(work, smaller(own + kRows, work.rows) - 1),
                                                work.task.sequence.queries, work.task.first_key, work.task.last_key)
                        : 0);
      }
    } else {
      return first_seeing(work, first + kRows);
    }
  }
  // Fills one of the two rings with the rows that see some key, tile by tile, and says at the end that they are over.
  // set(stage, first, count, changes) sets the other numbers of `count` rows from row `first` on; count is 0 at the
  // end.
  template <class Barriers, class Set>
  __device__ __forceinline__ void copy_rows(const Work& work, Ring<kStages>& stage, const Operand& x, int name,
                                            int64_t cols, PanelTile<S, kRows, kDim> (&tiles)[kStages],
                                            Barriers& barriers, Set set) {
    const PanelCopy<S, kRows, kDim, kCopying> c{static_cast<int>(thread_index()) % kCopying};
    bool changes = false;
    MaskWindow<kKeys> window;
    int64_t begin = -32 * kRows;
    const auto next = [&](int64_t first) { return next_shown(work, first, window, begin, changes); };
    Filling filling{&shared.keys.full[0]};
#pragma unroll 1
    for (int64_t first = next(-kRows); first < work.rows; first = next(first))
      filling.fill(barriers, stage, [&](int i) {
        const int count = static_cast<int>(smaller(kRows, work.rows - first));
        const S* const data = static_cast<const S*>(x.data) + work.begins.of[name];
        c.start_scattered(tiles[i], data, count, cols, [&](int j) {
          const Row row = row_at(work, first + j);
          return row.head * x.head + row.position * x.row;
        });
        set(i, row_at(work, first), count, changes);
      });
    filling.fill(barriers, stage, [&](int i) { set(i, Row{}, 0, false); });
    filling.finish();
  }
  // Starts to copy the mask of `count` rows from row `first` on, and of the task's keys.
  __device__ __forceinline__ void start_mask(int stage, const Work& work, const Row& first, int count) {
    const auto row_at = [&](int i) {
      const Row row = row_after(work.task.sequence.queries, first, RowTile<kRows>::last_repeated(i, count));
      return batch_offset(p, p.mask, row.n) + row.head * p.mask.head + row.position * p.mask.row;
    };
    with_mask_number(p, [&]<class M>() {
      Tasks::Shared::Mask::template copy_row_by_row<M, kCopying>(shared.mask[stage], p, row_at, work.task.first_key);
    });
  }
  __device__ __forceinline__ void set_rows(Rows& to, const Work& work, const Row& first, int count, bool changes) {
    const Task& task = work.task;
    const int thread = thread_index() % kCopying;
    // One pass multiplies dS of all keys by K, so keys that are not there are hidden, too.
    const int64_t last_key = kOnePass ? task.first_key + kKeys : task.last_key;
    if (thread == 0) {
      to.is_over = count == 0;
      to.changes = changes;
      to.hides = count < kRows || !all_visible(task.sequence, positions_of_rows(task.sequence, first, count),
                                               {task.first_key, last_key});
    }
    if (count == 0) return;
    const int64_t queries = task.sequence.queries;
    for (int i = thread; i < kRows; i += kCopying) {
      const Row row = row_after(queries, first, RowTile<kRows>::last_repeated(i, count));
      const int64_t number = row_number(p, task.n, row.head, row.position);
      to.shift[i] = shift_under_mask(p, static_cast<const Pair<float>*>(p.logsumexp)[number], work.per_score);
      to.delta[i] = static_cast<const float*>(p.delta)[number];
      const Range seen = visible_keys(task.sequence, {row.position, row.position + 1});
      to.seen[i] = TileRange(i < count ? seen : Range{0, 0}, task.first_key);
      if constexpr (kDrops) to.dropout[i] = work.dropout.row(p, task.n, row.head, row.position);
      if constexpr (kHasTerms) {
        const float slope = p.alibi_slopes ? static_cast<const float*>(p.alibi_slopes)[head_number(p, row)] : 0;
        to.alibi[i] = {slope / terms_left(p), static_cast<float>(row.position + task.sequence.offset - task.first_key)};
      }
    }
  }

  // --- the consumers ---

  __device__ __forceinline__ void attend(const Work& work, int consumer, Place& place) {
    if (uniform(work.keys) == 0) return;
    Sum of_ds = {}, of_weights = {};
    if (uniform(!work.rows_seen.empty())) {
      wait(shared.keys.full[0], place.keys.parity);
      if constexpr (kOnePass) copy_finite_keys();
      Ring<kStages>& stage = place.stage;
#pragma unroll 1
      for (;; stage = stage.after()) {
        wait(shared.queries.full[stage.stage], stage.parity);
        if (uniform(shared.rows[stage.stage].is_over)) break;
        add_tile(work, of_ds, of_weights, consumer, stage, place.query_sums);
        if constexpr (kOnePass) place.query_sums = place.query_sums.after();
      }
      wait(shared.grad_outputs.full[stage.stage], stage.parity);
      __syncwarp();  // all lanes have read that it is over
      arrive_once(shared.queries.empty[stage.stage]);
      arrive_once(shared.grad_outputs.empty[stage.stage]);
      arrive_once(shared.keys.empty[0]);
      stage = stage.after();
      place.keys = place.keys.after();
    }
    write(work, p.grad_key, Operands::kGradKey, p.head_dim, of_ds, ScoreFunction<float>::of(p).slope());
    write(work, p.grad_value, Operands::kGradValue, p.value_dim, of_weights, static_cast<float>(p.keep_scale));
  }

  // dQ reads K with 0 in place of infinities and NaNs, which reach dQ only through dS; scores need them. No barrier
  // is needed: all consumers have released K of the task before, and wait for each other's dS before they read this.
  __device__ __forceinline__ void copy_finite_keys() {
    const auto* const from = reinterpret_cast<const Vec16<uint32_t>*>(shared.key.numbers);
    auto* const to = reinterpret_cast<Vec16<uint32_t>*>(shared.query_sums.finite_key.numbers);
#pragma unroll 1
    for (int i = thread_index(); i < kKeys * kDim / kVector; i += kConsumerThreads) {
      Vec16<uint32_t> vector = from[i];
#pragma unroll
      for (uint32_t& two : vector.at) two = make_finite<S>(two);
      to[i] = vector;
    }
    publish_writes();
  }
  // Starts a consumer's columns of dS K, for all rows of the tile. dS is stored for it as [keys, rows].
  using QuerySum = float[kQueryCols / 8][4];
  __device__ __forceinline__ void start_query_sum(QuerySum& sum, const Packed& ds, int consumer, const Ring<1>& at) {
    static_assert(kRows == 64);
    auto& tiles = shared.query_sums;
    const MmaThread thread;
    const int key = 16 * thread.warp + thread.lane % 16;
    const SharedAddress row = shared_address(tiles.ds.numbers) + key * 128;
    wait(tiles.slopes.empty[0], at.parity ^ 1);
#pragma unroll
    for (int k = 0; k < kRows / 16; ++k) store_matrices(row + ((2 * k + thread.lane / 16) ^ key % 8) * 16, ds[k]);
    publish_writes();
    arrive(tiles.slopes.full[0]);
    wait(tiles.slopes.full[0], at.parity);
    const Matrix a = tiles.ds.matrix();
    const Matrix b = from_column<kKeys>(tiles.finite_key.matrix(), kQueryCols * consumer);
    begin_products();
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k)
      multiply_group<S, true, true>(sum, from_row(a, 16 * k), from_row(b, 16 * k), k > 0);
    commit_products();
  }
  __device__ __forceinline__ void pass_on(const QuerySum& sum, int consumer, const Ring<1>& at) {
    auto& tiles = shared.query_sums;
    auto* const to = reinterpret_cast<Vec16<float>*>(tiles.of_tile[consumer]) + thread_index() % kGroupThreads;
    wait(tiles.sums[consumer].empty[0], at.parity ^ 1);
#pragma unroll
    for (int n = 0; n < kQueryCols / 8; ++n) to[n * kGroupThreads] = {{sum[n][0], sum[n][1], sum[n][2], sum[n][3]}};
    publish_writes();
    arrive(tiles.sums[consumer].full[0]);
  }

  __device__ __forceinline__ void add_tile(const Work& work, Sum& of_ds, Sum& of_weights, int consumer,
                                           const Ring<kStages>& stage, const Ring<1>& of_queries) {
    const Rows& rows = shared.rows[stage.stage];
    auto &query = shared.query[stage.stage], &grad_output = shared.grad_output[stage.stage];
    Scores x, dx;
    Packed weights, ds;
    [[maybe_unused]] Packed shown;  // see clears_hidden()
    const MmaThread thread;
    typename Fragments::Kept kept = {};  // by dropout
    if constexpr (kDrops)                // before products take registers
      Fragments::template dropout_mask<kRows / 8>(
          kept, 16 * thread.warp, work.dropout, [&](int i, int) { return rows.dropout[i]; }, work.task.first_key);
    const auto keeps = [&](int n, int i) { return kept[i / 2] >> (2 * n + i % 2) & 1; };
    start_dots(x, shared.key, 64 * consumer, query);
    wait(shared.grad_outputs.full[stage.stage], stage.parity);
    start_dots(dx, shared.value, 64 * consumer, grad_output);
    wait_for_products<1>(x);
    make_finite<Tasks::kConsumerThreads>(x, query);
    const bool hides = uniform(rows.hides), changes = kMasked && uniform(rows.changes) != 0;
    if constexpr (kHasTerms) {
      [[maybe_unused]] const Cap cap = cap_beside_slopes(p);
      if constexpr (kMasked)
        weigh_under_mask(x, weights, shown, rows, hides, changes, shared.mask[stage.stage][consumer]);
      else if (cap == Cap::none)
        weigh<Cap::none>(x, weights, rows, hides);
      else if (cap == Cap::small)
        weigh<Cap::small>(x, weights, rows, hides);
      else
        weigh<Cap::large>(x, weights, rows, hides);
    } else {
      weigh(x, rows, hides);
      if constexpr (kDrops)
#pragma unroll
        for (int n = 0; n < kRows / 8; ++n)
#pragma unroll
          for (int half = 0; half < 2; ++half)
            weights[n / 2][2 * (n % 2) + half] =
                pack<S>(keeps(n, 2 * half) ? x[n][2 * half] : 0, keeps(n, 2 * half + 1) ? x[n][2 * half + 1] : 0);
      else
        pack_all<S>(weights, x);
    }
    keep_beside_products();
    wait_for_products<0>(dx);
    start_weighted(of_weights, weights, grad_output);
    const float keep_scale = static_cast<float>(p.keep_scale);
#pragma unroll
    for (int n = 0; n < kRows / 8; ++n) {
      const float delta[2] = {rows.delta[thread.col(n)], rows.delta[thread.col(n) + 1]};
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if constexpr (kDrops)
          dx[n][i] = fmaf(dx[n][i], keeps(n, i) ? keep_scale : 0, -delta[i % 2]);
        else
          dx[n][i] -= delta[i % 2];
    }
    const bool clears = kMasked && changes && clears_hidden(p);
    turn_into_ds(dx, x, hides || (changes && !clears));
    pack_all<S>(ds, dx);
    if (clears) clear_hidden(ds, shown);
    [[maybe_unused]] QuerySum of_query;
    if constexpr (kOnePass) start_query_sum(of_query, ds, consumer, of_queries);
    start_weighted(of_ds, ds, query);
    wait_for_products<1>(of_weights);
    arrive_once(shared.grad_outputs.empty[stage.stage]);
    if constexpr (kOnePass) {
      wait_for_products<1>(of_query);
      arrive_once(shared.query_sums.slopes.empty[0]);
      pass_on(of_query, consumer, of_queries);
    }
    wait_for_products<0>(of_ds);
    __syncwarp();  // all lanes have read the numbers of the rows
    arrive_once(shared.queries.empty[stage.stage]);
  }

  static __device__ __forceinline__ TwoShifts shifts_of(const Rows& rows, int i) {
    return *reinterpret_cast<const TwoShifts*>(&rows.shift[i]);
  }
  // The thread's key with the number `half` of its two, in the task.
  static __device__ __forceinline__ int key_of(const MmaThread& thread, int half) {
    return 16 * thread.warp + thread.group + 8 * half;
  }
  // Sets numbers of keys that a row does not see to `hidden`, whatever a mask says.
  __device__ __forceinline__ void hide(Scores& x, const Rows& rows, float hidden) {
    const MmaThread thread;
#pragma unroll
    for (int n = 0; n < kRows / 8; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const TileRange seen = rows.seen[thread.col(n) + c];
#pragma unroll
        for (int half = 0; half < 2; ++half)
          if (!seen.contains(key_of(thread, half))) x[n][2 * half + c] = hidden;
      }
  }
  // Turns products into weights.
  __device__ __forceinline__ void weigh(Scores& x, const Rows& rows, bool hides) {
    const MmaThread thread;
    const float slope = exponent_slope(p);
#pragma unroll
    for (int n = 0; n < kRows / 8; ++n) {
      const TwoShifts shift = shifts_of(rows, thread.col(n));
#pragma unroll
      for (int i = 0; i < 4; ++i) x[n][i] = exponent_of(x[n][i], slope, shift.of[i % 2]);
    }
    if (hides) hide(x, rows, -infinity<float>());
    turn_into_weights(x);
  }
  // The same with a cap or ALiBi. Also packs the weights, and multiplies them by the derivative of the cap.
  template <Cap kCap>
  __device__ __forceinline__ void weigh(Scores& x, Packed& weights, const Rows& rows, bool hides) {
    if (hides)
      weigh_all<kCap, kMayHaveSlopes<kCap>, true, Reads::nothing>(x, weights, rows);
    else
      weigh_all<kCap, kMayHaveSlopes<kCap>, false, Reads::nothing>(x, weights, rows);
  }
  template <Cap kCap, bool kSlopes, bool kHides, Reads kReads>
  __device__ __forceinline__ void weigh_all(Scores& x, Packed& weights, const Rows& rows) {
    const MmaThread thread;
#pragma unroll
    for (int n = 0; n < kRows / 8; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        weigh_two<kCap, kSlopes, kHides, kReads>(x, weights, rows, thread, n, half, 0);
  }
  // Two scores of neighbouring rows, of which `two` is the mask.
  template <Cap kCap, bool kSlopes, bool kHides, Reads kReads>
  __device__ __forceinline__ void weigh_two(Scores& x, Packed& weights, const Rows& rows, const MmaThread& thread,
                                            int n, int half, uint32_t two) {
    constexpr bool kMayHide = kHides || kReads == Reads::booleans || kReads == Reads::numbers;
    const auto tanh = Tanh<kCap>::of(p);
    const float slope = exponent_slope(p);
    const TwoShifts shift = shifts_of(rows, thread.col(n));
    const BackwardSlope* const alibi = &rows.alibi[thread.col(n)];
    const TileRange* const seen = &rows.seen[thread.col(n)];
    const int key = key_of(thread, half);
    float of_row[2];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      float& number = x[n][2 * half + c];
      const float y = tanh(number), distance = fabsf(alibi[c].ahead - static_cast<float>(key));
      const float sum = kSlopes ? fmaf(alibi[c].slope, Alibi<float>::by_slope(distance), y) : y;
      const float weight =
          exp2_approx(exponent_under_mask<S, kReads, 16>(sum, slope, terms_left(p), shift.of[c], two, c));
      of_row[c] = kHides && !seen[c].contains(key) ? 0 : weight;
      number = kCap == Cap::none ? of_row[c] : of_row[c] * cap_slope(y);
      if (kMayHide && kCap != Cap::none && of_row[c] == 0) number = 0;  // even if the hidden product is NaN
    }
    weights[n / 2][2 * (n % 2) + half] = pack<S>(of_row[0], of_row[1]);
  }
  // As weigh(), with a mask, of which the tile is read if `changes`. Sets `shown` if clears_hidden().
  template <class Mask>
  __device__ __forceinline__ void weigh_under_mask(Scores& x, Packed& weights, Packed& shown, const Rows& rows,
                                                   bool hides, bool changes, Mask& mask) {
    const MmaThread thread;
    const auto read = [&]<Cap kCap, bool kSlopes, bool kHides>() {
      with_mask_number(p, [&]<class M>() {
        constexpr Reads kReads = sizeof(M) == 1 ? Reads::booleans : Reads::numbers;
        mask.template each_transposed<M>([&](int n, int half, uint32_t two) {
          weigh_two<kCap, kSlopes, kHides, kReads>(x, weights, rows, thread, n, half, two);
        });
      });
    };
    // With a mask, larger caps run on mma/: see uses_backward_wgmma().
    if (p.softcap > 0) return read.template operator()<Cap::small, false, true>();
    if (p.alibi_slopes)
      read.template operator()<Cap::none, true, false>();
    else if (p.mask.dtype == DType::boolean)
      weigh_all<Cap::none, false, false, Reads::nothing>(x, weights, rows);
    else if (changes)
      mask.template each_transposed<uint16_t>([&](int n, int half, uint32_t two) {
        weigh_two<Cap::none, false, false, Reads::numbers>(x, weights, rows, thread, n, half, two);
      });
    else
      weigh_all<Cap::none, false, false, Reads::zeros>(x, weights, rows);
    if (hides) {
      hide(x, rows, 0);
      pack_all<S>(weights, x);
    }
    if (!changes || !clears_hidden(p)) return;
    mask.template each_transposed<uint8_t>(
        [&](int n, int half, uint32_t two) { shown[n / 2][2 * (n % 2) + half] = fill_halves(two); });
    clear_hidden(weights, shown);
  }
  static __device__ __forceinline__ void clear_hidden(Packed& x, const Packed& shown) {
#pragma unroll
    for (int k = 0; k < kRows / 16; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i) x[k][i] &= shown[k][i];
  }

  __device__ __forceinline__ void write(const Work& work, const Operand& to, int name, int64_t cols, const Sum& sum,
                                        float scale) {
    if (!to.data) return;
    const int64_t base = work.begins.of[name] + work.task.key_head * to.head;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = 16 * MmaThread().warp + MmaThread().group + 8 * half;
      write_gradient<S>(p, to, base + (work.task.first_key + i) * to.row, cols, sum, half, scale, i < work.keys);
    }
  }
};

}  // namespace attn::cuda
