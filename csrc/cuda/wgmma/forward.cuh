// Computes the forward on Hopper's tensor cores, where uses_forward_wgmma() says so. As in FlashAttention-3 (Shah et
// al., 2024), one warpgroup of a block copies and the others compute. A consumer owns 64 rows. While tensor cores
// compute its products with the next keys and with these values, it turns the scores of these keys into weights.
// Consumers take turns, so that one has the tensor cores while another computes weights.
#pragma once

#include "cuda/wgmma/row_tasks.cuh"

namespace attn::cuda {

template <class S, int kRows, int kDim, int kKeys, int kStages>
struct ForwardTiles {
  PanelTile<S, kRows, kDim> query;
  PanelTile<S, kKeys, kDim> key[kStages], value[kStages];

  __device__ __forceinline__ void init_all() {}
};

// S: the type of query, key, value. kDim: head_dim of key and value, padded. kPaged: whether keys and values are stored
// in pages. kHasTerms: see ForwardTasks. kTurns: whether consumers take turns. kFilling: how many threads fill a tile
// of keys or of values.
template <class S, int kDim, int kConsumers, int kKeys, int kStages, bool kPaged, bool kHasTerms = false,
          bool kTurns = true, int kFilling = kGroupThreads / 2>
struct ForwardWgmma : ForwardTasks<S, ForwardTiles<S, 64 * kConsumers, kDim, kKeys, kStages>, kConsumers,
                                   64 * kConsumers, kKeys, kStages, 4 * kConsumers, kFilling, kHasTerms> {
  using Tasks = ForwardTasks<S, ForwardTiles<S, 64 * kConsumers, kDim, kKeys, kStages>, kConsumers, 64 * kConsumers,
                             kKeys, kStages, 4 * kConsumers, kFilling, kHasTerms>;
  using Tasks::p, Tasks::shared;
  using typename Tasks::Operands, typename Tasks::Weighing, typename Tasks::Work;
  // Setting a task takes 80 registers. If consumers leave fewer, some of its numbers are in local memory.
  static constexpr bool kLeavesSome = kConsumers == 2 && kDim == 128 && kKeys <= 128 && !kHasTerms;
  static constexpr int kProducerRegisters = kLeavesSome ? 88 : kConsumers == 2 ? 56 : 32;
  static constexpr int kConsumerRegisters = (512 - kProducerRegisters) / kConsumers / 8 * 8;

  using Output = float[kDim / 8][4];
  using Weights = uint32_t[kKeys / 16][4];

  __device__ __forceinline__ void run(int64_t number) {
    run(number, [&](const Work& work, Ring<kStages>& stage) {
      Tasks::template copy_keys<kPaged>(work, stage, shared.key, shared.value);
    });
  }
  // `copy`: see RowTasks::run().
  template <class Copy>
  __device__ __forceinline__ void run(int64_t number, Copy copy) {
    if constexpr (!kHasSm90)
      trap();
    else
      Tasks::template run<kProducerRegisters, kConsumerRegisters>(
          number, [&](const Work& work) { Tasks::start_rows(shared.query, work, Operands::kQuery, 0, p.head_dim); },
          copy, [&](int consumer) { consume(consumer); });
  }

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
    Place place;
    if (kTurns && consumer == 0) arrive_threads<2 * kGroupThreads>(kTurn);
    Tasks::consume([&](const Work& work) { attend(work, consumer, place); });
    if (kTurns && consumer == 0) sync_threads<2 * kGroupThreads>(kTurn);  // takes the last turn that was passed
  }

  __device__ __forceinline__ void attend(const Work& work, int consumer, Place& place) {
    const int own = 16 * MmaThread().warp;  // the warp's first row
    Output output[1] = {};
    Weighing w(p, work, own);
    auto& x = w.x;
    const int tiles = uniform(work.tiles);
    if (tiles > 0) {
      Weights weights;
      Ring<kStages>& stage = place.stage;
      wait(shared.queries.full[0], place.queries.parity);
      wait(shared.keys.full[stage.stage], stage.parity);
      wait_for_turn(consumer);
      start_dots(x[0], shared.query, 64 * consumer, shared.key[stage.stage]);
      pass_turn(consumer);
      wait_for_products<0>(x[0]);
      arrive_once(shared.keys.empty[stage.stage]);
      w.weigh(0);
      pack_all<S>(weights, x[0]);
#pragma unroll 1
      for (int tile = 1; tile < tiles; ++tile) {
        const Ring<kStages> before = stage;
        stage = stage.after();
        wait(shared.keys.full[stage.stage], stage.parity);
        wait_for_turn(consumer);
        start_dots(x[0], shared.query, 64 * consumer, shared.key[stage.stage]);
        wait(shared.values.full[before.stage], before.parity);
        start_weighted(output[0], weights, shared.value[before.stage]);
        pass_turn(consumer);
        wait_for_products<1>(x[0]);
        arrive_once(shared.keys.empty[stage.stage]);
        w.weigh(tile);
        keep_beside_products();
        wait_for_products<0>(output[0]);
        arrive_once(shared.values.empty[before.stage]);
        pack_all<S>(weights, x[0]);
#pragma unroll
        for (int n = 0; n < kDim / 8; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) output[0][n][i] *= w.factor[i / 2];
      }
      arrive_once(shared.queries.empty[0]);
      place.queries = place.queries.after();
      wait(shared.values.full[stage.stage], stage.parity);
      start_weighted(output[0], weights, shared.value[stage.stage]);
      wait_for_products<0>(output[0]);
      arrive_once(shared.values.empty[stage.stage]);
      stage = stage.after();
    }
    w.add_lanes();
    Tasks::write(work, output, own, w.best, w.sum);
  }
};

template <class S, int kDim, bool kPaged>
Error launch_forward_wgmma(const ForwardParams& p, const Gpu& gpu) {
  constexpr int kConsumers = forward_wgmma_rows(kDim) / 64, kKeys = forward_wgmma_keys(kDim);
  constexpr int kStages = kDim <= 64 ? 4 : 2;
  if (Error error = clear_counters(p.counters, 1, gpu.stream)) return error;
  if (has_terms(p)) return launch_persistent<ForwardWgmma<S, kDim, kConsumers, kKeys, kStages, kPaged, true>>(p, gpu);
  return launch_persistent<ForwardWgmma<S, kDim, kConsumers, kKeys, kStages, kPaged>>(p, gpu);
}

}  // namespace attn::cuda
