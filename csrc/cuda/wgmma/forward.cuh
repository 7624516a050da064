// Computes the forward on Hopper's tensor cores, where uses_wgmma() says so. As in FlashAttention-3 (Shah et al.,
// 2024), one warpgroup of a block copies, the producer, and the others compute, the consumers. A consumer owns 64 rows.
// While tensor cores compute its products with the next keys and with these values, it turns the scores of these keys
// into weights. Consumers take turns, so that one has the tensor cores while another computes weights. A block stays
// for many tasks: the producer copies the next task's rows while the consumers still write this one's.
#pragma once

#include "cuda/kernels.h"
#include "cuda/launch.cuh"
#include "cuda/mma/online_softmax.cuh"
#include "cuda/wgmma/wgmma.cuh"

namespace attn::cuda {

// S: the type of query, key, value. kDim: head_dim of key and value, padded. kPaged: whether keys and values are stored
// in pages. kTurns: whether consumers take turns. kFilling: how many threads fill a tile of keys or of values.
template <class S, int kDim, int kConsumers, int kKeys, int kStages, bool kPaged, bool kTurns = true,
          int kFilling = kGroupThreads / 2>
struct ForwardWgmma {
  static constexpr int kThreads = (kConsumers + 1) * kGroupThreads, kBlocks = 1;
  static constexpr int kRows = 64 * kConsumers;
  // Setting a task takes 80 registers. If consumers leave fewer, some of its numbers are in local memory.
  static constexpr bool kLeavesSome = kConsumers == 2 && kDim == 128 && kKeys <= 128;
  static constexpr int kProducerRegisters = kLeavesSome ? 88 : kConsumers == 2 ? 40 : 32;
  static constexpr int kConsumerRegisters = (512 - kProducerRegisters) / kConsumers / 8 * 8;
  static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <= 65536 / kThreads / 8 * 8 * (kConsumers + 1));
  static constexpr int kReaders = 4 * kConsumers;     // warps
  static constexpr int kCopying = kGroupThreads / 2;  // one half copies keys, the other half values

  using QueryCopy = PanelCopy<S, kRows, kDim, kGroupThreads>;
  using KeyCopy = PanelCopy<S, kKeys, kDim, kCopying>;
  using Tile = PanelTile<S, kKeys, kDim>;

  // The next task of this block, and how it is counted. In shared memory, because the producer has few registers.
  struct Next {
    int64_t number, end, step;
  };
  // A task and its tiles of keys. Every row sees all keys of the tiles from first_seen to last_seen - 1.
  struct Work {
    bool is_over;  // there are no more tasks: nothing else is set
    Task task;
    int tiles, first_seen, last_seen;
    // Where the task's batch entry begins in these operands, in elements.
    enum { kQuery, kKey, kValue, kOutput, kResidual, kOperands };
    int64_t begin[kOperands];

    // Called by a warp. `next`: which task it is.
    __device__ __forceinline__ void set(const ForwardParams& p, const Next& next, int lane) {
      if (lane == 0) {
        is_over = next.number >= next.end;
        if (!is_over) set(p, next.number);
      }
      __syncwarp();
      if (!is_over && lane < kOperands) begin[lane] = batch_offset(p, operand(p, lane), task.n);
    }

   private:
    static __device__ __forceinline__ const Operand& operand(const ForwardParams& p, int i) {
      if (i == kQuery) return p.query;
      if (i == kKey) return p.key;
      if (i == kValue) return p.value;
      return i == kOutput ? p.output : p.residual;
    }
    __device__ __forceinline__ void set(const ForwardParams& p, int64_t number) {
      task.set(p, p.counters ? p.order[number] : number, kRows, kKeys);
      const int64_t keys = task.rows > 0 ? larger(0, task.last_key - task.first_key) : 0;
      tiles = static_cast<int>(divide_up(keys, kKeys));
      if (tiles == 0) return;
      const Range seen = task.seen_by_all;
      first_seen = static_cast<int>(divide_up(smaller(keys, larger(0, seen.first - task.first_key)), kKeys));
      last_seen = static_cast<int>(smaller(keys, larger(0, seen.last - task.first_key)) / kKeys);
    }
  };
  struct Shared {
    PanelTile<S, kRows, kDim> query;
    Tile key[kStages], value[kStages];
    Work work[2];  // a block's tasks use them in turns
    Next next;
    RingBarriers<2, 32, kReaders + 4> tasks;
    RingBarriers<1, kGroupThreads, kReaders> queries;
    RingBarriers<kStages, kFilling, kReaders> keys, values;
  };
  using Softmax = OnlineSoftmax<1, kKeys / 8, false>;
  using Scores = typename Softmax::Scores;
  using Output = float[kDim / 8][4];
  using Weights = uint32_t[kKeys / 16][4];

