#include "inst_forward_fma.cuh"

namespace attn::cuda {

template Error launch_forward_fma<double>(const ForwardParams&, Stream);
template Error launch_merge_splits<double>(const ForwardParams&, Stream);

}  // namespace attn::cuda
