// Computes the gradients on Hopper's tensor cores, where uses_backward_wgmma() says so, in two passes. In the first one
// a block owns rows and sums dQ over keys, in the second one it owns keys and sums dK and dV over rows. As in
// mma/backward.cuh, every product has one of two forms, where a consumer owns 64 rows or keys of `own`, and `other` is
// the tile in use:
//
//   form               if the block owns keys      if it owns rows
//   own other^T        x = K Q^T, dP = V G^T       x = Q K^T, dP = G V^T
//   (16-bit x) other   dV += P^T G, dK += dS^T Q   dQ += dS K
//
// So weights stay in registers from the first product to the second, sums are added up in the order of the tiles, and
// their bits are always the same.
#pragma once

#include "cuda/mma/gradients.cuh"
#include "cuda/wgmma/row_tasks.cuh"

namespace attn::cuda {

// Blocks of 128 rows sum dQ over tiles of so many keys. Blocks of 128 keys sum dK and dV over tiles of so many rows.
constexpr int backward_wgmma_keys(int dim) { return dim <= 64 ? 128 : 96; }
constexpr int backward_wgmma_rows(int dim) { return dim <= 64 ? 96 : 64; }

// Whether a tile is finite, whose products with others are `x`. A number of the tile that is not finite makes all its
// products so. Therefore all warps of the block find the same answer, though each of them has products of its own.
template <class S, int kRows, int kCols>
__device__ __forceinline__ bool is_finite(const float (&x)[kRows / 8][4], const PanelTile<S, kRows, kCols>& tile) {
  if (ScoresMma<S, kRows / 8, false>::all_finite(&x)) return true;
  bool finite = true;
  for (int i = MmaThread().lane; i < kRows * kCols / kVector; i += 32)
    for (const uint32_t two : reinterpret_cast<const Vec16<uint32_t>*>(tile.numbers)[i].at)
      finite &= make_finite<S>(two) == two;
  __syncwarp();  // all lanes have read the tile
  return __all_sync(~0u, finite);
}

// Turns exponents into weights.
template <int kFragments>
__device__ __forceinline__ void turn_into_weights(float (&x)[kFragments][4]) {
#pragma unroll
  for (int n = 0; n < kFragments; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) x[n][i] = exp2_approx(x[n][i]);
}
// Turns dP - delta into dS, where `w` are weights. If some keys may be hidden, it is 0 where the weight is 0, because a
// NaN in a hidden key's value must not reach a gradient.
template <int kFragments>
__device__ __forceinline__ void turn_into_ds(float (&x)[kFragments][4], const float (&w)[kFragments][4], bool hides) {
  if (hides)
#pragma unroll
    for (int n = 0; n < kFragments; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (w[n][i] == 0) x[n][i] = 0;
#pragma unroll
  for (int n = 0; n < kFragments; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) x[n][i] *= w[n][i];
}

// Makes a tile finite, whose products with others are `x`: puts 0 in place of infinities and NaNs. So they reach a
// gradient only through dS, where a row sees the key. Called by kThreads threads, of all consumers, after products of
// this tile, and before they multiply dS by it.
template <int kThreads, class S, int kRows, int kCols>
__device__ __forceinline__ void make_finite(const float (&x)[kRows / 8][4], PanelTile<S, kRows, kCols>& tile) {
  if (is_finite(x, tile)) return;
  constexpr int kBarrier = 1;
  sync_threads<kThreads>(kBarrier);  // all threads have read the tile, and so have their products
  for (int i = thread_index(); i < kRows * kCols / kVector; i += kThreads)
    for (uint32_t& two : reinterpret_cast<Vec16<uint32_t>*>(tile.numbers)[i].at) two = make_finite<S>(two);
  publish_writes();
  sync_threads<kThreads>(kBarrier);
}

// The ways to turn products into weights: without a cap, with a small cap and no ALiBi, and with anything.
__device__ __forceinline__ Cap cap_beside_slopes(const Problem& p) {
  const Cap cap = cap_of(p);
  return cap == Cap::small && p.alibi_slopes ? Cap::large : cap;
}
template <Cap kCap>
constexpr bool kMayHaveSlopes = kCap != Cap::small;

// SoftCap::slope() in one instruction.
__device__ __forceinline__ float cap_slope(float y) { return fmaf(-y, y, 1); }

// --- dQ ---

template <class S, int kRows, int kDim, int kKeys, int kStages>
struct GradQueryTiles {
  PanelTile<S, kRows, kDim> query, grad_output;
  PanelTile<S, kKeys, kDim> key[kStages], value[kStages];

  __device__ __forceinline__ void init_all() {}
};
template <class S, int kDim, int kKeys, int kStages, int kConsumers = 2>
using GradQueryTasks = RowTasks<BackwardTaskParams, S, GradQueryTiles<S, 64 * kConsumers, kDim, kKeys, kStages>,
                                kConsumers, 64 * kConsumers, kKeys, kStages, 4 * kConsumers, kGroupThreads / 2>;

// kHasTerms: whether there is a cap or ALiBi.
template <class S, int kDim, int kKeys, int kStages, bool kHasTerms = false>
struct GradQueryWgmma : GradQueryTasks<S, kDim, kKeys, kStages> {
  static constexpr int kProducerRegisters = 56, kConsumerRegisters = 224;
  using Tasks = GradQueryTasks<S, kDim, kKeys, kStages>;
  using Tasks::kRows, Tasks::p, Tasks::shared;
  using typename Tasks::Hiding, typename Tasks::Operands, typename Tasks::Work;
  using Scores = float[kKeys / 8][4];

  __device__ __forceinline__ void run(int64_t number) {
    if constexpr (!kHasSm90)
      trap();
    else
      Tasks::template run<kProducerRegisters, kConsumerRegisters>(
          number,
          [&](const Work& work) {
            Tasks::start_rows(shared.query, work, Operands::kQuery, 0, p.head_dim);
            Tasks::start_rows(shared.grad_output, work, Operands::kGradOutput, 0, p.value_dim);
          },
          [&](const Work& work, Ring<kStages>& stage) {
            Tasks::template copy_keys<false>(work, stage, shared.key, shared.value);
          },
          [&](int consumer) {
            Place place;
            Tasks::consume([&](const Work& work) { attend(work, consumer, place); });
          });
  }

  struct Place {
    Ring<kStages> stage;
    Ring<1> queries;
  };
  // dS of a thread's two rows.
  struct ScoreGradients : Hiding {
    const BackwardTaskParams& p;
    float slope;
    Pair<float> shift[2];
    float delta[2];
    std::conditional_t<kHasTerms, RowSlopes, Nothing> slopes;
    float (&of_slopes)[2];  // the sums of the slopes' gradient
    Scores x, dx;           // products of Q and K, of G and V; then weights, dS

    __device__ __forceinline__ ScoreGradients(const BackwardTaskParams& p, const Work& work, int own,
                                              float (&of_slopes)[2])
        : Hiding(work, own),
          p(p),
          slope(exponent_slope(p)),
          slopes(Tasks::template slopes_of<kHasTerms>(p, work, own)),
          of_slopes(of_slopes) {
      const double per_score = exponent_per_score(p);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const Row row = Tasks::row_of(work.task, own + MmaThread().group + 8 * r);
        const int64_t number = row_number(p, row.n, row.head, row.position);
        shift[r] = exponent_shift(static_cast<const Pair<float>*>(p.logsumexp)[number], per_score);
        delta[r] = static_cast<const float*>(p.delta)[number];
      }
    }
    // Turns x into weights, times the derivative of the cap if there is one.
    __device__ __forceinline__ void weigh(int tile) {
      if constexpr (kHasTerms) {
        const Cap cap = cap_beside_slopes(p);
        const float key = static_cast<float>(tile * kKeys);
        if (cap == Cap::none)
          weigh<Cap::none>(key);
        else if (cap == Cap::small)
          weigh<Cap::small>(key);
        else
          weigh<Cap::large>(key);
        if (this->hides(tile)) this->hide(x, tile, 0);
      } else {
#pragma unroll
        for (auto& four : x)
#pragma unroll
          for (int i = 0; i < 4; ++i) four[i] = exponent_of(four[i], slope, shift[i / 2]);
        if (this->hides(tile)) this->hide(x, tile);
        turn_into_weights(x);
      }
    }
    // `key`: see RowSlopes.
    template <Cap kCap>
    __device__ __forceinline__ void weigh(float key) {
      const auto tanh = Tanh<kCap>::of(p);
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float y = tanh(x[n][i]), sum = kMayHaveSlopes<kCap> ? slopes.add(y, n, i, key) : y;
          const float weight = exp2_approx(exponent_of(sum, slope, shift[i / 2]));
          x[n][i] = kCap == Cap::none ? weight : weight * cap_slope(y);
        }
    }
    // Turns dx into dS.
    __device__ __forceinline__ void make_ds(int tile) {
#pragma unroll
      for (auto& four : dx)
#pragma unroll
        for (int i = 0; i < 4; ++i) four[i] -= delta[i / 2];
      turn_into_ds(dx, x, this->hides(tile));
      if constexpr (kHasTerms)
        // The number of the tile is read again, so that no distance stays in a register from weigh() on.
        if (p.grad_slopes) add_to_slopes(static_cast<float>(uniform(tile) * kKeys));
    }
    // `key`: see RowSlopes. There is no cap, because dS would have to be known in front of the cap, too.
    __device__ __forceinline__ void add_to_slopes(float key) {
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          of_slopes[i / 2] = fmaf(dx[n][i], Alibi<float>::by_slope(slopes.distance(n, i, key)), of_slopes[i / 2]);
    }
  };

