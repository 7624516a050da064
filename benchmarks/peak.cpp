// What the machine can do, with all threads: `peak flops` prints GFLOP/s of float32 FMAs and, where the processor has
// VDPBF16PS and AMX, of bfloat16 products with these, from registers alone; `peak read BYTES` prints GB/s of reading
// that many, repeatedly, in the median.
// Compiled and run by common.py.
#include <omp.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#if defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if defined(__AVX512F__)
#include <immintrin.h>
constexpr int kBytes = 64;
#elif defined(__AVX__)
constexpr int kBytes = 32;
#else
constexpr int kBytes = 16;
#endif
typedef float Vec __attribute__((vector_size(kBytes)));

double seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// Twelve independent chains: more than any processor needs to hide the latency of one.
template <class Step>
Vec chains(long rounds, Step step) {
  // of different values, else the compiler makes one of them
  Vec s0{}, s1 = s0 + 1, s2 = s0 + 2, s3 = s0 + 3, s4 = s0 + 4, s5 = s0 + 5, s6 = s0 + 6, s7 = s0 + 7, s8 = s0 + 8,
            s9 = s0 + 9, s10 = s0 + 10, s11 = s0 + 11;
  for (long i = 0; i < rounds; ++i) {
    s0 = step(s0), s1 = step(s1), s2 = step(s2), s3 = step(s3), s4 = step(s4), s5 = step(s5);
    s6 = step(s6), s7 = step(s7), s8 = step(s8), s9 = step(s9), s10 = step(s10), s11 = step(s11);
  }
  return s0 + s1 + s2 + s3 + s4 + s5 + s6 + s7 + s8 + s9 + s10 + s11;
}

template <class Step>
double gflops(double flops_per_step, Step step) {
  constexpr long kRounds = 10000000;
  double best = 0;
  for (int repeat = 0; repeat < 3; ++repeat) {
    float sink = 0;
    const double start = seconds();
#pragma omp parallel reduction(+ : sink)
    sink += chains(kRounds, step)[0];
    const double rate = kRounds * 12.0 * flops_per_step * omp_get_max_threads() / (seconds() - start) / 1e9;
    if (rate > best && sink == sink) best = rate;
  }
  return best;
}

#if defined(__AMX_BF16__)
// Four independent tiles of sums; 0 where the operating system does not grant tiles.
double tile_gflops() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM of <asm/prctl.h>
  if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) != 0) return 0;
  struct alignas(64) {
    unsigned char palette = 1, start_row = 0, reserved[14] = {};
    unsigned short bytes_of_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    unsigned char rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } const configuration;
  constexpr long kRounds = 2000000;
  double best = 0;
  for (int repeat = 0; repeat < 3; ++repeat) {
    const double start = seconds();
#pragma omp parallel
    {
      _tile_loadconfig(&configuration);
      for (long i = 0; i < kRounds; ++i) {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
      _tile_release();
    }
    best = std::max(best, kRounds * 4 * 16384.0 * omp_get_max_threads() / (seconds() - start) / 1e9);
  }
  return best;
}
#endif

double read_gbytes(long bytes) {
  const long vectors = bytes / kBytes / omp_get_max_threads() / 8 * 8;
  const long size = vectors * omp_get_max_threads() * kBytes;
  char* data = static_cast<char*>(std::aligned_alloc(64, size / 64 * 64 + 64));
  std::memset(data, 1, size);
  std::vector<double> rates;
  for (double end = seconds() + 1; seconds() < end;) {
    float sink = 0;
    const double start = seconds();
#pragma omp parallel reduction(+ : sink)
    {
      const Vec* from = reinterpret_cast<const Vec*>(data) + omp_get_thread_num() * vectors;
      Vec sum[8] = {};
      for (long i = 0; i < vectors; i += 8)
        for (int k = 0; k < 8; ++k) sum[k] += from[i + k];
      for (const Vec& s : sum) sink += s[0];
    }
    const double rate = size / (seconds() - start) / 1e9;
    if (sink == sink) rates.push_back(rate);
  }
  std::free(data);
  std::nth_element(rates.begin(), rates.begin() + rates.size() / 2, rates.end());
  return rates[rates.size() / 2];
}

int main(int argc, char** argv) {
  if (argc == 3 && std::string(argv[1]) == "read") {
    std::printf("%.2f\n", read_gbytes(std::atol(argv[2])));
    return 0;
  }
  const Vec a = Vec{} + 0.999f, b = Vec{} + 0.5f;
  std::printf("%.1f", gflops(2.0 * kBytes / 4, [&](Vec s) { return s * a + b; }));
#if defined(__AVX512BF16__)
  std::printf(" %.1f", gflops(2.0 * kBytes / 2, [&](Vec s) {
                __m512bh x, y;
                std::memcpy(&x, &a, sizeof x);
                std::memcpy(&y, &b, sizeof y);
                return (Vec)_mm512_dpbf16_ps((__m512)s, x, y);
              }));
#endif
#if defined(__AMX_BF16__)
  std::printf(" %.1f", tile_gflops());
#endif
  std::printf("\n");
}
