// The other head sizes and float16.
#include "check_backward.h"
#include "cuda/mma/backward.cuh"

int main() {
  using namespace attn;
  using namespace attn::cuda;
  check_all<Half, 64>(launch_backward_mma<Half, 64>, DType::f16, 0x1p-11, 0x1p-25);
  check_all<Half, 128>(launch_backward_mma<Half, 128>, DType::f16, 0x1p-11, 0x1p-25);
  check_all<BFloat16, 256>(launch_backward_mma<BFloat16, 256>, DType::bf16, 0x1p-8, 0);
  std::printf("right\n");
}
