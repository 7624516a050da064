// Checks the arguments of a call, and computes the shapes of the call. The functions of run.cpp call validate() below
// autograd, for every device and for Meta. vmap and the formulas call it, too. Sizes are symbolic (SymInt), so that the
// same code also checks dynamic shapes.
#pragma once

#include "operators/ops.h"
#include "operators/programs/compile.h"

namespace attn {

// One call after broadcasting: query [*batch, heads, L, E], key [*batch, key_heads, S, E],
// value [*batch, value_heads, S, Ev], scores [*batch, heads, L, S]. Tensors of two dimensions have one head.
struct Shape {
  const char* op = nullptr;  // the operator's name, with which error messages begin
  int64_t dims = 0;          // of the output
  c10::SymDimVector batch;
  c10::SymInt heads = 1, key_heads = 1, value_heads = 1;
  // If sequences are packed: queries is T_q, and keys is T_k or, with a block_table, page_size.
  c10::SymInt queries, keys, head_dim, value_dim;
  std::optional<c10::SymInt> sequences;  // the number of packed sequences
  Programs programs;                     // the functions of the pair, compiled

  c10::SymDimVector expanded(const c10::SymInt& tensor_heads, const c10::SymInt& rows, const c10::SymInt& cols) const;
  c10::SymDimVector output() const { return expanded(heads, queries, value_dim); }
  c10::SymDimVector logsumexp() const { return expanded(heads, queries, 2); }
  // The sizes of a tensor with one number for each query or key of a head: [*batch, heads, length].
  c10::SymDimVector numbers(const c10::SymInt& length) const;
  // The sizes of a tensor with one number per head: [*batch, heads]. If the tensors of the call have no dimension of
  // heads, `heads` is 1.
  c10::SymDimVector of_heads() const;
  // The sizes of a tensor with one number per batch entry: [*batch], or [*batch, sequences].
  c10::SymDimVector of_entries() const;
};

// Checks a call of `op`. Throws a c10::Error that names `op`, the argument, its value and what is allowed.
// ValidatedCall does not know the operator: it passes the name of varlen_attention if sequences are packed, of
// flex_attention if there is a program, else of sdpa.
Shape validate(const char* op, const Call& call);

inline void check_allowed(const char* op, const char* name, std::optional<double> number, const Allowed& allowed) {
  TORCH_CHECK(!number || allowed.holds(*number), op, ": ", name, " is ", *number, "; it must be ", allowed.text);
}

// `of` is the key or the value. Checks that `scale` is given and fits if `of` has 8-bit numbers, and that no `scale` is
// given otherwise.
void check_scale_of_8_bits(const char* op, const char* name, const std::optional<at::Tensor>& scale,
                           const at::Tensor& of);

// Validates a call in its constructor. The member functions check the other arguments of the private operators.
struct ValidatedCall {
  const Call& call;
  const Shape shape = validate(call.is_packed()     ? VarlenOp::name
                               : call.has_program() ? FlexOp::name
                                                    : SdpaOp::name,
                               call);

  void check(const GradResults& u) const;
  void check(const Saved& s) const;
  void check(const Direction& d) const;
  void check(const TangentResults& t) const;
  void check(Wanted w) const;
  void check_rng_state(const at::Tensor& t) const;
  void refuse_derivatives() const;  // for a call that is, or will be, differentiated: pages and 8 bits have none

 private:
  void check_exact(const char* name, const at::Tensor& t, c10::SymIntArrayRef sizes, at::ScalarType dtype) const;
  void check_output(const char* name, const at::Tensor& t) const;
  void check_logsumexp(const char* name, const at::Tensor& t) const;
  void check_residual(const char* name, const at::Tensor& t) const;
};

// Returns the element at place i, in contiguous order, of a tensor of integers in a CPU's memory. Reads the memory
// without an operator, because transforms of torch.func would intercept an operator.
inline int64_t number_at(const at::Tensor& t, int64_t i) {
  int64_t at = 0;
  for (int64_t d = t.dim(); d-- > 0; i /= t.size(d)) at += i % t.size(d) * t.stride(d);
  return t.scalar_type() == at::kInt ? t.const_data_ptr<int32_t>()[at] : t.const_data_ptr<int64_t>()[at];
}

// The type that kernels compute in. It is also the type of workspaces and statistics.
at::ScalarType compute_dtype(const at::Tensor& query);
at::TensorOptions compute_options(const at::Tensor& query);

// Allocate results, uninitialised. The output's strides follow the query's: if the query is a transposed [B, L, H, D]
// tensor, so is the output.
at::Tensor empty_output(const Shape& shape, const at::Tensor& query);
at::Tensor empty_numbers(const c10::SymDimVector& sizes, const at::Tensor& query);  // in the compute dtype
// Whether the rounding error of an output of a half type (the residual) is kept for derivatives. It is kept if there is
// a floating mask, slopes, sinks or a score_mod, because the error matters in the gradients of these arguments. In
// other gradients it matters less than the rounding errors of the weights. The error is also kept with dropout. Without
// the residual, the scores of a row with one key would get gradients that come from the rounding of value / (1 -
// dropout_p). The true gradients of these scores are 0.
bool has_residual(const Call& call);
at::Tensor empty_residual(const at::Tensor& output, const Call& call);

}  // namespace attn
