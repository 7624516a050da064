#include "cuda/mma/forward.cuh"

namespace attn::cuda {

template Error launch_forward_mma<BFloat16, 128, false>(const ForwardParams&, Stream);
template Error launch_forward_mma<Half, 128, false>(const ForwardParams&, Stream);
template Error launch_forward_mma<BFloat16, 256, false>(const ForwardParams&, Stream);
template Error launch_forward_mma<Half, 256, false>(const ForwardParams&, Stream);

}  // namespace attn::cuda
