#include "cuda/mma/forward.cuh"

namespace attn::cuda {

template Error launch_forward_mma<BFloat16, 64, true>(const ForwardParams&, Stream);
template Error launch_forward_mma<Half, 64, true>(const ForwardParams&, Stream);
template Error launch_forward_mma<BFloat16, 128, true>(const ForwardParams&, Stream);
template Error launch_forward_mma<Half, 128, true>(const ForwardParams&, Stream);
template Error launch_forward_mma<BFloat16, 256, true>(const ForwardParams&, Stream);
template Error launch_forward_mma<Half, 256, true>(const ForwardParams&, Stream);
template Error launch_forward_numbers<BFloat16, 64>(const ForwardParams&, Stream);
template Error launch_forward_numbers<Half, 64>(const ForwardParams&, Stream);
template Error launch_forward_numbers<BFloat16, 128>(const ForwardParams&, Stream);
template Error launch_forward_numbers<Half, 128>(const ForwardParams&, Stream);
template Error launch_forward_numbers<BFloat16, 256>(const ForwardParams&, Stream);
template Error launch_forward_numbers<Half, 256>(const ForwardParams&, Stream);

}  // namespace attn::cuda
