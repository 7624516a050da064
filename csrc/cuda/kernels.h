// The instantiations, one inst_*.cu each; launch.cu chooses among them.
#pragma once

#include "launch.h"

namespace attn::cuda {

// The keys of a tile of every kernel.
constexpr int64_t kKeysPerTile = 64;

// Computing in float or double.
template <class T>
Error launch_forward_fma(const ForwardParams& p, Stream stream);
template <class T>
Error launch_merge_splits(const ForwardParams& p, Stream stream);

}  // namespace attn::cuda