  __device__ __forceinline__ void start(ScoreGradients& s, int consumer, const Ring<kStages>& stage) {
    wait(shared.keys.full[stage.stage], stage.parity);
    start_dots(s.x, shared.query, 64 * consumer, shared.key[stage.stage]);
    wait(shared.values.full[stage.stage], stage.parity);
    start_dots(s.dx, shared.grad_output, 64 * consumer, shared.value[stage.stage]);
  }
  // Computes dS, beside kSums sums that are under way.
  template <int kSums>
  __device__ __forceinline__ void compute(ScoreGradients& s, int tile, const Ring<kStages>& stage) {
    wait_for_products<kSums + 1>(s.x);
    make_finite<Tasks::kConsumerThreads>(s.x, shared.key[stage.stage]);
    s.weigh(tile);
    keep_beside_products();
    wait_for_products<kSums>(s.dx);
    arrive_once(shared.values.empty[stage.stage]);
    s.make_ds(tile);
  }

  __device__ __forceinline__ void attend(const Work& work, int consumer, Place& place) {
    const int own = 16 * MmaThread().warp;  // the warp's first row
    const int tiles = uniform(work.tiles);
    float sum[kDim / 8][4] = {}, of_slopes[2] = {};
    if (tiles > 0) {
      ScoreGradients s(p, work, own, of_slopes);
      uint32_t ds[kKeys / 16][4];
      Ring<kStages>& stage = place.stage;
      wait(shared.queries.full[0], place.queries.parity);
      start(s, consumer, stage);
      compute<0>(s, 0, stage);
#pragma unroll 1
      for (int tile = 1; tile < tiles; ++tile) {
        const Ring<kStages> before = stage;
        pack_all<S>(ds, s.dx);
        stage = stage.after();
        start(s, consumer, stage);
        start_weighted(sum, ds, shared.key[before.stage]);
        compute<1>(s, tile, stage);
        keep_beside_products();
        wait_for_products<0>(sum);
        arrive_once(shared.keys.empty[before.stage]);
      }
      arrive_once(shared.queries.empty[0]);
      place.queries = place.queries.after();
      pack_all<S>(ds, s.dx);
      start_weighted(sum, ds, shared.key[stage.stage]);
      wait_for_products<0>(sum);
      arrive_once(shared.keys.empty[stage.stage]);
      stage = stage.after();
    }
    write(work, own, sum, of_slopes);
  }

