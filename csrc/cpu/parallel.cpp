#include "cpu/parallel.h"

#include <ATen/Parallel.h>
#include <c10/core/CPUAllocator.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <thread>

// Functions of torch's OpenMP, libgomp. GCC compiles `#pragma omp parallel num_threads(threads)` to a call of
// GOMP_parallel, which calls f(data) on every thread of a team. clang would compile the pragma to a call of LLVM's
// OpenMP, whose threads would compete with torch's threads for the same cores. So this file uses no pragma, and the
// library runs on torch's threads whatever the compiler.
extern "C" void GOMP_parallel(void (*f)(void*), void* data, unsigned threads, unsigned flags);
extern "C" int omp_get_thread_num();
extern "C" int omp_pause_resource_all(int kind);

namespace attn {

namespace {

constexpr int kPauseHard = 2;  // omp_pause_hard of <omp.h>

// A forked process has only the thread that forked. If this thread had a team of OpenMP threads, its next parallel
// region would wait for that team forever. So the team is dissolved before the fork. Parent and child each make a new
// team when they need one.
[[maybe_unused]] const int registered = pthread_atfork([] { omp_pause_resource_all(kPauseHard); }, nullptr, nullptr);

constexpr double kWorthwhileFlops = 4e5;

int64_t threads_for(int64_t tasks, double flops) {
  if (tasks <= 1 || flops < kWorthwhileFlops || at::in_parallel_region()) return 1;
  return std::min<int64_t>(tasks, at::get_num_threads());
}

class Stay {
 public:
  explicit Stay(OnThread on_thread) : end_(on_thread.end) {
    if (on_thread.begin) on_thread.begin();
  }
  ~Stay() {
    if (end_) end_();
  }
  Stay(const Stay&) = delete;
  Stay& operator=(const Stay&) = delete;

 private:
  void (*end_)();
};

}  // namespace

void run_tasks(int64_t tasks, double flops, int64_t workspace_bytes, OnThread on_thread,
               const std::function<void(int64_t, char*)>& f, Take take) {
  if (tasks <= 0) return;
  const int64_t threads = threads_for(tasks, flops);
  const int64_t stride = (workspace_bytes + 63) / 64 * 64;
  const at::DataPtr memory = c10::GetCPUAllocator()->allocate(threads * stride);
  char* const workspace = static_cast<char*>(memory.get());
  if (threads == 1) {
    const Stay stay(on_thread);
    for (int64_t task = 0; task < tasks; ++task) f(task, workspace);
    return;
  }
  std::atomic<int64_t> next{0};
  auto take_tasks = [&] {
    const Stay stay(on_thread);
    char* const own = workspace + omp_get_thread_num() * stride;
    // A thread takes several tasks at once, because data of neighbouring tasks is often in one page. It takes fewer
    // tasks towards the end, so that no thread has much left when other threads are done.
    const int64_t parts = take == Take::one ? tasks : 4 * threads;
    int64_t first = next.load(std::memory_order_relaxed), last;
    while (first < tasks) {
      last = first + std::max<int64_t>(1, (tasks - first) / parts);
      if (!next.compare_exchange_weak(first, last, std::memory_order_relaxed)) continue;
      for (int64_t task = first; task < last; ++task) f(task, own);
      first = next.load(std::memory_order_relaxed);
    }
  };
  GOMP_parallel([](void* team) { (*static_cast<decltype(&take_tasks)>(team))(); }, &take_tasks, threads, 0);
}

void run_ranges(int64_t count, int64_t per_task, double flops, int64_t workspace_bytes,
                const std::function<void(int64_t, int64_t, char*)>& f) {
  run_tasks((count + per_task - 1) / per_task, flops, workspace_bytes, {}, [&](int64_t task, char* workspace) {
    f(task * per_task, std::min(count, (task + 1) * per_task), workspace);
  });
}

void wait_for_turn(int32_t* turn, int32_t number) {
  const std::atomic_ref<int32_t> at(*turn);
  for (int tries = 0; at.load(std::memory_order_acquire) != number; ++tries)
    if (tries > 100) std::this_thread::yield();
}

void end_turn(int32_t* turn) { std::atomic_ref<int32_t>(*turn).fetch_add(1, std::memory_order_release); }

}  // namespace attn
