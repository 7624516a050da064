// Declares the launchers. The files of instances/ instantiate them, and launch.cu chooses among them.
#pragma once

#include "cuda/launch.h"
#include "core/score.h"

namespace attn::cuda {

static_assert(sizeof(SecondParams) <= 4096, "CUDA passes at most 4 KiB to a kernel");

// The largest number of keys per tile in the kernels that pass over keys. It is a multiple of the number of keys per
// tile in each of them.
constexpr int64_t kKeysPerTile = 64;
// Rows and keys per tile in the kernels without tensor cores (SIMT). The tasks of a mask's gradient are counted in such
// tiles (mask_tasks()).
constexpr int kSimtTile = 64;
static_assert(kSimtTile == kScoreTile && kSimtTile == kKeysPerTile);

// Head sizes up to this one run on tensor cores, padded to 64, 128 or 256. Of larger ones only multi-head latent
// attention does.
constexpr int64_t kMmaMaxDim = 256;
// Says whether forward and backward take the general kernels (kGeneral), which handle masks, dropout, a cap, ALiBi and
// scores that fall as the product grows. The other kernels save registers, because their weights are 2^(product * slope
// - shift) with a positive slope.
constexpr bool is_general(const Problem& p) {
  return p.has_mask || p.has_dropout || has_score_terms(p) || !ScoreFunction<float>::of(p).keeps_order();
}
// Says whether the kernels with tensor cores compute the gradient of a mask that several heads or batch entries share.
// These kernels do not sum a gradient over rows.
constexpr bool sums_mask(const BackwardParams& p) { return p.mask_is_shared && p.grad_mask.row != 0; }
// Soft caps up to 64 have a faster tanh (Tanh).
enum class Cap { none, small, large };
ATTN_INLINE constexpr Cap cap_of(const Problem& p) {
  return p.softcap == 0 ? Cap::none : p.softcap <= 64 ? Cap::small : Cap::large;
}
// How the gradients on Hopper turn products into weights: without a cap, with a small cap and no ALiBi, or with
// anything.
ATTN_INLINE constexpr Cap cap_beside_slopes(const Problem& p) {
  const Cap cap = cap_of(p);
  return cap == Cap::small && p.alibi_slopes ? Cap::large : cap;
}
// The number of tiles of 16 rows per warp: as many as the warp's registers hold.
constexpr int forward_mma_tiles(int64_t dim) { return dim <= 128 ? 2 : 1; }
// The number of rows of a block, which has four warps.
constexpr int64_t forward_mma_rows(int tiles) { return 64 * tiles; }

// The kernel for decoding takes at most so many rows of a group of heads. Each of its warps has all of them.
constexpr int64_t kDecodeRows = 16;

// The rows of a block and the keys of a tile of the forward on Hopper. Shared memory holds two stages of 80 keys with
// head_dim 256, and of 64 keys with the larger ones of multi-head latent attention.
// beside_others: with a mask or dropout, which take registers.
constexpr int64_t forward_wgmma_rows(int64_t dim, bool beside_others) {
  if (dim <= 64 && !beside_others) return 192;
  return dim <= kMmaMaxDim ? 128 : 64;
}
constexpr int64_t forward_wgmma_keys(int64_t dim) { return dim <= 128 ? 128 : dim <= kMmaMaxDim ? 80 : 64; }

// The largest size of a head on Hopper in the backward, and in the forward with a mask or dropout. Tiles of a mask need
// shared memory.
constexpr int64_t kBackwardWgmmaDim = 128, kMaskedWgmmaDim = 128;

// The largest sizes of multi-head latent attention, and the rows of a block on a GPU other than Hopper.
constexpr int64_t kLatentKeyDim = 576, kLatentValueDim = 512, kLatentMmaRows = 32;

// Calls f.template operator()<kDim>() with the padded head size.
template <class F>
Error with_padded_dim(int64_t dim, F f) {
  if (dim <= 64) return f.template operator()<64>();
  return dim <= 128 ? f.template operator()<128>() : f.template operator()<256>();
}

// For kernels whose blocks stay for many tasks. (Beside what SecondParams has, a kernel's 4 KiB hold no more.)
struct BackwardTaskParams : BackwardParams, TaskCounters {};

// S: Half or BFloat16. kPaged: whether keys and values are stored in pages.
template <class S, int kDim, bool kPaged>
Error launch_forward_mma(const ForwardParams& p, Stream stream);

// The same where reads_numbers(), for any number of rows.
template <class S, int kDim>
Error launch_forward_numbers(const ForwardParams& p, Stream stream);

// For decoding: at most kDecodeRows rows of a group of heads.
template <class S, int kDim, bool kPaged>
Error launch_decode_mma(const ForwardParams& p, Stream stream);

// Both for keys and values of 8 bits. S: the type of the query.
template <class S, int kDim, bool kPaged>
Error launch_forward_eight_bits(const ForwardParams& p, Stream stream);
template <class S, int kDim, bool kPaged>
Error launch_decode_eight_bits(const ForwardParams& p, Stream stream);

// On Hopper. The files of instances/ that instantiate it are traps for any other device.
template <class S, int kDim, bool kPaged>
Error launch_forward_wgmma(const ForwardParams& p, const Gpu& gpu);

// Multi-head latent attention, on Hopper and on any GPU.
template <class S>
Error launch_latent_wgmma(const ForwardParams& p, const Gpu& gpu);
template <class S>
Error launch_latent_mma(const ForwardParams& p, Stream stream);

// Computes grad_query, grad_key, grad_value, and grad_mask unless grad_mask is summed over rows. `delta` must have been
// written before.
template <class S, int kDim>
Error launch_backward_mma(const BackwardParams& p, Stream stream);

// The same on Hopper, where uses_backward_wgmma(). `counter` is memory for one number, in which blocks count their
// tasks.
template <class S, int kDim>
Error launch_backward_wgmma(const BackwardParams& p, int* counter, const Gpu& gpu);

// Writes `delta` for both, if delta_takes_vectors() (launch.cu).
template <class S>
Error launch_delta_mma(const BackwardParams& p, Stream stream);

// The kernels without tensor cores. T: float or double.
template <class T>
Error launch_forward_simt(const ForwardParams& p, Stream stream);
template <class T>
Error launch_merge_splits(const ForwardParams& p, Stream stream);
// Params: BackwardParams for the gradients, SecondParams for their derivative. Call launch_delta_simt() first.
template <class T, class Params>
Error launch_delta_simt(const Params& p, Stream stream);
template <class T, class Params>
Error launch_gradients_simt(const Params& p, Stream stream);
template <class T>
Error launch_tangent_simt(const TangentParams& p, Stream stream);
template <class T>
Error launch_stats_simt(const StatsParams& p, Stream stream);

}  // namespace attn::cuda
