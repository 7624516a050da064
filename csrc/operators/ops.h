// The operators as C++ types (operator.h), the structs of their results, and the structs of their arguments other than
// Call. schema.cpp has the schemas of the operators and says what they compute.
#pragma once

#include "attn/sdpa.h"
#include "operators/call.h"

namespace attn {

// The results of sdpa_stats.
struct Statistics : Stats {
  static auto fields(auto& r) { return std::tie(r.largest_score, r.entropy, r.logsumexp, r.received_weight); }
};

// Two numbers for every row of scores, [*batch, heads, L], in the compute dtype.
struct RowResults {
  at::Tensor logsumexp;  // includes the sink
  at::Tensor max_score;  // without the sink; has no derivative

  static auto fields(auto& r) { return std::tie(r.logsumexp, r.max_score); }
};
// The results of attention.
struct OutputAndRows {
  at::Tensor output;  // [*batch, heads, L, Ev]
  RowResults rows;

  static auto fields(auto& r) { return std::tuple_cat(std::tie(r.output), RowResults::fields(r.rows)); }
};

// The results of sdpa_with_weights.
struct OutputAndWeights {
  at::Tensor output;   // [*batch, heads, L, Ev]
  at::Tensor weights;  // [*batch, heads, L, S], before dropout
  at::Tensor scores;   // [*batch, heads, L, S]

  static auto fields(auto& r) { return std::tie(r.output, r.weights, r.scores); }
};
// Which of them are computed.
struct WantedWeights {
  bool mean = false;  // whether weights are averaged over the heads: [*batch, L, S]
  bool scores = true;
  bool output = false;
};

// The results of the forward, which the derivatives use.
struct Saved {
  at::Tensor output;     // [*batch, heads, L, Ev]
  at::Tensor logsumexp;  // [*batch, heads, L, 2]
  at::Tensor rng_state;  // [3], or [*batch, 1, 1, 3] under vmap; [0] without dropout
  at::Tensor residual;   // [*batch, heads, L, Ev] if there is one (validate.h), else [0]

  static constexpr const char* kNames[] = {"output", "logsumexp", "rng_state", "residual"};
  static auto fields(auto& s) { return std::tie(s.output, s.logsumexp, s.rng_state, s.residual); }
};

// All results of the forward. The results for rows are empty, [0], if they are not wanted.
struct ForwardResults {
  Saved saved;
  RowResults rows;

  static auto fields(auto& r) { return std::tuple_cat(Saved::fields(r.saved), RowResults::fields(r.rows)); }
};

// u, the gradients of the output and of the rows' logsumexp. The gradient of the logsumexp is absent if it is zero.
struct GradResults {
  at::Tensor output;
  std::optional<at::Tensor> logsumexp;  // [*batch, heads, L]

  static auto fields(auto& u) { return std::tie(u.output, u.logsumexp); }
};

// The derivatives of the forward's results along a direction. Each has the shape of its result in Saved.
struct TangentResults {
  at::Tensor output, logsumexp, residual;

  static auto fields(auto& r) { return std::tie(r.output, r.logsumexp, r.residual); }
};

using SdpaOp = Operator<"attn::sdpa", at::Tensor(Builtin)>;
using AttentionOp = Operator<"attn::attention", OutputAndRows(WithoutProgram)>;
using FlexOp = Operator<"attn::flex_attention", OutputAndRows(Flex)>;
using OverProcessesOp = Operator<"attn::_attend_over_processes", OutputAndRows(WithoutProgram)>;
using VarlenOp = Operator<"attn::varlen_attention", OutputAndRows(Varlen)>;
using WeightsOp = Operator<"attn::sdpa_with_weights", OutputAndWeights(Unpacked)>;
using ModuleOp = Operator<"attn::_sdpa_and_weights", std::tuple<at::Tensor, at::Tensor>(Unpacked, bool)>;
using StatsOp = Operator<"attn::sdpa_stats", Statistics(Scores)>;
// The arguments of _sdpa_forward after the call are rng_state and exact_residual (core/params.h).
using ForwardOp = Operator<"attn::_sdpa_forward", ForwardResults(Call, std::optional<at::Tensor>, bool)>;
using BackwardOp = Operator<"attn::_sdpa_backward", Gradients(GradResults, Saved, Call, Wanted)>;
using TangentOp = Operator<"attn::_sdpa_tangent", TangentResults(Saved, Direction, Call)>;
using SecondOp = Operator<"attn::_sdpa_second", Gradients(GradResults, Saved, Direction, TangentResults, Call, Wanted)>;
using LogsumexpOfPairOp = Operator<"attn::_logsumexp_of_pair", at::Tensor(at::Tensor, Call)>;
using PairOfLogsumexpOp = Operator<"attn::_pair_of_logsumexp", at::Tensor(at::Tensor, at::Tensor, Call)>;

// Whether `Op` may return the rows' results beside the output.
template <class Op>
constexpr bool kWithRows = !std::is_same_v<Op, SdpaOp>;
// Makes the result of `Op`, which is sdpa, attention or flex_attention.
template <class Op>
auto results_for(const at::Tensor& output, const RowResults& rows) {
  if constexpr (kWithRows<Op>)
    return OutputAndRows{output, rows};
  else
    return output;
}
inline Call without_rows(Call call) {
  call.with_rows = false;
  return call;
}
// Computes `Op` by _sdpa_forward, which has derivatives.
template <class Op>
auto attend_by_forward(Call call, const std::optional<at::Tensor>& rng_state = std::nullopt) {
  call.with_rows = call.with_rows && kWithRows<Op>;
  const auto [saved, rows] = ForwardOp::call(call, rng_state, /*exact_residual=*/false);
  return results_for<Op>(saved.output, rows);
}

// Returns the output. Calls sdpa if sdpa can take the call, so that an exported program contains sdpa and not the more
// general attention.
inline at::Tensor attend(const Call& call) {
  return is_builtin(call) ? SdpaOp::call(call) : AttentionOp::call(without_rows(call)).output;
}

}  // namespace attn
