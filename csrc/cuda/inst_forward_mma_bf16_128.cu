#include "inst_forward_mma.cuh"

namespace attn::cuda {

template Error launch_forward_mma<BFloat16, 128>(const ForwardParams& p, Stream stream);

}  // namespace attn::cuda
