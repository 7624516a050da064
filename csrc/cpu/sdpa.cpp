// The operators on the CPU: tensors to params, work cut into tasks, threads.
//
// How the work is cut depends on the shape alone. The number of threads decides only who computes a task, so the
// result has the same bits with any number of threads.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ExpandUtils.h>
#include <torch/library.h>

#include <mutex>
#include <numeric>

#include "../problem.h"
#include "dispatch.h"
#include "parallel.h"

namespace attn {
namespace {

using at::Tensor;

constexpr int64_t kEnoughTasks = 32;   // below this a call cuts finer, so that many cores find work
constexpr int64_t kEnoughChunks = 16;  // of the backward: each costs a grad_query of its own
constexpr int64_t kRowsPerRange = 64;

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t round_up(int64_t a, int64_t b) { return divide_up(a, b) * b; }

// Of one product over all pairs of queries and keys.
double product_flops(const Problem& p) {
  return 2.0 * p.batch * p.heads * p.queries * p.keys * std::max(p.head_dim, p.value_dim);
}

Tensor draw_rng_state(const Tensor& query, int64_t heads) {
  Tensor state = empty_rng_state(query, 1);
  auto* generator =
      at::get_generator_or_default<at::CPUGeneratorImpl>(std::nullopt, at::detail::getDefaultCPUGenerator());
  std::lock_guard<std::mutex> lock(generator->mutex_);
  auto* values = state.mutable_data_ptr<int64_t>();
  values[0] = static_cast<int64_t>(generator->random64());
  values[1] = 0;
  values[2] = heads;
  return state;
}

// ---------------------------------------------------------------------------------------------------------------
// Forward

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

Tensors4 forward(bool for_derivatives, ATTN_INPUTS_ARGS, ATTN_OPTIONS_ARGS, const std::optional<Tensor>& given_state) {
  ForwardParams p;
  const Tensors4 result = describe_forward(p, for_derivatives, ATTN_INPUTS, ATTN_OPTIONS, given_state, draw_rng_state);
  if (no_rows(p)) return result;
  plan(p);
  const auto partial = allocate_splits(p, query);

  const ForwardKernels& k = kernels().forward;
  const int64_t workspace = k.workspace(p);
  run_tasks(p.tasks(), 2 * product_flops(p), workspace, [&](int64_t task, char* own) { k.run(p, task, own); });
  const int64_t rows = p.batch * p.heads * p.queries;
  if (p.splits > 1)
    run_ranges(rows, kRowsPerRange, 2.0 * p.splits * rows * p.value_dim, workspace,
               [&](int64_t first, int64_t last, char* own) { k.merge(p, first, last, own); });
  return result;
}

Tensor sdpa_cpu(ATTN_INPUTS_ARGS, ATTN_OPTIONS_ARGS) {
  return std::get<0>(forward(false, ATTN_INPUTS, ATTN_OPTIONS, std::nullopt));
}

Tensors4 forward_cpu(ATTN_INPUTS_ARGS, ATTN_OPTIONS_ARGS, const std::optional<Tensor>& rng_state) {
  return forward(true, ATTN_INPUTS, ATTN_OPTIONS, rng_state);
}

// ---------------------------------------------------------------------------------------------------------------
// Gradients, and their derivative along a direction: the same plan, buffers and passes

void plan_mask(BackwardParams& p) {
  if (!p.grad_mask.data) return;
  int64_t shared = 1;
  const auto visit = [&](int64_t extent, int64_t stride) {
    if (stride == 0) shared *= extent;
  };
  for (int d = 0; d < p.batch_dims; ++d) visit(p.batch_size[d], p.grad_mask.batch[d]);
  visit(p.heads, p.grad_mask.head);
  const bool one_row = p.grad_mask.row == 0;
  p.mask_is_shared = shared > 1 || (one_row && p.queries > 1);
  p.mask_slices = p.batch * p.heads / shared;
  p.mask_row_tasks = one_row ? 1 : divide_up(p.queries, kRowTile);
  p.mask_key_tasks = divide_up(p.keys, kKeyTile);
}

void plan(BackwardParams& p) {
  p.span = std::lcm(p.heads / p.key_heads, p.heads / p.value_heads);
  // What a pass keeps of its rows (Q, Q^T, dO, dO^T, dQ) should stay in the L2 cache.
  const int64_t bytes_per_row = (3 * p.head_dim + 2 * p.value_dim + 2) * static_cast<int64_t>(sizeof(float));
  const int64_t rows = std::clamp<int64_t>((int64_t{512} << 10) / bytes_per_row / kRowTile, 1, 16) * kRowTile;
  p.rows_per_pass = std::min(rows, round_up(p.rows(), kRowTile));
  p.keys_per_chunk = p.keys;
  if (p.tasks() < kEnoughChunks) {
    const int64_t chunks = std::min(divide_up(kEnoughChunks, p.tasks()), divide_up(p.keys, 4 * kKeyTile));
    p.keys_per_chunk = round_up(divide_up(p.keys, chunks), kKeyTile);
    p.chunks = divide_up(p.keys, p.keys_per_chunk);
  }
  plan_mask(p);
}

// `p` and `builder` hold everything but the gradients.
template <class Params>
Tensors4 gradients(Params& p, ProblemBuilder& builder, const BackwardKernels<Params>& k, const Shape& shape,
                   ATTN_INPUTS_ARGS, Wanted wanted) {
  const auto gradient = [&](bool is_wanted, Operand& operand, const Tensor& input, const c10::SymDimVector& sizes) {
    if (!is_wanted) return Tensor();
    // Written at the broadcast shape; reduced() sums it back to the input's.
    Tensor grad = input.sym_sizes() == c10::SymIntArrayRef(sizes) ? empty_gradient(input)
                                                                  : at::empty_symint(sizes, input.options());
    builder.add_result(operand, grad);
    return grad;
  };
  const Tensor grad_query =
      gradient(wanted[0], p.grad_query, query, shape.expanded(shape.heads, shape.queries, shape.head_dim));
  const Tensor grad_key =
      gradient(wanted[1], p.grad_key, key, shape.expanded(shape.key_heads, shape.keys, shape.head_dim));
  const Tensor grad_value =
      gradient(wanted[2], p.grad_value, value, shape.expanded(shape.value_heads, shape.keys, shape.value_dim));
  Tensor grad_mask;
  if (wanted[3]) {
    grad_mask = at::zeros_like(*attn_mask);  // tiles that causality hides are never written
    // A number added to all scores of a row changes nothing: a mask shared by all keys has gradient 0.
    if (attn_mask->size(-1) > 1) builder.add_result(p.grad_mask, grad_mask);
  }

  if (no_rows(p) || p.keys == 0) {
    for (const Tensor& t : {grad_query, grad_key, grad_value})
      if (t.defined()) t.zero_();
  } else {
    builder.merge_batch_dims();
    plan(p);
    Tensor partial;
    if (p.chunks > 1 && p.grad_query.data) {
      partial = at::empty({p.chunks, p.batch, p.heads, p.queries, p.head_dim}, compute_options(query));
      p.partial_grad_query = partial.mutable_data_ptr();
    }
    const int64_t workspace = k.workspace(p);
    const bool direct_mask = p.grad_mask.data && !p.mask_is_shared;
    if (p.grad_query.data || p.grad_key.data || p.grad_value.data || direct_mask)
      run_tasks(p.tasks(), 5 * product_flops(p), workspace, [&](int64_t task, char* own) { k.run(p, task, own); });
    const int64_t rows = p.batch * p.heads * p.queries;
    if (p.partial_grad_query)
      run_ranges(rows, kRowsPerRange, 2.0 * p.chunks * rows * p.head_dim, workspace,
                 [&](int64_t first, int64_t last, char* own) { k.merge(p, first, last, own); });
    if (p.mask_is_shared)
      run_tasks(p.mask_tasks(), 2 * product_flops(p), workspace,
                [&](int64_t task, char* own) { k.mask(p, task, own); });
  }
  const auto reduced = [](const Tensor& grad, const Tensor& input) {
    if (!grad.defined() || grad.sizes() == input.sizes()) return grad;
    return empty_gradient(input).copy_(at::sum_to(grad, input.sizes()));
  };
  return {reduced(grad_query, query), reduced(grad_key, key), reduced(grad_value, value), grad_mask};
}

// Adds the forward's results to any of the params that hold them. Keeps `logsumexp` contiguous.
template <class Params>
void describe_saved(Params& p, ProblemBuilder& builder, Tensor& contiguous_logsumexp, ATTN_SAVED_ARGS) {
  (void)rng_state;
  builder.add(p.output, output);
  if (residual.dim() > 1) builder.add(p.residual, residual);
  contiguous_logsumexp = logsumexp.contiguous();
  p.logsumexp = contiguous_logsumexp.const_data_ptr();
}

void describe_tangents(Tangents& t, ProblemBuilder& builder, ATTN_TANGENTS_ARGS) {
  const auto add = [&](Operand& operand, const std::optional<Tensor>& tangent) {
    if (tangent && tangent->numel() > 0) builder.add(operand, *tangent);
  };
  add(t.query, tangent_query);
  add(t.key, tangent_key);
  add(t.value, tangent_value);
  add(t.mask, tangent_mask);
}

Tensors4 backward_cpu(const Tensor& grad_output, ATTN_INPUTS_ARGS, ATTN_SAVED_ARGS, ATTN_OPTIONS_ARGS,
                      Wanted grad_input_mask) {
  const char* op = "attn::_sdpa_backward";
  const Shape shape = validate(ATTN_INPUTS, ATTN_OPTIONS);
  validate_like_output(op, "grad_output", grad_output, shape, query);
  validate_saved(op, shape, query, dropout_p, ATTN_SAVED);
  validate_wanted(op, attn_mask, grad_input_mask);

  BackwardParams p;
  ProblemBuilder builder(p, shape);
  Tensor contiguous_logsumexp;
  describe(p, builder, rng_state, ATTN_INPUTS, ATTN_OPTIONS);
  describe_saved(p, builder, contiguous_logsumexp, ATTN_SAVED);
  builder.add(p.grad_output, grad_output);
  return gradients(p, builder, kernels().backward, shape, ATTN_INPUTS, grad_input_mask);
}

Tensors4 second_cpu(const Tensor& grad_output, ATTN_INPUTS_ARGS, ATTN_SAVED_ARGS, ATTN_TANGENTS_ARGS, ATTN_MOVED_ARGS,
                    ATTN_OPTIONS_ARGS, Wanted grad_input_mask) {
  const char* op = "attn::_sdpa_second";
  const Shape shape = validate(ATTN_INPUTS, ATTN_OPTIONS);
  validate_like_output(op, "grad_output", grad_output, shape, query);
  validate_saved(op, shape, query, dropout_p, ATTN_SAVED);
  validate_tangents(op, ATTN_INPUTS, ATTN_TANGENTS);
  validate_moved(op, shape, query, ATTN_MOVED);
  validate_wanted(op, attn_mask, grad_input_mask);

  SecondParams p;
  ProblemBuilder builder(p, shape);
  Tensor contiguous_logsumexp;
  describe(p, builder, rng_state, ATTN_INPUTS, ATTN_OPTIONS);
  describe_saved(p, builder, contiguous_logsumexp, ATTN_SAVED);
  describe_tangents(p.t, builder, ATTN_TANGENTS);
  builder.add(p.grad_output, grad_output);
  builder.add(p.tangent_output, tangent_output);
  if (tangent_residual.dim() > 1) builder.add(p.tangent_residual, tangent_residual);
  const Tensor moved = tangent_logsumexp.contiguous();
  p.tangent_logsumexp = moved.const_data_ptr();
  return gradients(p, builder, kernels().second, shape, ATTN_INPUTS, grad_input_mask);
}

// ---------------------------------------------------------------------------------------------------------------
// Tangent

Tensors3 tangent_cpu(ATTN_INPUTS_ARGS, ATTN_SAVED_ARGS, ATTN_TANGENTS_ARGS, ATTN_OPTIONS_ARGS) {
  const char* op = "attn::_sdpa_tangent";
  const Shape shape = validate(ATTN_INPUTS, ATTN_OPTIONS);
  validate_saved(op, shape, query, dropout_p, ATTN_SAVED);
  validate_tangents(op, ATTN_INPUTS, ATTN_TANGENTS);

  TangentParams p;
  ProblemBuilder builder(p, shape);
  Tensor contiguous_logsumexp;
  const Tensor tangent_output = empty_output(shape, query);
  const Tensor tangent_logsumexp = empty_logsumexp(shape, query);
  const Tensor tangent_residual = empty_residual(tangent_output);
  describe(p, builder, rng_state, ATTN_INPUTS, ATTN_OPTIONS);
  describe_saved(p, builder, contiguous_logsumexp, ATTN_SAVED);
  describe_tangents(p.t, builder, ATTN_TANGENTS);
  builder.add_result(p.tangent_output, tangent_output);
  if (tangent_residual.dim() > 1) builder.add_result(p.tangent_residual, tangent_residual);
  p.tangent_logsumexp = tangent_logsumexp.mutable_data_ptr();
  if (!no_rows(p)) {
    builder.merge_batch_dims();
    p.rows_per_task = kRowTile;
    const TangentKernels& k = kernels().tangent;
    run_tasks(p.tasks(), 4 * product_flops(p), k.workspace(p), [&](int64_t task, char* own) { k.run(p, task, own); });
  }
  return {tangent_output, tangent_logsumexp, tangent_residual};
}

}  // namespace

TORCH_LIBRARY_IMPL(attn, CPU, m) {
  m.impl("sdpa", sdpa_cpu);
  m.impl("_sdpa_forward", forward_cpu);
  m.impl("_sdpa_backward", backward_cpu);
  m.impl("_sdpa_tangent", tangent_cpu);
  m.impl("_sdpa_second", second_cpu);
}

}  // namespace attn
