#include "cuda/simt/forward.cuh"
#include "cuda/simt/merge.cuh"

namespace attn::cuda {

template Error launch_forward_simt<float>(const ForwardParams&, Stream);
template Error launch_merge_splits<float>(const ForwardParams&, Stream);
template Error launch_forward_simt<double>(const ForwardParams&, Stream);
template Error launch_merge_splits<double>(const ForwardParams&, Stream);

}  // namespace attn::cuda
