// Multi-head latent attention against a plain loop, without torch.
#pragma once

#include "check_forward.h"

namespace attn::cuda {

// launch.template operator()<S>(p) computes p, with `rows` rows of a block and tiles of `tile` keys.
template <class Launch>
void check_latent(int64_t rows, int64_t tile, Launch launch) {
  const auto check = [&]<class S>(Case c, int dim = 576, int value_dim = 512) {
    c.latent = true;
    c.dim = dim;
    c.value_dim = value_dim;
    check_forward<S>(c, rows, tile, false, [&](const ForwardParams& p) { return launch.template operator()<S>(p); });
  };
  check.template operator()<BFloat16>({.name = "decoding", .heads = 16, .group = 16, .queries = 1, .keys = 391});
  check.template operator()<Half>({.name = "128 heads", .heads = 128, .group = 128, .queries = 2});
  check.template operator()<BFloat16>(
      {.name = "a prompt", .group = 2, .queries = 200, .keys = 200, .right = 0, .lists = 1});
  check.template operator()<BFloat16>(
      {.name = "two heads of keys", .heads = 4, .group = 2, .queries = 70, .has_sinks = true}, 512);
  check.template operator()<Half>({.name = "odd sizes", .heads = 40, .group = 40, .queries = 3, .keys = 200}, 264, 200);
  check.template operator()<BFloat16>(
      {.name = "window", .heads = 6, .group = 6, .queries = 100, .keys = 300, .left = 40, .right = 3, .offset = 200},
      320, 256);
  check.template operator()<BFloat16>(
      {.name = "no keys in use", .heads = 16, .group = 16, .queries = 1, .keys = 100, .in_use = 0});
  check.template operator()<Half>(
      {.name = "splits", .heads = 80, .group = 80, .queries = 1, .keys = 500, .in_use = 450, .splits = 3});
  check.template operator()<BFloat16>({.name = "pages",
                                       .heads = 16,
                                       .group = 16,
                                       .queries = 2,
                                       .keys = 300,
                                       .right = 0,
                                       .offset = 288,
                                       .in_use = 290,
                                       .page = 16});
  check.template operator()<Half>({.name = "rows without keys among others",
                                   .heads = 12,
                                   .group = 6,
                                   .queries = 100,
                                   .keys = 129,
                                   .right = 0,
                                   .offset = -90,
                                   .has_sinks = true},
                                  520, 264);
  check.template operator()<BFloat16>(
      {.name = "pages, splits", .group = 2, .queries = 70, .keys = 396, .page = 4, .splits = 4}, 576, 392);
}

}  // namespace attn::cuda
