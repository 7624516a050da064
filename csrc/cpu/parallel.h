// Independent tasks over torch's threads.
#pragma once

#include <cstdint>
#include <functional>

#include "cpu/isa.h"

namespace attn {

// Runs f(task, workspace) for every task in [0, tasks), each call with `workspace_bytes` of its own, 64-byte aligned.
// Any thread takes any task: but for those that wait in turns (below) they must not depend on each other, and then the
// result does not depend on the number of threads (torch.get_num_threads()). Serial inside another parallel region, and
// where all tasks together (`flops`, roughly) are less work than waking a thread.
//
// A thread takes several neighbours, which lie side by side in memory, or one task at a time, always the first that is
// left: then a task may wait for what an earlier one does.
enum class Take { neighbours, one };
void run_tasks(int64_t tasks, double flops, int64_t workspace_bytes, OnThread on_thread,
               const std::function<void(int64_t, char*)>& f, Take take = Take::neighbours);

// Runs tasks that are ranges [first, last) of `count` items, `per_task` of them at a time.
void run_ranges(int64_t count, int64_t per_task, double flops, int64_t workspace_bytes,
                const std::function<void(int64_t, int64_t, char*)>& f);

}  // namespace attn
