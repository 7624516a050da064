// Has one function for each instruction that only GPUs of compute capability 9.0 (Hopper) have. As in ptx.cuh, no other
// file has inline PTX. tests/stand_in has its own version of this header.
#pragma once

#include "cuda/shared/ptx.cuh"

namespace attn::cuda {

// Whether the compiler's target has these instructions. Only sm_90a has them, with the letter. For any other target, a
// kernel with these instructions has to be a trap, because an empty kernel would return without an error and write
// nothing.
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
constexpr bool kHasSm90 = true;
#else
constexpr bool kHasSm90 = false;
#endif
__device__ __forceinline__ void trap() { asm volatile("trap;"); }

// --- registers ---
// A warpgroup is four warps whose first thread has a number that is a multiple of 128. All threads of a warpgroup call
// one of these functions. Afterwards each thread has kRegisters registers, a multiple of 8.

template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// --- barriers ---

// An mbarrier, in shared memory. Its phase 0 ends after as many arrivals as init() names, and so do the phases after
// it. What a thread did before it arrived is there for a thread that has waited for the end of this phase.
struct alignas(8) Barrier {
  uint64_t state;
};
// Called by one thread. fence_inits() must follow, and a barrier of the block.
__device__ __forceinline__ void init(Barrier& b, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&b)), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void fence_inits() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void arrive(Barrier& b) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&b)) : "memory");
}
// Whether the phase with this parity has ended; the phase before the first one has the parity 1 and has ended. Answers
// at once, where the first instruction below may put the thread to sleep until the phase ends.
template <bool kSleeps = false>
__device__ __forceinline__ bool has_ended(Barrier& b, uint32_t parity) {
  uint32_t ended;
  if constexpr (kSleeps)
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(ended)
                 : "r"(shared_address(&b)), "r"(parity)
                 : "memory");
  else
    asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(ended)
                 : "r"(shared_address(&b)), "r"(parity)
                 : "memory");
  return ended;
}
// With ATTN_BOUNDED_WAITS, which is for first runs on a GPU, a wait that lasts too long (some 10 ms) goes on with wrong
// numbers. There is no trap, because a trap makes ptxas 13.0 spill registers and serialize products (warning C7512).
__device__ __forceinline__ void wait(Barrier& b, uint32_t parity) {
#ifdef ATTN_BOUNDED_WAITS
  for (int i = 0; i < 1 << 20 && !has_ended(b, parity); ++i) {
  }
#else
  while (!has_ended<true>(b, parity)) {
  }
#endif
}

// Barrier `number` of the block, from 1 to 15, at which kThreads threads meet, whole warps. Threads that only arrive go
// on at once.
template <int kThreads>
__device__ __forceinline__ void sync_threads(int number) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "n"(kThreads) : "memory");
}
template <int kThreads>
__device__ __forceinline__ void arrive_threads(int number) {
  asm volatile("bar.arrive %0, %1;" ::"r"(number), "n"(kThreads) : "memory");
}

// Turns that blocks take: what a block did before store_release() is there for a block that has read the number.
__device__ __forceinline__ int load_acquire(const int* p) {
  int x;
  asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
  return x;
}
__device__ __forceinline__ void store_release(int* p, int x) {
  asm volatile("st.release.gpu.global.b32 [%0], %1;" ::"l"(p), "r"(x) : "memory");
}

// Waits until it is the turn of number `turn`; bounded like a wait for a barrier.
__device__ __forceinline__ void wait_for_turn(const int* p, int turn) {
#ifdef ATTN_BOUNDED_WAITS
  for (int i = 0; i < 1 << 16 && load_acquire(p) != turn; ++i) {
  }
#else
  while (load_acquire(p) != turn) {
  }
#endif
}

// --- shared memory ---

// Makes what this thread has stored in shared memory, by copy_async() too, visible to products and to bulk operations
// of threads that wait for this thread afterwards. Without it they may read what was there before.
__device__ __forceinline__ void publish_writes() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Stores four 8 x 8 matrices of 16-bit numbers: the inverse of load_matrices().
__device__ __forceinline__ void store_matrices(SharedAddress row, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(r[0]), "r"(r[1]),
               "r"(r[2]), "r"(r[3])
               : "memory");
}

