// Independent tasks over torch's threads.
#pragma once

#include <cstdint>
#include <functional>

#include "cpu/isa.h"

namespace attn {

// Runs f(task, workspace) for every task in [0, tasks), each call with `workspace_bytes` of its own, 64-byte aligned.
// Any thread takes any task. Tasks must not depend on each other, unless they wait in turns (below); so the result does
// not depend on the number of threads (torch.get_num_threads()). Runs serially inside another parallel region, and if
// all tasks together (`flops`, roughly) are less work than waking a thread.
//
// neighbours: a thread takes several tasks at once, whose memory is adjacent. one: a thread takes the first task that
// is left, so a task may wait for an earlier one.
enum class Take { neighbours, one };
void run_tasks(int64_t tasks, double flops, int64_t workspace_bytes, OnThread on_thread,
               const std::function<void(int64_t, char*)>& f, Take take = Take::neighbours);

// Runs tasks that are ranges [first, last) of `count` items, `per_task` of them at a time.
void run_ranges(int64_t count, int64_t per_task, double flops, int64_t workspace_bytes,
                const std::function<void(int64_t, int64_t, char*)>& f);

}  // namespace attn
