// sdpa_with_weights: the output of sdpa beside the scores and weights it went through, composed of ATen operators, so
// that every derivative and every device comes from them.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <limits>

#include "validate.h"

namespace attn {
namespace {

// Brings key or value heads to the query's: each is repeated for its group of query heads.
at::Tensor repeat_heads(const at::Tensor& t, const Shape& shape) {
  if (t.dim() < 3) return t;
  const c10::SymInt heads = t.sym_size(-3);
  if (heads == shape.heads || heads == 1) return t;
  return t.repeat_interleave_symint(shape.heads / heads, -3);
}

Tensors3 sdpa_with_weights(ATTN_ARGUMENTS) {
  const Shape shape = validate(ATTN_PASS);
  at::Tensor output = sdpa_op().call(ATTN_PASS);

  const double minus_infinity = -std::numeric_limits<double>::infinity();
  const double s = scale_or_default(scale, shape.head_dim == 0 ? 0 : shape.head_dim.guard_int(__FILE__, __LINE__));
  at::Tensor scores = at::matmul(query * s, repeat_heads(key, shape).transpose(-2, -1));
  scores = scores.expand_symint(shape.expanded(shape.heads, shape.queries, shape.keys));
  if (attn_mask) {
    const bool boolean = attn_mask->scalar_type() == at::kBool;
    const at::Tensor masked = boolean ? attn_mask->logical_not() : attn_mask->eq(minus_infinity);
    if (!boolean) scores = scores + attn_mask->to(scores.scalar_type());
    scores = scores.masked_fill(masked, minus_infinity);
  }
  if (is_causal) {
    const at::Tensor seen = at::ones_symint({shape.queries, shape.keys}, query.options().dtype(at::kBool)).tril();
    scores = scores.masked_fill(seen.logical_not(), minus_infinity);
  }
  // softmax where a fully masked row gives 0 and finite gradients
  const at::Tensor empty_row = scores.eq(minus_infinity).all(-1, /*keepdim=*/true);
  at::Tensor weights = at::softmax(scores.masked_fill(empty_row, 0), -1).masked_fill(empty_row, 0);
  return {output, weights, scores};
}

}  // namespace

TORCH_LIBRARY_IMPL(attn, CompositeImplicitAutograd, m) { m.impl("sdpa_with_weights", sdpa_with_weights); }

}  // namespace attn
