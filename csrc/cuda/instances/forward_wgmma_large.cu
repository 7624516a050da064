#ifdef ATTN_SM90A
#include "cuda/wgmma/forward.cuh"

namespace attn::cuda {

template Error launch_forward_wgmma<BFloat16, 128, false>(const ForwardParams&, const Gpu&);
template Error launch_forward_wgmma<Half, 128, false>(const ForwardParams&, const Gpu&);
template Error launch_forward_wgmma<BFloat16, 128, true>(const ForwardParams&, const Gpu&);
template Error launch_forward_wgmma<Half, 128, true>(const ForwardParams&, const Gpu&);
template Error launch_forward_wgmma<BFloat16, 256, false>(const ForwardParams&, const Gpu&);
template Error launch_forward_wgmma<Half, 256, false>(const ForwardParams&, const Gpu&);
template Error launch_forward_wgmma<BFloat16, 256, true>(const ForwardParams&, const Gpu&);
template Error launch_forward_wgmma<Half, 256, true>(const ForwardParams&, const Gpu&);

}  // namespace attn::cuda
#endif
