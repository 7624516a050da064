// The one argument checker, used by every device, by Meta and by autograd, and the shapes that follow from the
// arguments. Sizes are symbolic, so that the same code serves dynamic shapes.
#pragma once

#include "ops.h"

namespace attn {

// One call after broadcasting: query [*batch, heads, L, E], key [*batch, key_heads, S, E],
// value [*batch, value_heads, S, Ev], scores [*batch, heads, L, S]. Tensors of two dimensions have one head.
struct Shape {
  int64_t dims = 0;  // of the output
  c10::SymDimVector batch;
  c10::SymInt heads = 1, key_heads = 1, value_heads = 1;
  c10::SymInt queries, keys, head_dim, value_dim;

  c10::SymDimVector expanded(const c10::SymInt& tensor_heads, const c10::SymInt& rows, const c10::SymInt& cols) const;
  c10::SymDimVector output() const { return expanded(heads, queries, value_dim); }
  c10::SymDimVector logsumexp() const { return expanded(heads, queries, 2); }
};

// Throws c10::Error naming the argument, what it was and what is allowed.
Shape validate(ATTN_INPUTS_ARGS, ATTN_OPTIONS_ARGS);

// The same for what the derivatives take besides. `op` is named in the error.
void validate_saved(const char* op, const Shape& shape, const at::Tensor& query, double dropout_p, ATTN_SAVED_ARGS);
void validate_rng_state(const char* op, const at::Tensor& rng_state, const Shape& shape, const at::Tensor& query,
                        double dropout_p);
void validate_like_output(const char* op, const char* name, const at::Tensor& t, const Shape& shape,
                          const at::Tensor& query);
void validate_tangents(const char* op, ATTN_INPUTS_ARGS, ATTN_TANGENTS_ARGS);
void validate_moved(const char* op, const Shape& shape, const at::Tensor& query, ATTN_MOVED_ARGS);
void validate_wanted(const char* op, const std::optional<at::Tensor>& attn_mask, Wanted wanted);

// Results, uninitialised. The output's layout follows the query's: a [B, L, H, D] view stays one.
at::Tensor empty_output(const Shape& shape, const at::Tensor& query);
at::Tensor empty_logsumexp(const Shape& shape, const at::Tensor& query);
at::Tensor empty_residual(const at::Tensor& output);
at::Tensor empty_gradient(const at::Tensor& input);
// int64 (seed, offset, period), see params.h; empty without dropout.
at::Tensor empty_rng_state(const at::Tensor& query, double dropout_p);

// 1 / sqrt(head_dim) where not given; scores of vectors without entries are 0 with any scale.
double scale_or_default(std::optional<double> scale, int64_t head_dim);

}  // namespace attn