// Adds `bytes` bytes of floats in shared memory to those at `to`. Addresses and `bytes` are multiples of 16. A thread
// may overwrite the floats after commit_bulk() and wait_for_bulk_reads(); the sums are there after wait_for_bulk().
__device__ __forceinline__ void add_bulk(float* to, SharedAddress from, uint32_t bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(from),
               "r"(bytes)
               : "memory");
}
// Copies them instead.
__device__ __forceinline__ void store_bulk(float* to, SharedAddress from, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void commit_bulk() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
__device__ __forceinline__ void wait_for_bulk_reads() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ __forceinline__ void wait_for_bulk() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// --- products of a warpgroup ---
// C [64 x kCols] of floats lies in the registers of a warpgroup. Warp w has rows 16 w to 16 w + 15, as fragments C
// [16 x 8] side by side (ptx.cuh). B, and A if it is not in registers, lie in shared memory, in panels of 64 columns. A
// row of a panel takes 128 bytes, and its 16-byte vectors are permuted by an XOR with the row's number modulo 8. A
// panel begins at a multiple of 1024 bytes.

// Says where products find a matrix of 16-bit numbers.
using Matrix = uint64_t;
__device__ __forceinline__ Matrix matrix_at(SharedAddress panel, uint32_t panel_bytes) {
  constexpr Matrix kSwizzle128 = Matrix{1} << 62, kEightRows = Matrix{1024 >> 4} << 32;
  return (panel & 0x3ffff) >> 4 | Matrix{panel_bytes >> 4} << 16 | kEightRows | kSwizzle128;
}
// The same matrix from a column on, which is a multiple of 16, or from a row on, a multiple of 8.
template <int kRows>
__device__ __forceinline__ Matrix from_column(Matrix m, int column) {
  return m + ((column / 64 * kRows * 128 + column % 64 * 2) >> 4);
}
__device__ __forceinline__ Matrix from_row(Matrix m, int row) { return m + (row * 128 >> 4); }

// Registers that products read or add to were written by other instructions before begin_products(). The products of a
// group run after commit_products(), in order. Until wait_for_products() their registers and their matrices must
// neither be read nor written.
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most the latest `kLeft` groups are under way. `c` are the registers that may then be read: the
// compiler moves no access of them across the wait.
template <int kLeft, int N>
__device__ __forceinline__ void wait_for_products(float (&c)[N][4]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
#pragma unroll
  for (auto& four : c)
#pragma unroll
    for (float& x : four) asm volatile("" : "+f"(x)::"memory");
}
// ptxas 13.0 moves a wait for products up, in front of arithmetic that is there to run beside the products. It moves
// none across this.
__device__ __forceinline__ void keep_beside_products() { __threadfence_block(); }

// Registers %0 to %(8 k + 7), which hold 16 (k + 1) columns of C.
#define ATTN_C0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define ATTN_C1 ATTN_C0 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define ATTN_C2 ATTN_C1 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define ATTN_C3 ATTN_C2 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define ATTN_C4 ATTN_C3 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define ATTN_C5 ATTN_C4 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define ATTN_C6 ATTN_C5 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define ATTN_C7 ATTN_C6 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define ATTN_C8 ATTN_C7 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define ATTN_C15                                                                                                   \
  ATTN_C8                                                                                                          \
  ", %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, "    \
  "%93, %94, %95, %96, %97, %98, %99"                                                                              \
  ", %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, " \
  "%118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define ATTN_FOUR(n) "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])
#define ATTN_IN0 ATTN_FOUR(0), ATTN_FOUR(1)
#define ATTN_IN1 ATTN_IN0, ATTN_FOUR(2), ATTN_FOUR(3)
#define ATTN_IN2 ATTN_IN1, ATTN_FOUR(4), ATTN_FOUR(5)
#define ATTN_IN3 ATTN_IN2, ATTN_FOUR(6), ATTN_FOUR(7)
#define ATTN_IN4 ATTN_IN3, ATTN_FOUR(8), ATTN_FOUR(9)
#define ATTN_IN5 ATTN_IN4, ATTN_FOUR(10), ATTN_FOUR(11)
#define ATTN_IN6 ATTN_IN5, ATTN_FOUR(12), ATTN_FOUR(13)
#define ATTN_IN7 ATTN_IN6, ATTN_FOUR(14), ATTN_FOUR(15)
#define ATTN_IN8 ATTN_IN7, ATTN_FOUR(16), ATTN_FOUR(17)
#define ATTN_IN15                                                                                                    \
  ATTN_IN8, ATTN_FOUR(18), ATTN_FOUR(19), ATTN_FOUR(20), ATTN_FOUR(21), ATTN_FOUR(22), ATTN_FOUR(23), ATTN_FOUR(24), \
      ATTN_FOUR(25), ATTN_FOUR(26), ATTN_FOUR(27), ATTN_FOUR(28), ATTN_FOUR(29), ATTN_FOUR(30), ATTN_FOUR(31)
