// The table of one instruction set, and which kernel runs when:
//
// - decode: calls with few queries and without score_mod or mask_mod, if no derivatives will be computed and the set
//   has this kernel for the call (Decode::takes). Reads each key and value once for all queries of a group of heads.
//   Memory limits its speed.
// - forward: all other calls (KernelTable::forward). Reads keys and values once for up to 256 rows of a group. Reads a
//   mask once for each head. If heads share a mask, a byte per tile says which tiles must read the mask (look_at_mask).
//   Products limit the speed.
// - backward: computes the gradients and, as `second`, their derivative. Reads each key and value once for the rows
//   that fit into the L2 cache (rows_per_pass), and each row once for every chunk of keys. Computes the gradients of
//   sinks, and of a mask with one number per row, in a separate pass over the rows.
// - tangent: a task has one tile of rows, and reads keys, values and their tangents once.
// - stats: makes one pass over the keys, as the forward does, and one pass over the rows. The second pass computes the
//   scores again. If rows are few (FewStats::takes), it reads stored scores instead.
// - weights: a task has one tile of rows, and keeps the scores of these rows.
//
// A set that does not support a problem (Formats::takes) falls back to another set: kernels_for().
#pragma once

#include "cpu/kernels/backward.inl"
#include "cpu/kernels/decode.inl"
#include "cpu/kernels/forward.inl"
#include "cpu/kernels/stats.inl"
#include "cpu/kernels/tangent.inl"
#include "cpu/kernels/weights.inl"
#include "cpu/tiles/pair_mask.inl"

namespace attn::ATTN_ISA {

// The struct Formats describes how the instruction set of a KernelTable multiplies:
// - takes(p): whether one of the set's formats holds the factors of products, which may be rounded to p.factor_bits
// - with(p, f): calls f with this format
// - kOnThread: what a thread calls before its first task and after its last one
// - kDecodes: whether the table has the kernel for few rows that multiplies in this format
// - falls_back_to: the table for all other problems, or null
//
// SinglesOnly is for sets that cannot multiply numbers of fewer bits, such as bfloat16.
struct SinglesOnly {
  static bool takes(const Problem&) { return true; }
  template <class Function>
  static ATTN_INLINE auto with(const Problem& p, Function f) {
    return p.query.dtype == DType::f64 ? f(Singles<double>()) : f(Singles<float>());
  }
  static constexpr OnThread kOnThread = {};
  static constexpr bool kDecodes = true;
  static constexpr decltype(nullptr) falls_back_to{};
};

// Each function of the table chooses a format for the problem, and returns the kernels of this format.
template <class Formats>
struct KernelTable {
  // The kernels of a format F. Tangents and second derivatives use F only for scores, because their scores must equal
  // the forward's.
  template <class F, class K = Forward<F>>
  static constexpr ForwardKernels kForward = {
      K::workspace, K::run, K::merge, Prepacked<F>::size, Prepacked<F>::pack, Formats::kOnThread};
  template <class F, class K = Decode<F>, class One = Singles<typename F::Number>>
  static constexpr ForwardKernels kDecode = {
      K::workspace, K::run, Forward<One>::merge, Prepacked<One>::size, Prepacked<One>::pack, Formats::kOnThread};
  template <class Params, class K>
  static constexpr OnePassKernels<Params> kOnePass = {K::workspace, K::run, Formats::kOnThread};
  template <class Params, class K>
  static constexpr BackwardKernels<Params> kBackward = {K::workspace, K::run, K::mask, K::rows, Formats::kOnThread};
  template <class F, class K = Stats<F>>
  static constexpr StatsKernels kStats = {K::workspace, K::rows, K::finish, K::keys, K::add_chunks, Formats::kOnThread};
  template <class T, class K = FewStats<T>, class All = Stats<Singles<T>>>
  static constexpr StatsKernels kFewStats = {K::workspace,       K::rows, All::finish, K::keys, All::add_chunks,
                                             Formats::kOnThread, true};

  // Returns f(format), or null if no format takes the problem.
  template <class Function>
  static auto chosen(const Problem& p, Function f) {
    return Formats::takes(p) ? Formats::with(p, f) : nullptr;
  }
  static const ForwardKernels* forward(const ForwardParams& p) {
    return chosen(p, [&]<class F>(F) -> const ForwardKernels* {
      if constexpr (Formats::kDecodes)
        if (Decode<F>::takes(p, false)) return &kDecode<F>;
      if (Formats::falls_back_to && Decode<Singles<float>>::takes(p, true)) return nullptr;
      return &kForward<F>;
    });
  }
  static const OnePassKernels<TangentParams>* tangent(const TangentParams& p) {
    return chosen(p, []<class F>(F) { return &kOnePass<TangentParams, Tangent<typename F::Number, F>>; });
  }
  static const BackwardKernels<BackwardParams>* backward(const BackwardParams& p) {
    return chosen(p, []<class F>(F) { return &kBackward<BackwardParams, Backward<F, BackwardParams>>; });
  }
  static const BackwardKernels<SecondParams>* second(const SecondParams& p) {
    using Params = SecondParams;
    return chosen(p, []<class F>(F) { return &kBackward<Params, Backward<Singles<typename F::Number>, Params, F>>; });
  }
  static const StatsKernels* stats(const StatsParams& p) {
    if (Formats::falls_back_to && FewStats<float>::takes(p, true)) return nullptr;
    return chosen(p, [&]<class F>(F) {
      if constexpr (std::is_null_pointer_v<decltype(Formats::falls_back_to)>)  // a sanitizer cannot compare addresses
        if (FewStats<typename F::Number>::takes(p, false)) return &kFewStats<typename F::Number>;
      return &kStats<F>;
    });
  }
  static const OnePassKernels<WeightsParams>* weights(const WeightsParams& p) {
    return chosen(p, []<class F>(F) { return &kOnePass<WeightsParams, Weights<F>>; });
  }
  static bool in_float64(const Problem& p, const PairMask& m) {
    return p.query.dtype == DType::f64 || (m.list && m.list->is_wide);
  }
  static void look_at_pairs(const Problem& p, const PairMask& m, int64_t task, bool wants_bits, char* workspace) {
    if (in_float64(p, m))
      ATTN_ISA::look_at_pairs<double>(p, m, task, wants_bits, reinterpret_cast<double*>(workspace));
    else
      ATTN_ISA::look_at_pairs<float>(p, m, task, wants_bits, reinterpret_cast<float*>(workspace));
  }
  static int64_t pair_workspace(const Problem& p, const PairMask& m) {
    return in_float64(p, m) ? room_of_mask<double>(m.list) : room_of_mask<float>(m.list);
  }
  static constexpr Kernels table = {Formats::falls_back_to,
                                    look_at_mask,
                                    look_at_pairs,
                                    pair_workspace,
                                    forward,
                                    tangent,
                                    backward,
                                    second,
                                    stats,
                                    weights};
};

}  // namespace attn::ATTN_ISA