  const ForwardParams& p;
  Shared& shared;

  ATTN_INLINE static constexpr int64_t blocks(const ForwardParams& p) { return p.splits * blocks_of_rows(p, kRows); }

  __device__ __forceinline__ void run(int64_t number) {
    run(number, [&](const Work& work, Ring<kStages>& stage) { copy_keys(work, stage); });
  }
  // `copy(work, stage)` copies the keys and values of a task, and waits for the rows, whose copies have been started.
  template <class Copy>
  __device__ __forceinline__ void run(int64_t number, Copy copy) {
    if constexpr (!kHasSm90) {
      trap();
    } else {
      if (threadIdx.x == 0) {
        shared.next = {number, blocks(p), static_cast<int64_t>(gridDim.x) * gridDim.y};
        shared.tasks.init_all();
        shared.queries.init_all();
        shared.keys.init_all();
        shared.values.init_all();
        fence_inits();
      }
      __syncthreads();
      // The same for all lanes, as the compiler knows from the shuffle.
      const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kGroupThreads, 0);
      if (group == kConsumers) {
        give_registers<kProducerRegisters>();
        produce(copy);
      } else {
        take_registers<kConsumerRegisters>();
        consume(group);
      }
    }
  }

  // --- the producer ---

  template <class Copy>
  __device__ __forceinline__ void produce(Copy copy) {
    Ring<2> tasks;
    Ring<1> queries;
    Ring<kStages> stage;  // of keys or of values, whichever this thread copies
    for (;; tasks = tasks.after()) {
      Work& work = shared.work[tasks.stage];
      const Task& task = work.task;
      wait(shared.tasks.empty[tasks.stage], tasks.parity ^ 1);
      if (const int lane = thread_index() % kGroupThreads; lane < 32) {
        work.set(p, shared.next, lane);
        arrive(shared.tasks.full[tasks.stage]);
      }
      wait(shared.tasks.full[tasks.stage], tasks.parity);
      if (work.is_over) break;
      if (work.tiles > 0) {
        wait(shared.queries.empty[0], queries.parity ^ 1);
        const S* const query = static_cast<const S*>(p.query.data) + work.begin[Work::kQuery];
        QueryCopy{thread_index() % kGroupThreads}.start_scattered(
            shared.query, query, task.rows, p.head_dim, [&](int i) {
              const Row row = task.row_at(i);
              return row.head * p.query.head + row.position * p.query.row;
            });
        commit_copies();
        copy(work, stage);
        queries = queries.after();
      }
      __syncwarp();  // all lanes have read the task
      arrive_once(shared.tasks.empty[tasks.stage]);
      if (Next& next = shared.next; thread_index() % kGroupThreads == 0)
        next.number = next.step + (p.counters ? take_ticket(p.counters) : next.number);
    }
  }

  __device__ __forceinline__ void copy_keys(const Work& work, Ring<kStages>& stage) {
    const Task& task = work.task;
    if (const int thread = thread_index() % kGroupThreads; thread < kCopying)
      copy_keys(task, p.key, work.begin[Work::kKey] + task.key_head * p.key.head, p.head_dim, thread, shared.key,
                shared.keys, stage);
    else
      copy_keys(task, p.value, work.begin[Work::kValue] + task.value_head * p.value.head, p.value_dim,
                thread - kCopying, shared.value, shared.values, stage);
  }
  // Copies the keys, or the values, of a task, tile by tile. The copies of the rows have been started before: their
  // barrier is arrived at as soon as they are there.
  template <class Barriers>
  __device__ __forceinline__ void copy_keys(const Task& task, const Operand& x, int64_t begin, int64_t cols, int thread,
                                            Tile (&tiles)[kStages], Barriers& barriers, Ring<kStages>& stage) {
    const KeyCopy copy{thread};
    const S* const data = static_cast<const S*>(x.data) + begin;
    const int64_t last = task.last_key;
    Barrier* pending = &shared.queries.full[0];  // of the copies under way
    const auto finish = [&] {
      wait_for_copies<0>();
      publish_writes();
      arrive(*pending);
      pending = nullptr;
    };
#pragma unroll 1
    for (int64_t key = task.first_key; key < last; key += kKeys, stage = stage.after()) {
      if (pending && !has_ended(barriers.empty[stage.stage], stage.parity ^ 1)) finish();
      wait(barriers.empty[stage.stage], stage.parity ^ 1);
      const int keys = static_cast<int>(smaller(kKeys, last - key));
      if constexpr (kPaged)
        copy.start_scattered(tiles[stage.stage], data, keys, cols,
                             [&](int j) { return offset_in_pages(p, x.page, x.row, task.n, key + j); });
      else
        copy.start(tiles[stage.stage], data + key * x.row, x.row, keys, cols);
      commit_copies();
      if (pending) {
        wait_for_copies<1>();
        publish_writes();
        arrive(*pending);
      }
      pending = &barriers.full[stage.stage];
    }
    finish();
  }

  // --- the consumers ---

  // Consumers pass turns on in a circle, by one barrier each.
  static constexpr int kTurn = 1;
  static __device__ __forceinline__ void wait_for_turn(int consumer) {
    if constexpr (kTurns) sync_threads<2 * kGroupThreads>(kTurn + consumer);
  }
  static __device__ __forceinline__ void pass_turn(int consumer) {
    if constexpr (kTurns) arrive_threads<2 * kGroupThreads>(kTurn + (consumer + 1 == kConsumers ? 0 : consumer + 1));
  }

  struct Place {
    Ring<kStages> stage;
    Ring<1> queries;
  };

  __device__ __forceinline__ void consume(int consumer) {
    Ring<2> tasks;
    Place place;
    if (kTurns && consumer == 0) arrive_threads<2 * kGroupThreads>(kTurn);
    for (;; tasks = tasks.after()) {
      wait(shared.tasks.full[tasks.stage], tasks.parity);
      const Work& work = shared.work[tasks.stage];
      if (work.is_over) break;
      if (uniform(work.task.rows) > 0) attend(work, consumer, place);
      __syncwarp();  // all lanes have read the task
      arrive_once(shared.tasks.empty[tasks.stage]);
    }
    if (kTurns && consumer == 0) sync_threads<2 * kGroupThreads>(kTurn);  // takes the last turn that was passed
  }

  // The positions of a warp's 16 rows, as ScoresMma::hide_keys() asks for them: by lane % 16.
  struct OwnRows {
    struct {
      int64_t of_lane;
      __device__ __forceinline__ int64_t operator[](int) const { return of_lane; }
    } position;
  };
  static __device__ __forceinline__ Row row_of(const Task& task, int i) {
    return task.row_at(RowTile<kRows>::last_repeated(i, task.rows));
  }

  // The number that all lanes of the warp hold. The compiler sees that they do, and computes what follows once for all.
  static __device__ __forceinline__ int uniform(int x) { return __shfl_sync(~0u, x, 0); }

  __device__ __forceinline__ void attend(const Work& work, int consumer, Place& place) {
    const Task& task = work.task;
    const Softmax softmax{p};
    const int own = 16 * MmaThread().warp;  // the warp's first row
    Output output[1] = {};
    float best[2] = {-infinity<float>(), -infinity<float>()}, sum[2] = {};
    const int tiles = uniform(work.tiles);
    if (tiles > 0) {
      const int first_seen = uniform(work.first_seen), last_seen = uniform(work.last_seen);
      const OwnRows rows{{row_of(task, own + thread_index() % 16).position}};
      Scores x[1];
      Weights weights;
      float factor[2];
      // Turns the scores of a tile into weights, which stay in x until pack_weights().
      const auto weigh = [&](int tile) {
        if (tile < first_seen || tile >= last_seen)
          ScoresMma<S, kKeys / 8, false>::hide_keys(x[0], own, task.sequence, rows, kRows,
                                                    task.first_key + int64_t{tile} * kKeys);
        float shift[2];
        const float old[2] = {best[0], best[1]};
        softmax.raise(best, x);
        softmax.find_shift(x, old, best, shift, factor);
#pragma unroll
        for (int r = 0; r < 2; ++r) sum[r] = sum[r] * factor[r] + softmax.weigh(x, r, shift[r]);
      };
      Ring<kStages>& stage = place.stage;
      wait(shared.queries.full[0], place.queries.parity);
      wait(shared.keys.full[stage.stage], stage.parity);
      wait_for_turn(consumer);
      start_scores(x[0], consumer, stage.stage);
      pass_turn(consumer);
      wait_for_products<0>(x[0]);
      arrive_once(shared.keys.empty[stage.stage]);
      weigh(0);
      pack_weights(weights, x[0]);
#pragma unroll 1
      for (int tile = 1; tile < tiles; ++tile) {
        const Ring<kStages> before = stage;
        stage = stage.after();
        wait(shared.keys.full[stage.stage], stage.parity);
        wait_for_turn(consumer);
        start_scores(x[0], consumer, stage.stage);
        wait(shared.values.full[before.stage], before.parity);
        start_output(output[0], weights, before.stage);
        pass_turn(consumer);
        wait_for_products<1>(x[0]);
        arrive_once(shared.keys.empty[stage.stage]);
        weigh(tile);
        keep_beside_products();
        wait_for_products<0>(output[0]);
        arrive_once(shared.values.empty[before.stage]);
        pack_weights(weights, x[0]);
#pragma unroll
        for (int n = 0; n < kDim / 8; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) output[0][n][i] *= factor[i / 2];
      }
      arrive_once(shared.queries.empty[0]);
      place.queries = place.queries.after();
      wait(shared.values.full[stage.stage], stage.parity);
      start_output(output[0], weights, stage.stage);
      wait_for_products<0>(output[0]);
      arrive_once(shared.values.empty[stage.stage]);
      stage = stage.after();
    }
    const bool vectors = softmax.writes_vectors(p);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
      sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
      const int i = own + MmaThread().group + 8 * r;
      const OutputRow<float> to(p, work.begin[Work::kOutput], work.begin[Work::kResidual], row_of(task, i), task.split);
      softmax.template write<S>(to, vectors, i < task.rows, output, r, best[r], sum[r]);
    }
  }

  __device__ __forceinline__ void start_scores(Scores& x, int consumer, int stage) {
    const Matrix query = from_row(shared.query.matrix(), 64 * consumer), key = shared.key[stage].matrix();
    begin_products();
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k)
      multiply_group<S, false, false>(x, from_column<kRows>(query, 16 * k), from_column<kKeys>(key, 16 * k), k > 0);
    commit_products();
  }
  __device__ __forceinline__ void start_output(Output& output, const Weights& weights, int stage) {
    const Matrix value = shared.value[stage].matrix();
    begin_products();
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) multiply_group<S, true>(output, weights[k], from_row(value, 16 * k), true);
    commit_products();
  }
  static __device__ __forceinline__ void pack_weights(Weights& weights, const Scores& x) {
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float (&two)[4] = x[2 * k + i / 2];
        weights[k][i] = pack<S>(two[2 * (i % 2)], two[2 * (i % 2) + 1]);
      }
  }
};

template <class S, int kDim, bool kPaged>
Error launch_forward_wgmma(const ForwardParams& p, const Gpu& gpu) {
  constexpr int kConsumers = forward_wgmma_rows(kDim) / 64, kKeys = forward_wgmma_keys(kDim);
  using Kernel = ForwardWgmma<S, kDim, kConsumers, kKeys, kDim <= 64 ? 4 : 2, kPaged>;
  if (Error error = clear_counters(p.counters, 1, gpu.stream)) return error;
  return launch_persistent<Kernel>(p, gpu);
}

}  // namespace attn::cuda
