// The forward on Hopper's tensor cores against a plain loop, without torch. Blocks have several tasks each, as on a GPU
// with more of them than multiprocessors.
#include <vector>

#include "check_forward.h"
#include "cuda/wgmma/forward.cuh"

namespace attn::cuda {
namespace {

template <class S, int kDim>
void check(const Case& c) {
  const Gpu gpu{3, 90, nullptr};
  check_forward<S>(c, forward_wgmma_rows(kDim, c.mask_bytes > 0 || c.dropout), forward_wgmma_keys(kDim), false,
                   [&](const ForwardParams& p) {
                     return c.page ? launch_forward_wgmma<S, kDim, true>(p, gpu)
                                   : launch_forward_wgmma<S, kDim, false>(p, gpu);
                   });
}

// Every task has one turn, and those with the most keys come first: all lists of a section before the next section.
void check_order() {
  for (int64_t tasks = 1; tasks < 12; ++tasks)
    for (int64_t number = 1; number < 12; ++number)
      for (int64_t lists = 1; lists < 14; ++lists) {
        const TaskOrder order{tasks, number, lists};
        std::vector<bool> seen(tasks * number);
        for (int64_t turn = 0, before = 0; turn < tasks * number; ++turn) {
          const int64_t task = order[turn], place = task / tasks / lists * tasks + task % tasks;
          require(task >= 0 && task < tasks * number && !seen[task] && before <= place, "the order of tasks");
          seen[task] = true;
          before = place;
        }
      }
}

}  // namespace
}  // namespace attn::cuda

int main() {
  using namespace attn::cuda;
  need_hopper();
  check_order();
  check<BFloat16, 128>({.name = "full", .keys = 391});
  check<Half, 128>({.name = "causal", .queries = 300, .keys = 300, .right = 0});
  check<BFloat16, 128>({.name = "tasks in order", .heads = 3, .queries = 300, .keys = 300, .right = 0, .lists = 2});
  check<Half, 64>({.name = "64, tasks in order",
                   .heads = 4,
                   .group = 2,
                   .queries = 391,
                   .keys = 391,
                   .dim = 64,
                   .value_dim = 64,
                   .right = 0,
                   .lists = 1});
  check<BFloat16, 64>({.name = "64, causal", .queries = 391, .keys = 391, .dim = 64, .value_dim = 64, .right = 0});
  check<Half, 64>({.name = "64, grouped", .heads = 4, .group = 4, .keys = 270, .dim = 64, .value_dim = 64});
  check<BFloat16, 256>({.name = "256, causal", .queries = 170, .keys = 170, .dim = 256, .value_dim = 256, .right = 0});
  check<Half, 256>({.name = "256, padded", .keys = 200, .dim = 136, .value_dim = 200});
  check<BFloat16, 128>({.name = "padded, values of another size", .keys = 200, .dim = 72, .value_dim = 104});
  check<BFloat16, 128>({.name = "window", .heads = 4, .group = 2, .queries = 300, .keys = 300, .left = 40, .right = 3});
  check<BFloat16, 64>({.name = "keys in use", .keys = 300, .dim = 64, .value_dim = 64, .right = 0, .in_use = 141});
  check<BFloat16, 128>({.name = "no keys in use", .keys = 300, .in_use = 0});
  check<Half, 128>({.name = "sinks", .queries = 70, .keys = 130, .right = 0, .has_sinks = true});
  check<BFloat16, 128>({.name = "a cap", .queries = 300, .keys = 300, .right = 0, .softcap = 2});
  check<Half, 64>({.name = "64, a large cap", .keys = 200, .dim = 64, .value_dim = 64, .softcap = 1e6});
  check<Half, 128>({.name = "ALiBi, grouped",
                    .heads = 4,
                    .group = 2,
                    .queries = 200,
                    .keys = 270,
                    .right = 90,
                    .offset = 60,
                    .has_sinks = true,
                    .has_slopes = true});
  check<BFloat16, 64>({.name = "64, a cap and ALiBi in pages",
                       .keys = 300,
                       .dim = 64,
                       .value_dim = 64,
                       .left = 120,
                       .in_use = 250,
                       .page = 16,
                       .softcap = 3,
                       .has_slopes = true});
  check<BFloat16, 256>({.name = "256, a cap and ALiBi",
                        .queries = 170,
                        .keys = 170,
                        .dim = 256,
                        .value_dim = 256,
                        .right = 0,
                        .softcap = 3,
                        .has_slopes = true});
  check<BFloat16, 128>({.name = "splits, a cap", .queries = 130, .keys = 400, .splits = 2, .softcap = 5});
  for (const int bytes : {1, 2}) {  // tiles of 64 keys are hidden, some beside others
    check<BFloat16, 128>({.name = "mask", .queries = 300, .keys = 300, .right = 0, .mask_bytes = bytes});
    check<Half, 128>({.name = "mask, grouped",
                      .heads = 4,
                      .group = 4,
                      .queries = 70,
                      .keys = 400,
                      .in_use = 391,
                      .has_sinks = true,
                      .softcap = 3,
                      .has_slopes = true,
                      .mask_bytes = bytes});
    check<BFloat16, 64>(
        {.name = "64, mask", .heads = 3, .queries = 290, .keys = 520, .dim = 64, .value_dim = 64, .mask_bytes = bytes});
    check<Half, 64>({.name = "64, mask, splits",
                     .queries = 130,
                     .keys = 700,
                     .dim = 64,
                     .value_dim = 64,
                     .splits = 2,
                     .mask_bytes = bytes});
  }
  check<BFloat16, 64>({.name = "a mask of more keys than one look finds",
                       .heads = 1,
                       .queries = 70,
                       .keys = 4300,
                       .dim = 64,
                       .value_dim = 64,
                       .mask_bytes = 1});
  check<BFloat16, 128>({.name = "mask of rows", .queries = 140, .keys = 300, .mask_bytes = 2, .mask_is_of_rows = true});
  check<BFloat16, 128>({.name = "dropout", .heads = 3, .queries = 200, .keys = 300, .right = 0, .dropout = true});
  check<Half, 64>({.name = "64, dropout, grouped",
                   .heads = 4,
                   .group = 2,
                   .queries = 200,
                   .keys = 391,
                   .dim = 64,
                   .value_dim = 64,
                   .left = 300,
                   .offset = 130,
                   .has_sinks = true,
                   .dropout = true});
  check<BFloat16, 128>({.name = "splits", .queries = 130, .keys = 400, .splits = 2});
  check<BFloat16, 64>({.name = "pages, 64", .keys = 300, .dim = 64, .value_dim = 64, .in_use = 250, .page = 16});
  check<BFloat16, 128>({.name = "pages, 128", .keys = 300, .in_use = 290, .page = 16});
  check<Half, 256>({.name = "pages, 256", .keys = 200, .dim = 256, .value_dim = 256, .in_use = 190, .page = 8});
  std::printf("right\n");
}
