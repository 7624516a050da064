// The part of CUDA that the kernels in csrc/cuda use, on a CPU. A block's threads are fibers of one thread of the
// system; who runs next is drawn at random, so that a missing barrier gives a wrong result on some seed
// (ATTN_STAND_IN_SEED). Blocks start in a random order, a random number of them at a time, side by side. Shared memory
// starts as NaN and ends at a page that cannot be read. races.h finds missing barriers that no order of the fibers
// shows. Registers and bank conflicts need a GPU.
#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <bit>
#include <functional>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __restrict__

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};

// As the fiber that runs sees them.
extern constinit thread_local dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace stand_in {

int lane();

// Waits for all threads of the block.
void barrier();
// The same; whether some thread has brought true.
bool barrier_or(bool mine);
// Waits for all lanes of the warp, then the last one calls f with what every lane has brought. `name`: all lanes must
// have come for the same.
void collective(const char* name, void* mine, void (*f)(void** of_lane));
// Orders memory for the warp's lanes: what some have stored is there for all.
void warp_barrier();
// For this thread, runs `copy` when it waits so that at most `left` groups are under way.
void start_copy(void* to, const void* from, int bytes);
void commit_copies();
void wait_for_copies(int left);

// Barrier `number` of the block, at which `threads` threads meet; who does not wait only arrives.
void named_barrier(int number, int threads, bool waits);
// Barriers in shared memory, of 8 bytes: `arrivals` end a phase.
void init_barrier(void* barrier, int arrivals);
void fence_barriers();
void arrive(void* barrier);
bool has_ended(void* barrier, uint32_t parity);
void wait(void* barrier, uint32_t parity);

// What this thread has stored in shared memory is there for products and bulk copies. `note_store`: it stores.
void publish_writes();
void note_store(const void* pointer, size_t bytes);
// Products read these bytes for the warp that runs, and bulk copies for the thread.
void check_published(const void* pointer, size_t bytes, const char* who);

// Adds floats of shared memory to global memory, at some time before the thread has waited.
void start_bulk(float* to, const void* from, uint32_t bytes, bool adds);
void commit_bulk();
void wait_for_bulk(bool reads_only);

int load_acquire(const int* p);
void store_release(int* p, int x);

// C (n fragments of four floats) = (adds ? C : 0) + A B. compute() does it for the warp: see shared/ptx_sm90.cuh.
struct GroupProduct {
  float* c;
  int n;
  const uint32_t* a;  // registers, or null
  uint64_t a_matrix, b_matrix;
  bool adds, a_by_columns, b_by_columns;
  std::vector<float> sums;  // C, while it is under way and its registers are NaN
  bool is_computed = false;
};
using ComputeProducts = void (*)(GroupProduct** of_lane, int warp);
void begin_products();
void start_product(GroupProduct product);
void commit_products(ComputeProducts compute);
void wait_for_products(int left, ComputeProducts compute);

unsigned char* shared_memory();
// Whether [pointer, pointer + bytes) lies in the block's shared memory.
bool is_shared(const void* pointer, size_t bytes);

[[noreturn]] void fail(const char* what);

// Memory as cudaMalloc() gives it. It ends, rounded up to 16 bytes, at a page that cannot be touched.
void* allocate(size_t bytes);
void release(void* memory);

// `code`: the kernel. With ATTN_STAND_IN_LAUNCHES its name is printed, if the program or library exports it.
void run(dim3 grid, dim3 block, size_t shared_bytes, const void* code, const std::function<void()>& kernel);

}  // namespace stand_in

inline void __syncthreads() { stand_in::barrier(); }
inline int __syncthreads_or(int predicate) { return stand_in::barrier_or(predicate != 0); }

inline void __syncwarp(unsigned mask = ~0u) {
  if (mask != ~0u) stand_in::fail("__syncwarp of a part of a warp");
  stand_in::collective("__syncwarp", nullptr, [](void**) { stand_in::warp_barrier(); });
}

// `from`, in the part of `width` lanes that this lane is in.
template <class T>
T __shfl_sync(unsigned mask, T value, int from, int width = 32) {
  if (mask != ~0u) stand_in::fail("a shuffle of a part of a warp");
  struct Lane {
    T value, result;
    int from;
  } lane{value, {}, stand_in::lane() / width * width + from};
  stand_in::collective("a shuffle", &lane, [](void** of_lane) {
    for (int l = 0; l < 32; ++l) {
      auto* to = static_cast<Lane*>(of_lane[l]);
      to->result = static_cast<Lane*>(of_lane[to->from])->value;
    }
  });
  return lane.result;
}

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask) {
  return __shfl_sync(mask, value, stand_in::lane() ^ lane_mask);
}

