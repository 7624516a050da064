// Computes multi-head latent attention (DeepSeek-AI, 2024, DeepSeek-V2) on Hopper's tensor cores, where uses_latent()
// says so: the values are the first columns of the keys, so that a tile of keys is all that is read. A task has 64
// rows. The output of 64 rows with 512 columns fills the registers of two warpgroups, which have one half each. The
// first one also turns scores into weights, and gives them to the second one through shared memory. Tensor cores then
// compute the second half of the output while the first warpgroup has the next scores or weights in work.
#pragma once

#include "cuda/wgmma/row_tasks.cuh"

namespace attn::cuda {

// Numbers of rows or keys in three parts, which lie side by side as the panels of one tile of 576 columns.
template <class S>
struct LatentTile {
  static constexpr int kLength = 64, kHalf = 256, kLast = 64;
  PanelTile<S, kLength, kHalf> first, second;  // halves of the value
  PanelTile<S, kLength, kLast> last;           // columns of the key alone
};

template <class S, int kStages>
struct LatentTiles {
  static constexpr int kRows = LatentTile<S>::kLength;
  LatentTile<S> query, key[kStages];
  // What the first consumer gives to the second one: for each tile, and for a task when its tiles are over.
  PanelTile<S, kRows, kRows> weights;
  float factor[kRows];
  float best[kRows], sum[kRows];
  RingBarriers<1, kGroupThreads, 4> given;

  __device__ __forceinline__ void init_all() { given.init_all(); }
};
template <class S, int kStages, int kLength = LatentTile<S>::kLength>
using LatentTasks = ForwardTasks<S, LatentTiles<S, kStages>, 2, kLength, kLength, kStages, 4, kGroupThreads / 2>;

// S: the type of query and key. kPaged: whether keys are stored in pages. The ring `keys` has the first columns of the
// keys, which the first consumer reads, and the ring `values` the others. The second consumer says when a stage of
// `values` has been read, because it is given the weights after the first one has read the stage.
template <class S, bool kPaged, int kStages = 2>
struct LatentWgmma : LatentTasks<S, kStages> {
  static constexpr int kKeys = LatentTile<S>::kLength, kHalf = LatentTile<S>::kHalf;
  static constexpr int kDim = 2 * kHalf + LatentTile<S>::kLast;
  // With these, both the producer and the consumers have all their numbers in registers.
  static constexpr int kProducerRegisters = 104, kConsumerRegisters = 200;
  using Tasks = LatentTasks<S, kStages>;
  using Tasks::kRows, Tasks::p, Tasks::shared;
  using typename Tasks::Operands, typename Tasks::Softmax, typename Tasks::Weighing, typename Tasks::Work;
  using Output = float[1][kHalf / 8][4];
  using OfRows = float[2];  // of a thread
  using Weights = uint32_t[kKeys / 16][4];

  __device__ __forceinline__ void run(int64_t number) {
    if constexpr (!kHasSm90) {
      trap();
    } else {
      Tasks::template run<kProducerRegisters, kConsumerRegisters>(
          number, [&](const Work& work) { start_rows(work); },
          [&](const Work& work, Ring<kStages>& stage) { copy_keys(work, stage); },
          [&](int consumer) {
            Place place;
            Tasks::consume([&](const Work& work) {
              Output output = {};
              OfRows best = {-infinity<float>(), -infinity<float>()}, sum = {};
              if (consumer == 0)
                weigh(work, place, output, best, sum);
              else
                receive(work, place, output, best, sum);
              Tasks::write(work, output, own_row(), best, sum, consumer * kHalf);
            });
          });
    }
  }

  __device__ __forceinline__ void start_rows(const Work& work) {
    Tasks::start_rows(shared.query.first, work, Operands::kQuery, 0, p.head_dim);
    Tasks::start_rows(shared.query.second, work, Operands::kQuery, kHalf, p.head_dim - kHalf);
    Tasks::start_rows(shared.query.last, work, Operands::kQuery, 2 * kHalf, p.head_dim - 2 * kHalf);
  }
  __device__ __forceinline__ void copy_keys(const Work& work, Ring<kStages>& stage) {
    const Task& task = work.task;
    const S* const data =
        static_cast<const S*>(p.key.data) + work.begins.of[Operands::kKey] + task.key_head * p.key.head;
    const int thread = static_cast<int>(thread_index()) % Tasks::kCopying;
    const PanelCopy<S, kKeys, kHalf, Tasks::kCopying> of_half{thread};
    const PanelCopy<S, kKeys, LatentTile<S>::kLast, Tasks::kCopying> of_last{thread};
    const auto start = [&](const auto& copy, auto& tile, int64_t key, int keys, int col) {
      this->template start_keys<kPaged>(copy, tile, task, p.key, data + col, key, keys, p.head_dim - col);
    };
    if (Tasks::part() == 0)
      this->fill(work, shared.keys, stage,
                 [&](int i, int64_t key, int keys) { start(of_half, shared.key[i].first, key, keys, 0); });
    else
      this->fill(work, shared.values, stage, [&](int i, int64_t key, int keys) {
        start(of_half, shared.key[i].second, key, keys, kHalf);
        start(of_last, shared.key[i].last, key, keys, 2 * kHalf);
      });
  }

