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
Array<uint8_t>& mask_tiles() {
  static Array<uint8_t> bytes(4096);
  return bytes;
}
template <class S, int kDim>
Error launch_ordered(const BackwardParams& p, Stream stream) {
  BackwardParams with_tiles = p;
  if (p.has_mask) require(set_mask_tiles(with_tiles) <= mask_tiles().size(), "mask_tiles");
  with_tiles.mask_tiles.data = mask_tiles().data();
  return launch_backward_wgmma<S, kDim>(with_tiles, counter().data(), {3, 90, stream});
}

template <class S, int kDim>
void check_dim(DType dtype, double unit, double smallest) {
  check_all<S, kDim>(launch_ordered<S, kDim>, dtype, unit, smallest,
                     {.rows_of_tile = backward_wgmma_rows(kDim, Extra::none),
                      .rows_under_mask = backward_wgmma_rows(kDim, Extra::mask),
                      .options = false});
}

}  // namespace
}  // namespace attn::cuda

int main() {
  using namespace attn;
  using namespace attn::cuda;
  need_hopper();
  counter(), mask_tiles();
  check_dim<BFloat16, 128>(DType::bf16, 0x1p-8, 0);
  check_dim<Half, 64>(DType::f16, 0x1p-11, 0x1p-25);
  std::printf("right\n");
}
