// In place of csrc/cuda/shared/ptx_sm90.cuh, which says what each function does. What a GPU may do at any time happens
// as late as it can, or as early: accumulators are NaN until the wait for their products, and operands are read at this
// wait or at the commit.
#pragma once

#include <vector>

#include "cuda/shared/ptx.cuh"

namespace attn::cuda {

constexpr bool kHasSm90 = true;
[[noreturn]] inline void trap() { stand_in::fail("a trap"); }

template <int kRegisters>
void take_registers() {
  static_assert(kRegisters % 8 == 0 && kRegisters <= 256);
}
template <int kRegisters>
void give_registers() {
  static_assert(kRegisters % 8 == 0 && kRegisters >= 24);
}

struct alignas(8) Barrier {
  uint64_t state;
};
inline void init(Barrier& b, int arrivals) { stand_in::init_barrier(&b, arrivals); }
inline void fence_inits() { stand_in::fence_barriers(); }
inline void arrive(Barrier& b) { stand_in::arrive(&b); }
inline bool has_ended(Barrier& b, uint32_t parity) { return stand_in::has_ended(&b, parity); }
inline void wait(Barrier& b, uint32_t parity) { stand_in::wait(&b, parity); }

template <int kThreads>
void sync_threads(int number) {
  stand_in::named_barrier(number, kThreads, true);
}
template <int kThreads>
void arrive_threads(int number) {
  stand_in::named_barrier(number, kThreads, false);
}

inline int load_acquire(const int* p) { return stand_in::load_acquire(p); }
inline void store_release(int* p, int x) { stand_in::store_release(p, x); }
inline void wait_for_turn(const int* p, int turn) {
  while (load_acquire(p) != turn) {
  }
}

inline void publish_writes() { stand_in::publish_writes(); }

inline void store_matrices(SharedAddress row, const uint32_t (&r)[4]) {
  struct Lane {
    unsigned char* row;
    const uint32_t* r;
  } mine{reinterpret_cast<unsigned char*>(row), r};
  if (row % 16) stand_in::fail("stmatrix: a row is not aligned");
  if (!stand_in::is_shared(mine.row, 16)) stand_in::fail("stmatrix: a row is not in shared memory");
  stand_in::collective("stmatrix", &mine, [](void** of_lane) {
    for (int m = 0; m < 4; ++m)
      for (int l = 0; l < 32; ++l)
        std::memcpy(static_cast<Lane*>(of_lane[8 * m + l / 4])->row + l % 4 * 4, &static_cast<Lane*>(of_lane[l])->r[m],
                    4);
  });
  stand_in::note_store(mine.row, 16);
}

inline void add_bulk(float* to, SharedAddress from, uint32_t bytes) {
  stand_in::start_bulk(to, reinterpret_cast<const void*>(from), bytes, true);
}
inline void store_bulk(float* to, SharedAddress from, uint32_t bytes) {
  stand_in::start_bulk(to, reinterpret_cast<const void*>(from), bytes, false);
}
inline void commit_bulk() { stand_in::commit_bulk(); }
inline void wait_for_bulk_reads() { stand_in::wait_for_bulk(true); }
inline void wait_for_bulk() { stand_in::wait_for_bulk(false); }

using Matrix = uint64_t;
inline uint32_t byte_of(SharedAddress address) {
  return static_cast<uint32_t>(address - reinterpret_cast<SharedAddress>(stand_in::shared_memory()));
}
inline Matrix matrix_at(SharedAddress panel, uint32_t panel_bytes) {
  if (byte_of(panel) % 1024) stand_in::fail("a panel does not begin at a multiple of 1024 bytes");
  return (byte_of(panel) & 0x3ffff) >> 4 | Matrix{panel_bytes >> 4} << 16 | Matrix{1024 >> 4} << 32 | Matrix{1} << 62;
}
template <int kRows>
Matrix from_column(Matrix m, int column) {
  return m + static_cast<Matrix>((column / 64 * kRows * 128 + column % 64 * 2) >> 4);
}
inline Matrix from_row(Matrix m, int row) { return m + static_cast<Matrix>(row * 128 >> 4); }

namespace fragments {

// Reads a matrix [rows x 16] of 16-bit numbers as a product of a warpgroup does.
template <class S>
__attribute__((no_sanitize("thread")))  // races.h hears of it by check_published()
void read_matrix(Matrix m, int first, int rows, bool by_columns, float (*to)[16]) {
  if (m >> 62 != 1) stand_in::fail("products know only panels of 128 bytes");
  const auto field = [&](int bit) { return static_cast<uint32_t>(m >> bit & 0x3fff) << 4; };
  const uint32_t start = field(0), leading = field(16), stride = field(32);
  const unsigned char* const memory = stand_in::shared_memory();
  const auto at = [&](int i, int k) {
    const uint32_t x = static_cast<uint32_t>(i), y = static_cast<uint32_t>(k);
    const uint32_t byte = by_columns ? start + x / 64 * leading + y / 8 * stride + y % 8 * 128 + x % 64 * 2
                                     : start + x / 8 * stride + x % 8 * 128 + y * 2;
    return memory + (byte ^ (byte >> 7 & 7) << 4);
  };
  constexpr const char* kWho = "products read what was not published";
  const int step = 8;  // numbers of 16 bytes
  for (int i = 0; i < rows; i += by_columns ? step : 1)
    for (int k = 0; k < 16; k += by_columns ? 1 : step) stand_in::check_published(at(first + i, k), 16, kWho);
  for (int i = 0; i < rows; ++i)
    for (int k = 0; k < 16; ++k) {
      S number;
      std::memcpy(&number, at(first + i, k), sizeof number);
      to[i][k] = to_float(number);
    }
}

template <class S>
__attribute__((no_sanitize("thread")))  // it only reads registers
void multiply_group(stand_in::GroupProduct** of_lane, int warp) {
  const stand_in::GroupProduct& p = *of_lane[0];
  const int cols = 8 * p.n;
  static thread_local float a[16][16], b[256][16];
  if (p.a)
    for (int l = 0; l < 32; ++l)
      for (int i = 0; i < 4; ++i)
        for (int k = 0; k < 2; ++k)
          a[l / 4 + i % 2 * 8][2 * (l % 4) + i / 2 * 8 + k] =
              to_float(S{static_cast<uint16_t>(of_lane[l]->a[i] >> 16 * k)});
  else
    read_matrix<S>(p.a_matrix, 16 * warp, 16, p.a_by_columns, a);
  read_matrix<S>(p.b_matrix, 0, cols, p.b_by_columns, b);
  for (int l = 0; l < 32; ++l)
    for (int n = 0; n < p.n; ++n)
      for (int i = 0; i < 4; ++i) {
        const float *const row = a[l / 4 + i / 2 * 8], *const col = b[8 * n + 2 * (l % 4) + i % 2];
        float sum = 0;
        for (int k = 0; k < 16; ++k) sum += row[k] * col[k];
        float& c = of_lane[l]->sums[static_cast<size_t>(4 * n + i)];
        c = (of_lane[l]->adds ? c : 0) + sum;
      }
}

}  // namespace fragments

// Computes products of the type S that this thread used last. A kernel has products of one type only.
inline thread_local stand_in::ComputeProducts multiply_group_now = nullptr;
inline void begin_products() { stand_in::begin_products(); }
inline void commit_products() { stand_in::commit_products(multiply_group_now); }
template <int kLeft, int N>
void wait_for_products(float (&)[N][4]) {
  stand_in::wait_for_products(kLeft, multiply_group_now);
}
inline void keep_beside_products() {}

template <class S, bool kAByColumns, bool kBByColumns, int N>
void multiply_group(float (&c)[N][4], Matrix a, Matrix b, bool adds) {
  multiply_group_now = fragments::multiply_group<S>;
  stand_in::start_product({&c[0][0], N, nullptr, a, b, adds, kAByColumns, kBByColumns, {}});
}
template <class S, bool kBByColumns, int N>
void multiply_group(float (&c)[N][4], const uint32_t (&a)[4], Matrix b, bool adds) {
  multiply_group_now = fragments::multiply_group<S>;
  stand_in::start_product({&c[0][0], N, a, 0, b, adds, false, kBByColumns, {}});
}

}  // namespace attn::cuda
