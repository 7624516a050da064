// Which rows a block of threads works on, and where they lie.
#pragma once

#include "numbers.cuh"

namespace attn::cuda {

// This block's number in a grid made by grid_of(), launch.cuh.
__device__ __forceinline__ int64_t block_number() { return blockIdx.x + static_cast<int64_t>(blockIdx.y) * gridDim.x; }

// Where batch entry n of an operand begins, in elements.
__device__ inline int64_t batch_offset(const Problem& p, const Operand& x, int64_t n) {
  int64_t offset = 0;
  for (int d = p.batch_dims - 1; d >= 0; --d) {
    offset += n % p.batch_size[d] * x.batch[d];
    n /= p.batch_size[d];
  }
  return offset;
}

// Up to kRows consecutive rows of a group of heads (Problem::group), in shared memory.
template <int kRows>
struct RowTile {
  int64_t head[kRows];
  int64_t position[kRows];

  // Rows of the list that begins with head `first_head`; called by all threads, followed by a barrier.
  __device__ void set(const Problem& p, int64_t first_head, int64_t first, int count) {
    for (int i = threadIdx.x; i < kRows; i += blockDim.x) {
      const int64_t r = first + smaller(i, count - 1);  // rows past the end repeat the last one and are never written
      head[i] = first_head + r / p.queries;
      position[i] = r % p.queries;
    }
  }
  // Of row i within its batch entry.
  __device__ __forceinline__ int64_t offset(const Operand& x, int i) const {
    return head[i] * x.head + position[i] * x.row;
  }
};

// One block's share of the problem, in shared memory: one thread computes it, and no register has to keep it. Blocks of
// the same keys are neighbours, those with most keys under causality first.
struct Task {
  int64_t n;           // flat batch index
  int64_t first_head;  // of the group
  int64_t key_head, value_head;
  int64_t first_row;  // of the group's list
  int rows;
  int64_t split;
  int64_t first_key, last_key;         // no row of the tile sees others
  int64_t min_position, max_position;  // of its rows

  // Rows of the list that begins with `head`. Called by one thread, followed by a barrier.
  __device__ void set_rows(const Problem& p, int64_t head, int64_t first, int64_t count) {
    first_head = head;
    key_head = head / (p.heads / p.key_heads);
    value_head = head / (p.heads / p.value_heads);
    first_row = first;
    rows = static_cast<int>(count);
    min_position = first % p.queries;
    max_position = min_position + rows - 1;
    if (max_position >= p.queries) {  // the end of one head and the beginning of the next
      min_position = 0;
      max_position = p.queries - 1;
    }
  }
  // The keys that rows up to max_position see.
  __device__ void set_keys(const Problem& p, int64_t first, int64_t last) {
    first_key = first;
    last_key = smaller(last, p.keys);
    if (p.causal) last_key = smaller(last_key, max_position + 1);
  }

  // All of it, of task `number`. Called by one thread, followed by a barrier.
  template <class Params>
  __device__ void set(const Params& p, int64_t number) {
    const int64_t row_tasks = p.row_tasks();
    const int64_t row = (row_tasks - 1 - number % row_tasks) * p.rows_per_task;
    number /= row_tasks;
    split = number % p.splits;
    number /= p.splits;
    n = number / p.groups();
    set_rows(p, number % p.groups() * p.group, row, smaller(p.rows_per_task, p.rows() - row));
    set_keys(p, split * p.keys_per_split, (split + 1) * p.keys_per_split);
  }
};

}  // namespace attn::cuda
