#include "operators/problem.h"

#include <ATen/ATen.h>

#include <cmath>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include "operators/switches.h"

namespace attn {

namespace {

int64_t concrete(const c10::SymInt& size) { return size.guard_int(__FILE__, __LINE__); }

int factor_bits_of(at::ScalarType dtype, at::ScalarType mask_dtype) {
  switch (dtype) {
    case at::kDouble:
      return 53;
    case at::kFloat:  // as torch.set_float32_matmul_precision sets it for matrix products
      switch (at::globalContext().float32Precision(at::Float32Backend::MKLDNN, at::Float32Op::MATMUL)) {
        case at::Float32Precision::BF16:
          return 8;
        case at::Float32Precision::TF32:
          return 16;
        default:
          return 24;
      }
    case at::kHalf:
      return 16;
    default:  // bfloat16; but a float32 mask and its gradient need weights that are not rounded to bfloat16
      return mask_dtype == at::kFloat ? 16 : 8;
  }
}

}  // namespace

DType dtype_of(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kDouble:
      return DType::f64;
    case at::kFloat:
      return DType::f32;
    case at::kBFloat16:
      return DType::bf16;
    case at::kHalf:
      return DType::f16;
    case at::kChar:
      return DType::i8;
    case at::kFloat8_e4m3fn:
      return DType::e4m3;
    case at::kBool:
      return DType::boolean;
    case at::kLong:
      return DType::i64;
    default:
      TORCH_INTERNAL_ASSERT(false, "attn: no kernel takes ", tensor.scalar_type());
  }
}

// With a head_dim of 0 all products are 0 whatever the scale is, and the default scale would be infinite. The scale is
// then 1. A cap above all numbers of the compute dtype counts as no cap. A positive cap below the smallest normal
// number becomes that number, because products are divided by the cap.
void describe_scores(Problem& problem, const Call& call) {
  using Single = std::numeric_limits<float>;
  const int64_t head_dim = concrete(call.query.sym_size(-1));
  problem.scale = head_dim == 0 ? 1 : call.scale.value_or(1 / std::sqrt(static_cast<double>(head_dim)));
  const bool is_single = compute_dtype(call.query) == at::kFloat;
  if (call.softcap != 0 && !(is_single && call.softcap > Single::max()))
    problem.softcap = std::max(call.softcap, is_single ? double{Single::min()} : std::numeric_limits<double>::min());
  problem.has_mask = call.attn_mask && !call.score_mod;
}

ProblemBuilder::ProblemBuilder(Problem& problem, const Shape& shape, const Call& call, const at::Tensor& rng_state,
                               WriteSequences* write)
    : shape_(shape), query_(call.query), problem_(problem) {
  for (const auto& size : shape.of_entries()) batch_size_.push_back(concrete(size));
  problem.heads = concrete(shape.heads);
  problem.key_heads = concrete(shape.key_heads);
  problem.value_heads = concrete(shape.value_heads);
  problem.queries = concrete(shape.queries);
  problem.keys = concrete(shape.keys);
  problem.head_dim = concrete(shape.head_dim);
  problem.value_dim = concrete(shape.value_dim);
  for (const int64_t size : {problem.head_dim, problem.value_dim})
    TORCH_CHECK(size < kMaxHeadDim, shape.op, ": the head_dim of query and key is ", problem.head_dim,
                ", that of value ", problem.value_dim, "; both must be below 2^32");
  problem.batch = c10::multiply_integers(batch_size_);
  if (problem.key_heads > 0 && problem.value_heads > 0)
    problem.group = std::gcd(problem.heads / problem.key_heads, problem.heads / problem.value_heads);

  const auto& [query, key, value, attn_mask] = std::tie(call.query, call.key, call.value, call.attn_mask);
  describe_scores(problem, call);
  problem.visibility.left = call.window_size[0];
  problem.visibility.right = call.is_causal ? 0 : call.window_size[1];
  if (call.is_packed()) {
    add_sequences(call, write);
  } else {
    problem.visibility.offsets = of_entries(call.query_offset);
    problem.visibility.key_lengths = of_entries(call.key_lengths);
  }
  problem.alibi_slopes = of_heads(call.alibi_slopes);
  problem.sinks = of_heads(call.sinks);
  if (call.has_program()) program.emplace(problem, shape, call, batch_size_);
  problem.invariant = is_invariant();
  problem.factor_bits = factor_bits_of(query.scalar_type(), problem.has_mask ? attn_mask->scalar_type() : at::kBool);
  add(problem.query, query);
  add(problem.key, key, Axis::keys);
  add(problem.value, value, Axis::keys);
  if (const auto& table = call.block_table) {
    problem.paging = {.table = table->const_data_ptr(),
                      .is_wide = table->scalar_type() == at::kLong,
                      .per_entry = table->stride(0),
                      .per_page = table->stride(1),
                      .page_size = key.size(-2),
                      .pages = key.size(0)};
    problem.key.page = key.stride(0);
    problem.value.page = value.stride(0);
  }
  if (attn_mask) add(problem.mask, *attn_mask);
  if (call.dropout_p == 0) return;
  problem.has_dropout = true;
  add(problem.rng, rng_state, Axis::none);
  problem.keep_below = static_cast<uint64_t>(std::llround((1 - call.dropout_p) * 0x1p32));
  problem.keep_scale = call.dropout_p == 1 ? 0 : 1 / (1 - call.dropout_p);
}