inline bool __all_sync(unsigned mask, bool predicate) {
  if (mask != ~0u) stand_in::fail("__all_sync of a part of a warp");
  bool all = predicate;
  stand_in::collective("__all_sync", &all, [](void** of_lane) {
    bool both = true;
    for (int l = 0; l < 32; ++l) both &= *static_cast<bool*>(of_lane[l]);
    for (int l = 0; l < 32; ++l) *static_cast<bool*>(of_lane[l]) = both;
  });
  return all;
}

inline unsigned __ballot_sync(unsigned mask, bool predicate) {
  if (mask != ~0u) stand_in::fail("__ballot_sync of a part of a warp");
  unsigned bits = predicate;
  stand_in::collective("__ballot_sync", &bits, [](void** of_lane) {
    unsigned all = 0;
    for (int l = 0; l < 32; ++l) all |= *static_cast<unsigned*>(of_lane[l]) << l;
    for (int l = 0; l < 32; ++l) *static_cast<unsigned*>(of_lane[l]) = all;
  });
  return bits;
}
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }

inline float __uint_as_float(uint32_t x) { return std::bit_cast<float>(x); }
inline uint32_t __float_as_uint(float x) { return std::bit_cast<uint32_t>(x); }
inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t selector) {
  const uint64_t bytes = x | uint64_t{y} << 32;
  uint32_t found = 0;
  for (int i = 0; i < 4; ++i) found |= static_cast<uint32_t>(bytes >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
  return found;
}
inline uint32_t __umulhi(uint32_t a, uint32_t b) { return static_cast<uint32_t>((uint64_t{a} * b) >> 32); }

// --- host ---

enum cudaError_t { cudaSuccess, cudaErrorInvalidConfiguration };
struct CUstream_st;
using cudaStream_t = CUstream_st*;

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
  void* attrs = nullptr;
  unsigned numAttrs = 0;
};

// The most shared memory that a block may have: on 9.0, or else on 8.6 and 8.9, which have the least.
namespace stand_in {
int capability();  // ATTN_STAND_IN_CAPABILITY: 90 is 9.0
}
inline size_t stand_in_shared_memory() { return stand_in::capability() == 90 ? 227 << 10 : 99 << 10; }

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* c, void (*kernel)(Parameters...), Arguments&&... arguments) {
  const uint64_t threads = uint64_t{c->blockDim.x} * c->blockDim.y * c->blockDim.z;
  if (!c->gridDim.x || !c->gridDim.y || c->gridDim.x > 0x7fffffffu || c->gridDim.y > 65535 || threads > 1024 ||
      c->dynamicSmemBytes > stand_in_shared_memory())
    return cudaErrorInvalidConfiguration;
  stand_in::run(c->gridDim, c->blockDim, c->dynamicSmemBytes, reinterpret_cast<const void*>(kernel),
                [&] { kernel(arguments...); });
  return cudaSuccess;
}

enum cudaDeviceAttr { cudaDevAttrComputeCapabilityMajor, cudaDevAttrComputeCapabilityMinor };
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  const int capability = stand_in::capability();
  *value = attribute == cudaDevAttrComputeCapabilityMajor ? capability / 10 : capability % 10;
  return cudaSuccess;
}
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
template <class F>
cudaError_t cudaFuncSetAttribute(F*, cudaFuncAttribute, int value) {
  return static_cast<size_t>(value) <= stand_in_shared_memory() ? cudaSuccess : cudaErrorInvalidConfiguration;
}
inline const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess ? "no error" : "invalid configuration argument";
}
// A product that is never part of a multiply-add.
inline float __fmul_rn(float a, float b) {
  float product = a * b;
  asm("" : "+x"(product));
  return product;
}
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
template <class T>
cudaError_t cudaMalloc(T** memory, size_t bytes) {
  *memory = static_cast<T*>(stand_in::allocate(bytes));
  return cudaSuccess;
}
inline cudaError_t cudaFree(void* memory) {
  stand_in::release(memory);
  return cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
  memset(to, value, bytes);
  return cudaSuccess;
}
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost };
inline cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  memcpy(to, from, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
