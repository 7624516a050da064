// The forward over pages whose rows are not vectors, against a plain loop, without torch.
#include "check_forward.h"
#include "cuda/mma/forward.cuh"

namespace attn::cuda {
namespace {

template <class S, int kDim>
void check(const Case& c) {
  check_forward<S>(c, forward_mma_rows(1), kKeysPerTile, false,
                   [](const ForwardParams& p) { return launch_forward_numbers<S, kDim>(p, nullptr); });
}

}  // namespace
}  // namespace attn::cuda

int main() {
  using namespace attn::cuda;
  check<BFloat16, 64>({.name = "odd sizes", .dim = 53, .value_dim = 35, .in_use = 141, .page = 16});
  check<Half, 128>({.name = "strided", .queries = 1, .keys = 300, .dim = 72, .value_dim = 128, .page = 8, .col = 3});
  check<BFloat16, 256>({.name = "grouped, causal, splits",
                        .heads = 4,
                        .group = 2,
                        .queries = 40,
                        .keys = 300,
                        .dim = 201,
                        .value_dim = 77,
                        .right = 0,
                        .offset = 260,
                        .page = 24,
                        .splits = 2,
                        .has_sinks = true});
  check<Half, 64>({.name = "cap and a mask",
                   .queries = 20,
                   .keys = 200,
                   .dim = 7,
                   .value_dim = 1,
                   .page = 16,
                   .col = 2,
                   .softcap = 3,
                   .mask_bytes = 1});
  std::printf("right\n");
}
