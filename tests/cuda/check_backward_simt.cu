// The kernels of plain multiply-adds: more columns than a block has, every kind of problem.
#include "check_backward.h"
#include "cuda/simt/backward.cuh"

int main() {
  using namespace attn;
  using namespace attn::cuda;
  check_all<float, 130>(launch_gradients_simt<float>, DType::f32, 0, 0);
  std::printf("right\n");
}
