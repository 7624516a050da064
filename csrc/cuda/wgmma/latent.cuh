// Computes multi-head latent attention (DeepSeek-AI, 2024, DeepSeek-V2) on Hopper's tensor cores, where uses_latent()
// says so: the values are the first columns of the keys, so that a tile of keys is all that is read. A task has 64
// rows. The output of 64 rows with 512 columns fills the registers of two warpgroups, which have one half each. The
// first one also turns scores into weights, and gives them to the second one through shared memory. Tensor cores then
// compute the second half of the output while the first warpgroup has the next scores or weights in work.
#pragma once

#include "cuda/wgmma/tasks.cuh"

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
  LatentTile<S> query, key[kStages];
  // What the first consumer gives to the second one: for each tile the weights and the factor of the sums so far, and
  // at the end of a task, as factor and best, the sum and the largest score.
  PanelTile<S, 64, 64> weights;
  float factor[64], best[64];
  RingBarriers<1, kGroupThreads, 4> given;
};

// S: the type of query and key. kPaged: whether keys are stored in pages. The ring `keys` has the first columns of the
// keys, which the first consumer reads, and the ring `values` the others. The second consumer says when a stage of
// `values` has been read, because it is given the weights after the first one has read the stage.
template <class S, bool kPaged>
struct LatentWgmma : TasksWgmma<S, LatentTiles<S, 2>, 2, 64, 64, 2, 4, kGroupThreads / 2> {
  static constexpr int kStages = 2, kKeys = 64, kHalf = LatentTile<S>::kHalf, kDim = 2 * kHalf + LatentTile<S>::kLast;
  using Tasks = TasksWgmma<S, LatentTiles<S, kStages>, 2, 64, kKeys, kStages, 4, kGroupThreads / 2>;
  using Tasks::p, Tasks::shared;
  using typename Tasks::Weighing, typename Tasks::Work;
  using Output = float[kHalf / 8][4];
  using Weights = uint32_t[kKeys / 16][4];

  __device__ __forceinline__ void run(int64_t number) {
    if constexpr (!kHasSm90) {
      trap();
    } else {
      if (threadIdx.x == 0) shared.given.init_all();
      Tasks::template run<104, 200>(
          number, [&](const Work& work) { start_rows(work); },
          [&](const Work& work, Ring<kStages>& stage) { copy_keys(work, stage); },
          [&](int consumer) {
            Place place;
            Tasks::consume([&](const Work& work) { consumer == 0 ? weigh(work, place) : receive(work, place); });
          });
    }
  }

