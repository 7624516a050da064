// Computes the gradients on Hopper's tensor cores, where uses_backward_wgmma() says so, in two passes. In the first one
// a block owns rows and sums dQ over keys, in the second one it owns keys and sums dK and dV over rows.
#pragma once

#include "cuda/wgmma/grad_key.cuh"
#include "cuda/wgmma/grad_query.cuh"

namespace attn::cuda {

// Blocks of 128 rows sum dQ over tiles of so many keys: as many as registers hold. With a mask, tiles begin where a
// tile of the mask does.
constexpr int backward_wgmma_keys(int dim, Extra extra) {
  if (extra == Extra::mask && dim > 64) return 64;
  return dim <= 64 && extra != Extra::dropout ? 128 : 96;
}
// Blocks of 128 keys sum dK and dV over tiles of so many rows.
constexpr int backward_wgmma_rows(int dim, Extra extra) { return extra == Extra::mask || dim > 64 ? 64 : 96; }

template <class S, int kDim>
Error launch_backward_wgmma(const BackwardParams& params, int* counter, const Gpu& gpu) {
  BackwardTaskParams p{params, {}};
  const auto launch = [&]<class Kernel>(const TaskOrder& order) -> Error {
    p.order = order;
    p.counters = order.at_once > 0 && Kernel::blocks(p) > gpu.multiprocessors ? counter : nullptr;
    if (Error error = clear_counters(p.counters, 1, gpu.stream)) return error;
    return launch_persistent<Kernel>(p, gpu);
  };
  const auto run = [&]<Extra kExtra>() -> Error {
    constexpr int kStages = kDim <= 64 ? 4 : 2;
    using OfQuery = GradQueryWgmma<S, kDim, backward_wgmma_keys(kDim, kExtra), kStages, kExtra>;
    using OfKeys = GradKeyWgmma<S, kDim, backward_wgmma_rows(kDim, kExtra), kStages, kExtra>;
    if (p.grad_query.data || p.grad_slopes)
      if (Error error = launch.template operator()<OfQuery>(order_of_rows(p, OfQuery::kRows))) return error;
    if (!p.grad_key.data && !p.grad_value.data) return nullptr;
    return launch.template operator()<OfKeys>(order_of_keys(p, p.key_heads, OfKeys::kKeys));
  };
  if (p.has_mask) {
    if (Error error = launch_blocks<LookAtMask<S>>(static_cast<const Problem&>(p), gpu.stream)) return error;
    return run.template operator()<Extra::mask>();
  }
  if (p.has_dropout) return run.template operator()<Extra::dropout>();
  return has_score_terms(p) ? run.template operator()<Extra::terms>() : run.template operator()<Extra::none>();
}

}  // namespace attn::cuda
