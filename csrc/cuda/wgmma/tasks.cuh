// What kernels on Hopper have in common. One warpgroup of a block copies, the producer, and the others compute, the
// consumers. A block stays for many tasks: the producer copies the next task's tiles while the consumers still write
// what this one's have given.
#pragma once

#include "cuda/kernels.h"
#include "cuda/launch.cuh"
#include "cuda/wgmma/wgmma.cuh"

namespace attn::cuda {

// What is done to products beside scaling them: nothing; a cap and ALiBi; these and a mask; dropout alone.
enum class Extra { none, terms, mask, dropout };
constexpr bool takes_terms(Extra extra) { return extra == Extra::terms || extra == Extra::mask; }

// The operands of which a task has to know where its batch entry begins.
template <class Params>
struct TaskOperands;
template <>
struct TaskOperands<ForwardParams> {
  enum Name { kQuery, kKey, kValue, kOutput, kResidual, kCount };
  static __device__ __forceinline__ const Operand& at(const ForwardParams& p, int name) {
    if (name == kQuery) return p.query;
    if (name == kKey) return p.key;
    if (name == kValue) return p.value;
    return name == kOutput ? p.output : p.residual;
  }
};
template <>
struct TaskOperands<BackwardTaskParams> {
  enum Name { kQuery, kKey, kValue, kGradOutput, kGradQuery, kGradKey, kGradValue, kCount };
  static __device__ __forceinline__ const Operand& at(const BackwardTaskParams& p, int name) {
    if (name == kQuery) return p.query;
    if (name == kKey) return p.key;
    if (name == kValue) return p.value;
    if (name == kGradOutput) return p.grad_output;
    if (name == kGradQuery) return p.grad_query;
    return name == kGradKey ? p.grad_key : p.grad_value;
  }
};
// Where a batch entry begins in each of them, in elements.
template <class Params>
struct Begins {
  using Operands = TaskOperands<Params>;

  int64_t of[Operands::kCount];

  // Called by a warp.
  __device__ __forceinline__ void set(const Params& p, int64_t n, int lane) {
    static_assert(Operands::kCount <= 32);
    if (lane < Operands::kCount) of[lane] = batch_offset(p, Operands::at(p, lane), n);
  }
};

// Params: ForwardParams or BackwardTaskParams. Work: a task, in shared memory. One thread calls Work::set(p, number),
// and then a warp sets Work::begins. Tiles: a struct of the block's tiles in shared memory and of their barriers, which
// init_all() initializes. kParts: of the producer, each of which copies something else.
template <class Params, class Work, class Tiles, int kConsumers, int kParts = 2>
struct TasksWgmma {
  static constexpr int kThreads = (kConsumers + 1) * kGroupThreads, kBlocks = 1;
  static constexpr int kConsumerThreads = kConsumers * kGroupThreads;
  static constexpr int kCopying = kGroupThreads / kParts;  // threads of a part

  // The next task of this block, and how it is counted. In shared memory, because the producer has few registers.
  struct Next {
    int64_t number, end, step;
  };
  struct Turn {
    Work work;
    bool is_over;  // there are no more tasks: `work` is not set
  };
  struct Shared : Tiles {
    Turn turns[2];  // a block's tasks use them one after the other
    Next next;
    RingBarriers<2, 32, 4 * kConsumers + 4> tasks;
  };

  const Params& p;
  Shared& shared;

  // copy(work) copies all tiles of a task. consume(number) is the part of a consumer. kTakesAll: whether tasks start in
  // order, because a task waits for those before it. Then a block takes a ticket for its first task, too.
  template <int kProducerRegisters, int kConsumerRegisters, bool kTakesAll = false, class Copy, class Consume>
  __device__ __forceinline__ void run(int64_t number, int64_t tasks, Copy copy, Consume consume) {
    static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <= 65536 / kThreads / 8 * 8 * (kConsumers + 1));
    if (threadIdx.x == 0) {
      if constexpr (kTakesAll)
        shared.next = {take_ticket(p.counters), tasks, 0};
      else
        shared.next = {number, tasks, static_cast<int64_t>(gridDim.x) * gridDim.y};
      shared.tasks.init_all();
      shared.init_all();
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

  // The part of the producer that this thread is in.
  static __device__ __forceinline__ int part() { return thread_index() % kGroupThreads / kCopying; }

  template <class Copy>
  __device__ __forceinline__ void produce(Copy copy) {
    for (Ring<2> tasks;; tasks = tasks.after()) {
      auto& [work, is_over] = shared.turns[tasks.stage];
      wait(shared.tasks.empty[tasks.stage], tasks.parity ^ 1);
      if (const int lane = thread_index() % kGroupThreads; lane < 32) {
        if (const Next& next = shared.next; lane == 0) {
          is_over = next.number >= next.end;
          if (!is_over) work.set(p, p.counters ? p.order[next.number] : next.number);
        }
        __syncwarp();
        if (!is_over) work.begins.set(p, work.task.n, lane);
        arrive(shared.tasks.full[tasks.stage]);
      }
      wait(shared.tasks.full[tasks.stage], tasks.parity);
      if (is_over) break;
      copy(work);
      __syncwarp();  // all lanes have read the task
      arrive_once(shared.tasks.empty[tasks.stage]);
      if (Next& next = shared.next; thread_index() % kGroupThreads == 0)
        next.number = next.step + (p.counters ? take_ticket(p.counters) : next.number);
    }
  }

  // A consumer calls attend(work) for each task.
  template <class Attend>
  __device__ __forceinline__ void consume(Attend attend) {
    for (Ring<2> tasks;; tasks = tasks.after()) {
      wait(shared.tasks.full[tasks.stage], tasks.parity);
      const Turn& turn = shared.turns[tasks.stage];
      if (turn.is_over) break;
      attend(turn.work);
      __syncwarp();  // all lanes have read the task
      arrive_once(shared.tasks.empty[tasks.stage]);
    }
  }
};

}  // namespace attn::cuda
