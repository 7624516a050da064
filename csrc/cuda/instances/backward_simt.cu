#include "cuda/mma/delta.cuh"
#include "cuda/simt/backward.cuh"

namespace attn::cuda {

template Error launch_delta_mma<BFloat16>(const BackwardParams&, Stream);
template Error launch_delta_mma<Half>(const BackwardParams&, Stream);
template Error launch_delta_simt<float>(const BackwardParams&, Stream);
template Error launch_gradients_simt<float>(const BackwardParams&, Stream);
template Error launch_delta_simt<double>(const BackwardParams&, Stream);
template Error launch_gradients_simt<double>(const BackwardParams&, Stream);

}  // namespace attn::cuda
