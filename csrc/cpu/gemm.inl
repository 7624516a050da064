// C[M x N] = A[M x K] B[K x N], or C += A B: the one matrix product of all kernels, on tiles that lie in the cache.
//
// B and C are row-major with N a multiple of the vector length: a vector holds neighbouring columns. Elements of A are
// broadcast, so A may be stored either way: A(m, k) = a[m * lda + k], or a[k * lda + m] when `kTransposed`.

namespace attn::ATTN_ISA {

template <class T>
struct Gemm {
  // A register tile of `rows` x `columns` vectors needs rows * columns accumulators, `columns` vectors of B and one
  // element of A.
  static constexpr int kMaxColumns = kRegisters == 32 ? 4 : 2;
  static constexpr int max_rows(int columns) {
    const int fit = (kRegisters - columns - 2) / columns;
    return fit < 8 ? fit : 8;
  }

  template <int M, int N, bool kTransposed>
  static void tile(int64_t K, const T* a, int64_t lda, const T* b, int64_t ldb, T* c, int64_t ldc, bool accumulate) {
    Vec<T> sum[M][N];
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) sum[m][n] = accumulate ? load<T>(c + m * ldc + n * kLanes<T>) : Vec<T>{};
    for (int64_t k = 0; k < K; ++k) {
      Vec<T> row[N];
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) row[n] = load<T>(b + k * ldb + n * kLanes<T>);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        const T element = kTransposed ? a[k * lda + m] : a[m * lda + k];
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) sum[m][n] += element * row[n];
      }
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) store<T>(c + m * ldc + n * kLanes<T>, sum[m][n]);
  }

  // `rows` register rows out of 1..M, known only now.
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
    int64_t blocks = (M + kMax - 1) / kMax;
    for (int64_t m = 0; m < M; --blocks) {
      const int rows = static_cast<int>((M - m + blocks - 1) / blocks);  // blocks of equal height, not 6, 6, ..., 1
      tile_of<kMax, N, kTransposed>(rows, K, a + (kTransposed ? m : m * lda), lda, b, ldb, c + m * ldc, ldc,
                                    accumulate);
      m += rows;
    }
  }

  template <bool kTransposed>
  static void run(int64_t M, int64_t N, int64_t K, const T* a, int64_t lda, const T* b, int64_t ldb, T* c, int64_t ldc,
                  bool accumulate) {
    constexpr int W = kLanes<T>;
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

}  // namespace attn::ATTN_ISA
