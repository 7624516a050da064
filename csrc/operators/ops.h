// The operators as C++ calls them, and the structs that they take and return. Their schemas, and what they compute,
// stand in schema.cpp.
#pragma once

#include <array>
#include <optional>

#include "attn/sdpa.h"
#include "operators/operator.h"

namespace attn {

// The inputs that may have derivatives.
struct Inputs {
  at::Tensor query;                        // [*batch, heads, L, E]
  at::Tensor key;                          // [*batch, key_heads, S, E]
  at::Tensor value;                        // [*batch, value_heads, S, Ev]
  std::optional<at::Tensor> attn_mask;     // broadcasts to [*batch, heads, L, S]: boolean, or floating
  std::optional<at::Tensor> alibi_slopes;  // broadcast to [*batch, heads]
  std::optional<at::Tensor> sinks;         // as they

  static constexpr const char* kNames[] = {"query", "key", "value", "attn_mask", "alibi_slopes", "sinks"};
  static auto fields(auto& x) { return std::tie(x.query, x.key, x.value, x.attn_mask, x.alibi_slopes, x.sinks); }
};
// Those that the built-in takes, too.
struct BuiltinInputs : Inputs {
  static auto fields(auto& x) { return std::tie(x.query, x.key, x.value, x.attn_mask); }
};
// The others, as the schemas of those operators have them that users call: last.
struct HeadInputs {
  std::optional<at::Tensor> alibi_slopes, sinks;

  static auto fields(auto& x) { return std::tie(x.alibi_slopes, x.sinks); }
};

// Sequences of different lengths, one behind the other: query [*batch, heads, T_q, E], key [*batch, key_heads, T_k, E],
// value likewise, attn_mask [*batch, heads or 1, T_q, max_k]. Sequence n has the queries from cu_seq_q[n] to
// cu_seq_q[n + 1] and the keys from cu_seq_k[n] to cu_seq_k[n + 1], which nobody else sees. There query_offset and
// key_lengths have a number for each sequence; without an offset its last query stands at its last key.
struct Packing {
  std::optional<at::Tensor> cu_seq_q, cu_seq_k;  // integers [N + 1], from 0, not decreasing; absent: nothing is packed
  c10::SymInt max_q = 0, max_k = 0;              // no sequence has more queries, or keys
  // Integers [N, most pages] in place of cu_seq_k: key and value are pools [pages, heads, page_size, E or Ev], and row
  // r of sequence n is row r % page_size of page block_table[n][r / page_size]. key_lengths are needed.
  std::optional<at::Tensor> block_table;

  static auto fields(auto& p) { return std::tie(p.cu_seq_q, p.cu_seq_k, p.max_q, p.max_k, p.block_table); }
};

// What has no derivatives. (attn::Options, with the mask, is what users name.)
struct CallOptions {
  double dropout_p = 0;
  bool is_causal = false;
  std::optional<double> scale;
  bool enable_gqa = false;
  double softcap = 0;                        // 0: none
  std::array<int64_t, 2> window = {-1, -1};  // keys to the left and right of the query's position; -1: all
  std::optional<at::Tensor> query_offset;    // integers that broadcast to [*batch]: the position of query 0
  std::optional<at::Tensor> key_lengths;     // as they: keys from there on are hidden
  Packing packing;

  bool packed() const { return packing.cu_seq_q.has_value(); }
  static auto dense_fields(auto& o) {
    return std::tie(o.dropout_p, o.is_causal, o.scale, o.enable_gqa, o.softcap, o.window, o.query_offset,
                    o.key_lengths);
  }
  static auto fields(auto& o) { return std::tuple_cat(dense_fields(o), Packing::fields(o.packing)); }
};
// Those of operators that take no packed sequences.
struct DenseOptions : CallOptions {
  static auto fields(auto& o) { return dense_fields(o); }
};
struct BuiltinOptions : CallOptions {
  static auto fields(auto& o) { return std::tie(o.dropout_p, o.is_causal, o.scale, o.enable_gqa); }
};

// What scores are made of: the arguments of sdpa_stats, without a value and without dropout.
struct QueryAndKey {
  at::Tensor query;
  at::Tensor key;
  std::optional<at::Tensor> attn_mask;

  static auto fields(auto& x) { return std::tie(x.query, x.key, x.attn_mask); }
};
struct ScoreOptions : CallOptions {
  static auto fields(auto& o) {
    return std::tie(o.is_causal, o.scale, o.enable_gqa, o.softcap, o.window, o.query_offset, o.key_lengths);
  }
};

// As the private operators take them. The value of statistics is never read, but its heads count: as many as the key's.
inline Inputs all_inputs(const BuiltinInputs& x, const HeadInputs& h) {
  return {x.query, x.key, x.value, x.attn_mask, h.alibi_slopes, h.sinks};
}
inline Inputs all_inputs(const QueryAndKey& x, const HeadInputs& h) {
  return {x.query, x.key, x.key, x.attn_mask, h.alibi_slopes, h.sinks};
}

// The results of sdpa_stats.
struct Statistics : Stats {
  static auto fields(auto& r) { return std::tie(r.largest_score, r.entropy, r.logsumexp, r.received_weight); }
};

// Two numbers of every row of scores, [*batch, heads, L], of the type computed in.
struct RowResults {
  at::Tensor logsumexp;  // has the sink in it
  at::Tensor max_score;  // has not, and no derivative

  static auto fields(auto& r) { return std::tie(r.logsumexp, r.max_score); }
};
// The results of attention.
struct OutputAndRows {
  at::Tensor output;  // [*batch, heads, L, Ev]
  RowResults rows;

