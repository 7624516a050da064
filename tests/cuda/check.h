// For programs that check kernels without torch, on a GPU or with the stand-in.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "cuda/launch.cuh"

namespace attn::cuda {

inline void require(bool condition, const char* what) {
  if (condition) return;
  std::printf("wrong: %s\n", what);
  std::exit(1);
}

inline void require_done(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::printf("not done: %s\n", cudaGetErrorString(error));
  std::exit(1);
}

// For loops of the host that take most of a program's time: only kernels are searched for races, see _cuda_programs.py.
#ifdef __SANITIZE_THREAD__
#define ATTN_NOT_WATCHED __attribute__((no_sanitize_thread))
#else
#define ATTN_NOT_WATCHED
#endif

ATTN_NOT_WATCHED inline double inner_product(const double* x, const double* y, int size) {
  double sum = 0;
  for (int i = 0; i < size; ++i) sum += x[i] * y[i];
  return sum;
}
// y += factor x.
ATTN_NOT_WATCHED inline void add_scaled(double factor, const double* x, int size, double* y) {
  for (int i = 0; i < size; ++i) y[i] += factor * x[i];
}

// Ends the program, and says so, if the GPU is not of compute capability 9.0.
inline void need_hopper() {
  int major = 0, minor = 0;
  require_done(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
  require_done(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0));
  if (major == 9 && minor == 0) return;
  std::printf("not run: the GPU is not of compute capability 9.0\n");
  std::exit(0);
}

// The bytes of an array, on the host and on the device. Before and after them is a guard, as large as the largest
// tile, of bytes that are NaN in every format: what is read there makes a result NaN, and nothing may be written there.
// ATTN_GUARD_BYTES=0 leaves it out for tools that see an access outside of an allocation: compute-sanitizer and
// the stand-in.
class Memory {
 public:
  explicit Memory(size_t bytes) : image_(2 * guard() + bytes, 0xff) {
    std::fill_n(host(), bytes, 0);
    require_done(cudaMalloc(&device_, image_.size()));
    all().push_back(this);
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() {
    std::erase(all(), this);
    cudaFree(device_);
  }
  unsigned char* host() { return image_.data() + guard(); }
  unsigned char* device() { return device_ + guard(); }

  static std::vector<Memory*>& all() {
    static std::vector<Memory*> memories;
    return memories;
  }
  void copy_to_device() { require_done(cudaMemcpy(device_, image_.data(), image_.size(), cudaMemcpyHostToDevice)); }
  void copy_back() {
    require_done(cudaMemcpy(image_.data(), device_, image_.size(), cudaMemcpyDeviceToHost));
    const auto is_whole = [](auto first) {
      return std::all_of(first, first + guard(), [](int x) { return x == 0xff; });
    };
    require(is_whole(image_.begin()) && is_whole(image_.end() - guard()), "written outside of an array");
  }

 private:
  static std::ptrdiff_t guard() {
    static const char* const bytes = std::getenv("ATTN_GUARD_BYTES");
    return bytes ? std::atoi(bytes) : 64 << 10;
  }

  std::vector<unsigned char> image_;  // with both guards
  unsigned char* device_ = nullptr;
};

// Numbers that are read and written here by their index, and by kernels at data(), where they are while one runs.
template <class T>
class Array {
 public:
  explicit Array(int64_t size) : memory_(static_cast<size_t>(size) * sizeof(T)), size_(size) {}
  T* data() { return reinterpret_cast<T*>(memory_.device()); }
  int64_t size() const { return size_; }
  T& operator[](int64_t i) { return reinterpret_cast<T*>(memory_.host())[i]; }

 private:
  Memory memory_;
  int64_t size_;
};

// Calls `launch`, which launches kernels, with all arrays on the device, and waits for their results.
template <class Launch>
void run(Launch launch) {
  for (Memory* memory : Memory::all()) memory->copy_to_device();
  const Error error = launch();
  if (error) std::printf("not launched: %s\n", error), std::exit(1);
  require_done(cudaDeviceSynchronize());
  for (Memory* memory : Memory::all()) memory->copy_back();
}

// The number with these bits of bfloat16 or float16: exact, but for infinity and NaN of float16.
inline float host_float(uint16_t bits, bool is_half) {
  if (!is_half) return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const float size = exponent == 0 ? std::ldexp(static_cast<float>(fraction), -24)
                                   : std::ldexp(static_cast<float>(1024 + fraction), exponent - 25);
  return bits >> 15 ? -size : size;
}

using Philox = std::array<uint32_t, 4>;

// Philox4x32-10 (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011), apart from the kernels' own.
inline Philox philox(Philox counter, std::array<uint32_t, 2> key) {
  const auto high = [](uint64_t x) { return static_cast<uint32_t>(x >> 32); };
  const auto low = [](uint64_t x) { return static_cast<uint32_t>(x); };
  for (uint32_t round = 0; round < 10; ++round) {
    const uint64_t first = uint64_t{0xD2511F53} * counter[0], second = uint64_t{0xCD9E8D57} * counter[2];
    counter = {high(second) ^ counter[1] ^ (key[0] + round * 0x9E3779B9), low(second),
               high(first) ^ counter[3] ^ (key[1] + round * 0xBB67AE85), low(first)};
  }
  return counter;
}
// Known answers of the authors' library, Random123.
inline void check_philox() {
  require(philox({0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344}, {0xA4093822, 0x299F31D0}) ==
              Philox{0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1},
          "philox");
}
// Whether dropout with the state `rng` keeps a weight; see Problem::rng.
inline bool keeps(Array<int64_t>& rng, uint64_t keep_below, int head, int query, int key) {
  const auto word = [](int64_t x) { return static_cast<uint32_t>(x); };
  const auto words =
      philox({word(key / 4), word(query), word(head % rng[2]), word(rng[1])}, {word(rng[0]), word(rng[0] >> 32)});
  return words[static_cast<size_t>(key % 4)] < keep_below;
}

}  // namespace attn::cuda