  struct Place {
    Ring<kStages> stage;
    Ring<1> queries, given;
  };
  // The first of the rows of a warp.
  static __device__ __forceinline__ int own_row() { return 16 * (MmaThread().warp % 4); }

  // The first consumer.
  __device__ __forceinline__ void weigh(const Work& work, Place& place, Output& output, OfRows& best, OfRows& sum) {
    const int tiles = uniform(work.tiles);
    if (tiles == 0) return;
    Weighing w(p, work, own_row());
    wait(shared.queries.full[0], place.queries.parity);
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
      const Ring<kStages> stage = place.stage;
      start_scores(w.x[0], stage);
      wait_for_products<0>(w.x[0]);
      w.weigh(tile);
      Weights weights;
      pack_all<S>(weights, w.x[0]);
      give(place, [&] {
        store(weights);
        put(shared.factor, w.factor);
      });
      Softmax::rescale(output[0], w.factor);
      start_weighted(output[0], weights, shared.key[stage.stage].first);
      wait_for_products<0>(output[0]);
      arrive_once(shared.keys.empty[stage.stage]);
      place.stage = stage.after();
    }
    arrive_once(shared.queries.empty[0]);
    place.queries = place.queries.after();
    w.add_lanes();
    give(place, [&] {
      put(shared.best, w.best);
      put(shared.sum, w.sum);
    });
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      best[r] = w.best[r];
      sum[r] = w.sum[r];
    }
  }

  // The second consumer.
  __device__ __forceinline__ void receive(const Work& work, Place& place, Output& output, OfRows& best, OfRows& sum) {
    const int tiles = uniform(work.tiles);
    if (tiles == 0) return;
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
      const Ring<kStages> stage = place.stage;
      wait(shared.given.full[0], place.given.parity);
      wait(shared.values.full[stage.stage], stage.parity);
      OfRows factor;
      get(factor, shared.factor);
      Softmax::rescale(output[0], factor);
      begin_products();
      const Matrix weights = shared.weights.matrix(), value = shared.key[stage.stage].second.matrix();
#pragma unroll
      for (int k = 0; k < kKeys / 16; ++k)
        multiply_group<S, false, true>(output[0], from_column<kRows>(weights, 16 * k), from_row(value, 16 * k), true);
      commit_products();
      wait_for_products<0>(output[0]);
      take(place);
      arrive_once(shared.values.empty[stage.stage]);
      place.stage = stage.after();
    }
    wait(shared.given.full[0], place.given.parity);
    get(best, shared.best);
    get(sum, shared.sum);
    take(place);
  }

  // The first consumer stores something, and the second one has read it.
  template <class Store>
  __device__ __forceinline__ void give(Place& place, Store store) {
    wait(shared.given.empty[0], place.given.parity ^ 1);
    store();
    publish_writes();
    arrive(shared.given.full[0]);
    place.given = place.given.after();
  }
  __device__ __forceinline__ void take(Place& place) {
    __syncwarp();  // all lanes have read
    arrive_once(shared.given.empty[0]);
    place.given = place.given.after();
  }
  static __device__ __forceinline__ void put(float (&to)[kRows], const OfRows& numbers) {
    if (const MmaThread thread; thread.place == 0)
#pragma unroll
      for (int r = 0; r < 2; ++r) to[own_row() + thread.group + 8 * r] = numbers[r];
  }
  static __device__ __forceinline__ void get(OfRows& numbers, const float (&from)[kRows]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) numbers[r] = from[own_row() + MmaThread().group + 8 * r];
  }
  __device__ __forceinline__ void store(const Weights& weights) {
    const int lane = MmaThread().lane, row = own_row() + lane % 16;
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k)
      store_matrices(shared_address(shared.weights.numbers) + row * 128 + ((2 * k + lane / 16) ^ row % 8) * 16,
                     weights[k]);
  }

  // Starts with the columns that have arrived first.
  __device__ __forceinline__ void start_scores(float (&x)[kKeys / 8][4], const Ring<kStages>& stage) {
    const Matrix query = shared.query.first.matrix(), key = shared.key[stage.stage].first.matrix();
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
      if (k == 0) wait(shared.keys.full[stage.stage], stage.parity);
      if (k == kHalf / 16) wait(shared.values.full[stage.stage], stage.parity);
      if (k == 0 || k == kHalf / 16) begin_products();
      multiply_group<S, false, false>(x, from_column<kRows>(query, 16 * k), from_column<kKeys>(key, 16 * k), k > 0);
    }
    commit_products();
  }
};

template <class S>
Error launch_latent_wgmma(const ForwardParams& p, const Gpu& gpu) {
  using Kernel = LatentWgmma<S, false>;
  static_assert(Kernel::kDim == kLatentKeyDim && 2 * Kernel::kHalf == kLatentValueDim);
  static_assert(Kernel::kRows == forward_wgmma_rows(kLatentKeyDim, false) &&
                Kernel::kKeys == forward_wgmma_keys(kLatentKeyDim));
  if (Error error = clear_counters(p.counters, 1, gpu.stream)) return error;
  return p.paging.table ? launch_persistent<LatentWgmma<S, true>>(p, gpu)
                        : launch_persistent<LatentWgmma<S, false>>(p, gpu);
}

}  // namespace attn::cuda
