// These operators serve a call whose keys are divided among processes: each process computes a part of the call, and
// the parts are merged. The first operator converts a part's pair (core/params.h) to a logsumexp in float64. The second
// operator converts the merged logsumexp to a pair, which the derivatives of every part take.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <limits>

#include "core/score.h"
#include "operators/problem.h"

namespace attn {
namespace {

using at::Tensor;

// The factor that turns the first number of the CPU's pair into a score. It is rounded as the kernels round it. `p` has
// no sinks, because each process computes its part without sinks.
double unit_of_pair(const Call& call) {
  Problem p;
  describe_scores(p, call);
  p.mask.dtype = call.attn_mask && call.attn_mask->scalar_type() == at::kBool ? DType::boolean : DType::f32;
  p.alibi_slopes = call.alibi_slopes ? call.alibi_slopes->const_data_ptr() : nullptr;
  const bool is_double = compute_dtype(call.query) == at::kDouble;
  const bool is_product = is_double ? leaves_products<double>(p) : leaves_products<float>(p);
  const double slope = kLog2E * (is_product ? ScoreFunction<double>::of(p).slope() : 1);
  return (is_double ? slope : static_cast<float>(slope)) / kLog2E;
}

// [..., L, 2] -> float64 [..., L]
Tensor logsumexp_of_pair(const Tensor& pair, const Call& call) {
  const Tensor first = pair.select(-1, 0).to(at::kDouble), second = pair.select(-1, 1).to(at::kDouble);
  return call.query.is_cpu() ? first * unit_of_pair(call) + second / kLog2E : first + second;
}
// The inverse of logsumexp_of_pair(). Each of the merged calls returned a pair for every row. `reference` holds, for
// each row, the largest of the first numbers of these pairs. On the CPU `reference` becomes the first number of the
// result, so that the second number is small. If a sink is far above the scores, the merged logsumexp becomes the first
// number instead.
Tensor pair_of_logsumexp(const Tensor& logsumexp, const Tensor& reference, const Call& call) {
  const auto dtype = compute_dtype(call.query);
  const bool is_cpu = call.query.is_cpu();
  const double unit = is_cpu ? unit_of_pair(call) : 1;
  constexpr double kFarAbove = 64;  // a sink may be this far above the scores
  const Tensor value = logsumexp / unit;
  const Tensor near = is_cpu ? at::where((value - reference) * unit < kFarAbove, reference, value) : value;
  const Tensor first = near.masked_fill(logsumexp.isinf(), -std::numeric_limits<double>::infinity()).to(dtype);
  const Tensor rest = (logsumexp - first.to(at::kDouble) * unit) * (is_cpu ? kLog2E : 1);
  const Tensor second = rest.masked_fill(logsumexp.isinf(), 0).to(dtype);
  return at::stack({first, second}, -1);
}

}  // namespace

TORCH_LIBRARY_IMPL(attn, CompositeExplicitAutograd, m) {
  m.impl("_logsumexp_of_pair", LogsumexpOfPairOp::kernel<logsumexp_of_pair>);
  m.impl("_pair_of_logsumexp", PairOfLogsumexpOp::kernel<pair_of_logsumexp>);
}

}  // namespace attn
