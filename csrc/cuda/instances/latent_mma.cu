#include "cuda/mma/latent.cuh"

namespace attn::cuda {

template Error launch_latent_mma<BFloat16>(const ForwardParams&, Stream);
template Error launch_latent_mma<Half>(const ForwardParams&, Stream);

}  // namespace attn::cuda
