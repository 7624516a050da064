// The table of an instruction set that multiplies bfloat16 itself: that of AVX-512, but where the factors of products
// may be rounded to so many bits that one of its formats has them. Decoding reads every number once, so products do not
// count there.

namespace attn::ATTN_ISA {

#ifdef ATTN_AMX
// Calls f with the format.
template <class Function>
ATTN_INLINE auto with_format(const Problem& p, Function f) {
  return p.factor_bits <= 8 ? f(Tiles<1>()) : p.factor_bits <= 16 ? f(Tiles<2>()) : f(Tiles<3>());
}
inline bool has_format(const Problem& p) { return p.factor_bits <= 24; }
#else
struct TileUnit {
  TileUnit() {}
};
template <class Function>
ATTN_INLINE auto with_format(const Problem&, Function f) {
  return f(Pairs());
}
inline bool has_format(const Problem& p) { return p.factor_bits <= 8; }
#endif

struct ForwardEntry {
  static bool takes(const ForwardParams& p) { return has_format(p) && !Decode<float>::takes(p); }
  static int64_t workspace(const ForwardParams& p) {
    const int64_t others = kernels_avx512()->forward.workspace(p);
    if (!takes(p)) return others;
    return larger(others,
                  with_format(p, [&](auto f) { return typename Forward<decltype(f)>::Buffers(p, nullptr).size; }));
  }
  static void run(const ForwardParams& p, int64_t task, char* workspace) {
    if (!takes(p)) return kernels_avx512()->forward.run(p, task, workspace);
    const TileUnit unit;
    with_format(p, [&](auto f) { Forward<decltype(f)>::run(p, task, workspace); });
  }
};

// Tangents and second derivatives take only the scores from the format, which must be the forward's.
struct TangentEntry {
  template <class F>
  using Kernel = Tangent<float, F>;
  static int64_t workspace(const TangentParams& p) {
    if (!has_format(p)) return kernels_avx512()->tangent.workspace(p);
    return with_format(p, [&](auto f) { return typename Kernel<decltype(f)>::Buffers(p, nullptr).size; });
  }
  static void run(const TangentParams& p, int64_t task, char* workspace) {
    if (!has_format(p)) return kernels_avx512()->tangent.run(p, task, workspace);
    const TileUnit unit;
    with_format(p, [&](auto f) { Kernel<decltype(f)>::run(p, task, workspace); });
  }
};

// What AVX-512's table has at this place, found when it is called: that table is another file's, so its entries are not
// constants here, and nothing may run when the library is loaded.
template <auto kPart, auto kFunction, class... Args>
auto avx512(Args... args) {
  return (kernels_avx512()->*kPart.*kFunction)(args...);
}

// Kernel: of a format.
template <class Params, auto kPart, template <class> class Kernel>
struct GradientsEntry {
  static const BackwardKernels<Params>& others() { return kernels_avx512()->*kPart; }
  static int64_t workspace(const Params& p) {
    if (!has_format(p)) return others().workspace(p);
    return larger(others().workspace(p), with_format(p, [&](auto f) { return Kernel<decltype(f)>::workspace(p); }));
  }
  static void run(const Params& p, int64_t task, char* workspace) {
    if (!has_format(p)) return others().run(p, task, workspace);
    const TileUnit unit;
    with_format(p, [&](auto f) { Kernel<decltype(f)>::run(p, task, workspace); });
  }
  static void mask(const Params& p, int64_t task, char* workspace) {
    if (!has_format(p)) return others().mask(p, task, workspace);
    const TileUnit unit;
    with_format(p, [&](auto f) { Kernel<decltype(f)>::mask(p, task, workspace); });
  }
  static constexpr BackwardKernels<Params> table = {workspace, run, avx512<kPart, &BackwardKernels<Params>::merge>,
                                                    mask};
};

template <class F>
using BackwardOf = Backward<F, BackwardParams>;
template <class F>
using SecondOf = Backward<Singles<float>, SecondParams, F>;

inline constinit const Kernels table = {
    {ForwardEntry::workspace, ForwardEntry::run, avx512<&Kernels::forward, &ForwardKernels::merge>},
    {TangentEntry::workspace, TangentEntry::run},
    GradientsEntry<BackwardParams, &Kernels::backward, BackwardOf>::table,
    GradientsEntry<SecondParams, &Kernels::second, SecondOf>::table,
};

}  // namespace attn::ATTN_ISA
