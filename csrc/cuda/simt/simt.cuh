// Multiplies tiles in shared memory by plain multiply-adds, with 128 threads.
//
// The threads form a grid of 8 x 16. In a tile of 64 x 64 n results, thread (y, x) has the rows 8 y to 8 y + 7. In each
// of the n blocks of 64 columns, it has the columns 4 x to 4 x + 3. In the factors, the dimension that is summed over
// is outermost. So in each step a thread reads 8 numbers from one place and 4 numbers from each of n places, and
// computes 32 n multiply-adds.
#pragma once

#include "cuda/kernels.h"
#include "cuda/launch.cuh"
#include "cuda/shared/rows.cuh"

namespace attn::cuda {

constexpr int kSimtThreads = 128;
constexpr int kSimtRows = 8;    // of a thread
constexpr int kSimtCols = 4;    // of a thread, in every kSimtTile
constexpr int kSimtBlocks = 2;  // of a multiprocessor at a time: no registers are left for more

// The size, in shared memory, of the dimension that is summed over. A larger dimension is loaded in parts.
template <class T>
constexpr int kSimtDepth = 128 / static_cast<int>(sizeof(T));

// The distance between rows of a tile: a multiple of 16 bytes that spreads each column over different banks.
template <class T>
constexpr int kSimtStride = kSimtTile + 16 / static_cast<int>(sizeof(T));

struct SimtThread {
  int x, y;

