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

template <class S, int kConsumers, int kDim, int kKeys, int kStages>
struct MaskedTiles : WithMask<ForwardTiles<S, 64 * kConsumers, kDim, kKeys, kStages>, S, kConsumers, kKeys, kStages> {
  // Whether ForwardTasks::is_left() with a boolean mask. With more columns, registers are too few for both ways.
  static constexpr bool kMayLeave = kDim <= 64;
};
template <class S, int kConsumers, int kDim, int kKeys, int kStages, Extra kExtra>
using TilesOfForward = std::conditional_t<kExtra == Extra::mask, MaskedTiles<S, kConsumers, kDim, kKeys, kStages>,
                                          ForwardTiles<S, 64 * kConsumers, kDim, kKeys, kStages>>;

// S: the type of query, key, value. kDim: head_dim of key and value, padded. kPaged: whether keys and values are stored
// in pages. kExtra: see there. kTurns: whether consumers take turns. kFilling: how many threads fill a tile
// of keys or of values.
template <class S, int kDim, int kConsumers, int kKeys, int kStages, bool kPaged, Extra kExtra = Extra::none,
          bool kTurns = true, int kFilling = kGroupThreads / 2>
struct ForwardWgmma : ForwardTasks<S, TilesOfForward<S, kConsumers, kDim, kKeys, kStages, kExtra>, kConsumers,
                                   64 * kConsumers, kKeys, kStages, 4 * kConsumers, kFilling, kExtra> {
  using Tasks = ForwardTasks<S, TilesOfForward<S, kConsumers, kDim, kKeys, kStages, kExtra>, kConsumers,
                             64 * kConsumers, kKeys, kStages, 4 * kConsumers, kFilling, kExtra>;
  using Tasks::p, Tasks::shared;
  using typename Tasks::Operands, typename Tasks::Weighing, typename Tasks::Work;
  // Setting a task takes 80 registers. If consumers leave fewer, some of its numbers are in local memory.
  static constexpr bool kLeavesSome = kConsumers == 2 && kDim == 128 && kKeys <= 128 && kExtra == Extra::none;
  static constexpr int kProducerRegisters = kLeavesSome ? 88 : kConsumers == 2 ? 56 : 32;
  static constexpr int kConsumerRegisters = (512 - kProducerRegisters) / kConsumers / 8 * 8;

  using Tasks::kMasked;
  using Fragments = ScoresMma<S, kKeys / 8, false>;
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
      ShownTile shown{-1, false};
      if constexpr (kMasked) Tasks::find_mask(work, consumer);
      wait(shared.queries.full[0], place.queries.parity);
      if (Tasks::next_tile(shown, tiles, consumer, stage)) {
        wait_for_turn(consumer);
        start_dots(x[0], shared.query, 64 * consumer, shared.key[stage.stage]);
        pass_turn(consumer);
        wait_for_products<0>(x[0]);
        arrive_once(shared.keys.empty[stage.stage]);
        weigh(w, shown, consumer);
        pack(weights, w, shown);
        Ring<kStages> before = stage;
        stage = stage.after();
#pragma unroll 1
        for (; Tasks::next_tile(shown, tiles, consumer, stage); stage = stage.after()) {
          wait_for_turn(consumer);
          start_dots(x[0], shared.query, 64 * consumer, shared.key[stage.stage]);
          wait(shared.values.full[before.stage], before.parity);
          start_weighted(output[0], weights, shared.value[before.stage]);
          pass_turn(consumer);
          wait_for_products<1>(x[0]);
          arrive_once(shared.keys.empty[stage.stage]);
          weigh(w, shown, consumer);
          keep_beside_products();
          wait_for_products<0>(output[0]);
          arrive_once(shared.values.empty[before.stage]);
          pack(weights, w, shown);
#pragma unroll
          for (int n = 0; n < kDim / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) output[0][n][i] *= w.factor[i / 2];
          before = stage;
        }
        wait(shared.values.full[before.stage], before.parity);
        start_weighted(output[0], weights, shared.value[before.stage]);
        wait_for_products<0>(output[0]);
        arrive_once(shared.values.empty[before.stage]);
      }
      if constexpr (kMasked) Tasks::pass_end(stage);
      arrive_once(shared.queries.empty[0]);
      place.queries = place.queries.after();
    }
    w.add_lanes();
    Tasks::write(work, output, own, w.best, w.sum);
  }

  __device__ __forceinline__ void weigh(Weighing& w, const ShownTile& shown, int consumer) {
    if constexpr (kMasked) make_scores(w, shown, consumer);
    w.weigh(shown.tile);
  }

  __device__ __forceinline__ void pack(Weights& weights, const Weighing& w, const ShownTile& shown) {
    pack_all<S>(weights, w.x[0]);
    if constexpr (kExtra == Extra::dropout) w.drop(weights, shown.tile);
  }

  // --- with a mask ---

  // Turns products into scores, or into numbers that are scores but for terms_left().
  __device__ __forceinline__ void make_scores(Weighing& w, const ShownTile& shown, int consumer) {
    auto& x = w.x[0];
    const float slope = terms_left(p);
    if (has_terms(p)) w.add_terms(static_cast<float>(shown.tile * kKeys));
    if (!shown.changes) {
      if (!Tasks::is_left(p))
#pragma unroll
        for (auto& four : x)
#pragma unroll
          for (float& score : four) score *= slope;
      return;
    }
    Tasks::wait_for_mask();
    if (p.mask.dtype == DType::boolean)
      add_mask<uint8_t, Fragments::Add::boolean>(x, consumer, Tasks::Shared::kMayLeave ? 1 : slope);
    else if (Fragments::all_finite(&x))
      add_mask<uint16_t, Fragments::Add::to_finite>(x, consumer, slope);
    else
      add_mask<uint16_t, Fragments::Add::to_any>(x, consumer, slope);
    __syncwarp();  // all lanes have read the mask
  }
  template <class M, typename Fragments::Add kHow>
  __device__ __forceinline__ void add_mask(typename Fragments::Scores& x, int consumer, float slope) {
    shared.mask[consumer].template each<M>(
        0, [&](int n, int half, uint32_t two) { Fragments::template add_two<kHow>(x, n, half, two, slope); });
  }
};

template <class S, int kDim, bool kPaged>
Error launch_forward_wgmma(const ForwardParams& p, const Gpu& gpu) {
  constexpr int kRows = forward_wgmma_rows(kDim, false), kKeys = forward_wgmma_keys(kDim), kStages = kDim <= 64 ? 4 : 2;
  if (Error error = clear_counters(p.counters, 1, gpu.stream)) return error;
  if constexpr (!kPaged && kDim <= kMaskedWgmmaDim) {
    constexpr int kConsumers = forward_wgmma_rows(kDim, true) / 64;
    if (p.has_mask) {
      if (Error error = launch_blocks<LookAtMask<S>>(static_cast<const Problem&>(p), gpu.stream)) return error;
      return launch_persistent<ForwardWgmma<S, kDim, kConsumers, kKeys, kStages, false, Extra::mask>>(p, gpu);
    }
    if (p.has_dropout)
      return launch_persistent<ForwardWgmma<S, kDim, kConsumers, kKeys, kStages, false, Extra::dropout>>(p, gpu);
  }
  if (has_score_terms(p))
    return launch_persistent<ForwardWgmma<S, kDim, kRows / 64, kKeys, kStages, kPaged, Extra::terms>>(p, gpu);
  return launch_persistent<ForwardWgmma<S, kDim, kRows / 64, kKeys, kStages, kPaged>>(p, gpu);
}

}  // namespace attn::cuda
