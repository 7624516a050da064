// One head size, every kind of problem: for compute-sanitizer, and to see that an error put into a kernel is found.
#include "check_backward.h"
#include "cuda/mma/backward.cuh"

int main() {
  using namespace attn;
  using namespace attn::cuda;
  check_all<BFloat16, 64>(launch_backward_mma<BFloat16, 64>, DType::bf16, 0x1p-8, 0);
  std::printf("right\n");
}
