// A variant of the forward on Hopper, to measure: tensor maps instead of a thread's copies bring keys and values. For
// contiguous tensors.
#pragma once

#include <cuda.h>

#include "check.h"
#include "cuda/wgmma/forward.cuh"

namespace attn::cuda {

struct MapParams : ForwardParams {
  CUtensorMap key, value;
};

// One arrival, and so many bytes of boxes, end the barrier's phase.
__device__ __forceinline__ void arrive_and_expect(Barrier& b, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&b)), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void start_box(SharedAddress to, const CUtensorMap& map, Barrier& b, int col, int row,
                                          int head) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], "
      "[%2];" ::"r"(to),
      "l"(&map), "r"(shared_address(&b)), "r"(col), "r"(row), "r"(head)
      : "memory");
}

template <int kDim, int kConsumers, int kKeys, int kStages>
struct ForwardWithMaps : ForwardWgmma<BFloat16, kDim, kConsumers, kKeys, kStages, false, Extra::none, true, 1> {
  using Base = ForwardWgmma<BFloat16, kDim, kConsumers, kKeys, kStages, false, Extra::none, true, 1>;
  using Base::shared, Base::p;
  using typename Base::Work;
  using Tile = PanelTile<BFloat16, kKeys, kDim>;

  const MapParams& maps;

  __device__ __forceinline__ void run(int64_t number) {
    Base::run(number, [&](const Work& work, Ring<kStages>& stage) { copy_keys(work, stage); });
  }

  // One thread starts all copies of keys. Another thread starts all copies of values.
  __device__ __forceinline__ void copy_keys(const Work& work, Ring<kStages>& stage) {
    const Task& task = work.task;
    const int thread = thread_index() % kGroupThreads, head = static_cast<int>(task.n * p.key_heads + task.key_head);
    const bool of_values = thread == Base::kCopying, starts = thread == 0 || of_values;
    const CUtensorMap& map = of_values ? maps.value : maps.key;
    auto& tiles = of_values ? shared.value : shared.key;
    auto& barriers = of_values ? shared.values : shared.keys;
    const auto start = [&](int tile) {
      Barrier& full = barriers.full[stage.stage];
      wait(barriers.empty[stage.stage], stage.parity ^ 1);
      arrive_and_expect(full, sizeof(Tile));
      for (int panel = 0; panel < kDim / 64; ++panel)
        start_box(shared_address(tiles[stage.stage].numbers) + panel * Tile::kPanelBytes, map, full, 64 * panel,
                  static_cast<int>(task.first_key) + tile * kKeys, head);
      stage = stage.after();
    };
    if (starts) start(0);
    wait_for_copies<0>();
    publish_writes();
    arrive(shared.queries.full[0]);
    for (int tile = 1; starts && tile < work.tiles; ++tile) start(tile);
  }
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, 1) run_with_maps(const __grid_constant__ MapParams p) {
  auto& shared = *reinterpret_cast<typename Kernel::Shared*>(shared_memory());
  const int64_t number = block_number();
  if (number < Kernel::blocks(p)) Kernel{{p, shared}, p}.run(number);
}

// The map of a contiguous tensor [heads, rows, cols] of bfloat16, in boxes of 64 columns, permuted as products read it.
inline CUtensorMap map_of(void* data, int64_t heads, int64_t rows, int64_t cols, int rows_of_box) {
  void* encode = nullptr;
  cudaDriverEntryPointQueryResult found;
  require_done(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, 12000, cudaEnableDefault, &found));
  require(found == cudaDriverEntryPointSuccess, "the driver has no tensor maps");
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(cols), static_cast<cuuint64_t>(rows),
                              static_cast<cuuint64_t>(heads)};
  const cuuint64_t strides[] = {2 * sizes[0], 2 * sizes[0] * sizes[1]};  // bytes
  const cuuint32_t box[] = {64, static_cast<cuuint32_t>(rows_of_box), 1}, steps[] = {1, 1, 1};
  alignas(64) CUtensorMap map;
  const CUresult result = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(encode)(
      &map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, data, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  require(result == CUDA_SUCCESS, "a tensor map is refused");
  return map;
}

}  // namespace attn::cuda
