#include "cuda/simt/backward.cuh"

namespace attn::cuda {

template Error launch_delta_simt<float>(const SecondParams&, Stream);
template Error launch_gradients_simt<float>(const SecondParams&, Stream);
template Error launch_delta_simt<double>(const SecondParams&, Stream);
template Error launch_gradients_simt<double>(const SecondParams&, Stream);

}  // namespace attn::cuda
