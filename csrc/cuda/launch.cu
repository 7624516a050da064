// Which kernel serves which problem, and how its work is cut.
#include "launch.cuh"

#include "kernels.h"

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

template <class T>
Error run_forward(const ForwardParams& p, Stream stream) {
  if (Error error = launch_forward_fma<T>(p, stream)) return error;
  return p.splits > 1 ? launch_merge_splits<T>(p, stream) : nullptr;
}

}  // namespace

void plan_forward(ForwardParams& p, int64_t multiprocessors) {
  p.rows_per_task = kRowTile;
  p.keys_per_split = round_up(larger(1, p.keys), kKeysPerTile);
  // With fewer blocks than the device can run at a time, keys are cut too; each split has some tiles of them.
  const int64_t wanted = 2 * multiprocessors, enough_keys = 4 * kKeysPerTile;
  if (p.tasks() >= wanted || p.keys < 2 * enough_keys) return;
  const int64_t splits = smaller(divide_up(wanted, p.tasks()), p.keys / enough_keys);
  p.keys_per_split = round_up(divide_up(p.keys, splits), kKeysPerTile);
  p.splits = divide_up(p.keys, p.keys_per_split);
}

Error launch_forward(const ForwardParams& p, Stream stream) {
  return p.query.dtype == DType::f64 ? run_forward<double>(p, stream) : run_forward<float>(p, stream);
}

Error launch_write_rng_state(int64_t* state, RngNumber seed, RngNumber offset, int64_t period, Stream stream) {
  return launch(write_rng_state, RngState{state, seed, offset, period}, 1, 32, 0, stream);
}

}  // namespace attn::cuda
