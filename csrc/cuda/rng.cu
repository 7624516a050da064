// The state of dropout, written on the device: under capture of a graph the host does not know it.
#include "cuda/launch.cuh"

namespace attn::cuda {

namespace {

struct RngState {
  int64_t* state;
  RngNumber seed, offset;
  int64_t period;
};

__global__ void write_rng_state(const __grid_constant__ RngState r) {
  if (threadIdx.x > 0) return;
  const auto value = [](const RngNumber& x) {
    return static_cast<int64_t>((x.pointer ? static_cast<uint64_t>(*x.pointer) : 0) + x.number);
  };
  r.state[0] = value(r.seed);
  r.state[1] = value(r.offset);
  r.state[2] = r.period;
}

}  // namespace

Error launch_write_rng_state(int64_t* state, RngNumber seed, RngNumber offset, int64_t period, Stream stream) {
  return launch<Nothing>(write_rng_state, RngState{state, seed, offset, period}, 1, 32, stream);
}

}  // namespace attn::cuda
