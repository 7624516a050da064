#include "cuda/simt/stats.cuh"

namespace attn::cuda {

template Error launch_stats_simt<float>(const StatsParams&, Stream);
template Error launch_stats_simt<double>(const StatsParams&, Stream);

}  // namespace attn::cuda
