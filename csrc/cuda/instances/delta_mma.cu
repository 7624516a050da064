#include "cuda/mma/delta.cuh"

namespace attn::cuda {

template Error launch_delta_mma<BFloat16>(const BackwardParams&, Stream);
template Error launch_delta_mma<Half>(const BackwardParams&, Stream);

}  // namespace attn::cuda
