// On tensor cores of all GPUs since 8.0.
#include "check_latent.h"
#include "cuda/mma/latent.cuh"

int main() {
  using namespace attn::cuda;
  check_latent(kLatentMmaRows, kKeysPerTile, []<class S>(const auto& p) { return launch_latent_mma<S>(p, nullptr); });
  std::printf("right\n");
}
