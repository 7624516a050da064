#include "cuda/simt/stats.cuh"

namespace attn::cuda {

void plan_stats(StatsParams& p, int64_t multiprocessors) {
  // As plan_forward(): with fewer blocks than the device runs at a time, what a block passes over is cut too.
  const int64_t wanted = 2 * multiprocessors;
  const auto parts = [&](int64_t blocks, int64_t length) {
    return blocks >= wanted ? 1 : larger(1, smaller(divide_up(wanted, larger(1, blocks)), length / (4 * kSimtTile)));
  };
  p.rows_per_task = kSimtTile;
  const int64_t keys = visible_keys(p, {0, p.queries}, p.keys).last;  // splits begin with key 0
  p.keys_per_split = round_up(larger(1, divide_up(keys, parts(p.tasks(), keys))), kSimtTile);
  p.splits = larger(1, divide_up(keys, p.keys_per_split));
  p.keys_per_task = kSimtTile;
  p.rows_per_chunk = round_up(divide_up(p.queries, parts(p.key_tasks(), p.queries)), kSimtTile);
  p.chunks = divide_up(p.queries, p.rows_per_chunk);
}

Error launch_stats(const StatsParams& p, Stream stream) {
  return p.query.dtype == DType::f64 ? launch_stats_simt<double>(p, stream) : launch_stats_simt<float>(p, stream);
}

}  // namespace attn::cuda