  __device__ __forceinline__ void start_rows(const Work& work) {
    Tasks::start_rows(shared.query.first, work, 0, p.head_dim);
    Tasks::start_rows(shared.query.second, work, kHalf, p.head_dim - kHalf);
    Tasks::start_rows(shared.query.last, work, 2 * kHalf, p.head_dim - 2 * kHalf);
  }
  __device__ __forceinline__ void copy_keys(const Work& work, Ring<kStages>& stage) {
    const Task& task = work.task;
    const S* const data = static_cast<const S*>(p.key.data) + work.begin[Work::kKey] + task.key_head * p.key.head;
    const int thread = static_cast<int>(thread_index()) % Tasks::kCopying;
    const PanelCopy<S, kKeys, kHalf, Tasks::kCopying> of_half{thread};
    const PanelCopy<S, kKeys, LatentTile<S>::kLast, Tasks::kCopying> of_last{thread};
    const auto start = [&](const auto& copy, auto& tile, int64_t key, int keys, int col) {
      this->template start_keys<kPaged>(copy, tile, task, p.key, data + col, key, keys, p.head_dim - col);
    };
    if (thread_index() % kGroupThreads < Tasks::kCopying)
      this->fill(task, shared.keys, stage,
                 [&](int i, int64_t key, int keys) { start(of_half, shared.key[i].first, key, keys, 0); });
    else
      this->fill(task, shared.values, stage, [&](int i, int64_t key, int keys) {
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
  __device__ __forceinline__ void weigh(const Work& work, Place& place) {
    Output output[1] = {};
    Weighing w(p, work, own_row());
    const int tiles = Tasks::uniform(work.tiles);
    if (tiles > 0) wait(shared.queries.full[0], place.queries.parity);
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
      const Ring<kStages> stage = place.stage;
      start_scores(w.x[0], stage);
      wait_for_products<0>(w.x[0]);
      w.weigh(tile);
      Weights weights;
      w.pack(weights);
      give(place, w.factor, w.best, [&] { store(weights); });
      multiply(output[0], w.factor);
      begin_products();
      const Matrix value = shared.key[stage.stage].first.matrix();
#pragma unroll
      for (int k = 0; k < kKeys / 16; ++k)
        multiply_group<S, true>(output[0], weights[k], from_row(value, 16 * k), true);
      commit_products();
      wait_for_products<0>(output[0]);
      arrive_once(shared.keys.empty[stage.stage]);
      place.stage = stage.after();
    }
    w.add_lanes();
    if (tiles > 0) {
      arrive_once(shared.queries.empty[0]);
      place.queries = place.queries.after();
      give(place, w.sum, w.best, [] {});
    }
    Tasks::write(work, output, own_row(), w.best, w.sum);
  }

  // The second consumer.
  __device__ __forceinline__ void receive(const Work& work, Place& place) {
    Output output[1] = {};
    float factor[2], best[2];
    const int tiles = Tasks::uniform(work.tiles);
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
      const Ring<kStages> stage = place.stage;
      wait(shared.given.full[0], place.given.parity);
      wait(shared.values.full[stage.stage], stage.parity);
      read(factor, shared.factor);
      multiply(output[0], factor);
      begin_products();
      const Matrix weights = shared.weights.matrix(), value = shared.key[stage.stage].second.matrix();
#pragma unroll
      for (int k = 0; k < kKeys / 16; ++k)
        multiply_group<S, false, true>(output[0], from_column<64>(weights, 16 * k), from_row(value, 16 * k), true);
      commit_products();
      wait_for_products<0>(output[0]);
      __syncwarp();  // all lanes have read their factors
      arrive_once(shared.given.empty[0]);
      arrive_once(shared.values.empty[stage.stage]);
      place.given = place.given.after();
      place.stage = stage.after();
    }
    float sum[2] = {};
    best[0] = best[1] = -infinity<float>();
    if (tiles > 0) {
      wait(shared.given.full[0], place.given.parity);
      read(sum, shared.factor);
      read(best, shared.best);
      __syncwarp();  // all lanes have read the sums
      arrive_once(shared.given.empty[0]);
      place.given = place.given.after();
    }
    Tasks::write(work, output, own_row(), best, sum, kHalf);
  }

  // The first consumer gives a factor and a number for each row, and what store() stores.
  template <class Store>
  __device__ __forceinline__ void give(Place& place, const float (&factor)[2], const float (&best)[2], Store store) {
    wait(shared.given.empty[0], place.given.parity ^ 1);
    store();
    if (const MmaThread thread; thread.place == 0)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        shared.factor[own_row() + thread.group + 8 * r] = factor[r];
        shared.best[own_row() + thread.group + 8 * r] = best[r];
      }
    publish_writes();
    arrive(shared.given.full[0]);
    place.given = place.given.after();
  }
  __device__ __forceinline__ void read(float (&of_rows)[2], const float (&from)[64]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) of_rows[r] = from[own_row() + MmaThread().group + 8 * r];
  }
  __device__ __forceinline__ void store(const Weights& weights) {
    const int lane = MmaThread().lane, row = own_row() + lane % 16;
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k)
      store_matrices(shared_address(shared.weights.numbers) + row * 128 + ((2 * k + lane / 16) ^ row % 8) * 16,
                     weights[k]);
  }
  // Seldom a largest score has risen. A factor of 1 would change no bits.
  static __device__ __forceinline__ void multiply(Output& output, const float (&factor)[2]) {
    if (__all_sync(~0u, factor[0] == 1 && factor[1] == 1)) return;
#pragma unroll
    for (auto& four : output)
#pragma unroll
      for (int i = 0; i < 4; ++i) four[i] *= factor[i / 2];
  }

  // Starts with the columns that have arrived first.
  __device__ __forceinline__ void start_scores(float (&x)[kKeys / 8][4], const Ring<kStages>& stage) {
    const Matrix query = shared.query.first.matrix(), key = shared.key[stage.stage].first.matrix();
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
      if (k == 0) wait(shared.keys.full[stage.stage], stage.parity);
      if (k == kHalf / 16) wait(shared.values.full[stage.stage], stage.parity);
      if (k == 0 || k == kHalf / 16) begin_products();
      multiply_group<S, false, false>(x, from_column<64>(query, 16 * k), from_column<kKeys>(key, 16 * k), k > 0);
    }
    commit_products();
  }
};

template <class S>
Error launch_latent_wgmma(const ForwardParams& p, const Gpu& gpu) {
  using Kernel = LatentWgmma<S, false>;
  static_assert(Kernel::kDim == kLatentKeyDim && 2 * Kernel::kHalf == kLatentValueDim);
  static_assert(Kernel::kRows == forward_wgmma_rows(kLatentKeyDim) &&
                Kernel::kKeys == forward_wgmma_keys(kLatentKeyDim));
  if (Error error = clear_counters(p.counters, 1, gpu.stream)) return error;
  return p.paging.table ? launch_persistent<LatentWgmma<S, true>>(p, gpu)
                        : launch_persistent<LatentWgmma<S, false>>(p, gpu);
}

}  // namespace attn::cuda
