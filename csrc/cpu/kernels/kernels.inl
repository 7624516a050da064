// The table of one instruction set.
#pragma once

#include "cpu/kernels/backward.inl"
#include "cpu/kernels/decode.inl"
#include "cpu/kernels/forward.inl"
#include "cpu/kernels/stats.inl"
#include "cpu/kernels/tangent.inl"

namespace attn::ATTN_ISA {

// A KernelTable is told how a set multiplies by a struct, its Formats:
//   takes(p)        whether it has a format that holds the factors of products, which may be rounded to p.factor_bits
//   with(p, f)      calls f with that format
//   ForwardLoop     the forward for a format
//   kOnThread       what a thread does before its first task and after its last one
//   kDecodes        whether the table also decodes: that reads every number once, so that products do not count
//   falls_back_to   the table for all else; null where nothing is left
//
// SinglesOnly is that of a set without products of fewer bits.
struct SinglesOnly {
  static bool takes(const Problem&) { return true; }
  template <class Function>
  static ATTN_INLINE auto with(const Problem& p, Function f) {
    return p.query.dtype == DType::f64 ? f(Singles<double>()) : f(Singles<float>());
  }
  template <class F>
  using ForwardLoop = Forward<F>;
  static constexpr OnThread kOnThread = {};
  static constexpr bool kDecodes = true;
  static constexpr const Kernels* (*falls_back_to)() = nullptr;
};

template <class Formats>
struct KernelTable {
  template <class F>
  struct ForwardOf {
    using Decoder = Decode<typename F::Number>;
    using Loop = typename Formats::template ForwardLoop<F>;

    static int64_t workspace(const ForwardParams& p) {
      if constexpr (Formats::kDecodes)
        if (Decoder::takes(p)) return Decoder::workspace(p);
      return Loop::workspace(p);
    }
    static void run(const ForwardParams& p, int64_t task, char* workspace) {
      if constexpr (Formats::kDecodes)
        if (Decoder::takes(p)) return Decoder::run(p, task, workspace);
      Loop::run(p, task, workspace);
    }
    static void merge(const ForwardParams& p, int64_t first, int64_t last, char* workspace) {
      Loop::merge(p, first, last, workspace);
    }
    static int64_t packed_size(const ForwardParams& p) { return Loop::packed_size(p); }
    static void pack(const ForwardParams& p, int64_t task) { Loop::pack(p, task); }
  };
  // Tangents and second derivatives take only the scores from the format, which must be the forward's.
  template <class F>
  using TangentOf = Tangent<typename F::Number, F>;
  template <class F>
  using BackwardOf = Backward<F, BackwardParams>;
  template <class F>
  using SecondOf = Backward<Singles<typename F::Number>, SecondParams, F>;

  // Kernel: of a format.
  template <class Params, template <class> class Kernel>
  struct Entry {
    static bool takes(const Params& p) { return Formats::takes(p); }
    static int64_t workspace(const Params& p) {
      return Formats::with(p, [&](auto f) { return Kernel<decltype(f)>::workspace(p); });
    }
    static void run(const Params& p, int64_t task, char* workspace) {
      Formats::with(p, [&](auto f) { Kernel<decltype(f)>::run(p, task, workspace); });
    }
    static void merge(const Params& p, int64_t first, int64_t last, char* workspace) {
      Formats::with(p, [&](auto f) { Kernel<decltype(f)>::merge(p, first, last, workspace); });
    }
    static int64_t packed_size(const Params& p) {
      return Formats::with(p, [&](auto f) { return Kernel<decltype(f)>::packed_size(p); });
    }
    static void pack(const Params& p, int64_t task) {
      Formats::with(p, [&](auto f) { Kernel<decltype(f)>::pack(p, task); });
    }
    static void mask(const Params& p, int64_t task, char* workspace) {
      Formats::with(p, [&](auto f) { Kernel<decltype(f)>::mask(p, task, workspace); });
    }
    static void rows(const Params& p, int64_t task, char* workspace) {
      Formats::with(p, [&](auto f) { Kernel<decltype(f)>::rows(p, task, workspace); });
    }
    static void finish(const Params& p, int64_t first, int64_t last) {
      Formats::with(p, [&](auto f) { Kernel<decltype(f)>::finish(p, first, last); });
    }
    static void keys(const Params& p, int64_t task, char* workspace) {
      Formats::with(p, [&](auto f) { Kernel<decltype(f)>::keys(p, task, workspace); });
    }
    static void add_chunks(const Params& p, int64_t first, int64_t last) {
      Formats::with(p, [&](auto f) { Kernel<decltype(f)>::add_chunks(p, first, last); });
    }
    static void weights(const Params& p, int64_t task, char* workspace) {
      Formats::with(p, [&](auto f) { Kernel<decltype(f)>::weights(p, task, workspace); });
    }
  };
  using ForwardEntry = Entry<ForwardParams, ForwardOf>;
  using TangentEntry = Entry<TangentParams, TangentOf>;
  using StatsEntry = Entry<StatsParams, Stats>;

  static bool takes_forward(const ForwardParams& p) {
    return Formats::takes(p) && (Formats::kDecodes || !Decode<float>::takes(p, Decode<float>::kRowsBesidePairs));
  }
  template <class Params, template <class> class Kernel>
  static constexpr BackwardKernels<Params> backward() {
    using E = Entry<Params, Kernel>;
    return {E::takes, E::workspace, E::run, E::merge, E::mask, Formats::kOnThread};
  }
  static constexpr Kernels table = {
      Formats::falls_back_to,
      look_at_mask,
      {takes_forward, ForwardEntry::workspace, ForwardEntry::run, ForwardEntry::merge, ForwardEntry::packed_size,
       ForwardEntry::pack, Formats::kOnThread},
      {TangentEntry::takes, TangentEntry::workspace, TangentEntry::run, Formats::kOnThread},
      backward<BackwardParams, BackwardOf>(),
      backward<SecondParams, SecondOf>(),
      {StatsEntry::takes, StatsEntry::workspace, StatsEntry::rows, StatsEntry::finish, StatsEntry::keys,
       StatsEntry::add_chunks, StatsEntry::weights, Formats::kOnThread},
  };
};

}  // namespace attn::ATTN_ISA
