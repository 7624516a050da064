// Threads of a CUDA block as fibers of one thread; see cuda_runtime.h here.
#include <cxxabi.h>
#include <dlfcn.h>
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

constinit thread_local dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace stand_in {

namespace {

constexpr size_t kStackBytes = 256 << 10;

struct Copy {
  void* to;
  const void* from;
  int bytes;
  const void* where;  // the code that copies
};
struct BulkCopy {
  float* to;
  const float* from;
  std::vector<float> numbers;  // once they have been read
  size_t count;
  bool adds;
  bool done = false;
};

// What a thread waits for: a text of printf() with numbers, which is printed if they do not come.
struct Reason {
  const char* text = "";
  int numbers[3] = {};
  bool operator==(const Reason& other) const {
    return std::strcmp(text, other.text) == 0 && std::ranges::equal(numbers, other.numbers);
  }
};

struct Block;
struct Fiber {
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  void* stack_pointer = nullptr;
  Block* block = nullptr;
  dim3 thread;
  int index = 0;
  bool done = false;
  bool is_slow = false;
  bool some = false;  // of those who waited with it at a barrier has brought true
  Reason waits_for;
  std::vector<Copy> started;                // not committed
  std::deque<std::vector<Copy>> under_way;  // groups
  std::vector<size_t> written;              // units of shared memory that it has not published
  std::vector<BulkCopy> bulk;
  bool has_begun_products = false;
  unsigned commits = 0;                // of groups of products
  std::vector<GroupProduct> products;  // not committed
  std::deque<std::vector<GroupProduct>> groups;

  bool on_stack(const void* pointer) const { return pointer >= stack.get() && pointer < stack.get() + kStackBytes; }
  bool is_idle() const {
    return started.empty() && under_way.empty() && bulk.empty() && products.empty() && groups.empty();
  }
};
constinit thread_local Fiber* running = nullptr;

struct Warp {
  int waiting = 0;
  const char* name = nullptr;
  void* of_lane[32] = {};
};

// Threads that wait, and what they will come after.
struct Meeting {
  int arrived = 0, threads = 0;
  std::vector<Fiber*> waiting;
  std::vector<int> all;  // who has arrived
};
struct SharedBarrier {
  int arrivals = 0, left = 0;
  uint32_t phase = 0;
  bool is_fenced = false;
  std::vector<Fiber*> waiting;
  Clock arriving, ended;
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

// A number that depends on the seed and on two others alone.
unsigned drawn(unsigned a, unsigned b) {
  unsigned x = (seed + 1) * 0x9e3779b9u ^ (a + 1) * 0x85ebca6bu ^ (b + 1) * 0xc2b2ae35u;
  x = (x ^ x >> 15) * 0x2c1b3c6du;
  return (x ^ x >> 12) * 0x297a2d39u >> 8;
}

// Fills memory that has not been written with NaN in every format. With odd seeds it is -inf in bfloat16, so that a
// mask that is read too early hides keys.
void poison(void* to, size_t bytes) {
  auto* const words = static_cast<uint16_t*>(to);
  std::fill(words, words + bytes / sizeof *words, seed % 2 == 1 ? uint16_t{0xff80} : uint16_t{0xffff});
}

class SharedMemory {
 public:
  void poison_all(size_t bytes) {
    bytes_ = round_up_to(1024, bytes);  // products need panels at multiples of 1024 bytes
    begin_ = pages_.last(bytes_);
    poison(begin_, bytes_);
  }
  unsigned char* begin() const { return begin_; }
  size_t bytes() const { return bytes_; }

 private:
  Pages pages_{stand_in_shared_memory()};
  size_t bytes_ = 0;
  unsigned char* begin_ = nullptr;
};

constexpr size_t kUnit = 16;  // bytes that are published together

struct Block {
  dim3 number;
  int place = 0;  // in the order of their numbers
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::vector<Warp> warps;
  std::vector<Fiber*> at_barrier;
  bool some = false;  // of those at the barrier has brought true
  Meeting named[16];
  std::map<void*, SharedBarrier> barriers;
  std::vector<int> unpublished;  // of each unit: the thread that wrote it, plus 1
  size_t threads = 0, live = 0;
  SharedMemory shared;
  Races races;
};

struct Launch {
  std::vector<std::unique_ptr<Block>> blocks;  // that run, or have run
  std::vector<Fiber*> ready;
  std::vector<dim3> waiting;  // blocks that have not started, the next one last
  size_t live = 0;            // blocks
  size_t shared_bytes = 0;
  uint64_t polls = 0;  // since something has happened
  std::minstd_rand random;
  void* caller = nullptr;
  const std::function<void()>* kernel = nullptr;
  Races between_blocks;
  std::map<const void*, Clock> released;  // by address

  Launch() { random.seed(seed + 1); }
};
thread_local std::unique_ptr<Launch> launch;

Block& block() { return *running->block; }

[[noreturn]] void fail_with_states(const char* what) {
  for (const auto& b : launch->blocks)
    for (size_t i = 0; i < b->threads; ++i) {
      const Fiber& f = *b->fibers[i];
      // If threads of a warp wait for the same thing, prints only the first of them.
      if (i % 32 && (f.done || f.waits_for == b->fibers[i - 1]->waits_for)) continue;
      const auto [text, numbers] = f.done ? Reason{"has returned"} : f.waits_for;
      std::fprintf(stderr, "block %u, thread %d: ", b->number.x, f.index);
      std::fprintf(stderr, text, numbers[0], numbers[1], numbers[2]);
      std::fprintf(stderr, "\n");
    }
  fail(what);
}

// Continues some fiber that can run, or the caller of run() when all have ended.
void switch_from(void** stack_pointer) {
  std::vector<Fiber*>& ready = launch->ready;
  if (ready.empty()) {
    if (launch->live == 0) return attn_stand_in_switch(stack_pointer, launch->caller);
    fail_with_states("deadlock: threads wait for others that do not come");
  }
  // Some warps are slow: they seldom run while others can.
  size_t chosen = launch->random() % ready.size();
  for (int again = 0; again < 8 && ready[chosen]->is_slow; ++again) chosen = launch->random() % ready.size();
  std::swap(ready[chosen], ready.back());
  Fiber* next = ready.back();
  ready.pop_back();
  if (next == running && stack_pointer == &next->stack_pointer) return;
  running = next;
  threadIdx = next->thread;
  blockIdx = next->block->number;
  attn_stand_in_switch(stack_pointer, next->stack_pointer);
}

std::map<void*, std::unique_ptr<Pages>> allocated;
std::map<void*, size_t> allocated_bytes;
bool is_allocated(const void* pointer) {
  auto at = allocated_bytes.upper_bound(const_cast<void*>(pointer));
  if (at == allocated_bytes.begin()) return false;
  --at;
  return pointer < static_cast<const char*>(at->first) + at->second;
}

// An access of the thread that runs, or of another of its warp.
void note(Races::Kind kind, const void* pointer, size_t bytes, const void* where, int thread = -1) {
  if (!running) return;  // the host
  Block& b = block();
  const uintptr_t at = reinterpret_cast<uintptr_t>(pointer) - reinterpret_cast<uintptr_t>(b.shared.begin());
  if (at < b.shared.bytes()) {
    if (kind == Races::kStore) note_store(pointer, bytes);
    b.races.access(kind, at, bytes, thread < 0 ? running->index : thread, where);
  } else if (Races::wanted && !running->on_stack(pointer) && is_allocated(pointer)) {
    launch->between_blocks.access(kind, reinterpret_cast<uintptr_t>(pointer), bytes, b.place, where);
  }
}

void wait_for(const char* text, int a = 0, int b = 0, int c = 0) {
  Fiber* me = running;
  me->waits_for = {text, {a, b, c}};
  switch_from(&me->stack_pointer);
}
void wake(std::vector<Fiber*>& waiting) {
  launch->ready.insert(launch->ready.end(), waiting.begin(), waiting.end());
  waiting.clear();
  launch->polls = 0;
}
// Lets other threads run. If threads only call poll(), again and again, and nothing else happens, this is a deadlock.
void poll(const char* what) {
  if (++launch->polls > 100000) fail_with_states("deadlock: threads ask for what does not happen");
  launch->ready.push_back(running);
  wait_for(what);
}

void start_block();

void fiber_main() {
  (*launch->kernel)();
  Fiber* me = running;
  if (!me->is_idle()) fail("a thread returned with copies or products under way");
  me->done = true;
  launch->polls = 0;
  if (--me->block->live == 0) {
    --launch->live;
    if (!launch->waiting.empty()) start_block();
  }
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
  Block& b = block();
  b.some |= mine;
  b.at_barrier.push_back(running);
  if (b.at_barrier.size() == b.threads) {
    std::vector<int> all;
    for (Fiber* fiber : b.at_barrier) fiber->some = b.some, all.push_back(fiber->index);
    b.some = false;
    b.races.meet(all);
    wake(b.at_barrier);
  }
  wait_for("__syncthreads");
  return running->some;
}

void collective(const char* name, void* mine, void (*f)(void** of_lane)) {
  const int index = running->index, first = index / 32 * 32;
  Warp& warp = block().warps[index / 32];
  if (warp.waiting == 0) warp.name = name;
  if (warp.name != name && std::strcmp(warp.name, name) != 0) fail("lanes of a warp came for different collectives");
  warp.of_lane[lane()] = mine;
  if (++warp.waiting == 32) {
    f(warp.of_lane);
    warp.waiting = 0;
    launch->polls = 0;
    for (int l = 0; l < 32; ++l) launch->ready.push_back(block().fibers[first + l].get());
  }
  wait_for(name);
}

void warp_barrier() {
  int lanes[32];
  for (int l = 0; l < 32; ++l) lanes[l] = running->index / 32 * 32 + l;
  block().races.meet(lanes);
}

void named_barrier(int number, int threads, bool waits) {
  if (number < 1 || number > 15 || threads % 32) fail("a barrier has a number from 1 to 15 and whole warps");
  Meeting& m = block().named[number];
  if (m.arrived == 0) m.threads = threads;
  if (m.threads != threads) fail("threads came to a barrier for different numbers of threads");
  m.all.push_back(running->index);
  if (waits) m.waiting.push_back(running);
  if (++m.arrived == threads) {
    // A thread that only arrives does not wait, so it is not ordered after the others.
    Clock all;
    for (int t : m.all) block().races.release(t, all);
    for (const Fiber* f : m.waiting) block().races.acquire(f->index, all);
    m.arrived = 0;
    m.all.clear();
    wake(m.waiting);
  }
  if (waits) wait_for("barrier %d", number);
}

static SharedBarrier& barrier_at(void* at) {
  const auto found = block().barriers.find(at);
  if (found == block().barriers.end()) fail("init() of a barrier is missing");
  if (!found->second.is_fenced) fail("fence_inits() is missing after the init() of a barrier");
  return found->second;
}
void init_barrier(void* barrier, int arrivals) {
  if (!is_shared(barrier, 8) || reinterpret_cast<uintptr_t>(barrier) % 8) fail("a barrier is not in shared memory");
  SharedBarrier& b = block().barriers[barrier];
  b = {};
  b.arrivals = b.left = arrivals;
}
void fence_barriers() {
  for (auto& [_, b] : block().barriers) b.is_fenced = true;
}
void arrive(void* barrier) {
  SharedBarrier& b = barrier_at(barrier);
  block().races.release(running->index, b.arriving);
  launch->polls = 0;
  if (--b.left > 0) return;
  b.left = b.arrivals;
  ++b.phase;
  b.ended = std::move(b.arriving);
  b.arriving = {};
  wake(b.waiting);
}
static bool is_over(const SharedBarrier& b, uint32_t parity) { return b.phase % 2 != parity; }
bool has_ended(void* barrier, uint32_t parity) {
  poll("has_ended()");
  const SharedBarrier& b = barrier_at(barrier);
  if (!is_over(b, parity)) return false;
  block().races.acquire(running->index, b.ended);
  return true;
}
void wait(void* barrier, uint32_t parity) {
  SharedBarrier& b = barrier_at(barrier);
  while (!is_over(b, parity)) {
    b.waiting.push_back(running);
    const auto at = static_cast<unsigned char*>(barrier) - block().shared.begin();
    wait_for("phase %d of the barrier at byte %d of shared memory, for %d more", static_cast<int>(parity),
             static_cast<int>(at), b.left);
  }
  block().races.acquire(running->index, b.ended);
}

void note_store(const void* pointer, size_t bytes) {
  const size_t at = static_cast<size_t>(static_cast<const unsigned char*>(pointer) - block().shared.begin());
  for (size_t unit = at / kUnit; unit * kUnit < at + bytes; ++unit) {
    if (block().unpublished[unit] == running->index + 1) continue;
    block().unpublished[unit] = running->index + 1;
    running->written.push_back(unit);
  }
}
void publish_writes() {
  for (const size_t unit : running->written)
    if (block().unpublished[unit] == running->index + 1) block().unpublished[unit] = 0;
  running->written.clear();
}
void check_published(const void* pointer, size_t bytes, const char* who) {
  if (!is_shared(pointer, bytes)) fail("products or a bulk copy read outside of shared memory");
  const size_t at = static_cast<size_t>(static_cast<const unsigned char*>(pointer) - block().shared.begin());
  for (size_t unit = at / kUnit; unit * kUnit < at + bytes; ++unit)
    if (const int writer = block().unpublished[unit]) {
      std::fprintf(stderr, "byte %zu of shared memory was stored by thread %d\n", unit * kUnit, writer - 1);
      fail(who);
    }
  note(Races::kLoad, pointer, bytes, __builtin_return_address(0), running->index / 32 * 32);
}

void start_copy(void* to, const void* from, int bytes) {
  if (!is_shared(to, 16)) fail("cp.async to what is not shared memory");
  if (reinterpret_cast<uintptr_t>(to) % 16 || (bytes > 0 && reinterpret_cast<uintptr_t>(from) % 16))
    fail("cp.async is not aligned");
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
      note_store(c.to, 16);
      std::memset(c.to, 0, 16);
      std::memcpy(c.to, c.from, static_cast<size_t>(c.bytes));
    }
}

static void read_bulk(BulkCopy& x) {
  if (!x.numbers.empty()) return;
  check_published(x.from, 4 * x.count, "a bulk copy reads what was not published");
  x.numbers.assign(x.from, x.from + x.count);
}
static void write_bulk(BulkCopy& x) {
  if (x.done) return;
  read_bulk(x);
  for (size_t i = 0; i < x.count; ++i) x.to[i] = x.adds ? x.to[i] + x.numbers[i] : x.numbers[i];
  x.done = true;
}
void start_bulk(float* to, const void* from, uint32_t bytes, bool adds) {
  if (reinterpret_cast<uintptr_t>(to) % 16 || reinterpret_cast<uintptr_t>(from) % 16 || bytes % 16)
    fail("a bulk copy is not aligned");
  running->bulk.push_back({to, static_cast<const float*>(from), {}, bytes / 4, adds});
}
void commit_bulk() {
  for (BulkCopy& x : running->bulk) {
    if (launch->random() % 2) read_bulk(x);
    if (launch->random() % 4 == 0) write_bulk(x);
  }
}
void wait_for_bulk(bool reads_only) {
  for (BulkCopy& x : running->bulk) reads_only ? read_bulk(x) : write_bulk(x);
  if (!reads_only) running->bulk.clear();
}

int load_acquire(const int* p) {
  poll("load_acquire()");
  const auto released = launch->released.find(p);
  if (released != launch->released.end()) launch->between_blocks.acquire(block().place, released->second);
  return *p;
}
void store_release(int* p, int x) {
  launch->between_blocks.release(block().place, launch->released[p]);
  launch->polls = 0;
  *p = x;
}

void begin_products() { running->has_begun_products = true; }
void start_product(GroupProduct p) {
  if (!running->has_begun_products) fail("products without begin_products() before them");
  if (running->index / 128 * 128 + 128 > static_cast<int>(block().threads)) fail("products of a part of a warpgroup");
  running->products.push_back(std::move(p));
  GroupProduct& mine = running->products.back();
  const auto is_open = [&](const GroupProduct& x) { return &x != &mine && x.c == mine.c; };
  bool open = std::any_of(running->products.begin(), running->products.end(), is_open);
  for (const auto& group : running->groups) open |= std::any_of(group.begin(), group.end(), is_open);
  if (open) return;  // the first product of these registers keeps them
  mine.sums.assign(mine.c, mine.c + 4 * mine.n);
  std::fill(mine.c, mine.c + 4 * mine.n, NAN);
}
// Computes the products of a group of a warp, of which `of_lane` are the fibers. The sums of a product go on to the
// next one that adds to the same registers.
static void compute_group(void** of_lane, size_t group, ComputeProducts compute) {
  const auto group_of = [&](int l) -> std::vector<GroupProduct>& {
    return static_cast<Fiber*>(of_lane[l])->groups[group];
  };
  const size_t count = group_of(0).size();
  for (size_t i = 0; i < count; ++i) {
    GroupProduct* products[32];
    for (int l = 0; l < 32; ++l) {
      if (group_of(l).size() != count) fail("lanes have started different products");
      products[l] = &group_of(l)[i];
    }
    compute(products, running->index / 32 % 4);
    for (int l = 0; l < 32; ++l) {
      products[l]->is_computed = true;
      const auto next = std::find_if(group_of(l).begin() + static_cast<std::ptrdiff_t>(i) + 1, group_of(l).end(),
                                     [&](const GroupProduct& x) { return x.c == products[l]->c; });
      if (next != group_of(l).end()) next->sums = std::move(products[l]->sums);
    }
  }
}
static thread_local ComputeProducts compute_now;

// A GPU reads a group's operands at any time between its commit and the wait. Here it is either of these, as the seed
// draws.
void commit_products(ComputeProducts compute) {
  Fiber* const me = running;
  me->groups.push_back(std::move(me->products));
  me->products.clear();
  me->has_begun_products = false;
  const bool early = drawn(static_cast<unsigned>(me->index / 32), me->commits++) % 2 == 0;
  const auto waits = [](const auto& group) { return !group.empty() && !group.front().is_computed; };
  if (!early || std::count_if(me->groups.begin(), me->groups.end(), waits) != 1) return;
  compute_now = compute;
  collective("commit_products", me, [](void** of_lane) {
    compute_group(of_lane, static_cast<Fiber*>(of_lane[0])->groups.size() - 1, compute_now);
  });
}
void wait_for_products(int left, ComputeProducts compute) {
  while (running->groups.size() > static_cast<size_t>(left)) {
    compute_now = compute;
    collective("wait_for_products", running, [](void** of_lane) {
      auto& first = static_cast<Fiber*>(of_lane[0])->groups.front();
      if (!first.empty() && !first.front().is_computed) compute_group(of_lane, 0, compute_now);
    });
    auto& groups = running->groups;
    for (GroupProduct& done : groups.front()) {
      if (done.sums.empty()) continue;
      GroupProduct* next = nullptr;
      for (size_t g = 1; g < groups.size() && !next; ++g)
        for (GroupProduct& x : groups[g])
          if (x.c == done.c && !next) next = &x;
      if (next)
        next->sums = std::move(done.sums);
      else
        std::copy(done.sums.begin(), done.sums.end(), done.c);
    }
    groups.pop_front();
  }
}

unsigned char* shared_memory() { return block().shared.begin(); }
bool is_shared(const void* pointer, size_t bytes) {
  const auto* p = static_cast<const unsigned char*>(pointer);
  return p >= block().shared.begin() && p + bytes <= block().shared.begin() + block().shared.bytes();
}

int capability() {
  const char* const given = std::getenv("ATTN_STAND_IN_CAPABILITY");
  return given ? std::atoi(given) : 80;
}

void* allocate(size_t bytes) {
  bytes = round_up_to(16, bytes);
  auto pages = std::make_unique<Pages>(bytes);
  void* const memory = pages->last(bytes);
  allocated[memory] = std::move(pages);
  allocated_bytes[memory] = bytes;
  return memory;
}
void release(void* memory) {
  allocated.erase(memory);
  allocated_bytes.erase(memory);
}

namespace {

// Starts the next block in the memory of one that has ended, but not of the one whose last fiber calls this function.
void start_block() {
  const auto free = std::find_if(launch->blocks.begin(), launch->blocks.end(),
                                 [](const auto& b) { return !b->live && (!running || b.get() != running->block); });
  Block& b = **free;
  b.number = launch->waiting.back();
  launch->waiting.pop_back();
  ++launch->live;
  b.place = static_cast<int>(b.number.x + gridDim.x * (b.number.y + gridDim.y * b.number.z));
  b.threads = size_t{blockDim.x} * blockDim.y * blockDim.z;
  b.live = b.threads;
  while (b.fibers.size() < b.threads) {
    b.fibers.push_back(std::make_unique<Fiber>());
    b.fibers.back()->index = static_cast<int>(b.fibers.size()) - 1;
    b.fibers.back()->block = &b;
  }
  b.warps.assign(b.threads / 32, {});
  b.barriers.clear();
  for (Meeting& m : b.named) m = {};
  b.shared.poison_all(launch->shared_bytes);
  b.unpublished.assign(b.shared.bytes() / kUnit, 0);
  b.races.begin(b.threads, "shared memory");
  for (size_t i = 0; i < b.threads; ++i) {
    Fiber& f = *b.fibers[i];
    const auto t = static_cast<unsigned>(i);
    f.thread = {t % blockDim.x, t / blockDim.x % blockDim.y, t / blockDim.x / blockDim.y};
    f.is_slow = drawn(t / 32, static_cast<unsigned>(b.place)) % 4 == 0;
    f.done = f.has_begun_products = false;
    f.commits = 0;
    f.written.clear();
    prepare(f);
    launch->ready.push_back(&f);
  }
}

}  // namespace

void run(dim3 grid, dim3 block_size, size_t shared_bytes, const void* code, const std::function<void()>& kernel) {
  static const bool prints = std::getenv("ATTN_STAND_IN_LAUNCHES") != nullptr;
  if (prints) {
    Dl_info found{};
    dladdr(code, &found);
    const std::unique_ptr<char, decltype(&std::free)> name(
        abi::__cxa_demangle(found.dli_sname ? found.dli_sname : "?", nullptr, nullptr, nullptr), &std::free);
    std::printf("launch of %u blocks: %s\n", grid.x * grid.y, name ? name.get() : "?");
    std::fflush(stdout);
  }
  if (!launch) launch = std::make_unique<Launch>();
  Launch& l = *launch;
  if (size_t{block_size.x} * block_size.y * block_size.z % 32) fail("a block of incomplete warps");
  l.kernel = &kernel;
  l.shared_bytes = shared_bytes;
  l.released.clear();
  blockDim = block_size;
  gridDim = grid;
  for (unsigned z = 0; z < grid.z; ++z)
    for (unsigned y = 0; y < grid.y; ++y)
      for (unsigned x = 0; x < grid.x; ++x) l.waiting.push_back({x, y, z});
  l.between_blocks.begin(Races::wanted ? l.waiting.size() : 0, "memory of the GPU");
  std::shuffle(l.waiting.begin(), l.waiting.end(), l.random);
  const size_t at_a_time = std::min<size_t>(1 + l.random() % 3, l.waiting.size());
  while (l.blocks.size() < at_a_time + 1) l.blocks.push_back(std::make_unique<Block>());
  for (size_t i = 0; i < at_a_time; ++i) start_block();
  switch_from(&l.caller);
  running = nullptr;
}

}  // namespace stand_in

// What code compiled with -fsanitize=thread calls; see races.h.
extern "C" {
#define ATTN_ACCESS(name, bytes, ...)                                                     \
  void __tsan_read##name(const void* pointer, ##__VA_ARGS__) {                            \
    if (!stand_in::Races::wanted) return;                                                 \
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
