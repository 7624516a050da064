#include "inst_forward_fma.cuh"

namespace attn::cuda {

template Error launch_forward_fma<float>(const ForwardParams&, Stream);
template Error launch_merge_splits<float>(const ForwardParams&, Stream);

}  // namespace attn::cuda
