// On Hopper's tensor cores.
#include "check_latent.h"
#include "cuda/wgmma/latent.cuh"

int main() {
  using namespace attn::cuda;
  need_hopper();
  const Gpu gpu{3, 90, nullptr};  // blocks have several tasks each
  check_latent(forward_wgmma_rows(kLatentKeyDim, false), forward_wgmma_keys(kLatentKeyDim),
               [&]<class S>(const auto& p) { return launch_latent_wgmma<S>(p, gpu); });
  std::printf("right\n");
}
