// The instantiations, one inst_*.cu each; launch.cu chooses among them.
#pragma once

#include "launch.h"

namespace attn::cuda {

// The keys of a tile of every kernel.
constexpr int64_t kKeysPerTile = 64;

// Head sizes up to this one run on tensor cores, padded to 64, 128 or 256.
constexpr int64_t kMmaMaxDim = 256;
// What needs more registers than the plain softmax of scale * products.
constexpr bool is_general(const Problem& p) {
  return p.has_mask || p.has_dropout || !(static_cast<float>(p.scale) > 0);
}
// Tiles of 16 rows of a warp: as many as its registers hold.
constexpr int forward_mma_tiles(int64_t dim, bool general) { return dim <= 64 || (dim <= 128 && !general) ? 2 : 1; }
// Rows of a block of four warps.
constexpr int64_t forward_mma_rows(int tiles) { return 64 * tiles; }

// S: Half or BFloat16.
template <class S, int kDim>
Error launch_forward_mma(const ForwardParams& p, Stream stream);

// grad_query, grad_key, grad_value, and grad_mask where each number of it belongs to one score. `delta` is there.
template <class S, int kDim>
Error launch_backward_mma(const BackwardParams& p, Stream stream);

// Computing in float or double.
template <class T>
Error launch_forward_fma(const ForwardParams& p, Stream stream);
template <class T>
Error launch_merge_splits(const ForwardParams& p, Stream stream);
// Params: BackwardParams for the gradients, SecondParams for their derivative. `delta` first.
template <class T, class Params>
Error launch_delta_fma(const Params& p, Stream stream);
template <class T, class Params>
Error launch_gradients_fma(const Params& p, Stream stream);
template <class T>
Error launch_tangent_fma(const TangentParams& p, Stream stream);

}  // namespace attn::cuda
