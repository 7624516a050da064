#include "cuda/mma/forward.cuh"

namespace attn::cuda {

template Error launch_forward_mma<BFloat16, 64, true>(const ForwardParams&, Stream);
template Error launch_forward_mma<Half, 64, true>(const ForwardParams&, Stream);
template Error launch_forward_mma<BFloat16, 128, true>(const ForwardParams&, Stream);
template Error launch_forward_mma<Half, 128, true>(const ForwardParams&, Stream);
template Error launch_forward_mma<BFloat16, 256, true>(const ForwardParams&, Stream);
template Error launch_forward_mma<Half, 256, true>(const ForwardParams&, Stream);

}  // namespace attn::cuda