  __device__ __forceinline__ void write(const Work& work, int own, const float (&sum)[kDim / 8][4],
                                        const float (&of_slopes)[2]) {
    const float scale = ScoreFunction<float>::of(p).slope();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int i = own + MmaThread().group + 8 * r;
      const Row row = Tasks::row_of(work.task, i);
      if constexpr (kHasTerms)
        if (p.grad_slopes)
          write_of_row(p.grad_slopes, row_number(p, row.n, row.head, row.position), of_slopes[r], i < work.task.rows);
      const Operand& to = p.grad_query;
      if (kHasTerms && !to.data) continue;
      write_gradient<S>(p, to, work.begins.of[Operands::kGradQuery] + row.head * to.head + row.position * to.row,
                        p.head_dim, sum, r, scale, i < work.task.rows);
    }
  }
};

// --- dK and dV ---

// A task of kKeys keys.
template <int kKeys>
struct KeyWork {
  Task task;  // the batch entry, the head and its keys
  int keys;
  int64_t rows;      // of the heads that read these keys
  Range rows_seen;   // positions
  double per_score;  // see exponent_per_score()
  Begins<BackwardTaskParams> begins;

  __device__ __forceinline__ void set(const BackwardTaskParams& p, int64_t number) {
    task.key_head = task.set_own_keys(p, number, p.key_heads, kKeys);
    keys = static_cast<int>(larger(0, task.last_key - task.first_key));
    rows = task.rows_of_group(p);
    per_score = exponent_per_score(p);
    rows_seen = keys > 0 ? visible_rows(task.sequence, {task.first_key, task.last_key}) : Range{};
  }
};

