// What the machine can do, with all threads: `peak flops` prints GFLOP/s of float32 FMAs and, where the processor has
// VDPBF16PS and AMX, of bfloat16 products with these, from registers alone, and on a second line floating-point
// operations per cycle of a thread; `peak read BYTES` prints GB/s of reading that many, repeatedly, in the median.
// Compiled and run by common.py.
#include <linux/perf_event.h>
#include <omp.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

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

// Twelve independent chains: more than any x86-64 processor needs to hide the latency of one.
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

// Cycles in user mode of the thread that makes it, as cycles.py counts them; NaN where they cannot be read.
class Cycles {
 public:
  Cycles() {
    perf_event_attr event{};
    event.type = PERF_TYPE_HARDWARE;
    event.size = sizeof event;
    event.config = PERF_COUNT_HW_CPU_CYCLES;
    event.exclude_kernel = event.exclude_hv = 1;
    file_ = static_cast<int>(syscall(SYS_perf_event_open, &event, 0, -1, -1, 0));
  }
  ~Cycles() { close(file_); }
  double read() const {
    uint64_t count;
    return ::read(file_, &count, sizeof count) == sizeof count ? static_cast<double>(count) : std::nan("");
  }

 private:
  int file_;
};

struct Rates {
  double gflops = 0;
  double per_cycle = 0;  // of a thread, NaN where cycles cannot be read
};

// The best of half a second: at first two threads may share a core. `work` is done by each thread, and is of so many
// floating-point operations.
template <class Work>
Rates rates(double flops, Work work) {
  Rates best;
  for (const double end = seconds() + 0.5; seconds() < end;) {
    float sink = 0;
    double cycles = 0;
    const double start = seconds();
#pragma omp parallel reduction(+ : sink, cycles)
    {
      const Cycles counter;
      sink += work();
      cycles += counter.read();
    }
    const double all = flops * omp_get_max_threads();
    const Rates now{all / (seconds() - start) / 1e9, all / cycles};
    if (now.gflops > best.gflops && sink == sink) best = now;
  }
  return best;
}

template <class Step>
Rates rates_of_chains(double flops_per_step, Step step) {
  constexpr long kRounds = 10000000;
  return rates(kRounds * 12.0 * flops_per_step, [&] { return chains(kRounds, step)[0]; });
}

#if defined(__AMX_BF16__)
// Four independent tiles of sums; 0 where the operating system does not grant tiles.
Rates rates_of_tiles() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM of <asm/prctl.h>
  if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) != 0) return {};
  struct alignas(64) {
    unsigned char palette = 1, start_row = 0, reserved[14] = {};
    unsigned short bytes_of_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    unsigned char rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } const configuration;
  constexpr long kRounds = 2000000;
  return rates(kRounds * 4 * 16384.0, [&] {
    _tile_loadconfig(&configuration);
    for (long i = 0; i < kRounds; ++i) {
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_release();
    return 0.0f;
  });
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
  std::vector<Rates> measured{rates_of_chains(2.0 * kBytes / 4, [&](Vec s) { return s * a + b; })};
#if defined(__AVX512BF16__)
  measured.push_back(rates_of_chains(2.0 * kBytes / 2, [&](Vec s) {
    __m512bh x, y;
    std::memcpy(&x, &a, sizeof x);
    std::memcpy(&y, &b, sizeof y);
    return (Vec)_mm512_dpbf16_ps((__m512)s, x, y);
  }));
#endif
#if defined(__AMX_BF16__)
  measured.push_back(rates_of_tiles());
#endif
  for (const Rates& r : measured) std::printf("%.1f ", r.gflops);
  std::printf("\n");
  for (const Rates& r : measured) std::printf("%.3f ", r.per_cycle);
  std::printf("\n");
}