// Calls F(columns, k, the numbers of the seven operands after C) for each number of columns that is in use.
#define ATTN_EACH_WIDTH(F)              \
  F(32, 1, 16, 17, 18, 19, 20, 21, 22)  \
  F(64, 3, 32, 33, 34, 35, 36, 37, 38)  \
  F(80, 4, 40, 41, 42, 43, 44, 45, 46)  \
  F(96, 5, 48, 49, 50, 51, 52, 53, 54)  \
  F(112, 6, 56, 57, 58, 59, 60, 61, 62) \
  F(128, 7, 64, 65, 66, 67, 68, 69, 70) \
  F(144, 8, 72, 73, 74, 75, 76, 77, 78) \
  F(256, 15, 128, 129, 130, 131, 132, 133, 134)
template <int N>
constexpr bool kIsWidth = false
#define ATTN_IS_WIDTH(cols, ...) || N * 8 == cols
    ATTN_EACH_WIDTH(ATTN_IS_WIDTH);
#undef ATTN_IS_WIDTH
#define ATTN_WGMMA(type, cols, k, predicate)          \
  "{ .reg .pred adds; setp.ne.b32 adds, %" #predicate \
  ", 0; "                                             \
  "wgmma.mma_async.sync.aligned.m64n" #cols "k16.f32." type "." type " {" ATTN_C##k "}, "

// Starts C = A B, or C += A B if `adds`, with 16 columns of A. Products read A [64 x 16] and B^T [kCols x 16] by rows.
// If kAByColumns or kBByColumns, they read the matrix by columns, so it lies in shared memory as A^T [16 x 64] or as B
// [16 x kCols].
template <class S, bool kAByColumns, bool kBByColumns, int N>
__device__ __forceinline__ void multiply_group(float (&c)[N][4], Matrix a, Matrix b, bool adds) {
  static_assert(kIsWidth<N>);
#define ATTN_START(type, cols, k, o0, o1, o2, o3, o4)                                                \
  asm volatile(ATTN_WGMMA(type, cols, k, o2) "%" #o0 ", %" #o1 ", adds, 1, 1, %" #o3 ", %" #o4 "; }" \
               : ATTN_IN##k                                                                          \
               : "l"(a), "l"(b), "r"(static_cast<int>(adds)), "n"(int{kAByColumns}), "n"(int{kBByColumns}))
#define ATTN_CHOOSE(cols, k, o0, o1, o2, o3, o4, o5, o6)  \
  if constexpr (8 * N == cols && std::is_same_v<S, Half>) \
    ATTN_START("f16", cols, k, o0, o1, o2, o3, o4);       \
  else if constexpr (8 * N == cols)                       \
    ATTN_START("bf16", cols, k, o0, o1, o2, o3, o4);
  ATTN_EACH_WIDTH(ATTN_CHOOSE)
#undef ATTN_START
#undef ATTN_CHOOSE
}
// The same with A in registers: a fragment A [16 x 16] (ptx.cuh) for each warp.
template <class S, bool kBByColumns, int N>
__device__ __forceinline__ void multiply_group(float (&c)[N][4], const uint32_t (&a)[4], Matrix b, bool adds) {
  static_assert(kIsWidth<N>);
#define ATTN_START(type, cols, k, o0, o1, o2, o3, o4, o5, o6)                                                     \
  asm volatile(                                                                                                   \
      ATTN_WGMMA(type, cols, k, o5) "{%" #o0 ", %" #o1 ", %" #o2 ", %" #o3 "}, %" #o4 ", adds, 1, 1, %" #o6 "; }" \
      : ATTN_IN##k                                                                                                \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(adds)), "n"(int{kBByColumns}))
#define ATTN_CHOOSE(cols, k, o0, o1, o2, o3, o4, o5, o6)    \
  if constexpr (8 * N == cols && std::is_same_v<S, Half>)   \
    ATTN_START("f16", cols, k, o0, o1, o2, o3, o4, o5, o6); \
  else if constexpr (8 * N == cols)                         \
    ATTN_START("bf16", cols, k, o0, o1, o2, o3, o4, o5, o6);
  ATTN_EACH_WIDTH(ATTN_CHOOSE)
#undef ATTN_START
#undef ATTN_CHOOSE
}

}  // namespace attn::cuda
