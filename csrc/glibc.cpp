// Makes the library run with glibc 2.28, the oldest glibc that torch's wheels support, whatever glibc the library is
// linked with. A later glibc has newer versions of the functions below. Their first versions compute the same, and
// glibc 2.28 has them. This file defines hidden functions of the same names, for this library alone, which call the
// first versions.
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

// glibc has this variable from 2.32 on. It tells std::shared_ptr whether counting without atomics is allowed; 0 says
// no.
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;
}
#endif
