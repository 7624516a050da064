// The library runs with glibc 2.28, the oldest that torch's wheels run with, whatever glibc it is linked on. Of what
// has a newer version since then, it takes the first one, which computes the same: by functions of the same names
// that are hidden, for this library alone.
#if defined(__x86_64__)
#define ATTN_FIRST "GLIBC_2.2.5"
#elif defined(__aarch64__)
#define ATTN_FIRST "GLIBC_2.17"
#endif

#ifdef ATTN_FIRST
#define ATTN_TAKE_FIRST(name)                                                   \
  asm(".symver attn_first_" #name "," #name "@" ATTN_FIRST "\n.hidden " #name); \
  double attn_first_##name(double) noexcept;                                    \
  double name(double x) noexcept { return attn_first_##name(x); }

extern "C" {
ATTN_TAKE_FIRST(exp2)
ATTN_TAKE_FIRST(log)
ATTN_TAKE_FIRST(log2)

// Of glibc 2.32: whether std::shared_ptr may count without atomics. It need not.
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;
}
#endif
