#include "inst_backward_fma.cuh"

namespace attn::cuda {

template Error launch_delta_fma<double>(const BackwardParams&, Stream);
template Error launch_gradients_fma<double>(const BackwardParams&, Stream);

}  // namespace attn::cuda
