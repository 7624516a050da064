#ifdef ATTN_SM90A
#include "cuda/wgmma/latent.cuh"

namespace attn::cuda {

template Error launch_latent_wgmma<BFloat16>(const ForwardParams&, const Gpu&);
template Error launch_latent_wgmma<Half>(const ForwardParams&, const Gpu&);

}  // namespace attn::cuda
#endif