// A tile of rows that see some of the keys of a task.
template <int kRows, bool kHasTerms>
struct SeeingRows {
  alignas(16) Pair<float> shift[kRows];
  alignas(8) float delta[kRows];
  TileRange seen[kRows];                       // of the task's keys; none for a row that is not there
  BackwardSlope alibi[kHasTerms ? kRows : 1];  // see RowSlopes
  bool is_over;                                // the task has no more tiles, and nothing else is set
  bool hides;                                  // some row does not see some key
};

struct alignas(16) TwoShifts {
  Pair<float> of[2];
};

template <class S, int kKeys, int kDim, int kRows, int kStages, int kReaders, bool kHasTerms>
struct GradKeyTiles {
  PanelTile<S, kKeys, kDim> key, value;
  PanelTile<S, kRows, kDim> query[kStages], grad_output[kStages];
  SeeingRows<kRows, kHasTerms> rows[kStages];
  RingBarriers<1, kGroupThreads, kReaders> keys;
  RingBarriers<kStages, kGroupThreads / 2, kReaders> queries, grad_outputs;

  __device__ __forceinline__ void init_all() {
    keys.init_all();
    queries.init_all();
    grad_outputs.init_all();
  }
};
template <class S, int kDim, int kRows, int kStages, bool kHasTerms, int kConsumers = 2>
using GradKeyTasks =
    TasksWgmma<BackwardTaskParams, KeyWork<64 * kConsumers>,
               GradKeyTiles<S, 64 * kConsumers, kDim, kRows, kStages, 4 * kConsumers, kHasTerms>, kConsumers>;

