#include "inst_tangent_fma.cuh"

namespace attn::cuda {

template Error launch_tangent_fma<double>(const TangentParams&, Stream);

}  // namespace attn::cuda
