// Multi-head latent attention on Hopper's tensor cores against a plain loop, without torch.
#include "check_forward.h"
#include "cuda/wgmma/latent.cuh"

namespace attn::cuda {
namespace {

template <class S>
void check(Case c, int dim = kLatentKeyDim, int value_dim = kLatentValueDim) {
  c.latent = true;
  c.dim = dim;
  c.value_dim = value_dim;
  const Gpu gpu{3, 90, nullptr};  // blocks have several tasks each
  check_forward<S>(c, forward_wgmma_rows(dim), forward_wgmma_keys(dim), false,
                   [&](const ForwardParams& p) { return launch_latent_wgmma<S>(p, gpu); });
}

}  // namespace
}  // namespace attn::cuda

int main() {
  using namespace attn::cuda;
  need_hopper();
  check<BFloat16>({.name = "decoding", .heads = 16, .group = 16, .queries = 1, .keys = 391});
  check<Half>({.name = "128 heads", .heads = 128, .group = 128, .queries = 2});
  check<BFloat16>({.name = "a prompt", .group = 2, .queries = 200, .keys = 200, .right = 0, .lists = 1});
  check<BFloat16>({.name = "two heads of keys", .heads = 4, .group = 2, .queries = 70, .has_sinks = true}, 512);
  check<Half>({.name = "odd sizes", .heads = 40, .group = 40, .queries = 3, .keys = 200}, 264, 200);
  check<BFloat16>(
      {.name = "window", .heads = 6, .group = 6, .queries = 100, .keys = 300, .left = 40, .right = 3, .offset = 200},
      320, 256);
  check<BFloat16>({.name = "no keys in use", .heads = 16, .group = 16, .queries = 1, .keys = 100, .in_use = 0});
  check<Half>({.name = "splits", .heads = 80, .group = 80, .queries = 1, .keys = 500, .in_use = 450, .splits = 3});
  check<BFloat16>({.name = "pages",
                   .heads = 16,
                   .group = 16,
                   .queries = 2,
                   .keys = 300,
                   .right = 0,
                   .offset = 288,
                   .in_use = 290,
                   .page = 16});
  std::printf("right\n");
}
