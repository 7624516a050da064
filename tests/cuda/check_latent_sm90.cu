// Multi-head latent attention on Hopper's tensor cores against a plain loop, without torch.
#include "check_forward.h"
#include "cuda/wgmma/latent.cuh"

namespace attn::cuda {
namespace {

template <class S>
void check(Case c) {
  c.latent = true;
  const Gpu gpu{3, 90, nullptr};  // blocks have several tasks each
  check_forward<S>(c, forward_wgmma_rows(kLatentKeyDim), forward_wgmma_keys(kLatentKeyDim), false,
                   [&](const ForwardParams& p) { return launch_latent_wgmma<S>(p, gpu); });
}

}  // namespace
}  // namespace attn::cuda

int main() {
  using namespace attn::cuda;
  need_hopper();
  check<BFloat16>(
      {.name = "decoding", .heads = 16, .group = 16, .queries = 1, .keys = 391, .dim = 576, .value_dim = 512});
  check<Half>(
      {.name = "128 heads", .heads = 128, .group = 128, .queries = 2, .keys = 150, .dim = 576, .value_dim = 512});
  check<BFloat16>({.name = "a prompt",
                   .heads = 2,
                   .group = 2,
                   .queries = 200,
                   .keys = 200,
                   .dim = 576,
                   .value_dim = 512,
                   .right = 0,
                   .lists = 1});
  check<BFloat16>({.name = "two heads of keys",
                   .heads = 4,
                   .group = 2,
                   .queries = 70,
                   .keys = 130,
                   .dim = 512,
                   .value_dim = 512,
                   .has_sinks = true});
  check<Half>({.name = "odd sizes", .heads = 40, .group = 40, .queries = 3, .keys = 200, .dim = 264, .value_dim = 200});
  check<BFloat16>({.name = "window",
                   .heads = 6,
                   .group = 6,
                   .queries = 100,
                   .keys = 300,
                   .dim = 320,
                   .value_dim = 256,
                   .left = 40,
                   .right = 3,
                   .offset = 200});
  check<BFloat16>({.name = "no keys in use",
                   .heads = 16,
                   .group = 16,
                   .queries = 1,
                   .keys = 100,
                   .dim = 576,
                   .value_dim = 512,
                   .in_use = 0});
  check<Half>({.name = "splits",
               .heads = 80,
               .group = 80,
               .queries = 1,
               .keys = 500,
               .dim = 576,
               .value_dim = 512,
               .in_use = 450,
               .splits = 3});
  check<BFloat16>({.name = "pages",
                   .heads = 16,
                   .group = 16,
                   .queries = 2,
                   .keys = 300,
                   .dim = 576,
                   .value_dim = 512,
                   .right = 0,
                   .offset = 288,
                   .in_use = 290,
                   .page = 16});
  std::printf("right\n");
}
