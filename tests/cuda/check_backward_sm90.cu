// The gradients on Hopper's tensor cores against plain loops, without torch. Blocks have several tasks each, as on a
// GPU with more of them than multiprocessors.
#include "check_backward.h"
#include "cuda/wgmma/backward.cuh"

namespace attn::cuda {
namespace {

Array<int>& counter() {
  static Array<int> one(1);
  return one;
}
template <class S, int kDim>
Error launch_ordered(const BackwardParams& p, Stream stream) {
  return launch_backward_wgmma<S, kDim>(p, counter().data(), {3, 90, stream});
}

template <class S, int kDim>
void check_dim(DType dtype, double unit, double smallest) {
  check_all<S, kDim>(launch_ordered<S, kDim>, dtype, unit, smallest,
                     {.rows_of_tile = backward_wgmma_rows(kDim), .options = false});
}

}  // namespace
}  // namespace attn::cuda

int main() {
  using namespace attn;
  using namespace attn::cuda;
  need_hopper();
  counter();
  check_dim<BFloat16, 128>(DType::bf16, 0x1p-8, 0);
  check_dim<Half, 64>(DType::f16, 0x1p-11, 0x1p-25);
  std::printf("right\n");
}
