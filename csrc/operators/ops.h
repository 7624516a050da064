// The operators as C++ calls them, and the structs that they take and return. Their schemas, and what they compute,
// stand in schema.cpp.
#pragma once

#include <array>
#include <optional>

#include "attn/sdpa.h"
#include "operators/operator.h"

namespace attn {

struct Inputs {
  at::Tensor query;                     // [*batch, heads, L, E]
  at::Tensor key;                       // [*batch, key_heads, S, E]
  at::Tensor value;                     // [*batch, value_heads, S, Ev]
  std::optional<at::Tensor> attn_mask;  // broadcasts to [*batch, heads, L, S]: boolean, or floating and differentiable

  static auto fields(auto& x) { return std::tie(x.query, x.key, x.value, x.attn_mask); }
};

// The options that are no tensors: they have no derivatives. (attn::Options, with the mask, is what users name.)
struct PlainOptions {
  double dropout_p = 0;
  bool is_causal = false;
  std::optional<double> scale;
  bool enable_gqa = false;

  static auto fields(auto& o) { return std::tie(o.dropout_p, o.is_causal, o.scale, o.enable_gqa); }
};

// What scores are made of: the arguments of sdpa_stats, without a value and without dropout.
struct QueryAndKey {
  at::Tensor query;
  at::Tensor key;
  std::optional<at::Tensor> attn_mask;

  static auto fields(auto& x) { return std::tie(x.query, x.key, x.attn_mask); }
  // For what is written for sdpa. The value is never read, but its heads count: as many as the key's.
  Inputs inputs() const { return {query, key, key, attn_mask}; }
};
struct ScoreOptions {
  bool is_causal = false;
  std::optional<double> scale;
  bool enable_gqa = false;

  static auto fields(auto& o) { return std::tie(o.is_causal, o.scale, o.enable_gqa); }
  PlainOptions options() const { return {/*dropout_p=*/0, is_causal, scale, enable_gqa}; }
};

// The results of sdpa_stats.
struct Statistics : Stats {
  static auto fields(auto& r) { return std::tie(r.largest_score, r.entropy, r.logsumexp, r.received_weight); }
};

// The results of sdpa_with_weights.
struct OutputAndWeights {
  at::Tensor output;   // [*batch, heads, L, Ev]
  at::Tensor weights;  // [*batch, heads, L, S]
  at::Tensor scores;   // [*batch, heads, L, S]

  static auto fields(auto& r) { return std::tie(r.output, r.weights, r.scores); }
};

// The results of the forward, which the derivatives use.
struct Saved {
  at::Tensor output;     // [*batch, heads, L, Ev]
  at::Tensor logsumexp;  // [*batch, heads, L, 2]
  at::Tensor rng_state;  // [3], or [*batch, 1, 1, 3] under vmap; [0] without dropout
  at::Tensor residual;   // [*batch, heads, L, Ev] where there is one (validate.h), else [0]

  static auto fields(auto& s) { return std::tie(s.output, s.logsumexp, s.rng_state, s.residual); }
};

// Weights and scores before dropout: the results of _sdpa_weights, and what is wanted of them.
struct WeightsAndScores {
  at::Tensor weights;  // [*batch, heads, L, S], or their mean over the heads [*batch, L, S]
  at::Tensor scores;   // [*batch, heads, L, S], else [0]
  at::Tensor output;   // [*batch, heads, L, Ev], else [0]

  static auto fields(auto& r) { return std::tie(r.weights, r.scores, r.output); }
};
struct WantedWeights {
  bool mean = false;  // over the heads
  bool scores = true;
  bool output = false;

  static auto fields(auto& w) { return std::tie(w.mean, w.scores, w.output); }
};

// The results of _sdpa_and_weights.
struct OutputAndMean {
  at::Tensor output;   // [*batch, heads, L, Ev]
  at::Tensor weights;  // as those of WeightsAndScores

  static auto fields(auto& r) { return std::tie(r.output, r.weights); }
};

// A direction in the space of inputs, with the fields of Inputs: each tensor has the shape of its input, and is absent
// where it is zero.
struct Direction {
  std::optional<at::Tensor> query, key, value, attn_mask;

  static auto fields(auto& t) { return std::tie(t.query, t.key, t.value, t.attn_mask); }
};

// The derivative of the forward's results along a direction, each with the shape that it has in Saved.
struct TangentResults {
  at::Tensor output, logsumexp, residual;

  static auto fields(auto& r) { return std::tie(r.output, r.logsumexp, r.residual); }
};

// Gradients, with the fields of Inputs: each has the shape of its input, and is undefined where not wanted.
struct Gradients {
  at::Tensor query, key, value, attn_mask;

  static auto fields(auto& g) { return std::tie(g.query, g.key, g.value, g.attn_mask); }
};
using Wanted = std::array<bool, kFields<Inputs>>;  // in the same order
static_assert(kFields<Direction> == kFields<Inputs> && kFields<Gradients> == kFields<Inputs>);

using SdpaOp = Operator<"attn::sdpa", at::Tensor(Inputs, PlainOptions)>;
using WeightsOp = Operator<"attn::sdpa_with_weights", OutputAndWeights(Inputs, PlainOptions)>;
using WeightsKernelOp = Operator<"attn::_sdpa_weights", WeightsAndScores(Inputs, PlainOptions, WantedWeights)>;
using ModuleOp = Operator<"attn::_sdpa_and_weights", OutputAndMean(Inputs, PlainOptions, bool)>;
using StatsOp = Operator<"attn::sdpa_stats", Statistics(QueryAndKey, ScoreOptions)>;
// Last comes rng_state.
using ForwardOp = Operator<"attn::_sdpa_forward", Saved(Inputs, PlainOptions, std::optional<at::Tensor>)>;
// First comes grad_output, here and in SecondOp.
using BackwardOp = Operator<"attn::_sdpa_backward", Gradients(at::Tensor, Inputs, Saved, PlainOptions, Wanted)>;
using TangentOp = Operator<"attn::_sdpa_tangent", TangentResults(Inputs, Saved, Direction, PlainOptions)>;
using SecondOp = Operator<"attn::_sdpa_second",
                          Gradients(at::Tensor, Inputs, Saved, Direction, TangentResults, PlainOptions, Wanted)>;

}  // namespace attn
