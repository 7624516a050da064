// C[M x N] = A[M x K] B[K x N], or C += A B: the one matrix product of all kernels, on tiles in the cache. They call
// multiply() and multiply_transposed(), below.
//
// B and C are row-major with N a multiple of the vector length: a vector holds neighbouring columns. Elements of A are
// broadcast, so A may be stored either way: A(m, k) = a[m * lda + k], or a[k * lda + m] when `kTransposed`.
// The elements of A and B are slots of the format F (formats.inl), and K counts slots; those of C are numbers.
//
// Every kDepth slots are summed from zero and then added to C: short chains keep the rounding error of long sums low.
#pragma once

#include "cpu/tiles/formats.inl"

namespace attn::ATTN_ISA {

template <class F>
struct Gemm {
  using T = typename F::Number;

  // A register tile of `rows` x `columns` vectors needs rows * columns accumulators, `columns` vectors of B and one
  // element of A.
  static constexpr int kMaxColumns = kRegisters == 32 ? 4 : 2;
  static constexpr int64_t kDepth = 32;
  static constexpr int max_rows(int columns) {
    const int fit = (kRegisters - columns - 2) / columns;
    return fit < 8 ? fit : 8;
  }

  template <int M, int N, bool kTransposed>
  static void tile(int64_t K, const T* a, int64_t lda, const T* b, int64_t ldb, T* c, int64_t ldc, bool accumulate) {
    Vec<T> sum[M][N] = {};
    const auto step = [&](int64_t k, auto is_first) {
      Vec<T> row[N];
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) row[n] = load<T>(b + k * ldb + n * kLanes<T>);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        const T* element = a + (kTransposed ? k * lda + m : m * lda + k);
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n)
          sum[m][n] = is_first() ? F::multiply(element, row[n]) : F::multiply_add(sum[m][n], element, row[n]);
      }
    };
    int64_t k = 0;
    // Where processors have 16 registers, they take as long to zero one as to multiply; later ones rename it.
    if constexpr (kRegisters == 16) step(k++, std::true_type());
#pragma GCC unroll 4
    for (; k < K; ++k) step(k, std::false_type());
    T* row = c;
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        T* at = row + n * kLanes<T>;
        store<T>(at, accumulate ? load<T>(at) + sum[m][n] : sum[m][n]);
      }
      row += ldc;
      asm("" : "+r"(row));  // else the compiler computes all M * N addresses before the loop
    }
  }

  // tile() for a number of rows, 1 ... M, that is known at run time only.
  template <int M, int N, bool kTransposed>
  static ATTN_INLINE void tile_of(int rows, int64_t K, const T* a, int64_t lda, const T* b, int64_t ldb, T* c,
                                  int64_t ldc, bool accumulate) {
    if (rows == M) {
      tile<M, N, kTransposed>(K, a, lda, b, ldb, c, ldc, accumulate);
    } else if constexpr (M > 1) {
      tile_of<M - 1, N, kTransposed>(rows, K, a, lda, b, ldb, c, ldc, accumulate);
    }
  }

  template <int N, bool kTransposed>
  static void columns(int64_t M, int64_t K, const T* a, int64_t lda, const T* b, int64_t ldb, T* c, int64_t ldc,
                      bool accumulate) {
    constexpr int kMax = max_rows(N);
    for (int64_t k = 0; k < K; k += kDepth) {
      const int64_t depth = smaller(kDepth, K - k);
      int64_t blocks = divide_up(M, kMax);
      for (int64_t m = 0; m < M; --blocks) {
        const int rows = static_cast<int>(divide_up(M - m, blocks));  // blocks of equal height, not 6, 6, ..., 1
        tile_of<kMax, N, kTransposed>(rows, depth, a + (kTransposed ? k * lda + m : m * lda + k), lda, b + k * ldb, ldb,
                                      c + m * ldc, ldc, accumulate || k > 0);
        m += rows;
      }
    }
  }

  template <bool kTransposed>
  static void run(int64_t M, int64_t N, int64_t K, const T* a, int64_t lda, const T* b, int64_t ldb, T* c, int64_t ldc,
                  bool accumulate) {
    constexpr int W = kLanes<T>;
    if (K == 0) {
      for (int64_t m = 0; m < M && !accumulate; ++m)
        for (int64_t n = 0; n < N; n += W) store<T>(c + m * ldc + n, Vec<T>{});
      return;
    }
    int64_t n = 0;
    for (; n + kMaxColumns * W <= N; n += kMaxColumns * W)
      columns<kMaxColumns, kTransposed>(M, K, a, lda, b + n, ldb, c + n, ldc, accumulate);
    const int64_t left = (N - n) / W;
    if (left == 1) columns<1, kTransposed>(M, K, a, lda, b + n, ldb, c + n, ldc, accumulate);
    if constexpr (kMaxColumns == 4) {
      if (left == 2) columns<2, kTransposed>(M, K, a, lda, b + n, ldb, c + n, ldc, accumulate);
      if (left == 3) columns<3, kTransposed>(M, K, a, lda, b + n, ldb, c + n, ldc, accumulate);
    }
  }
};

// Of a product: the rows and columns of C, and the slots that are summed over.
struct Extents {
  int64_t rows, columns, slots;
};
enum class Store { set, add };

// C = A B or C += A B, the rows of C `ld` numbers apart.
template <class F, class T = typename F::Number>
void multiply(Extents x, const Rows<T>& a, const Rows<T>& b, T* c, int64_t ld, Store store) {
  Gemm<F>::template run<false>(x.rows, x.columns, x.slots, a.data, a.ld, b.data, b.ld, c, ld, store == Store::add);
}
// The same for an A that is packed to be read transposed (formats.inl).
template <class F, class T = typename F::Number>
void multiply_transposed(Extents x, const Rows<T>& a, const Rows<T>& b, T* c, int64_t ld, Store store) {
  Gemm<F>::template run<true>(x.rows, x.columns, x.slots, a.data, a.ld, b.data, b.ld, c, ld, store == Store::add);
}

}  // namespace attn::ATTN_ISA
