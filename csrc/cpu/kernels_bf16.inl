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

struct BackwardEntry {
  template <class F>
  using Kernel = Backward<F, BackwardParams>;
  static int64_t workspace(const BackwardParams& p) {
    const int64_t others = kernels_avx512()->backward.workspace(p);
    if (!has_format(p)) return others;
    return larger(others, with_format(p, [&](auto f) { return Kernel<decltype(f)>::workspace(p); }));
  }
  static void run(const BackwardParams& p, int64_t task, char* workspace) {
    if (!has_format(p)) return kernels_avx512()->backward.run(p, task, workspace);
    const TileUnit unit;
    with_format(p, [&](auto f) { Kernel<decltype(f)>::run(p, task, workspace); });
  }
  static void mask(const BackwardParams& p, int64_t task, char* workspace) {
    if (!has_format(p)) return kernels_avx512()->backward.mask(p, task, workspace);
    const TileUnit unit;
    with_format(p, [&](auto f) { Kernel<decltype(f)>::mask(p, task, workspace); });
  }
};

// What AVX-512's table has at this place, found when it is called: that table is another file's, so its entries are not
// constants here, and nothing may run when the library is loaded.
template <auto kPart, auto kFunction, class... Args>
auto avx512(Args... args) {
  return (kernels_avx512()->*kPart.*kFunction)(args...);
}

using SecondKernels = BackwardKernels<SecondParams>;

inline constinit const Kernels table = {
    {ForwardEntry::workspace, ForwardEntry::run, avx512<&Kernels::forward, &ForwardKernels::merge>},
    {avx512<&Kernels::tangent, &TangentKernels::workspace>, avx512<&Kernels::tangent, &TangentKernels::run>},
    {BackwardEntry::workspace, BackwardEntry::run, avx512<&Kernels::backward, &BackwardKernels<BackwardParams>::merge>,
     BackwardEntry::mask},
    {avx512<&Kernels::second, &SecondKernels::workspace>, avx512<&Kernels::second, &SecondKernels::run>,
     avx512<&Kernels::second, &SecondKernels::merge>, avx512<&Kernels::second, &SecondKernels::mask>},
};

}  // namespace attn::ATTN_ISA