void ProblemBuilder::add_sequences(const Call& call, WriteSequences* write) {
  const int64_t tokens = problem_.queries, all_keys = problem_.keys;  // in pages: page_size
  int64_t room = all_keys;                                            // for the keys of a sequence
  if (call.block_table && __builtin_mul_overflow(call.block_table->size(1), all_keys, &room))
    room = std::numeric_limits<int64_t>::max();
  if (call.block_table && call.key.size(0) == 0) room = 0;
  problem_.sequences = batch_size_.back();
  problem_.tokens = tokens;
  problem_.queries = std::clamp<int64_t>(concrete(call.max_q), 0, tokens);
  problem_.keys = std::clamp<int64_t>(concrete(call.max_k), 0, room);
  const int64_t batch = problem_.batch;
  const auto whole_numbers = [&](const std::optional<at::Tensor>& t, bool of_entries) {
    if (!t) return WholeNumbers{};
    return WholeNumbers{contiguous(of_entries ? t->expand(batch_size_) : *t), t->scalar_type() == at::kLong};
  };
  const at::Tensor written = at::empty({5, batch}, query_.options().dtype(at::kLong));
  const auto* const numbers = static_cast<const int64_t*>(contiguous(written));
  write({whole_numbers(call.cu_seq_q, false), whole_numbers(call.block_table ? std::nullopt : call.cu_seq_k, false),
         whole_numbers(call.key_lengths, true), whole_numbers(call.query_offset, true), batch, problem_.sequences,
         tokens, all_keys, written.mutable_data_ptr<int64_t>()},
        query_);
  problem_.query_starts = numbers;
  problem_.visibility.query_lengths = numbers + batch;
  if (!call.block_table) {
    problem_.key_starts = numbers + 2 * batch;
    problem_.key_tokens = all_keys;
  }
  problem_.visibility.key_lengths = numbers + 3 * batch;
  problem_.visibility.offsets = numbers + 4 * batch;
}

void ProblemBuilder::add(Operand& operand, const at::Tensor& tensor, Axis axis) {
  add(operand, tensor, const_cast<void*>(tensor.const_data_ptr()), axis);  // kernels only read inputs
}

void ProblemBuilder::add_result(Operand& operand, const at::Tensor& tensor, Axis axis) {
  add(operand, tensor, tensor.mutable_data_ptr(), axis);
}

void ProblemBuilder::add_scale_of_8_bits(Operand& operand, const std::optional<at::Tensor>& scale,
                                         const at::Tensor& of) {
  if (!scale) return;
  const at::Tensor of_rows = scale->expand(of.sizes().slice(0, of.dim() - 1)).unsqueeze(-1);
  add(operand, of_rows, Axis::keys);
  if (problem_.paging.table) operand.page = of_rows.stride(0);
}

const void* ProblemBuilder::contiguous(const at::Tensor& tensor) {
  at::Tensor& numbers = contiguous_.emplace_back(tensor.contiguous());
  // CUDA kernels read two float32 at once, so a view is copied if its address is not aligned to 8 bytes.
  if (reinterpret_cast<uintptr_t>(numbers.const_data_ptr()) % (2 * sizeof(float)) != 0) numbers = numbers.clone();
  return numbers.const_data_ptr();
}

const void* ProblemBuilder::of_heads(const std::optional<at::Tensor>& tensor) {
  if (!tensor) return nullptr;
  at::Tensor numbers = tensor->to(compute_dtype(query_)).expand_symint(shape_.of_heads());
  if (shape_.sequences) {  // one number per sequence and head
    auto sizes = shape_.of_entries();
    sizes.push_back(shape_.heads);
    numbers = numbers.unsqueeze(-2).expand_symint(sizes);
  }
  return contiguous(numbers);
}