// kRows: of a tile. kHasTerms: whether there is a cap or ALiBi.
template <class S, int kDim, int kRows, int kStages, bool kHasTerms = false>
struct GradKeyWgmma : GradKeyTasks<S, kDim, kRows, kStages, kHasTerms> {
  static constexpr int kProducerRegisters = kDim <= 64 ? 56 : 40, kConsumerRegisters = kDim <= 64 ? 224 : 232;
  using Tasks = GradKeyTasks<S, kDim, kRows, kStages, kHasTerms>;
  using Tasks::kCopying, Tasks::p, Tasks::shared;
  static constexpr int kKeys = Tasks::kConsumerThreads / 2;  // a warpgroup owns 64
  using Work = KeyWork<kKeys>;
  using Operands = TaskOperands<BackwardTaskParams>;
  using Scores = float[kRows / 8][4];
  using Sum = float[kDim / 8][4];
  using Packed = uint32_t[kRows / 16][4];
  struct Place {
    Ring<kStages> stage;
    Ring<1> keys;
  };

  ATTN_INLINE static constexpr int64_t blocks(const BackwardTaskParams& p) {
    return blocks_of_keys(p, p.key_heads, kKeys);
  }

  __device__ __forceinline__ void run(int64_t number) {
    Place place;
    if constexpr (!kHasSm90)
      trap();
    else
      Tasks::template run<kProducerRegisters, kConsumerRegisters>(
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
    if (Tasks::in_first_half())
      copy_rows(work, place.stage, p.query, Operands::kQuery, p.head_dim, shared.query, shared.queries,
                [&](int stage, const Row& first, int count) { set_rows(shared.rows[stage], work, first, count); });
    else
      copy_rows(work, place.stage, p.grad_output, Operands::kGradOutput, p.value_dim, shared.grad_output,
                shared.grad_outputs, [](int, const Row&, int) {});
  }
  __device__ __forceinline__ void start_own(PanelTile<S, kKeys, kDim>& tile, const Work& work, const Operand& x,
                                            int name, int64_t cols) {
    const S* const data = static_cast<const S*>(x.data) + work.begins.of[name];
    PanelCopy<S, kKeys, kDim, kGroupThreads>{static_cast<int>(thread_index()) % kGroupThreads}.start(
        tile, data + work.task.key_head * x.head + work.task.first_key * x.row, x.row, work.keys, cols);
  }
  // Fills one of the two rings with the rows that see some key, tile by tile, and says at the end that they are over.
  // set(stage, first, count) sets the other numbers of `count` rows from row `first` on; count is 0 at the end.
  template <class Barriers, class Set>
  __device__ __forceinline__ void copy_rows(const Work& work, Ring<kStages>& stage, const Operand& x, int name,
                                            int64_t cols, PanelTile<S, kRows, kDim> (&tiles)[kStages],
                                            Barriers& barriers, Set set) {
    const PanelCopy<S, kRows, kDim, kCopying> c{static_cast<int>(thread_index()) % kCopying};
    // The producer has few registers. So it finds rows by their numbers, and reads again what is in shared memory.
    const auto row_at = [&](int64_t number) {
      return row_after(work.task.sequence.queries, Row{work.task.n, work.task.key_head * p.group, 0}, number);
    };
    const auto first_seeing = [&](int64_t number) {
      return number +
             rows_until(work.rows_seen, row_at(number).position, work.task.sequence.queries, work.rows - number, kRows);
    };
    Filling filling{&shared.keys.full[0]};
#pragma unroll 1
    for (int64_t first = first_seeing(0); first < work.rows; first = first_seeing(first + kRows))
      filling.fill(barriers, stage, [&](int i) {
        const int count = static_cast<int>(smaller(kRows, work.rows - first));
        const S* const data = static_cast<const S*>(x.data) + work.begins.of[name];
        c.start_scattered(tiles[i], data, count, cols, [&](int j) {
          const Row row = row_at(first + j);
          return row.head * x.head + row.position * x.row;
        });
        set(i, row_at(first), count);
      });
    filling.fill(barriers, stage, [&](int i) { set(i, Row{}, 0); });
    filling.finish();
  }
  __device__ __forceinline__ void set_rows(SeeingRows<kRows, kHasTerms>& to, const Work& work, const Row& first,
                                           int count) {
    const Task& task = work.task;
    const int thread = thread_index() % kCopying;
    if (thread == 0) {
      to.is_over = count == 0;
      to.hides = count < kRows || !all_visible(task.sequence, positions_of_rows(task.sequence, first, count),
                                               {task.first_key, task.last_key});
    }
    if (count == 0) return;
    const int64_t queries = task.sequence.queries;
    for (int i = thread; i < kRows; i += kCopying) {
      const Row row = row_after(queries, first, RowTile<kRows>::last_repeated(i, count));
      const int64_t number = row_number(p, task.n, row.head, row.position);
      to.shift[i] = exponent_shift(static_cast<const Pair<float>*>(p.logsumexp)[number], work.per_score);
      to.delta[i] = static_cast<const float*>(p.delta)[number];
      const Range seen = visible_keys(task.sequence, {row.position, row.position + 1});
      to.seen[i] = TileRange(i < count ? seen : Range{0, 0}, task.first_key);
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
      Ring<kStages>& stage = place.stage;
#pragma unroll 1
      for (;; stage = stage.after()) {
        wait(shared.queries.full[stage.stage], stage.parity);
        if (uniform(shared.rows[stage.stage].is_over)) break;
        add_tile(of_ds, of_weights, consumer, stage);
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

  __device__ __forceinline__ void add_tile(Sum& of_ds, Sum& of_weights, int consumer, const Ring<kStages>& stage) {
    const SeeingRows<kRows, kHasTerms>& rows = shared.rows[stage.stage];
    auto &query = shared.query[stage.stage], &grad_output = shared.grad_output[stage.stage];
    Scores x, dx;
    Packed weights, ds;
    const MmaThread thread;
    start_dots(x, shared.key, 64 * consumer, query);
    wait(shared.grad_outputs.full[stage.stage], stage.parity);
    start_dots(dx, shared.value, 64 * consumer, grad_output);
    wait_for_products<1>(x);
    make_finite<Tasks::kConsumerThreads>(x, query);
    const bool hides = uniform(rows.hides);
    if constexpr (kHasTerms) {
      const Cap cap = cap_beside_slopes(p);
      if (cap == Cap::none)
        weigh<Cap::none>(x, weights, rows, hides);
      else if (cap == Cap::small)
        weigh<Cap::small>(x, weights, rows, hides);
      else
        weigh<Cap::large>(x, weights, rows, hides);
    } else {
      weigh(x, rows, hides);
      pack_all<S>(weights, x);
    }
    keep_beside_products();
    wait_for_products<0>(dx);
    start_weighted(of_weights, weights, grad_output);
#pragma unroll
    for (int n = 0; n < kRows / 8; ++n) {
      const float delta[2] = {rows.delta[thread.col(n)], rows.delta[thread.col(n) + 1]};
#pragma unroll
      for (int i = 0; i < 4; ++i) dx[n][i] -= delta[i % 2];
    }
    turn_into_ds(dx, x, hides);
    pack_all<S>(ds, dx);
    start_weighted(of_ds, ds, query);
    wait_for_products<1>(of_weights);
    arrive_once(shared.grad_outputs.empty[stage.stage]);
    wait_for_products<0>(of_ds);
    __syncwarp();  // all lanes have read the numbers of the rows
    arrive_once(shared.queries.empty[stage.stage]);
  }

  static __device__ __forceinline__ TwoShifts shifts_of(const SeeingRows<kRows, kHasTerms>& rows, int i) {
    return *reinterpret_cast<const TwoShifts*>(&rows.shift[i]);
  }
  // The thread's key with the number `half` of its two, in the task.
  static __device__ __forceinline__ int key_of(const MmaThread& thread, int half) {
    return 16 * thread.warp + thread.group + 8 * half;
  }
  // Turns products into weights.
  __device__ __forceinline__ void weigh(Scores& x, const SeeingRows<kRows, kHasTerms>& rows, bool hides) {
    const MmaThread thread;
    const float slope = exponent_slope(p);
#pragma unroll
    for (int n = 0; n < kRows / 8; ++n) {
      const TwoShifts shift = shifts_of(rows, thread.col(n));
#pragma unroll
      for (int i = 0; i < 4; ++i) x[n][i] = exponent_of(x[n][i], slope, shift.of[i % 2]);
    }
    if (hides)
#pragma unroll
      for (int n = 0; n < kRows / 8; ++n)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const TileRange seen = rows.seen[thread.col(n) + c];
#pragma unroll
          for (int half = 0; half < 2; ++half)
            if (!seen.contains(key_of(thread, half))) x[n][2 * half + c] = -infinity<float>();
        }
    turn_into_weights(x);
  }
  // The same with a cap or ALiBi. Packs the weights, and multiplies them by the derivative of the cap.
  template <Cap kCap>
  __device__ __forceinline__ void weigh(Scores& x, Packed& weights, const SeeingRows<kRows, kHasTerms>& rows,
                                        bool hides) {
    if (hides)
      weigh<kCap, true>(x, weights, rows);
    else
      weigh<kCap, false>(x, weights, rows);
  }
  template <Cap kCap, bool kHides>
  __device__ __forceinline__ void weigh(Scores& x, Packed& weights, const SeeingRows<kRows, kHasTerms>& rows) {
    const MmaThread thread;
    const auto tanh = Tanh<kCap>::of(p);
    const float slope = exponent_slope(p);
#pragma unroll
    for (int n = 0; n < kRows / 8; ++n) {
      const TwoShifts shift = shifts_of(rows, thread.col(n));
      const BackwardSlope* const alibi = &rows.alibi[thread.col(n)];
      const TileRange* const seen = &rows.seen[thread.col(n)];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int key = key_of(thread, half);
        float of_row[2];
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& number = x[n][2 * half + c];
          const float y = tanh(number), distance = fabsf(alibi[c].ahead - static_cast<float>(key));
          const float sum = kMayHaveSlopes<kCap> ? fmaf(alibi[c].slope, Alibi<float>::by_slope(distance), y) : y;
          const float weight = exp2_approx(exponent_of(sum, slope, shift.of[c]));
          of_row[c] = kHides && !seen[c].contains(key) ? 0 : weight;
          number = kCap == Cap::none ? of_row[c] : of_row[c] * cap_slope(y);
          if (kHides && of_row[c] == 0) number = 0;  // even if the hidden product is NaN
        }
        weights[n / 2][2 * (n % 2) + half] = pack<S>(of_row[0], of_row[1]);
      }
    }
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

template <class S, int kDim>
Error launch_backward_wgmma(const BackwardParams& params, int* counter, const Gpu& gpu) {
  BackwardTaskParams p{params, {}};
  const auto launch = [&]<class Kernel>(const TaskOrder& order) -> Error {
    p.order = order;
    p.counters = order.at_once > 0 && Kernel::blocks(p) > gpu.multiprocessors ? counter : nullptr;
    if (Error error = clear_counters(p.counters, 1, gpu.stream)) return error;
    return launch_persistent<Kernel>(p, gpu);
  };
  constexpr int kStages = kDim <= 64 ? 4 : 2;
  const auto run = [&]<bool kHasTerms>() -> Error {
    using OfQuery = GradQueryWgmma<S, kDim, backward_wgmma_keys(kDim), kStages, kHasTerms>;
    using OfKeys = GradKeyWgmma<S, kDim, backward_wgmma_rows(kDim), kStages, kHasTerms>;
    if (p.grad_query.data || p.grad_slopes)
      if (Error error = launch.template operator()<OfQuery>(order_of_rows(p, OfQuery::kRows))) return error;
    if (!p.grad_key.data && !p.grad_value.data) return nullptr;
    return launch.template operator()<OfKeys>(order_of_keys(p, p.key_heads, OfKeys::kKeys));
  };
  return has_score_terms(p) ? run.template operator()<true>() : run.template operator()<false>();
}

}  // namespace attn::cuda
