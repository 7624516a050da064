#include "cuda/simt/tangent.cuh"

namespace attn::cuda {

template Error launch_tangent_simt<float>(const TangentParams&, Stream);
template Error launch_tangent_simt<double>(const TangentParams&, Stream);

}  // namespace attn::cuda
