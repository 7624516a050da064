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
#define ATTN_TAKE_FIRST(name, parameters, ...)                                  \
  asm(".symver attn_first_" #name "," #name "@" ATTN_FIRST "\n.hidden " #name); \
  double attn_first_##name parameters noexcept;                                 \
  double name parameters noexcept { return attn_first_##name(__VA_ARGS__); }
#define ATTN_TAKE_FIRST_OF_ONE(name) ATTN_TAKE_FIRST(name, (double x), x)
#define ATTN_TAKE_FIRST_OF_TWO(name) ATTN_TAKE_FIRST(name, (double x, double y), x, y)

extern "C" {
ATTN_TAKE_FIRST_OF_ONE(acos)
ATTN_TAKE_FIRST_OF_ONE(acosh)
ATTN_TAKE_FIRST_OF_ONE(asin)
ATTN_TAKE_FIRST_OF_ONE(atanh)
ATTN_TAKE_FIRST_OF_ONE(cosh)
ATTN_TAKE_FIRST_OF_ONE(exp2)
ATTN_TAKE_FIRST_OF_ONE(log)
ATTN_TAKE_FIRST_OF_ONE(log10)
ATTN_TAKE_FIRST_OF_ONE(log2)
ATTN_TAKE_FIRST_OF_ONE(sinh)
ATTN_TAKE_FIRST_OF_TWO(atan2)
ATTN_TAKE_FIRST_OF_TWO(pow)

// glibc has this variable from 2.32 on. It tells std::shared_ptr whether counting without atomics is allowed; 0 says
// no.
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;
}
#endif
