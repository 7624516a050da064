// The table of an instruction set that multiplies bfloat16 itself: that of AVX-512, but where products may be of
// bfloat16. Decoding reads every number once, so they do not count there.

namespace attn::ATTN_ISA {

struct ForwardEntry {
  static bool takes(const ForwardParams& p) { return p.bf16_products && !Decode<float>::takes(p); }
  static int64_t workspace(const ForwardParams& p) {
    const int64_t others = kernels_avx512()->forward.workspace(p);
    return takes(p) ? larger(others, Forward<Pairs>::Buffers(p, nullptr).size) : others;
  }
  static void run(const ForwardParams& p, int64_t task, char* workspace) {
    takes(p) ? Forward<Pairs>::run(p, task, workspace) : kernels_avx512()->forward.run(p, task, workspace);
  }
};

struct BackwardEntry {
  using Kernel = Backward<Pairs, BackwardParams>;
  static bool takes(const BackwardParams& p) { return p.bf16_products; }
  static int64_t workspace(const BackwardParams& p) {
    const int64_t others = kernels_avx512()->backward.workspace(p);
    return takes(p) ? larger(others, Kernel::workspace(p)) : others;
  }
  static void run(const BackwardParams& p, int64_t task, char* workspace) {
    takes(p) ? Kernel::run(p, task, workspace) : kernels_avx512()->backward.run(p, task, workspace);
  }
  static void mask(const BackwardParams& p, int64_t task, char* workspace) {
    takes(p) ? Kernel::mask(p, task, workspace) : kernels_avx512()->backward.mask(p, task, workspace);
  }
};

inline Kernels make_table() {
  Kernels table = *kernels_avx512();
  table.forward.workspace = ForwardEntry::workspace;
  table.forward.run = ForwardEntry::run;
  table.backward.workspace = BackwardEntry::workspace;
  table.backward.run = BackwardEntry::run;
  table.backward.mask = BackwardEntry::mask;
  return table;
}
inline const Kernels table = make_table();

}  // namespace attn::ATTN_ISA
