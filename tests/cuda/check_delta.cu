// delta = <G, O + residual> of every row, of all head sizes, against plain sums.
#include <cmath>

#include "check_backward.h"
#include "cuda/mma/delta.cuh"

namespace attn::cuda {
namespace {

template <class S>
void check_delta(int queries, int value_dim, bool has_residual, DType dtype) {
  std::mt19937 random(5);
  Input<S> grad_output(kHeads, queries, value_dim, random), output(kHeads, queries, value_dim, random);
  Matrices<float> residual(kHeads, queries, value_dim);
  Array<float> delta(kHeads * queries);
  for (int64_t i = 0; i < residual.array.size(); ++i) residual.array[i] = draw(random) / 256;

  BackwardParams p;
  p.batch = 2;  // of half the heads
  p.batch_dims = 1;
  p.batch_size[0] = 2;
  p.heads = kHeads / 2;
  p.queries = queries;
  p.value_dim = value_dim;
  p.grad_output = grad_output.operand(dtype);
  p.output = output.operand(dtype);
  if (has_residual) p.residual = residual.operand(DType::f32);
  for (Operand* x : {&p.grad_output, &p.output, &p.residual}) x->batch[0] = kHeads / 2 * x->head;
  p.delta = delta.data();
  run([&] { return launch_delta_mma<S>(p, nullptr); });

  for (int h = 0; h < kHeads; ++h)
    for (int i = 0; i < queries; ++i) {
      double expected = 0, size = 0;
      for (int d = 0; d < value_dim; ++d) {
        const double rest = has_residual ? residual.array[residual.at(h, i, d)] : 0;
        const double term = grad_output(h, i, d) * (output(h, i, d) + rest);
        expected += term;
        size += std::fabs(term);
      }
      // Eight products, one sum with the residual's, and at most five of lanes: 14 roundings.
      require(std::fabs(delta[h * queries + i] - expected) <= 14 * 0x1p-24 * size, "delta");
    }
}

}  // namespace
}  // namespace attn::cuda

int main() {
  using namespace attn;
  using namespace attn::cuda;
  for (const int value_dim : {8, 64, 72, 128, 136, 256})
    for (const int queries : {1, 37, 150})
      for (const bool has_residual : {false, true}) {
        check_delta<BFloat16>(queries, value_dim, has_residual, DType::bf16);
        check_delta<Half>(queries, value_dim, has_residual, DType::f16);
      }
  std::printf("right\n");
}
