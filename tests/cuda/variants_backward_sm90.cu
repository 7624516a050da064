// The backward on Hopper in two passes and in one, side by side. Prints TFLOP/s of the five products that a backward
// needs, and the largest difference between the gradients of one pass and of two. Then runs one pass 100 times more,
// and prints how many of these runs have other bits than the first. For a GPU: nothing of it runs over the stand-in.
#include <string>

#include "cuda/wgmma/backward.cuh"
#include "cuda/wgmma/one_pass.cuh"
#include "variants.h"

namespace attn::cuda {
namespace {

struct Shape {
  int batch, heads, length;
  bool causal;
  double softcap;
};

template <int kDim>
void time_both(const Shape& s) {
  const size_t heads = size_t{1} * s.batch * s.heads, rows = heads * s.length, count = rows * kDim;
  BackwardParams p;
  p.batch = s.batch;
  p.batch_dims = 1;
  p.batch_size[0] = s.batch;
  p.heads = p.key_heads = p.value_heads = s.heads;
  p.queries = p.keys = s.length;
  p.head_dim = p.value_dim = kDim;
  p.scale = 1 / std::sqrt(static_cast<double>(kDim));
  p.softcap = s.softcap;
  if (s.causal) p.visibility.right = 0;
  Operand* const inputs[] = {&p.query, &p.key, &p.value, &p.grad_output};
  Operand* const gradients[] = {&p.grad_query, &p.grad_key, &p.grad_value};
  const auto set = [&](Operand& x, uint16_t* data) {
    x.data = data;
    x.dtype = DType::bf16;
    x.batch[0] = int64_t{s.heads} * s.length * kDim;
    x.head = int64_t{s.length} * kDim;
    x.row = kDim;
    x.col = 1;
  };
  unsigned seed = 1;
  for (Operand* x : inputs) set(*x, make_numbers(count, seed++));
  for (Operand* x : gradients) set(*x, make_numbers(count, 0));
  // Any logsumexp and delta will do.
  std::vector<Pair<float>> logsumexp(rows, {std::log(static_cast<float>(s.length)), 0});
  void *of_rows = nullptr, *sums = nullptr;
  int* counters = nullptr;
  require_done(cudaMalloc(&of_rows, rows * sizeof(Pair<float>)));
  require_done(cudaMemcpy(of_rows, logsumexp.data(), rows * sizeof(Pair<float>), cudaMemcpyHostToDevice));
  p.logsumexp = of_rows;
  require_done(cudaMalloc(&p.delta, rows * sizeof(float)));
  require_done(cudaMemset(p.delta, 0, rows * sizeof(float)));
  require_done(cudaMalloc(&counters, sizeof(int) * (1 + one_pass_tiles(p))));
  require_done(cudaMalloc(&sums, sizeof(float) * one_pass_tiles(p) * kOnePassRows * kDim));
  int multiprocessors = 0;
  require_done(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, 0));
  const Gpu gpu{multiprocessors, 90, nullptr};
  const double flop = 10.0 * heads * s.length * s.length * kDim * (s.causal ? 0.5 : 1);
  const auto time = [&](const char* name, auto launch) {
    const double ms = median_ms(launch);
    std::printf("%d x %d x %5d, %3d %-7s%s %-10s %8.3f ms %5.0f TFLOP/s", s.batch, s.heads, s.length, kDim,
                s.causal ? "causal" : "full", s.softcap > 0 ? ", cap," : "", name, ms, flop / ms * 1e-9);
  };
  time("two passes", [&] { return launch_backward_wgmma<BFloat16, kDim>(p, counters, gpu); });
  std::printf("\n");
  uint16_t* of_two[3];
  for (int i = 0; i < 3; ++i) {
    of_two[i] = static_cast<uint16_t*>(gradients[i]->data);
    gradients[i]->data = make_numbers(count, 0);
  }
  p.grad_query_sum.data = sums;
  const auto launch = [&]() -> Error {
    return s.softcap > 0 ? launch_one_pass<BFloat16, kDim, Extra::terms>(p, counters, gpu)
                         : launch_one_pass<BFloat16, kDim, Extra::none>(p, counters, gpu);
  };
  time("one pass", launch);
  std::printf(", off by");
  for (int i = 0; i < 3; ++i)
    std::printf(" %.1e", largest_difference(of_two[i], static_cast<uint16_t*>(gradients[i]->data), count));
  int others = 0;
  uint16_t* const first = of_two[0];
  require_done(cudaMemcpy(first, p.grad_query.data, 2 * count, cudaMemcpyDeviceToDevice));
  for (int i = 0; i < 100; ++i) {
    require(!launch(), "not launched");
    others += largest_difference(first, static_cast<uint16_t*>(p.grad_query.data), count) != 0;
  }
  std::printf(", other bits in %d of 100 runs\n", others);
  std::fflush(stdout);
  for (uint16_t* x : of_two) cudaFree(x);
  for (Operand* x : inputs) cudaFree(x->data);
  for (Operand* x : gradients) cudaFree(x->data);
  for (void* x : {of_rows, p.delta, sums, static_cast<void*>(counters)}) cudaFree(x);
}

}  // namespace
}  // namespace attn::cuda

int main() {
  using namespace attn::cuda;
  need_hopper();
  for (const double softcap : {0.0, 30.0})
    for (const bool causal : {false, true}) {
      time_both<64>({8, 32, 2048, causal, softcap});
      time_both<128>({8, 16, 2048, causal, softcap});
      time_both<64>({2, 32, 8192, causal, softcap});
      time_both<128>({2, 16, 8192, causal, softcap});
    }
  std::printf("right\n");
}
