// The one matrix product of all kernels, on tiles in the cache: C[M x N] = A[M x K] B[K x N], or C += A B. Kernels call
// multiply() and multiply_transposed(), below.
//
// B and C are row-major. A vector holds neighbouring columns, so N is a multiple of the vector length. Elements of A
// are broadcast, so A may be stored either way: A(m, k) = a[m * lda + k], or a[k * lda + m] if `kTransposed`. The
// elements of A and B are slots of the format F (formats.inl), and K counts slots. The elements of C are numbers.
//
// A sum over kDepth slots begins at zero, and is then added to C. Such short chains of additions keep the rounding
// error of long sums low.
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
    // Processors with 16 registers take as long to zero a register as to multiply, so there the first step does not add
    // its products to zeros. Processors with 32 registers zero a register at no cost.
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
      asm("" : "+r"(row));  // without this the compiler computes all M * N addresses before the loop
    }
  }

  // Calls tile() for `rows` rows. This number is 1 to M, and known only at run time.
  template <int M, int N, bool kTransposed>
  static ATTN_INLINE void tile_of(int rows, int64_t K, const T* a, int64_t lda, const T* b, int64_t ldb, T* c,
                                  int64_t ldc, bool accumulate) {
    if (rows == M) {
      tile<M, N, kTransposed>(K, a, lda, b, ldb, c, ldc, accumulate);
    } else if constexpr (M > 1) {
      tile_of<M - 1, N, kTransposed>(rows, K, a, lda, b, ldb, c, ldc, accumulate);
    }
  }

  template <int N, bool kTransposed, class Between>
  static void columns(int64_t M, int64_t K, const T* a, int64_t lda, const T* b, int64_t ldb, T* c, int64_t ldc,
                      bool accumulate, Between& between) {
    constexpr int kMax = max_rows(N);
    for (int64_t k = 0; k < K; k += kDepth) {
      const int64_t depth = smaller(kDepth, K - k);
      int64_t blocks = divide_up(M, kMax);
      for (int64_t m = 0; m < M; --blocks) {
        const int rows = static_cast<int>(divide_up(M - m, blocks));  // blocks of equal height, not 6, 6, ..., 1
        tile_of<kMax, N, kTransposed>(rows, depth, a + (kTransposed ? k * lda + m : m * lda + k), lda, b + k * ldb, ldb,
                                      c + m * ldc, ldc, accumulate || k > 0);
        m += rows;
        between();
      }
    }
  }

  // Calls between() after each register tile.
  template <bool kTransposed, class Between>
  static void run(int64_t M, int64_t N, int64_t K, const T* a, int64_t lda, const T* b, int64_t ldb, T* c, int64_t ldc,
                  bool accumulate, Between& between) {
    constexpr int W = kLanes<T>;
    if (K == 0) {
      for (int64_t m = 0; m < M && !accumulate; ++m)
        for (int64_t n = 0; n < N; n += W) store<T>(c + m * ldc + n, Vec<T>{});
      return;
    }
    int64_t n = 0;
    for (; n + kMaxColumns * W <= N; n += kMaxColumns * W)
      columns<kMaxColumns, kTransposed>(M, K, a, lda, b + n, ldb, c + n, ldc, accumulate, between);
    const int64_t left = (N - n) / W;
    if (left == 1) columns<1, kTransposed>(M, K, a, lda, b + n, ldb, c + n, ldc, accumulate, between);
    if constexpr (kMaxColumns == 4) {
      if (left == 2) columns<2, kTransposed>(M, K, a, lda, b + n, ldb, c + n, ldc, accumulate, between);
      if (left == 3) columns<3, kTransposed>(M, K, a, lda, b + n, ldb, c + n, ldc, accumulate, between);
    }
  }
};

// The size of a product: the rows and columns of C, and the number of slots that are summed.
struct Extents {
  int64_t rows, columns, slots;
};
enum class Store { set, add };
constexpr auto kNothingBetween = [] {};

// In a call with at most this many bytes of keys and values, prefetching costs more than it saves (measured).
constexpr int64_t kInCache = int64_t{4} << 20;

// Prefetches the keys or values that follow a tile in memory, because processors by themselves do not read far enough
// ahead. Fetches some cache lines after each register tile of a product. After the last tile of a head, these lines
// belong to the next head or sequence. Does nothing if several tiles of rows read the same keys.
class RowsAhead {
 public:
  // The product multiplies `rows` rows with the keys or values of a tile, which are in `block` and have `cols` numbers
  // each.
  RowsAhead(const Problem& p, const Block& block, Range keys, int64_t cols, int64_t rows) {
    const int64_t size = size_of(block.dtype);
    const int64_t all_keys = larger(p.batch * p.keys, p.key_tokens);
    const int64_t numbers = all_keys * (p.key_heads * p.head_dim + p.value_heads * p.value_dim);
    if (p.rows() > kRowTile || block.col != 1 || cols == 0 || numbers * size <= kInCache) return;
    row_ = block.next ? block.next : block.data + keys.size() * block.row * size;
    step_ = block.row * size;
    bytes_ = cols * size;
    rows_ = smaller(kKeyTile, p.keys);
    const int64_t tiles = divide_up(keys.size(), 8) * divide_up(rows, 64) * divide_up(cols, 64);  // approximately
    lines_ = divide_up(rows_ * divide_up(bytes_, kLine), tiles);
  }
  ATTN_INLINE void operator()() {
    for (int64_t i = 0; i < lines_ && rows_ > 0; ++i) {
      __builtin_prefetch(row_ + at_, 0, 2);
      at_ += kLine;
      if (at_ < bytes_) continue;
      at_ = 0;
      row_ += step_;
      --rows_;
    }
  }

 private:
  static constexpr int64_t kLine = 64;
  const char* row_ = nullptr;
  int64_t step_ = 0, bytes_ = 0, rows_ = 0, at_ = 0;
  int64_t lines_ = 0;  // prefetched after each tile
};

// C = A B or C += A B. The rows of C are `ld` numbers apart. Calls between() about once for each register tile.
template <class F, class T = typename F::Number, class Between = const decltype(kNothingBetween)>
void multiply(Extents x, const Rows<T>& a, const Rows<T>& b, T* c, int64_t ld, Store store,
              Between& between = kNothingBetween) {
  Gemm<F>::template run<false>(x.rows, x.columns, x.slots, a.data, a.ld, b.data, b.ld, c, ld, store == Store::add,
                               between);
}
// Does what multiply() does, for an A that is stored transposed, as A' (formats.inl).
template <class F, class T = typename F::Number, class Between = const decltype(kNothingBetween)>
void multiply_transposed(Extents x, const Rows<T>& a, const Rows<T>& b, T* c, int64_t ld, Store store,
                         Between& between = kNothingBetween) {
  Gemm<F>::template run<true>(x.rows, x.columns, x.slots, a.data, a.ld, b.data, b.ld, c, ld, store == Store::add,
                              between);
}

}  // namespace attn::ATTN_ISA
