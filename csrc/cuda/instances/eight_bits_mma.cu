#include "cuda/mma/decode.cuh"
#include "cuda/mma/forward.cuh"

namespace attn::cuda {

template Error launch_decode_mma<BFloat16, 64, false, true>(const ForwardParams&, Stream);
template Error launch_decode_mma<Half, 64, false, true>(const ForwardParams&, Stream);
template Error launch_decode_mma<BFloat16, 128, false, true>(const ForwardParams&, Stream);
template Error launch_decode_mma<Half, 128, false, true>(const ForwardParams&, Stream);
template Error launch_decode_mma<BFloat16, 256, false, true>(const ForwardParams&, Stream);
template Error launch_decode_mma<Half, 256, false, true>(const ForwardParams&, Stream);
template Error launch_decode_mma<BFloat16, 64, true, true>(const ForwardParams&, Stream);
template Error launch_decode_mma<Half, 64, true, true>(const ForwardParams&, Stream);
template Error launch_decode_mma<BFloat16, 128, true, true>(const ForwardParams&, Stream);
template Error launch_decode_mma<Half, 128, true, true>(const ForwardParams&, Stream);
template Error launch_decode_mma<BFloat16, 256, true, true>(const ForwardParams&, Stream);
template Error launch_decode_mma<Half, 256, true, true>(const ForwardParams&, Stream);
template Error launch_forward_mma<BFloat16, 64, false, true>(const ForwardParams&, Stream);
template Error launch_forward_mma<Half, 64, false, true>(const ForwardParams&, Stream);
template Error launch_forward_mma<BFloat16, 128, false, true>(const ForwardParams&, Stream);
template Error launch_forward_mma<Half, 128, false, true>(const ForwardParams&, Stream);
template Error launch_forward_mma<BFloat16, 256, false, true>(const ForwardParams&, Stream);
template Error launch_forward_mma<Half, 256, false, true>(const ForwardParams&, Stream);
template Error launch_forward_mma<BFloat16, 64, true, true>(const ForwardParams&, Stream);
template Error launch_forward_mma<Half, 64, true, true>(const ForwardParams&, Stream);
template Error launch_forward_mma<BFloat16, 128, true, true>(const ForwardParams&, Stream);
template Error launch_forward_mma<Half, 128, true, true>(const ForwardParams&, Stream);
template Error launch_forward_mma<BFloat16, 256, true, true>(const ForwardParams&, Stream);
template Error launch_forward_mma<Half, 256, true, true>(const ForwardParams&, Stream);

}  // namespace attn::cuda
