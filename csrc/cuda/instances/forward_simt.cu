#include "cuda/simt/forward.cuh"
#include "cuda/simt/merge.cuh"
#include "cuda/simt/stats.cuh"

namespace attn::cuda {

template Error launch_forward_simt<float>(const ForwardParams&, Stream);
template Error launch_merge_splits<float>(const ForwardParams&, Stream);
template Error launch_forward_simt<double>(const ForwardParams&, Stream);
template Error launch_merge_splits<double>(const ForwardParams&, Stream);
template Error launch_stats_simt<float>(const StatsParams&, Stream);
template Error launch_stats_simt<double>(const StatsParams&, Stream);

}  // namespace attn::cuda
