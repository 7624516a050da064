// Threads of a CUDA block as fibers of one thread; see cuda_runtime.h here.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <vector>

#include "cuda_runtime.h"
#include "races.h"

// Saves the registers that a call keeps, and the stack, of the caller and continues where `to` was left.
extern "C" void attn_stand_in_switch(void** from, void* to);
asm(R"(
.text
.type attn_stand_in_switch, @function
attn_stand_in_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");

thread_local dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace stand_in {

namespace {

constexpr size_t kStackBytes = 256 << 10;

struct Copy {
  void* to;
  const void* from;
  int bytes;
  const void* where;  // the code that copies
};

struct Fiber {
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  void* stack_pointer = nullptr;
  dim3 thread;
  int index = 0;
  bool done = false;
  bool some = false;  // of those who waited with it at a barrier has brought true
  const char* waits_for = nullptr;
  std::vector<Copy> started;                // not committed
  std::deque<std::vector<Copy>> under_way;  // groups
};
thread_local Fiber* running;

struct Warp {
  int waiting = 0;
  const char* name = nullptr;
  void* of_lane[32] = {};
};

size_t round_up_to(size_t multiple, size_t bytes) { return (bytes + multiple - 1) / multiple * multiple; }

// Memory that ends right before a page that cannot be touched.
class Pages {
 public:
  explicit Pages(size_t bytes) : page_(static_cast<size_t>(sysconf(_SC_PAGESIZE))), bytes_(round_up_to(page_, bytes)) {
    constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS;
    base_ = static_cast<unsigned char*>(mmap(nullptr, bytes_ + page_, PROT_READ | PROT_WRITE, kFlags, -1, 0));
    if (base_ == MAP_FAILED || mprotect(base_ + bytes_, page_, PROT_NONE) != 0) fail("no memory");
  }
  Pages(const Pages&) = delete;
  ~Pages() { munmap(base_, bytes_ + page_); }
  unsigned char* last(size_t bytes) const { return base_ + bytes_ - bytes; }

 private:
  size_t page_, bytes_;
  unsigned char* base_;
};

const unsigned seed = [] {
  const char* given = std::getenv("ATTN_STAND_IN_SEED");
  return given ? static_cast<unsigned>(std::atoi(given)) : 0;
}();

// Fills memory that has not been written with NaN in every format. With odd seeds it is -inf in bfloat16, so that a
// mask that is read too early hides keys.
void poison(void* to, size_t bytes) {
  auto* const words = static_cast<uint16_t*>(to);
  std::fill(words, words + bytes / sizeof *words, seed % 2 == 1 ? uint16_t{0xff80} : uint16_t{0xffff});
}

class SharedMemory {
 public:
  void poison_all(size_t bytes) {
    bytes_ = round_up_to(128, bytes);
    poison(begin(), bytes_);
  }
  unsigned char* begin() const { return pages_.last(bytes_); }
  size_t bytes() const { return bytes_; }

 private:
  Pages pages_{kStandInSharedMemory};
  size_t bytes_ = 0;
};

struct Block {
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::vector<Warp> warps;
  std::vector<Fiber*> ready;
  std::vector<Fiber*> at_barrier;
  bool some = false;  // of those at the barrier has brought true
  size_t threads = 0, live = 0;
  SharedMemory shared;
  Races races;
  std::minstd_rand random;
  void* caller = nullptr;
  const std::function<void()>* kernel = nullptr;

  Block() { random.seed(seed + 1); }
};
thread_local std::unique_ptr<Block> block;

// Continues some fiber that can run, or the caller of run() when all have ended.
void switch_from(void** stack_pointer) {
  if (block->ready.empty()) {
    if (block->live == 0) return attn_stand_in_switch(stack_pointer, block->caller);
    for (size_t i = 0; i < block->threads; ++i) {
      const Fiber& f = *block->fibers[i];
      std::fprintf(stderr, "thread %d: %s\n", f.index, f.done ? "has returned" : f.waits_for);
    }
    fail("deadlock: threads wait for others that do not come");
  }
  std::swap(block->ready[block->random() % block->ready.size()], block->ready.back());
  Fiber* next = block->ready.back();
  block->ready.pop_back();
  if (next == running && stack_pointer == &next->stack_pointer) return;
  running = next;
  threadIdx = next->thread;
  attn_stand_in_switch(stack_pointer, next->stack_pointer);
}

// An access of the thread that runs.
void note(Races::Kind kind, const void* pointer, size_t bytes, const void* where) {
  if (Races::concerns(pointer)) block->races.access(kind, pointer, bytes, running->index, where);
}

void wait(const char* what) {
  Fiber* me = running;
  me->waits_for = what;
  switch_from(&me->stack_pointer);
}

void fiber_main() {
  (*block->kernel)();
  Fiber* me = running;
  if (!me->started.empty() || !me->under_way.empty()) fail("a thread returned with copies under way");
  me->done = true;
  --block->live;
  switch_from(&me->stack_pointer);
  std::abort();
}

void prepare(Fiber& f) {
  auto top = reinterpret_cast<uintptr_t>(f.stack.get() + kStackBytes) & ~uintptr_t{15};
  void** stack = reinterpret_cast<void**>(top);
  *--stack = nullptr;  // so that the stack is aligned as after a call
  *--stack = reinterpret_cast<void*>(fiber_main);
  for (int i = 0; i < 6; ++i) *--stack = nullptr;
  f.stack_pointer = stack;
}

}  // namespace

void fail(const char* what) {
  std::fprintf(stderr, "CUDA stand-in: block (%u, %u), thread %u: %s\n", blockIdx.x, blockIdx.y, threadIdx.x, what);
  std::abort();
}

int lane() { return running->index % 32; }

void barrier() { barrier_or(false); }

bool barrier_or(bool mine) {
  block->some |= mine;
  block->at_barrier.push_back(running);
  if (block->at_barrier.size() == block->threads) {
    for (Fiber* fiber : block->at_barrier) fiber->some = block->some;
    block->some = false;
    block->races.block_barrier();
    block->ready.insert(block->ready.end(), block->at_barrier.begin(), block->at_barrier.end());
    block->at_barrier.clear();
  }
  wait("__syncthreads");
  return running->some;
}

void collective(const char* name, void* mine, void (*f)(void** of_lane)) {
  const int index = running->index, first = index / 32 * 32;
  Warp& warp = block->warps[index / 32];
  if (warp.waiting == 0) warp.name = name;
  if (std::strcmp(warp.name, name) != 0) fail("lanes of a warp came for different collectives");
  warp.of_lane[lane()] = mine;
  if (++warp.waiting == 32) {
    f(warp.of_lane);
    warp.waiting = 0;
    for (int l = 0; l < 32; ++l) block->ready.push_back(block->fibers[first + l].get());
  }
  wait(name);
}

void warp_barrier() { block->races.warp_barrier(running->index / 32); }

void start_copy(void* to, const void* from, int bytes) {
  if (!is_shared(to, 16)) fail("cp.async to what is not shared memory");
  if (reinterpret_cast<uintptr_t>(to) % 16 || reinterpret_cast<uintptr_t>(from) % 16) fail("cp.async is not aligned");
  if (bytes < 0 || bytes > 16) fail("cp.async of more than 16 bytes");
  const void* const where = __builtin_return_address(0);
  note(Races::kStore, to, 16, where);
  poison(to, 16);  // what was there is lost at once, what comes is late
  running->started.push_back({to, from, bytes, where});
}
void commit_copies() {
  running->under_way.push_back(std::move(running->started));
  running->started.clear();
}
void wait_for_copies(int left) {
  auto& groups = running->under_way;
  for (; groups.size() > static_cast<size_t>(left); groups.pop_front())
    for (const Copy& c : groups.front()) {
      note(Races::kStore, c.to, 16, c.where);
      std::memset(c.to, 0, 16);
      std::memcpy(c.to, c.from, static_cast<size_t>(c.bytes));
    }
}

unsigned char* shared_memory() { return block->shared.begin(); }
bool is_shared(const void* pointer, size_t bytes) {
  const auto* p = static_cast<const unsigned char*>(pointer);
  return p >= block->shared.begin() && p + bytes <= block->shared.begin() + block->shared.bytes();
}

static std::map<void*, std::unique_ptr<Pages>> allocated;

void* allocate(size_t bytes) {
  bytes = round_up_to(16, bytes);
  auto pages = std::make_unique<Pages>(bytes);
  void* const memory = pages->last(bytes);
  allocated[memory] = std::move(pages);
  return memory;
}
void release(void* memory) { allocated.erase(memory); }

void run(dim3 grid, dim3 block_size, size_t shared_bytes, const std::function<void()>& kernel) {
  if (!block) block = std::make_unique<Block>();
  Block& b = *block;
  b.threads = size_t{block_size.x} * block_size.y * block_size.z;
  if (b.threads % 32) fail("a block of incomplete warps");
  while (b.fibers.size() < b.threads) {
    b.fibers.push_back(std::make_unique<Fiber>());
    b.fibers.back()->index = static_cast<int>(b.fibers.size()) - 1;
  }
  b.kernel = &kernel;
  blockDim = block_size;
  gridDim = grid;
  for (unsigned z = 0; z < grid.z; ++z)
    for (unsigned y = 0; y < grid.y; ++y)
      for (unsigned x = 0; x < grid.x; ++x) {
        blockIdx = {x, y, z};
        b.warps.assign(b.threads / 32, {});
        b.ready.clear();
        b.live = b.threads;
        b.shared.poison_all(shared_bytes);
        b.races.begin_block(b.shared.begin(), b.shared.bytes());
        for (size_t i = 0; i < b.threads; ++i) {
          Fiber& f = *b.fibers[i];
          const auto t = static_cast<unsigned>(i);
          f.thread = {t % block_size.x, t / block_size.x % block_size.y, t / block_size.x / block_size.y};
          f.done = false;
          prepare(f);
          b.ready.push_back(&f);
        }
        switch_from(&b.caller);
      }
}

}  // namespace stand_in

// What code compiled with -fsanitize=thread calls; see races.h.
extern "C" {
#define ATTN_ACCESS(name, bytes, ...)                                                     \
  void __tsan_read##name(const void* pointer, ##__VA_ARGS__) {                            \
    stand_in::note(stand_in::Races::kLoad, pointer, bytes, __builtin_return_address(0));  \
  }                                                                                       \
  void __tsan_write##name(const void* pointer, ##__VA_ARGS__) {                           \
    stand_in::note(stand_in::Races::kStore, pointer, bytes, __builtin_return_address(0)); \
  }
ATTN_ACCESS(1, 1)
ATTN_ACCESS(2, 2)
ATTN_ACCESS(4, 4)
ATTN_ACCESS(8, 8)
ATTN_ACCESS(16, 16)
ATTN_ACCESS(_range, bytes, size_t bytes)
void __tsan_init() { stand_in::Races::can_be_seen = true; }
}
