#include "cuda/mma/decode.cuh"
#include "cuda/mma/forward.cuh"

namespace attn::cuda {

template Error launch_decode_eight_bits<BFloat16, 64, false>(const ForwardParams&, Stream);
template Error launch_decode_eight_bits<Half, 64, false>(const ForwardParams&, Stream);
template Error launch_decode_eight_bits<BFloat16, 128, false>(const ForwardParams&, Stream);
template Error launch_decode_eight_bits<Half, 128, false>(const ForwardParams&, Stream);
template Error launch_decode_eight_bits<BFloat16, 256, false>(const ForwardParams&, Stream);
template Error launch_decode_eight_bits<Half, 256, false>(const ForwardParams&, Stream);
template Error launch_decode_eight_bits<BFloat16, 64, true>(const ForwardParams&, Stream);
template Error launch_decode_eight_bits<Half, 64, true>(const ForwardParams&, Stream);
template Error launch_decode_eight_bits<BFloat16, 128, true>(const ForwardParams&, Stream);
template Error launch_decode_eight_bits<Half, 128, true>(const ForwardParams&, Stream);
template Error launch_decode_eight_bits<BFloat16, 256, true>(const ForwardParams&, Stream);
template Error launch_decode_eight_bits<Half, 256, true>(const ForwardParams&, Stream);
template Error launch_forward_eight_bits<BFloat16, 64, false>(const ForwardParams&, Stream);
template Error launch_forward_eight_bits<Half, 64, false>(const ForwardParams&, Stream);
template Error launch_forward_eight_bits<BFloat16, 128, false>(const ForwardParams&, Stream);
template Error launch_forward_eight_bits<Half, 128, false>(const ForwardParams&, Stream);
template Error launch_forward_eight_bits<BFloat16, 256, false>(const ForwardParams&, Stream);
template Error launch_forward_eight_bits<Half, 256, false>(const ForwardParams&, Stream);
template Error launch_forward_eight_bits<BFloat16, 64, true>(const ForwardParams&, Stream);
template Error launch_forward_eight_bits<Half, 64, true>(const ForwardParams&, Stream);
template Error launch_forward_eight_bits<BFloat16, 128, true>(const ForwardParams&, Stream);
template Error launch_forward_eight_bits<Half, 128, true>(const ForwardParams&, Stream);
template Error launch_forward_eight_bits<BFloat16, 256, true>(const ForwardParams&, Stream);
template Error launch_forward_eight_bits<Half, 256, true>(const ForwardParams&, Stream);

}  // namespace attn::cuda
