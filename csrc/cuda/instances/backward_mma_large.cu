#include "cuda/mma/backward.cuh"

namespace attn::cuda {

template Error launch_backward_mma<BFloat16, 128>(const BackwardParams&, Stream);
template Error launch_backward_mma<Half, 128>(const BackwardParams&, Stream);
template Error launch_backward_mma<BFloat16, 256>(const BackwardParams&, Stream);
template Error launch_backward_mma<Half, 256>(const BackwardParams&, Stream);

}  // namespace attn::cuda
