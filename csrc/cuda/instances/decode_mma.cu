#include "cuda/mma/decode.cuh"

namespace attn::cuda {

template Error launch_decode_mma<BFloat16, 64, false>(const ForwardParams&, Stream);
template Error launch_decode_mma<Half, 64, false>(const ForwardParams&, Stream);
template Error launch_decode_mma<BFloat16, 128, false>(const ForwardParams&, Stream);
template Error launch_decode_mma<Half, 128, false>(const ForwardParams&, Stream);
template Error launch_decode_mma<BFloat16, 256, false>(const ForwardParams&, Stream);
template Error launch_decode_mma<Half, 256, false>(const ForwardParams&, Stream);
template Error launch_decode_mma<BFloat16, 64, true>(const ForwardParams&, Stream);
template Error launch_decode_mma<Half, 64, true>(const ForwardParams&, Stream);
template Error launch_decode_mma<BFloat16, 128, true>(const ForwardParams&, Stream);
template Error launch_decode_mma<Half, 128, true>(const ForwardParams&, Stream);
template Error launch_decode_mma<BFloat16, 256, true>(const ForwardParams&, Stream);
template Error launch_decode_mma<Half, 256, true>(const ForwardParams&, Stream);

}  // namespace attn::cuda