const int64_t* ProblemBuilder::of_entries(const std::optional<at::Tensor>& tensor) {
  if (!tensor) return nullptr;
  return static_cast<const int64_t*>(contiguous(tensor->to(at::kLong).expand(batch_size_)));
}

void ProblemBuilder::add(Operand& operand, const at::Tensor& tensor, void* data, Axis axis) {
  const int64_t dims = tensor.dim();
  const auto stride = [&](int64_t dim_from_end) -> int64_t {
    const int64_t d = dims - dim_from_end;
    return d < 0 || tensor.size(d) == 1 ? 0 : tensor.stride(d);
  };
  operand.data = data;
  operand.dtype = dtype_of(tensor);
  operand.col = stride(1);
  operand.row = stride(2);
  operand.head = stride(3);
  operand.axis = axis;
  Strides strides{&operand, {}};
  const auto batch_dims = static_cast<int64_t>(shape_.batch.size());
  for (int64_t d = 0; d < batch_dims; ++d) strides.batch.push_back(stride(3 + batch_dims - d));
  if (shape_.sequences) strides.batch.push_back(0);
  operands_.push_back(std::move(strides));
}

void ProblemBuilder::merge_batch_dims() {
  int merged = 0;
  // Whether dimension d can be merged with the last kept dimension. In every operand, one stride must then serve both
  // dimensions.
  const auto mergeable = [&](size_t d) {
    return merged > 0 && std::all_of(operands_.begin(), operands_.end(), [&](const Strides& s) {
             return s.operand->batch[merged - 1] == s.batch[d] * batch_size_[d];
           });
  };
  for (size_t d = 0; d < batch_size_.size(); ++d) {
    if (batch_size_[d] == 1) continue;
    const bool merge = mergeable(d);
    TORCH_CHECK(merge || merged < kMaxBatchDims, shape_.op, ": the leading dimensions ", at::IntArrayRef(batch_size_),
                " of query, key, value, attn_mask and the results leave more than ", kMaxBatchDims,
                " after those that lie alike in memory are merged; .expand() the inputs to these dimensions and call "
                ".contiguous() on them");
    if (!merge) problem_.batch_size[merged++] = 1;
    problem_.batch_size[merged - 1] *= batch_size_[d];
    for (const Strides& s : operands_) s.operand->batch[merged - 1] = s.batch[d];
  }
  problem_.batch_dims = merged;
}

std::array<at::Tensor, 3> allocate_splits(ForwardParams& p, const at::Tensor& query) {
  if (p.splits == 1) return {};
  const auto options = compute_options(query);
  const int64_t rows = p.splits * number_of_rows(p);
  const int64_t columns = p.value_dim * (p.exact_residual ? 2 : 1);  // the residual of an output is beside it
  std::array<at::Tensor, 3> partial = {at::empty({rows, columns}, options), at::empty({rows, 2}, options)};
  p.partial_output = partial[0].mutable_data_ptr();
  p.partial_logsumexp = partial[1].mutable_data_ptr();
  if (p.max_score) {
    partial[2] = at::empty({rows}, options);
    p.partial_max = partial[2].mutable_data_ptr();
  }
  return partial;
}

std::array<at::Tensor, 3> allocate_partial(StatsParams& p, const at::Tensor& query) {
  const auto options = compute_options(query);
  const int64_t rows = number_of_rows(p);
  std::array<at::Tensor, 3> tensors = {at::empty({p.splits, rows, 4}, options), at::empty({rows, 2}, options)};
  p.partial = tensors[0].mutable_data_ptr();
  p.pairs = tensors[1].mutable_data_ptr();
  if (p.chunks > 1) {
    tensors[2] = at::empty({p.chunks, p.batch, p.heads, p.keys}, options);
    p.partial_received = tensors[2].mutable_data_ptr();
  }
  return tensors;
}

void plan_mask(BackwardParams& p) {
  if (!p.grad_mask.data) return;
  int64_t shared = 1;
  const auto visit = [&](int64_t extent, int64_t stride) {
    if (stride == 0) shared *= extent;
  };
  for (int d = 0; d < p.batch_dims; ++d)
    if (!counts_sequences(p, d)) visit(p.batch_size[d], p.grad_mask.batch[d]);
  visit(p.heads, p.grad_mask.head);
  const bool one_row = p.grad_mask.row == 0;
  p.mask_is_shared = shared > 1 || (one_row && p.queries > 1);
  p.mask_slices = p.batch * p.heads / shared;
  p.mask_row_tasks = one_row ? 1 : divide_up(p.queries, kScoreTile);
  p.mask_key_tasks = divide_up(p.keys, kScoreTile);
}

}  // namespace attn
