#ifdef ATTN_SM90A
#include "cuda/wgmma/forward.cuh"

namespace attn::cuda {

template Error launch_forward_wgmma<BFloat16, 64, false>(const ForwardParams&, const Gpu&);
template Error launch_forward_wgmma<Half, 64, false>(const ForwardParams&, const Gpu&);
template Error launch_forward_wgmma<BFloat16, 64, true>(const ForwardParams&, const Gpu&);
template Error launch_forward_wgmma<Half, 64, true>(const ForwardParams&, const Gpu&);

}  // namespace attn::cuda
#endif