  static auto fields(auto& r) { return std::tuple_cat(std::tie(r.output), RowResults::fields(r.rows)); }
};

// The arguments of varlen_attention, in the order of torch.nn.attention.varlen.varlen_attn.
struct VarlenCall {
  at::Tensor query;     // [T_q, Hq, E]
  at::Tensor key;       // [T_k, Hk, E]
  at::Tensor value;     // [T_k, Hv, Ev]
  at::Tensor cu_seq_q;  // [N + 1]
  std::optional<at::Tensor> cu_seq_k;
  c10::SymInt max_q, max_k;
  std::optional<double> scale;
  std::array<int64_t, 2> window = {-1, -1};
  bool enable_gqa = false;
  std::optional<at::Tensor> seqused_k, block_table;
  double softcap = 0;
  std::optional<at::Tensor> alibi_slopes, sinks, query_offset;
  double dropout_p = 0;
  std::optional<at::Tensor> attn_mask;

  static auto fields(auto& c) {
    return std::tie(c.query, c.key, c.value, c.cu_seq_q, c.cu_seq_k, c.max_q, c.max_k, c.scale, c.window, c.enable_gqa,
                    c.seqused_k, c.block_table, c.softcap, c.alibi_slopes, c.sinks, c.query_offset, c.dropout_p,
                    c.attn_mask);
  }
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

  static constexpr const char* kNames[] = {"output", "logsumexp", "rng_state", "residual"};
  static auto fields(auto& s) { return std::tie(s.output, s.logsumexp, s.rng_state, s.residual); }
};

// All results of the forward. Those for rows are undefined where they are not wanted.
struct ForwardResults {
  Saved saved;
  RowResults rows;

  static auto fields(auto& r) { return std::tuple_cat(Saved::fields(r.saved), RowResults::fields(r.rows)); }
};

// The gradient of the forward's results, u: of the output and, where it is not zero, of the rows' logsumexp.
struct GradResults {
  at::Tensor output;
  std::optional<at::Tensor> logsumexp;  // [*batch, heads, L]

  static auto fields(auto& u) { return std::tie(u.output, u.logsumexp); }
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
  std::optional<at::Tensor> query, key, value, attn_mask, alibi_slopes, sinks;

  static auto fields(auto& t) { return Inputs::fields(t); }
};

// The derivative of the forward's results along a direction, each with the shape that it has in Saved.
struct TangentResults {
  at::Tensor output, logsumexp, residual;

  static auto fields(auto& r) { return std::tie(r.output, r.logsumexp, r.residual); }
};

// Gradients, with the fields of Inputs: each has the shape of its input, and is undefined where not wanted.
struct Gradients {
  at::Tensor query, key, value, attn_mask, alibi_slopes, sinks;

  static auto fields(auto& g) { return Inputs::fields(g); }
};
using Wanted = std::array<bool, kFields<Inputs>>;  // in the same order
static_assert(kFields<Direction> == kFields<Inputs> && kFields<Gradients> == kFields<Inputs>);

using SdpaOp = Operator<"attn::sdpa", at::Tensor(BuiltinInputs, BuiltinOptions)>;
using AttentionOp = Operator<"attn::attention", OutputAndRows(BuiltinInputs, CallOptions, HeadInputs)>;
using OverProcessesOp = Operator<"attn::_attend_over_processes", OutputAndRows(BuiltinInputs, CallOptions, HeadInputs)>;
using VarlenOp = Operator<"attn::varlen_attention", OutputAndRows(VarlenCall)>;
using WeightsOp = Operator<"attn::sdpa_with_weights", OutputAndWeights(BuiltinInputs, DenseOptions, HeadInputs)>;
using ModuleOp = Operator<"attn::_sdpa_and_weights", OutputAndMean(BuiltinInputs, DenseOptions, HeadInputs, bool)>;
using StatsOp = Operator<"attn::sdpa_stats", Statistics(QueryAndKey, ScoreOptions, HeadInputs)>;
using WeightsKernelOp = Operator<"attn::_sdpa_weights", WeightsAndScores(Inputs, DenseOptions, WantedWeights)>;
// Last come rng_state, and whether the rows' results are wanted.
using ForwardOp =
    Operator<"attn::_sdpa_forward", ForwardResults(Inputs, CallOptions, std::optional<at::Tensor>, bool, bool)>;
using BackwardOp = Operator<"attn::_sdpa_backward", Gradients(GradResults, Inputs, Saved, CallOptions, Wanted)>;
using TangentOp = Operator<"attn::_sdpa_tangent", TangentResults(Inputs, Saved, Direction, CallOptions)>;
using SecondOp = Operator<"attn::_sdpa_second",
                          Gradients(GradResults, Inputs, Saved, Direction, TangentResults, CallOptions, Wanted)>;

// Whether all that the built-in has not is as it is by default. Goes over the fields: none can be forgotten.
inline bool is_builtin(CallOptions options, const HeadInputs& of_heads) {
  const CallOptions by_default;
  BuiltinOptions::fields(options) = BuiltinOptions::fields(by_default);
  bool all = true;
  const auto compare = [&]<class T>(size_t, const T& given, const T& usual) {
    if constexpr (std::is_same_v<T, std::optional<at::Tensor>>)
      all = all && given.has_value() == usual.has_value();
    else
      all = all && given == usual;
  };
  for_each_field(compare, options, by_default);
  const HeadInputs none;
  for_each_field(compare, of_heads, none);
  return all;
}

// The output, by the plain operator where it can: programs that are exported name it.
inline at::Tensor attend(const BuiltinInputs& x, const CallOptions& options, const HeadInputs& of_heads) {
  return is_builtin(options, of_heads) ? SdpaOp::call(x, {options}) : AttentionOp::call(x, options, of_heads).output;
}

}  // namespace attn