  __device__ __forceinline__ SimtThread() {
    const int thread = thread_index();
    x = thread % 16;
    y = thread / 16;
  }
  __device__ __forceinline__ int row(int i) const { return y * kSimtRows + i; }
  __device__ __forceinline__ int col(int j) const { return j / kSimtCols * kSimtTile + x * kSimtCols + j % kSimtCols; }
};

// Whether a thread sums kSimtDepth products in a chain that starts from 0, and then adds the chain to the sum. Float
// sums have short chains, because these keep the error of long sums low.
template <class T>
constexpr bool kShortChains = sizeof(T) == 4;

// sum[i][j] += sum_k a[k * lda + row(i)] b[k * ldb + col(j)], k < kSimtDepth
template <class T, int M, int N>
__device__ __forceinline__ void add_products(T (&sum)[M][N], const SimtThread& t, const T* a, int lda, const T* b,
                                             int ldb) {
  static_assert(M == kSimtRows && N % kSimtCols == 0);
  T chain[M][N];
#pragma unroll
  for (int i = 0; i < M; ++i)
#pragma unroll
    for (int j = 0; j < N; ++j) chain[i][j] = kShortChains<T> ? 0 : sum[i][j];
#pragma unroll 4
  for (int k = 0; k < kSimtDepth<T>; ++k) {
    T left[M], right[N];
    load_vec16(left, a + k * lda + t.row(0));
#pragma unroll
    for (int j = 0; j < N; j += kSimtCols) {
      T quad[kSimtCols];
      load_vec16(quad, b + k * ldb + t.col(j));
#pragma unroll
      for (int c = 0; c < kSimtCols; ++c) right[j + c] = quad[c];
    }
#pragma unroll
    for (int i = 0; i < M; ++i)
#pragma unroll
      for (int j = 0; j < N; ++j) chain[i][j] = fma(left[i], right[j], chain[i][j]);
  }
#pragma unroll
  for (int i = 0; i < M; ++i)
#pragma unroll
    for (int j = 0; j < N; ++j) sum[i][j] = kShortChains<T> ? sum[i][j] + chain[i][j] : chain[i][j];
}

// Fills tile[outer * stride + inner] for all outer < kOuters and inner < kInners with number at(outer, inner) of an
// operand. Where `outer` is not less than `outer_count` or `inner` is not less than `inner_count`, fills in 0.
// `outer_is_fast`: whether neighbouring threads read neighbouring numbers of the outer dimension. A thread starts all
// its loads of kBatch numbers before it waits for one of them. kMayBeEight: whether the numbers may have 8 bits.
template <int kOuters, int kInners, bool kMayBeEight, class T, class At, class Convert>
__device__ __forceinline__ void fill_tile(T* tile, int stride, const Operand& x, int64_t outer_count,
                                          int64_t inner_count, bool outer_is_fast, At at, Convert convert) {
  constexpr int kAll = kOuters * kInners, kMost = 16 * kSimtThreads, kBatch = kAll < kMost ? kAll : kMost;
  const auto each = [&](int first, auto f) {  // f(number in the batch, outer, inner)
#pragma unroll
    for (int k = 0; k < kBatch / kSimtThreads; ++k) {
      const int i = first + k * kSimtThreads;
      f(k, outer_is_fast ? i % kOuters : i / kInners, outer_is_fast ? i / kOuters : i % kInners);
    }
  };
  with_loaded<T, kMayBeEight>(x, [&]<class N>() {
    const N* data = static_cast<const N*>(x.data);
#pragma unroll 1
    for (int first = threadIdx.x; first < kAll; first += kBatch) {
      N loaded[kBatch / kSimtThreads];
      each(first, [&](int k, int outer, int inner) {
        const int64_t index = at(outer, inner);  // unconditional, so that only the load depends on the condition
        loaded[k] = outer < outer_count && inner < inner_count ? data[index] : static_cast<N>(0);
      });
      each(first,
           [&](int k, int outer, int inner) { tile[outer * stride + inner] = convert(value_of<T>(x, loaded[k])); });
    }
  });
}

// tile[d * kSimtStride + i] = x(row i, first_col + d), d < kSimtDepth<T>; row i begins offset(i) elements behind
// `base`.
template <bool kMayBeEight = false, class T, class Offset>
__device__ __forceinline__ void load_transposed(T* tile, const Operand& x, int64_t base, int64_t rows, int64_t cols,
                                                int64_t first_col, Offset offset) {
  base += first_col * x.col;
  fill_tile<kSimtDepth<T>, kSimtTile, kMayBeEight>(
      tile, kSimtStride<T>, x, cols - first_col, rows, x.col <= 1,
      [&](int d, int i) { return base + offset(i) + d * x.col; }, [](T number) { return number; });
}

// Return the sum, or the maximum, of the numbers that the 16 threads with the same rows hold.
template <class T>
__device__ __forceinline__ T sum_over_x(T x) {
#pragma unroll
  for (int lanes = 1; lanes < 16; lanes *= 2) x += __shfl_xor_sync(~0u, x, lanes);
  return x;
}
template <class T>
__device__ __forceinline__ T max_over_x(T x) {
#pragma unroll
  for (int lanes = 1; lanes < 16; lanes *= 2) x = max_or_nan(__shfl_xor_sync(~0u, x, lanes), x);
  return x;
}

// Calls f.template operator()<kCols>(), where kCols is how many columns of a result a block sums. The registers of a
// thread limit kCols.
template <class T, class F>
Error with_cols(int64_t cols, F f) {
  if constexpr (sizeof(T) == 4)
    if (cols > 64) return f.template operator()<128>();
  return f.template operator()<64>();
}

// tile[i * (kCols + padding) + d] = x(row i, first_col + d), i < kSimtDepth<T>, d < kCols; row i begins offset(i)
// elements behind `base`.
template <int kCols, Factor kFactor, bool kMayBeEight, class T, class Offset>
__device__ __forceinline__ void load_rows(T* tile, const Operand& x, int64_t base, int64_t rows, int64_t cols,
                                          int64_t first_col, Offset offset) {
  base += first_col * x.col;
  fill_tile<kSimtDepth<T>, kCols, kMayBeEight>(
      tile, kCols + kSimtStride<T> - kSimtTile, x, rows, cols - first_col, x.col > 1,
      [&](int i, int d) { return base + offset(i) + d * x.col; },
      [](T number) { return kFactor == Factor::finite && number - number != 0 ? 0 : number; });
}

}  // namespace attn::cuda
