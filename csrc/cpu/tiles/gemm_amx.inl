// The matrix product on the processor's tiles. A block of C has 32 x 32 numbers, in four tiles. Each tile of A or B is
// loaded once for two tiles of C.
#pragma once

#include "cpu/tiles/formats_bf16.inl"  // first, because it chooses an instruction set if none is chosen

#include "cpu/isa/instructions_amx.inl"
#include "cpu/tiles/gemm.inl"

namespace attn::ATTN_ISA {

template <int kSummands>
struct Gemm<Tiles<kSummands>> {
  static constexpr int64_t kTile = 16;  // rows, and slots of a row

  // The summands of A and B (formats_bf16.inl) are multiplied in this order, the largest product last. Consecutive
  // products share a summand, so its tiles need not be loaded again.
  struct Pair {
    int a, b;
  };
  static constexpr Pair kProducts[] = {{0, 1}, {1, 1}, {1, 0}, {0, 0}};
  static constexpr int kCount = kSummands * kSummands;
  static constexpr int kFirst = 4 - kCount;

  // These functions zero, load and store M x N tiles of C. Tile (m, n) of C is the processor's tile 2 m + n.
  template <int M, int N>
  static ATTN_INLINE void zero() {
    tile_zero<0>();
    if constexpr (N == 2) tile_zero<1>();
    if constexpr (M == 2) tile_zero<2>();
    if constexpr (M == 2 && N == 2) tile_zero<3>();
  }
  // `last` points to the last row of tiles.
  template <int M, int N>
  static ATTN_INLINE void load(const float* c, int64_t ldc, const float* last, int64_t ld_last) {
    if constexpr (M == 2) {
      tile_load<0>(c, ldc);
      if constexpr (N == 2) tile_load<1>(c + kTile, ldc);
    }
    tile_load<M * 2 - 2>(last, ld_last);
    if constexpr (N == 2) tile_load<M * 2 - 1>(last + kTile, ld_last);
  }
  template <int M, int N>
  static ATTN_INLINE void store(float* c, int64_t ldc, float* last, int64_t ld_last) {
    if constexpr (M == 2) {
      tile_store<0>(c, ldc);
      if constexpr (N == 2) tile_store<1>(c + kTile, ldc);
    }
    tile_store<M * 2 - 2>(last, ld_last);
    if constexpr (N == 2) tile_store<M * 2 - 1>(last + kTile, ld_last);
  }
  // C += A B
  template <int M, int N, class Between>
  static ATTN_INLINE void multiply_add(int64_t K, const float* a, int64_t lda, const float* b, int64_t ldb,
                                       Between& between) {
    for (int64_t k = 0; k < K; k += kTile * kSummands) {
      for (int i = 0; i < M; ++i) between();  // about as often as in gemm.inl
#pragma GCC unroll 4
      for (int i = 0; i < kCount; ++i) {
        const Pair now = kProducts[kFirst + i], before = i == 0 ? Pair{-1, -1} : kProducts[kFirst + i - 1];
        const float* a_part = a + k + now.a * kTile;
        const float* b_part = b + (k + now.b * kTile) * ldb;
        if (now.b != before.b) {
          tile_load<6>(b_part, ldb);
          if constexpr (N == 2) tile_load<7>(b_part + kTile, ldb);
        }
        if (now.a != before.a) tile_load<4>(a_part, lda);
        tile_multiply_add<0, 4, 6>();
        if constexpr (N == 2) tile_multiply_add<1, 4, 7>();
        if constexpr (M == 2) {
          if (now.a != before.a) tile_load<5>(a_part + kTile * lda, lda);
          tile_multiply_add<2, 5, 6>();
          if constexpr (N == 2) tile_multiply_add<3, 5, 7>();
        }
      }
    }
  }

  // The last row of tiles has `rows` rows.
  template <int M, int N, class Between>
  static void block(int64_t rows, int64_t K, const float* a, int64_t lda, const float* b, int64_t ldb, float* c,
                    int64_t ldc, bool accumulate, Between& between) {
    // A tile with fewer than 16 rows goes through a copy, because the rows below it in C belong to another task. The
    // other rows of the copy may hold anything, because rows do not mix in a product.
    alignas(64) float edge[N * kTile * kTile];
    const bool has_edge = rows < kTile;
    const auto copy_edge = [&](bool back) {
      float* const from = c + (M - 1) * kTile * ldc;
      for (int64_t i = 0; i < rows; ++i) {
        float *in_c = from + i * ldc, *in_edge = edge + i * N * kTile;
        __builtin_memcpy(back ? in_c : in_edge, back ? in_edge : in_c, N * kTile * sizeof(float));
      }
    };
    float* const last = has_edge ? edge : c + (M - 1) * kTile * ldc;
    const int64_t ld_last = has_edge ? N * kTile : ldc;
    if (!accumulate) {
      zero<M, N>();
    } else {
      if (has_edge) copy_edge(false);
      load<M, N>(c, ldc, last, ld_last);
    }
    multiply_add<M, N>(K, a, lda, b, ldb, between);
    store<M, N>(c, ldc, last, ld_last);
    if (has_edge) copy_edge(true);
  }

  // Does what run() of gemm.inl does. But K must be a whole number of steps, and A(m, k) is a[m * lda + k], whatever
  // kTransposed is.
  template <bool kTransposed, class Between>
  static void run(int64_t M, int64_t N, int64_t K, const float* a, int64_t lda, const float* b, int64_t ldb, float* c,
                  int64_t ldc, bool accumulate, Between& between) {
    for (int64_t n = 0; n < N; n += 2 * kTile)
      for (int64_t m = 0; m < M; m += 2 * kTile) {
        const bool two_rows = M - m > kTile, two_columns = N - n > kTile;
        const int64_t rows = smaller(kTile, M - m - (two_rows ? kTile : 0));
        const auto product = two_rows ? (two_columns ? block<2, 2, Between> : block<2, 1, Between>)
                                      : (two_columns ? block<1, 2, Between> : block<1, 1, Between>);
        product(rows, K, a + m * lda, lda, b + n, ldb, c + m * ldc + n, ldc, accumulate, between);
      }
  }
};

}  // namespace attn::ATTN_ISA
