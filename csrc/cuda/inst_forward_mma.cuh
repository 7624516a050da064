// Included by the inst_forward_mma_*.cu files.
#pragma once

#include "forward_mma.cuh"
#include "kernels.h"
#include "launch.cuh"

namespace attn::cuda {

template <class S, int kDim, int kTiles, bool kGeneral>
Error launch_forward_mma_tiles(const ForwardParams& p, Stream stream) {
  return launch(forward_mma<S, kDim, kTiles, kGeneral>, p, p.tasks(), kMmaThreads,
                sizeof(typename ForwardMma<S, kDim, kTiles, kGeneral>::Shared), stream);
}

template <class S, int kDim, bool kGeneral>
Error launch_forward_mma_of(const ForwardParams& p, Stream stream) {
  constexpr int kTiles = forward_mma_tiles(kDim, kGeneral);
  return p.rows_per_task == forward_mma_rows(kTiles) ? launch_forward_mma_tiles<S, kDim, kTiles, kGeneral>(p, stream)
                                                     : launch_forward_mma_tiles<S, kDim, 1, kGeneral>(p, stream);
}

template <class S, int kDim>
Error launch_forward_mma(const ForwardParams& p, Stream stream) {
  return is_general(p) ? launch_forward_mma_of<S, kDim, true>(p, stream)
                       : launch_forward_mma_of<S, kDim, false>(p, stream);
}

}  // namespace attn::cuda
