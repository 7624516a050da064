// The gradients in one pass on Hopper against plain loops, without torch, and the same bits on a second run. Blocks
// have several tasks each, as on a GPU with more of them than multiprocessors.
#include "check_backward.h"
#include "cuda/wgmma/one_pass.cuh"

namespace attn::cuda {
namespace {

// For the largest case, with a head's keys or rows filled up to whole tiles.
constexpr int64_t kMostTiles = 64;
Array<int>& counters() {
  static Array<int> numbers(1 + kMostTiles);
  return numbers;
}
Array<float>& sums() {
  static Array<float> numbers(kMostTiles * kOnePassRows * 128);
  return numbers;
}

// Counters and sums are left as the launch before has left them.
template <class S, int kDim>
Error launch(const BackwardParams& p, Stream stream) {
  BackwardParams with_sums = p;
  require(takes_one_pass(p) && one_pass_tiles(p) <= kMostTiles, "memory for sums");
  with_sums.grad_query_sum.data = sums().data();
  const Gpu gpu{3, 90, stream};
  return has_score_terms(p) ? launch_one_pass<S, kDim, Extra::terms>(with_sums, counters().data(), gpu)
                            : launch_one_pass<S, kDim, Extra::none>(with_sums, counters().data(), gpu);
}

}  // namespace
}  // namespace attn::cuda

int main() {
  using namespace attn;
  using namespace attn::cuda;
  need_hopper();
  for (int64_t i = 0; i < counters().size(); ++i) counters()[i] = 7;
  for (int64_t i = 0; i < sums().size(); ++i) sums()[i] = NAN;
  const auto check_dim = [&]<class S, int kDim>(DType dtype, double unit, double smallest) {
    check_all<S, kDim>(launch<S, kDim>, dtype, unit, smallest,
                       {.rows_of_tile = kOnePassRows, .options = false, .one_pass = true});
  };
  check_dim.template operator()<BFloat16, 128>(DType::bf16, 0x1p-8, 0);
  check_dim.template operator()<Half, 64>(DType::f16, 0x1p-11, 0x1p-25);
  std::printf("right\n");
}
