#include "inst_backward_mma.cuh"

namespace attn::cuda {

template Error launch_backward_mma<Half, 128>(const BackwardParams& p, Stream stream);

}  // namespace attn::cuda
