// The operators on the CPU: tensors to params, work cut into tasks, threads.
//
// How the work is cut depends on the shape alone. The number of threads decides only who computes a task, so the
// result has the same bits with any number of threads.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <torch/library.h>

#include <mutex>
#include <numeric>

#include "../problem.h"
#include "dispatch.h"
#include "parallel.h"

namespace attn {
namespace {

constexpr int64_t kEnoughTasks = 32;  // below this a call cuts finer, so that many cores find work
constexpr int64_t kRowsPerRange = 64;

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t round_up(int64_t a, int64_t b) { return divide_up(a, b) * b; }

bool empty(const Problem& p) { return p.batch * p.heads * p.queries == 0; }

at::Tensor new_rng_state(const at::Tensor& query, double dropout_p) {
  at::Tensor state = empty_rng_state(query, dropout_p);
  if (dropout_p > 0) {
    auto* generator = at::get_generator_or_default<at::CPUGeneratorImpl>(std::nullopt, at::detail::getDefaultCPUGenerator());
    std::lock_guard<std::mutex> lock(generator->mutex_);
    state.mutable_data_ptr<int64_t>()[0] = static_cast<int64_t>(generator->random64());
    state.mutable_data_ptr<int64_t>()[1] = 0;
  }
  return state;
}

void plan(ForwardParams& p) {
  // Several tiles of rows share one pass over the keys, as long as there are tasks enough.
  p.rows_per_task = 4 * kRowTile;
  while (p.rows_per_task > kRowTile && p.tasks() < 2 * kEnoughTasks) p.rows_per_task /= 2;
  p.keys_per_split = p.keys;
  if (p.tasks() < kEnoughTasks && p.keys >= 1024) {
    const int64_t splits = std::min(divide_up(kEnoughTasks, p.tasks()), p.keys / 512);
    p.keys_per_split = round_up(divide_up(p.keys, splits), kKeyTile);
    p.splits = divide_up(p.keys, p.keys_per_split);
  }
}

struct ForwardResult {
  at::Tensor output, logsumexp, rng_state;
};

ForwardResult forward(bool want_logsumexp, ATTN_ARGUMENTS) {
  const Shape shape = validate(ATTN_PASS);
  ForwardResult result{empty_output(shape, query), {}, new_rng_state(query, dropout_p)};
  if (want_logsumexp) result.logsumexp = empty_logsumexp(shape, query);

  ForwardParams p;
  ProblemBuilder builder(p, shape);
  describe(p, builder, shape, ATTN_PASS);
  describe_dropout(p, dropout_p, result.rng_state);
  builder.add(p.output, result.output);
  if (empty(p)) return result;
  builder.merge_batch_dims();
  if (want_logsumexp) p.logsumexp = result.logsumexp.mutable_data_ptr();
  plan(p);

  at::Tensor partial_output, partial_logsumexp;
  if (p.splits > 1) {
    const auto options = query.options().dtype(query.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
    const int64_t rows = p.splits * p.batch * p.heads * p.queries;
    partial_output = at::empty({rows, p.value_dim}, options);
    partial_logsumexp = at::empty({rows}, options);
    p.partial_output = partial_output.mutable_data_ptr();
    p.partial_logsumexp = partial_logsumexp.mutable_data_ptr();
  }

  const Kernels& k = kernels();
  const int64_t workspace = k.forward_workspace(p);
  run_tasks(p.tasks(), workspace, [&](int64_t task, char* own) { k.forward(p, task, own); });
  if (p.splits > 1)
    run_ranges(p.batch * p.heads * p.queries, kRowsPerRange, workspace,
               [&](int64_t first, int64_t last, char* own) { k.forward_merge(p, first, last, own); });
  return result;
}

void plan(BackwardParams& p) {
  p.span = std::lcm(p.heads / p.key_heads, p.heads / p.value_heads);
  // What a pass keeps of its rows (Q, Q^T, dO, dO^T, dQ) should stay in the L2 cache.
  const int64_t bytes_per_row = (3 * p.head_dim + 2 * p.value_dim + 2) * static_cast<int64_t>(sizeof(float));
  const int64_t rows = std::clamp<int64_t>((int64_t{512} << 10) / bytes_per_row / kRowTile, 1, 16) * kRowTile;
  p.rows_per_pass = std::min(rows, round_up(p.rows(), kRowTile));
  p.keys_per_chunk = p.keys;
  if (p.tasks() < kEnoughTasks) {
    const int64_t chunks = std::min(divide_up(kEnoughTasks, p.tasks()), divide_up(p.keys, 4 * kKeyTile));
    p.keys_per_chunk = round_up(divide_up(p.keys, chunks), kKeyTile);
    p.chunks = divide_up(p.keys, p.keys_per_chunk);
  }
  if (!p.grad_mask.data) return;

  int64_t shared = 1;
  const auto visit = [&](int64_t extent, int64_t stride) {
    if (stride == 0) shared *= extent;
    return stride == 0 && extent > 1;
  };
  for (int d = 0; d < p.batch_dims; ++d) p.mask_is_shared |= visit(p.batch_size[d], p.grad_mask.batch[d]);
  p.mask_is_shared |= visit(p.heads, p.grad_mask.head);
  const bool one_row = p.grad_mask.row == 0, one_key = p.grad_mask.col == 0;
  p.mask_is_shared |= (one_row && p.queries > 1) || (one_key && p.keys > 1);
  p.mask_slices = p.batch * p.heads / shared;
  p.mask_row_tasks = one_row ? 1 : divide_up(p.queries, kRowTile);
  p.mask_key_tasks = one_key ? 1 : divide_up(p.keys, kKeyTile);
}

Tensors4 backward(ATTN_BACKWARD_ARGUMENTS) {
  const Shape shape = validate_backward(ATTN_BACKWARD_PASS);
  BackwardParams p;
  ProblemBuilder builder(p, shape);
  describe(p, builder, shape, ATTN_PASS);
  describe_dropout(p, dropout_p, rng_state);
  builder.add(p.output, output);
  builder.add(p.grad_output, grad_output);

  const auto gradient = [&](bool wanted, Operand& operand, const at::Tensor& input, const c10::SymInt& heads,
                            const c10::SymInt& rows, const c10::SymInt& cols) {
    if (!wanted) return at::Tensor();
    at::Tensor grad = empty_gradient(input, shape.expanded(heads, rows, cols));
    builder.add(operand, grad);
    return grad;
  };
  at::Tensor grad_query =
      gradient(grad_input_mask[0], p.grad_query, query, shape.heads, shape.queries, shape.head_dim);
  at::Tensor grad_key = gradient(grad_input_mask[1], p.grad_key, key, shape.key_heads, shape.keys, shape.head_dim);
  at::Tensor grad_value =
      gradient(grad_input_mask[2], p.grad_value, value, shape.value_heads, shape.keys, shape.value_dim);
  at::Tensor grad_mask;
  if (grad_input_mask[3]) {
    grad_mask = at::zeros_like(*attn_mask);  // tiles that causality hides are never written
    builder.add(p.grad_mask, grad_mask);
  }

  if (empty(p) || p.keys == 0) {
    for (at::Tensor* t : {&grad_query, &grad_key, &grad_value})
      if (t->defined()) t->zero_();
  } else {
    builder.merge_batch_dims();
    plan(p);
    const auto options = logsumexp.options();
    const at::Tensor contiguous_logsumexp = logsumexp.contiguous();
    const at::Tensor delta = at::empty(logsumexp.sizes(), options);
    p.logsumexp = contiguous_logsumexp.const_data_ptr();
    p.delta = delta.mutable_data_ptr();
    at::Tensor partial;
    if (p.chunks > 1 && p.grad_query.data) {
      partial = at::empty({p.chunks, p.batch, p.heads, p.queries, p.head_dim}, options);
      p.partial_grad_query = partial.mutable_data_ptr();
    }

    const Kernels& k = kernels();
    const int64_t workspace = k.backward_workspace(p);
    const int64_t rows = p.batch * p.heads * p.queries;
    run_ranges(rows, kRowsPerRange, workspace,
               [&](int64_t first, int64_t last, char* own) { k.backward_delta(p, first, last, own); });
    const bool direct_mask = p.grad_mask.data && !p.mask_is_shared;
    if (p.grad_query.data || p.grad_key.data || p.grad_value.data || direct_mask)
      run_tasks(p.tasks(), workspace, [&](int64_t task, char* own) { k.backward(p, task, own); });
    if (p.partial_grad_query)
      run_ranges(rows, kRowsPerRange, workspace,
                 [&](int64_t first, int64_t last, char* own) { k.backward_merge(p, first, last, own); });
    if (p.mask_is_shared)
      run_tasks(p.mask_tasks(), workspace, [&](int64_t task, char* own) { k.backward_mask(p, task, own); });
  }
  return {reduced(grad_query, query), reduced(grad_key, key), reduced(grad_value, value), grad_mask};
}

at::Tensor sdpa_cpu(ATTN_ARGUMENTS) { return forward(false, ATTN_PASS).output; }

Tensors3 forward_cpu(ATTN_ARGUMENTS) {
  ForwardResult r = forward(true, ATTN_PASS);
  return {r.output, r.logsumexp, r.rng_state};
}

}  // namespace

TORCH_LIBRARY_IMPL(attn, CPU, m) {
  m.impl("sdpa", sdpa_cpu);
  m.impl("_sdpa_forward", forward_cpu);
  m.impl("_sdpa_backward", backward);
}

}  // namespace attn
