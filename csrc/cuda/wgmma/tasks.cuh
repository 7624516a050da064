// What the forwards on Hopper have in common. One warpgroup of a block copies, the producer, and the others compute,
// the consumers. A block stays for many tasks: the producer copies the next task's rows while the consumers still write
// this one's.
#pragma once

#include "cuda/kernels.h"
#include "cuda/launch.cuh"
#include "cuda/mma/online_softmax.cuh"
#include "cuda/wgmma/wgmma.cuh"

namespace attn::cuda {

// S: the type of query, key, value. Tiles: a struct of the block's tiles in shared memory. kTaskRows: of a task. kKeys:
// of a tile. The producer fills two rings of kStages tiles each side by side, `keys` and `values`. kReaders warps say
// that a tile has been read, and that the rows have been read. kFilling: how many threads fill a tile.
template <class S, class Tiles, int kConsumers, int kTaskRows, int kKeys, int kStages, int kReaders, int kFilling>
struct TasksWgmma {
  static constexpr int kThreads = (kConsumers + 1) * kGroupThreads, kBlocks = 1, kRows = kTaskRows;
  static constexpr int kCopying = kGroupThreads / 2;  // one half of the producer fills `keys`, the other half `values`

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
      first_seen = last_seen = 0;
      if (tiles == 0) return;
      const Range seen = task.seen_by_all;
      first_seen = static_cast<int>(divide_up(smaller(keys, larger(0, seen.first - task.first_key)), kKeys));
      last_seen = static_cast<int>(smaller(keys, larger(0, seen.last - task.first_key)) / kKeys);
    }
  };
  struct Shared : Tiles {
    Work work[2];  // a block's tasks use them in turns
    Next next;
    RingBarriers<2, 32, 4 * kConsumers + 4> tasks;
    RingBarriers<1, kGroupThreads, kReaders> queries;
    RingBarriers<kStages, kFilling, kReaders> keys, values;
  };

  const ForwardParams& p;
  Shared& shared;

  ATTN_INLINE static constexpr int64_t blocks(const ForwardParams& p) { return p.splits * blocks_of_rows(p, kRows); }

  // start_rows(work) starts to copy the rows of a task. Then copy(work, stage) copies its keys and values, and waits
  // for the rows. consume(number) is the part of a consumer.
  template <int kProducerRegisters, int kConsumerRegisters, class StartRows, class Copy, class Consume>
  __device__ __forceinline__ void run(int64_t number, StartRows start_rows, Copy copy, Consume consume) {
    static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <= 65536 / kThreads / 8 * 8 * (kConsumers + 1));
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
      produce(start_rows, copy);
    } else {
      take_registers<kConsumerRegisters>();
      consume(group);
    }
  }

  // --- the producer ---

  template <class StartRows, class Copy>
  __device__ __forceinline__ void produce(StartRows start_rows, Copy copy) {
    Ring<2> tasks;
    Ring<1> queries;
    Ring<kStages> stage;  // of keys or of values, whichever this thread copies
    for (;; tasks = tasks.after()) {
      Work& work = shared.work[tasks.stage];
      wait(shared.tasks.empty[tasks.stage], tasks.parity ^ 1);
      if (const int lane = thread_index() % kGroupThreads; lane < 32) {
        work.set(p, shared.next, lane);
        arrive(shared.tasks.full[tasks.stage]);
      }
      wait(shared.tasks.full[tasks.stage], tasks.parity);
      if (work.is_over) break;
      if (work.tiles > 0) {
        wait(shared.queries.empty[0], queries.parity ^ 1);
        start_rows(work);
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

  // Starts to copy `cols` numbers of each row, from number `col` on.
  template <int kCols>
  __device__ __forceinline__ void start_rows(PanelTile<S, kRows, kCols>& tile, const Work& work, int col,
                                             int64_t cols) {
    const Task& task = work.task;
    const S* const query = static_cast<const S*>(p.query.data) + work.begin[Work::kQuery] + col;
    PanelCopy<S, kRows, kCols, kGroupThreads>{thread_index() % kGroupThreads}.start_scattered(
        tile, query, task.rows, cols, [&](int i) {
          const Row row = task.row_at(i);
          return row.head * p.query.head + row.position * p.query.row;
        });
  }

  // Fills one of the two rings with a task's keys, tile by tile: start(stage, key, keys) starts to copy `keys` keys
  // from `key` on. The copies of the rows have been started before: their barrier is arrived at as soon as they are
  // there.
  template <class Barriers, class Start>
  __device__ __forceinline__ void fill(const Task& task, Barriers& barriers, Ring<kStages>& stage, Start start) {
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
      start(stage.stage, key, static_cast<int>(smaller(kKeys, last - key)));
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
  // Starts to copy `keys` keys, or their values, from `key` on. `cols`: the numbers of a row behind `data`.
  template <bool kPaged, int kCols>
  __device__ __forceinline__ void start_keys(const PanelCopy<S, kKeys, kCols, kCopying>& copy,
                                             PanelTile<S, kKeys, kCols>& tile, const Task& task, const Operand& x,
                                             const S* data, int64_t key, int keys, int64_t cols) {
    if constexpr (kPaged)
      copy.start_scattered(tile, data, keys, cols,
                           [&](int j) { return offset_in_pages(p, x.page, x.row, task.n, key + j); });
    else
      copy.start(tile, data + key * x.row, x.row, keys, cols);
  }

  // --- the consumers ---

  // Calls attend(work) for each task.
  template <class Attend>
  __device__ __forceinline__ void consume(Attend attend) {
    Ring<2> tasks;
    for (;; tasks = tasks.after()) {
      wait(shared.tasks.full[tasks.stage], tasks.parity);
      const Work& work = shared.work[tasks.stage];
      if (work.is_over) break;
      if (uniform(work.task.rows) > 0) attend(work);
      __syncwarp();  // all lanes have read the task
      arrive_once(shared.tasks.empty[tasks.stage]);
    }
  }
  // The number that all lanes of the warp hold. The compiler sees that they do, and computes what follows once for all.
  static __device__ __forceinline__ int uniform(int x) { return __shfl_sync(~0u, x, 0); }
  static __device__ __forceinline__ Row row_of(const Task& task, int i) {
    return task.row_at(RowTile<kRows>::last_repeated(i, task.rows));
  }

  // The softmax of a thread's two rows.
  struct Weighing {
    using Softmax = OnlineSoftmax<1, kKeys / 8, false>;
    // The positions of a warp's 16 rows, as ScoresMma::hide_keys() asks for them: by lane % 16.
    struct OwnRows {
      struct {
        int64_t of_lane;
        __device__ __forceinline__ int64_t operator[](int) const { return of_lane; }
      } position;
    };

    const Work& work;
    Softmax softmax;
    int own;  // the warp's first row
    int first_seen, last_seen;
    OwnRows rows;
    float best[2] = {-infinity<float>(), -infinity<float>()}, sum[2] = {}, factor[2];
    float x[1][kKeys / 8][4];  // the scores of a tile, then its weights

    __device__ __forceinline__ Weighing(const ForwardParams& p, const Work& work, int own)
        : work(work),
          softmax{p},
          own(own),
          first_seen(uniform(work.first_seen)),
          last_seen(uniform(work.last_seen)),
          rows{{row_of(work.task, own + thread_index() % 16).position}} {}

    // Turns the scores of a tile into weights.
    __device__ __forceinline__ void weigh(int tile) {
      if (tile < first_seen || tile >= last_seen)
        ScoresMma<S, kKeys / 8, false>::hide_keys(x[0], own, work.task.sequence, rows, kRows,
                                                  work.task.first_key + int64_t{tile} * kKeys);
      float shift[2];
      const float old[2] = {best[0], best[1]};
      softmax.raise(best, x);
      softmax.find_shift(x, old, best, shift, factor);
#pragma unroll
      for (int r = 0; r < 2; ++r) sum[r] = sum[r] * factor[r] + softmax.weigh(x, r, shift[r]);
    }
    // Adds the sums of the four lanes of a row.
    __device__ __forceinline__ void add_lanes() {
#pragma unroll
      for (float& of_row : sum) {
        of_row += __shfl_xor_sync(~0u, of_row, 1);
        of_row += __shfl_xor_sync(~0u, of_row, 2);
      }
    }
    __device__ __forceinline__ void pack(uint32_t (&weights)[kKeys / 16][4]) const {
#pragma unroll
      for (int k = 0; k < kKeys / 16; ++k)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float (&two)[4] = x[0][2 * k + i / 2];
          weights[k][i] = ::attn::cuda::pack<S>(two[2 * (i % 2)], two[2 * (i % 2) + 1]);
        }
    }
  };

  // Writes `output`, which begins with column `col` of the task's rows from `own` on: a warp's 16 rows.
  template <int kOutputs>
  __device__ __forceinline__ void write(const Work& work, const float (*output)[kOutputs][4], int own,
                                        const float (&best)[2], const float (&sum)[2], int col = 0) {
    const OnlineSoftmax<1, kKeys / 8, false> softmax{p};
    const bool vectors = softmax.writes_vectors(p);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int i = own + MmaThread().group + 8 * r;
      const OutputRow<float> to(p, work.begin[Work::kOutput], work.begin[Work::kResidual], row_of(work.task, i),
                                work.task.split);
      softmax.template write<S>(to, vectors, i < work.task.rows, output, r, best[r], sum[r], col);
    }
  }
};

}  // namespace attn::cuda
