// The forward of few rows against a plain loop, without torch.
#include "check_forward.h"
#include "cuda/mma/decode.cuh"

namespace attn::cuda {
namespace {

template <class S, int kDim>
void check(const Case& c) {
  check_forward<S>(c, kDecodeRows, kKeysPerTile, true, [&](const ForwardParams& p) {
    return c.page ? launch_decode_mma<S, kDim, true>(p, nullptr) : launch_decode_mma<S, kDim, false>(p, nullptr);
  });
}

}  // namespace
}  // namespace attn::cuda

int main() {
  using namespace attn::cuda;
  check<BFloat16, 128>({.name = "one query", .queries = 1, .keys = 391});
  check<Half, 128>({.name = "fewer keys than warps have", .queries = 1, .keys = 21});
  check<BFloat16, 128>({.name = "one key", .queries = 2, .keys = 1});
  check<BFloat16, 64>(
      {.name = "64, grouped", .heads = 8, .group = 8, .queries = 2, .keys = 700, .dim = 64, .value_dim = 64});
  check<Half, 256>(
      {.name = "256, grouped", .heads = 6, .group = 3, .queries = 5, .keys = 300, .dim = 256, .value_dim = 256});
  check<Half, 64>({.name = "64, padded", .queries = 16, .keys = 200, .dim = 40, .value_dim = 24});
  check<BFloat16, 256>({.name = "256, padded", .queries = 1, .keys = 200, .dim = 136, .value_dim = 200});
  check<BFloat16, 128>(
      {.name = "causal", .heads = 8, .group = 4, .queries = 4, .keys = 300, .right = 0, .offset = 296});
  check<Half, 64>({.name = "window",
                   .heads = 4,
                   .group = 2,
                   .queries = 3,
                   .keys = 500,
                   .dim = 64,
                   .value_dim = 64,
                   .left = 70,
                   .right = 0,
                   .offset = 400});
  check<BFloat16, 128>({.name = "keys in use", .group = 2, .queries = 1, .keys = 300, .in_use = 141});
  check<BFloat16, 128>({.name = "no keys in use", .queries = 1, .keys = 300, .in_use = 0});
  check<Half, 128>({.name = "sinks", .queries = 3, .keys = 130, .right = 0, .offset = 100, .has_sinks = true});
  check<BFloat16, 128>({.name = "splits", .heads = 4, .group = 4, .queries = 3, .keys = 800, .splits = 3});
  check<Half, 64>({.name = "splits, some without keys",
                   .heads = 6,
                   .group = 2,
                   .queries = 2,
                   .keys = 900,
                   .dim = 64,
                   .value_dim = 64,
                   .right = 0,
                   .offset = 500,
                   .in_use = 700,
                   .splits = 7,
                   .has_sinks = true});
  check<BFloat16, 64>(
      {.name = "pages, 64", .queries = 2, .keys = 300, .dim = 64, .value_dim = 64, .in_use = 250, .page = 16});
  check<Half, 128>({.name = "pages, 128", .group = 2, .queries = 1, .keys = 520, .in_use = 490, .page = 8});
  check<BFloat16, 256>({.name = "pages, 256", .queries = 1, .keys = 200, .dim = 256, .value_dim = 256, .page = 24});
  check<BFloat16, 128>({.name = "cap", .queries = 2, .keys = 300, .softcap = 3});
  check<Half, 64>({.name = "slopes",
                   .heads = 4,
                   .group = 2,
                   .queries = 2,
                   .keys = 300,
                   .dim = 64,
                   .value_dim = 64,
                   .right = 0,
                   .offset = 298,
                   .has_slopes = true});
  check<BFloat16, 64>(
      {.name = "mask", .heads = 4, .group = 4, .queries = 3, .keys = 300, .dim = 64, .value_dim = 64, .mask_bytes = 2});
  check<Half, 128>({.name = "boolean mask", .queries = 9, .keys = 300, .mask_bytes = 1});
  check<BFloat16, 256>({.name = "mask, cap, pages",
                        .queries = 2,
                        .keys = 250,
                        .dim = 256,
                        .value_dim = 256,
                        .page = 16,
                        .softcap = 5,
                        .mask_bytes = 2});
  check<BFloat16, 64>({.name = "a mask, splits behind the keys in use",
                       .queries = 2,
                       .keys = 800,
                       .dim = 64,
                       .value_dim = 64,
                       .in_use = 141,
                       .splits = 3,
                       .mask_bytes = 1});
  check<Half, 128>({.name = "a mask of 16 bits, splits behind the keys in use",
                    .queries = 1,
                    .keys = 800,
                    .in_use = 141,
                    .splits = 3,
                    .mask_bytes = 2});
  check<BFloat16, 128>({.name = "a mask, rows that see nothing",
                        .queries = 2,
                        .keys = 300,
                        .right = 0,
                        .offset = -100,
                        .mask_bytes = 2});
  check<Half, 64>({.name = "a mask of rows",
                   .queries = 3,
                   .keys = 200,
                   .dim = 64,
                   .value_dim = 64,
                   .mask_bytes = 2,
                   .mask_is_of_rows = true});
  check<BFloat16, 128>({.name = "negative scale", .queries = 2, .keys = 300, .scale = -0.125});
  check<Half, 256>({.name = "256, pages, splits",
                    .heads = 2,
                    .group = 2,
                    .queries = 2,
                    .keys = 900,
                    .dim = 256,
                    .value_dim = 256,
                    .page = 16,
                    .splits = 3});
  std::printf("right\n");
}
