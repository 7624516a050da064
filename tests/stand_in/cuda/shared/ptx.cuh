// In place of csrc/cuda/shared/ptx.cuh, which says what each function does.
#pragma once

#include <cuda_runtime.h>

#include <cstring>
#include <type_traits>

namespace attn::cuda {

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

inline unsigned char* shared_memory() { return stand_in::shared_memory(); }

inline int thread_index() { return static_cast<int>(threadIdx.x); }
inline void read_again() {}

using SharedAddress = uintptr_t;
inline SharedAddress shared_address(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); }

inline float to_float(Half x) { return static_cast<float>(std::bit_cast<_Float16>(x.bits)); }
inline float to_float(BFloat16 x) { return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }

template <class S>
S from_float(float x) {
  if constexpr (std::is_same_v<S, Half>) return {std::bit_cast<uint16_t>(static_cast<_Float16>(x))};
  const auto bits = std::bit_cast<uint32_t>(x);
  if (x != x) return {0x7fff};
  return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

template <class S>
uint32_t pack(float first, float second) {
  return from_float<S>(first).bits | static_cast<uint32_t>(from_float<S>(second).bits) << 16;
}

constexpr bool kConvertsE4m3 = true;
inline uint32_t halves_of_e4m3(uint32_t two) {
  const auto number = [&](int k) {
    const uint32_t bits = two >> 8 * k & 255, magnitude = bits & 127;
    if (magnitude == 127) return NAN;
    const float x = std::bit_cast<float>(magnitude << 20) * 0x1p120f;
    return bits >> 7 ? -x : x;
  };
  return pack<Half>(number(0), number(1));
}

template <class S>
uint32_t multiply_add_two(uint32_t a, uint32_t b, uint32_t c) {
  const auto number = [&](int k) {
    const auto half = [&](uint32_t two) { return double{to_float(S{static_cast<uint16_t>(two >> 16 * k)})}; };
    return static_cast<float>(half(a) * half(b) + half(c));
  };
  return pack<S>(number(0), number(1));
}

inline uint32_t fill_halves(uint32_t two) { return (two & 0xffff ? 0xffff : 0) | (two >> 16 ? 0xffffu << 16 : 0); }

inline float max_or_nan(float a, float b) { return a > b || a != a ? a : b; }

inline float exp2_approx(float x) {
  const float y = std::exp2(x);
  return y < 0x1p-126f ? 0 : y;  // .ftz
}

inline float reciprocal_approx(float x) { return 1 / x; }

namespace fragments {

struct Load {
  uint32_t* r;
  const unsigned char* row;
};
template <bool kTransposed>
void load(void** of_lane) {
  uint16_t rows[32][8];
  for (int l = 0; l < 32; ++l) std::memcpy(rows[l], static_cast<Load*>(of_lane[l])->row, 16);
  const auto number = [&](int matrix, int row, int col) { return uint32_t{rows[8 * matrix + row][col]}; };
  for (int l = 0; l < 32; ++l)
    for (int m = 0; m < 4; ++m) {
      const int i = l / 4, j = 2 * (l % 4);
      static_cast<Load*>(of_lane[l])->r[m] =
          kTransposed ? number(m, j, i) | number(m, j + 1, i) << 16 : number(m, i, j) | number(m, i, j + 1) << 16;
    }
}
inline void load(const char* name, uint32_t* r, const void* row, void (*f)(void**)) {
  if (reinterpret_cast<uintptr_t>(row) % 16) stand_in::fail("ldmatrix: a row is not aligned");
  if (!stand_in::is_shared(row, 16)) stand_in::fail("ldmatrix: a row is not in shared memory");
  Load mine{r, static_cast<const unsigned char*>(row)};
  stand_in::collective(name, &mine, f);
}

struct Product {
  float* c;
  const uint32_t* a;
  uint32_t b[2];
};
template <class S>
__attribute__((no_sanitize("thread")))  // it only reads registers: see races.h
void multiply_add(void** of_lane) {
  const auto half = [](uint32_t r, int k) { return to_float(S{static_cast<uint16_t>(k ? r >> 16 : r)}); };
  float a[16][16], b[16][8];
  for (int l = 0; l < 32; ++l) {
    const auto& x = *static_cast<Product*>(of_lane[l]);
    const int group = l / 4, place = l % 4;
    for (int k = 0; k < 2; ++k) {
      a[group][2 * place + k] = half(x.a[0], k);
      a[group + 8][2 * place + k] = half(x.a[1], k);
      a[group][2 * place + 8 + k] = half(x.a[2], k);
      a[group + 8][2 * place + 8 + k] = half(x.a[3], k);
      b[2 * place + k][group] = half(x.b[0], k);
      b[2 * place + 8 + k][group] = half(x.b[1], k);
    }
  }
  float c[16][8] = {};
  for (int i = 0; i < 16; ++i)
    for (int k = 0; k < 16; ++k)
      for (int j = 0; j < 8; ++j) c[i][j] += a[i][k] * b[k][j];
  for (int l = 0; l < 32; ++l)
    for (int i = 0; i < 4; ++i) static_cast<Product*>(of_lane[l])->c[i] += c[l / 4 + 8 * (i / 2)][2 * (l % 4) + i % 2];
}

}  // namespace fragments

inline void load_matrices(uint32_t (&r)[4], SharedAddress row) {
  fragments::load("ldmatrix", r, reinterpret_cast<const void*>(row), fragments::load<false>);
}
inline void load_matrices_transposed(uint32_t (&r)[4], SharedAddress row) {
  fragments::load("ldmatrix.trans", r, reinterpret_cast<const void*>(row), fragments::load<true>);
}

template <class S>
void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  fragments::Product mine{c, a, {b0, b1}};
  stand_in::collective("mma", &mine, fragments::multiply_add<S>);
}

inline void copy_async(void* to, const void* from, bool there) { stand_in::start_copy(to, from, there ? 16 : 0); }
inline void copy_async(SharedAddress to, const void* from, bool there) {
  copy_async(reinterpret_cast<void*>(to), from, there);
}
inline void copy_async(SharedAddress to, const void* from) { copy_async(to, from, true); }
inline void commit_copies() { stand_in::commit_copies(); }
template <int kLeft>
void wait_for_copies() {
  stand_in::wait_for_copies(kLeft);
}

inline int take_ticket(int* p) {
  const int x = stand_in::load_acquire(p);
  stand_in::store_release(p, x + 1);
  return x;
}

}  // namespace attn::cuda
