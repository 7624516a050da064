// Has one function for each instruction that C++ cannot express. No other file of the kernels has inline PTX. So
// tests/stand_in replaces only this header and cuda_runtime.h to run the kernels on a CPU.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

#include <type_traits>

namespace attn::cuda {

// 16-bit numbers as they are stored.
struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

// The block's dynamic shared memory. Kernels use no other shared memory. Hopper's products need tiles at multiples of
// 1024 bytes.
__device__ __forceinline__ unsigned char* shared_memory() {
  extern __shared__ __align__(1024) unsigned char attn_shared_memory[];
  return attn_shared_memory;
}

// Reads threadIdx.x anew at each call. So values that one phase of a kernel derives from the thread's number take no
// registers during other phases.
__device__ __forceinline__ int thread_index() {
  int x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
}

// Memory is read again after this call, so that what was stored before it takes no registers.
__device__ __forceinline__ void read_again() { asm volatile("" ::: "memory"); }

// An address in shared memory, in the form that load_matrices() takes. It is an integer, so that tiles can compute one
// address from another by an XOR.
using SharedAddress = uint32_t;
__device__ __forceinline__ SharedAddress shared_address(const void* pointer) {
  return static_cast<SharedAddress>(__cvta_generic_to_shared(pointer));
}

// --- conversions: they round to nearest even, and numbers that are too large become infinite ---

__device__ __forceinline__ float to_float(Half x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}
__device__ __forceinline__ float to_float(BFloat16 x) { return __uint_as_float(static_cast<uint32_t>(x.bits) << 16); }

template <class S>
__device__ __forceinline__ S from_float(float x) {
  S y;
  if constexpr (std::is_same_v<S, Half>)
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  else
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}

// Rounds two numbers to S and packs them into one register, the first number into the low half.
template <class S>
__device__ __forceinline__ uint32_t pack(float first, float second) {
  uint32_t y;
  if constexpr (std::is_same_v<S, Half>)
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(second), "f"(first));
  else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(second), "f"(first));
  return y;
}

// Returns two numbers of float8_e4m3fn, the low half of `two`, as two of type Half, which are exact.
__device__ __forceinline__ uint32_t halves_of_e4m3(uint32_t two) {
  uint32_t y;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(y) : "h"(static_cast<uint16_t>(two)));
  return y;
}
// Since which GPU there is this instruction.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 890
constexpr bool kConvertsE4m3 = true;
#else
constexpr bool kConvertsE4m3 = false;
#endif

// Returns a * b + c for each of the two numbers of type S in a word, rounded once.
template <class S>
__device__ __forceinline__ uint32_t multiply_add_two(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t y;
  if constexpr (std::is_same_v<S, Half>)
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));
  else
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));
  return y;
}

// Sets all bits of each half of a word that is not 0. A half is at most 0x7c00, because float16 numbers are compared.
__device__ __forceinline__ uint32_t fill_halves(uint32_t two) {
  uint32_t filled;
  asm("set.ne.u32.f16x2 %0, %1, %2;" : "=r"(filled) : "r"(two), "r"(0));
  return filled;
}

// Returns the larger number, or NaN if one of them is NaN.
__device__ __forceinline__ float max_or_nan(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

// Returns 2^x with an error of at most 2 units in the last place. Returns 0 for -inf.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Returns 1 / x with an error of at most 1 unit in the last place. Returns 0 for infinity.
__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// --- tensor cores ---
// Lane l of a warp has group l / 4 and place l % 4. The list below gives the (row, column) of the lane's numbers for
// each fragment. A register of A or B holds two numbers. The first is at the listed (row, column). The second is next
// to it, in the next column of A or in the next row of B:
//   A [16 x 16]: a[0] (group, 2 place),     a[1] (group + 8, 2 place),
//                a[2] (group, 2 place + 8), a[3] (group + 8, 2 place + 8)
//   B [16 x 8]:  b[0] (2 place, group), b[1] (2 place + 8, group)
//   C [16 x 8], float: c[0] (group, 2 place),     c[1] (group, 2 place + 1),
//                      c[2] (group + 8, 2 place), c[3] (group + 8, 2 place + 1)

// Loads four 8 x 8 matrices of 16-bit numbers. Lane l passes the address of row l % 8 of matrix l / 8. A row is 16
// bytes. Lane l receives two numbers of matrix m in r[m]. They are in row l / 4 and in columns 2 (l % 4) and 2 (l % 4)
// + 1.
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], SharedAddress row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}
// Does the same with each matrix transposed.
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&r)[4], SharedAddress row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}

// C += A B
template <class S>
__device__ __forceinline__ void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<S, Half>)
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// --- asynchronous copies ---

// Starts to copy 16 bytes from global to shared memory. If `there` is false, writes zeros and reads nothing. Both
// addresses must be multiples of 16. This thread may read the copy after commit_copies() and wait_for_copies(). Other
// threads may read it after a further barrier.
__device__ __forceinline__ void copy_async(SharedAddress to, const void* from, bool there) {
  asm volatile(
      "{ .reg .pred absent; setp.eq.u32 absent, %2, 0; cp.async.cg.shared.global [%0], [%1], 16, absent; }" ::"r"(to),
      "l"(from), "r"(static_cast<uint32_t>(there))
      : "memory");
}
__device__ __forceinline__ void copy_async(void* to, const void* from, bool there) {
  copy_async(shared_address(to), from, there);
}
// The same for 16 bytes that are there.
__device__ __forceinline__ void copy_async(SharedAddress to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
// Makes one group of all copies that this thread has started since it last called commit_copies().
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most the latest `kLeft` groups of this thread are still under way.
template <int kLeft>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

// Returns the number, in global memory, and raises it by 1. What this thread has written or seen before is visible to
// whoever takes a later ticket.
__device__ __forceinline__ int take_ticket(int* p) {
  int x;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(x) : "l"(p) : "memory");
  return x;
}

}  // namespace attn::cuda
