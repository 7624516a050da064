#include "cuda/mma/forward.cuh"

namespace attn::cuda {

template Error launch_forward_mma<BFloat16, 64, false>(const ForwardParams&, Stream);
template Error launch_forward_mma<Half, 64, false>(const ForwardParams&, Stream);

}  // namespace attn::cuda
