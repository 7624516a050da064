// The kernels of an instruction set that multiplies bfloat16.
#pragma once

#include "cpu/backward.inl"
#include "cpu/decode.inl"
#include "cpu/forward.inl"
#include "cpu/operands_bf16.inl"
#include "cpu/tangent.inl"

namespace attn::ATTN_ISA {

// Formats says what the set has:
//   hold(p)           whether one of its formats holds the factors of products, which may be rounded to p.factor_bits
//   with(p, f)        calls f with that format
//   Unit              what a kernel owns while it runs
//   falls_back_to()   the kernels for everything else. They also decode: that reads every number once, so that products
//                     do not count.
template <class Formats>
struct Bf16Kernels {
  static const Kernels& others() { return Formats::falls_back_to(); }

  // A function of the other table, found when it is called: that table is another file's, so that its entries are no
  // constants here, and nothing may run when the library is loaded.
  template <auto kPart, auto kFunction, class... Args>
  static void fallback(Args... args) {
    (others().*kPart.*kFunction)(args...);
  }

  struct ForwardEntry {
    static bool takes(const ForwardParams& p) { return Formats::hold(p) && !Decode<float>::takes(p); }
    static int64_t workspace(const ForwardParams& p) {
      const int64_t of_others = others().forward.workspace(p);
      if (!takes(p)) return of_others;
      return larger(of_others,
                    Formats::with(p, [&](auto f) { return typename Forward<decltype(f)>::Buffers(p, nullptr).size; }));
    }
    static void run(const ForwardParams& p, int64_t task, char* workspace) {
      if (!takes(p)) return others().forward.run(p, task, workspace);
      const typename Formats::Unit unit;
      Formats::with(p, [&](auto f) { Forward<decltype(f)>::run(p, task, workspace); });
    }
  };

  // Tangents and second derivatives take only the scores from the format, which must be the forward's.
  struct TangentEntry {
    static int64_t workspace(const TangentParams& p) {
      if (!Formats::hold(p)) return others().tangent.workspace(p);
      return Formats::with(p, [&](auto f) { return typename Tangent<float, decltype(f)>::Buffers(p, nullptr).size; });
    }
    static void run(const TangentParams& p, int64_t task, char* workspace) {
      if (!Formats::hold(p)) return others().tangent.run(p, task, workspace);
      const typename Formats::Unit unit;
      Formats::with(p, [&](auto f) { Tangent<float, decltype(f)>::run(p, task, workspace); });
    }
  };
  template <class F>
  using BackwardOf = Backward<F, BackwardParams>;
  template <class F>
  using SecondOf = Backward<Singles<float>, SecondParams, F>;

  // Kernel: of a format. kPart: of the other table.
  template <class Params, auto kPart, template <class> class Kernel>
  struct GradientsEntry {
    static int64_t workspace(const Params& p) {
      const int64_t of_others = (others().*kPart).workspace(p);
      if (!Formats::hold(p)) return of_others;
      return larger(of_others, Formats::with(p, [&](auto f) { return Kernel<decltype(f)>::workspace(p); }));
    }
    static void run(const Params& p, int64_t task, char* workspace) {
      if (!Formats::hold(p)) return (others().*kPart).run(p, task, workspace);
      const typename Formats::Unit unit;
      Formats::with(p, [&](auto f) { Kernel<decltype(f)>::run(p, task, workspace); });
    }
    static void mask(const Params& p, int64_t task, char* workspace) {
      if (!Formats::hold(p)) return (others().*kPart).mask(p, task, workspace);
      const typename Formats::Unit unit;
      Formats::with(p, [&](auto f) { Kernel<decltype(f)>::mask(p, task, workspace); });
    }
    static constexpr BackwardKernels<Params> table = {workspace, run, fallback<kPart, &BackwardKernels<Params>::merge>,
                                                      mask};
  };

  static constexpr Kernels table = {
      {ForwardEntry::workspace, ForwardEntry::run, fallback<&Kernels::forward, &ForwardKernels::merge>},
      {TangentEntry::workspace, TangentEntry::run},
      GradientsEntry<BackwardParams, &Kernels::backward, BackwardOf>::table,
      GradientsEntry<SecondParams, &Kernels::second, SecondOf>::table,
  };
};

}  // namespace attn::ATTN_ISA
