// Independent tasks over torch's threads.
#pragma once

#include <cstdint>
#include <functional>

#include "cpu/isa.h"

namespace attn {

// Runs f(task, workspace) for every task in [0, tasks). Each thread has a workspace of its own of `workspace_bytes`,
// 64-byte aligned. Any thread may take any task. So a task must not depend on another task, unless it waits for earlier
// tasks (Take::one). If all tasks obey this rule, the result does not depend on the number of threads
// (torch.get_num_threads()). Runs all tasks in one thread if called inside another parallel region, or if all tasks
// together take less time than waking a thread. `flops` is roughly the work of all tasks.
//
// Take::neighbours: a thread takes several consecutive tasks at once, because their memory is adjacent. Take::one: a
// thread takes only the first task that is left. A task is then allowed to wait for an earlier task, because all
// earlier tasks have begun.
enum class Take { neighbours, one };
void run_tasks(int64_t tasks, double flops, int64_t workspace_bytes, OnThread on_thread,
               const std::function<void(int64_t, char*)>& f, Take take = Take::neighbours);

// Cuts `count` items into ranges of at most `per_task` items, and runs f(first, last, workspace) for each range
// [first, last).
void run_ranges(int64_t count, int64_t per_task, double flops, int64_t workspace_bytes,
                const std::function<void(int64_t, int64_t, char*)>& f);

}  // namespace attn
