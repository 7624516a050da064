#ifdef ATTN_SM90A
#include "cuda/wgmma/backward.cuh"

namespace attn::cuda {

template Error launch_backward_wgmma<BFloat16, 64>(const BackwardParams&, int*, const Gpu&);
template Error launch_backward_wgmma<Half, 64>(const BackwardParams&, int*, const Gpu&);
template Error launch_backward_wgmma<BFloat16, 128>(const BackwardParams&, int*, const Gpu&);
template Error launch_backward_wgmma<Half, 128>(const BackwardParams&, int*, const Gpu&);

}  // namespace attn::cuda
#endif
