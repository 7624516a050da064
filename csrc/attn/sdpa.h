// Scaled dot-product attention, the C++ API of libattn.
//
//   find_package(attn REQUIRED)
//   target_link_libraries(program PRIVATE attn::attn)
//
//   at::Tensor output = attn::sdpa(query, key, value, {.attn_mask = mask, .dropout_p = 0.1});
//
// The functions call the operators torch.ops.attn.* through PyTorch's dispatcher, so autograd, autocast and every
// device work as in Python. They may be called from several threads at once.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <tuple>
#include <variant>

#define ATTN_API __attribute__((visibility("default")))

namespace attn {

// One number for the whole batch, or integers that broadcast to [B...], on query's device.
using Integers = std::variant<int64_t, at::Tensor>;

// The arguments of a call beside query, key and value, by name. An argument left out has the operator's default.
struct Options {
  // Broadcasts to [B..., Hq, L, S]. In a boolean mask, true = attend. A floating mask (query's type or float32) is
  // added to the scaled scores and gets a gradient.
  std::optional<at::Tensor> attn_mask = std::nullopt;
  // Probability in [0, 1] that a weight is zeroed; other weights are divided by 1 - dropout_p. The random numbers come
  // from the default generator of the device.
  double dropout_p = 0.0;
  // Query i attends only to keys j <= i + query_offset, for any L and S. An attn_mask may hide more keys.
  bool is_causal = false;
  // Factor of query key^T: any number but NaN. Absent: 1 / sqrt(E).
  std::optional<double> scale = std::nullopt;
  // Allows Hk and Hv that divide Hq. Then Hq / Hk consecutive query heads share a key head, and Hq / Hv share a value
  // head.
  bool enable_gqa = false;

  // PyTorch's attention lacks the options from here on. Any of these options may be combined.
  // c > 0: a scaled score x becomes c tanh(x / c), before a mask is added. 0: scores are not capped.
  double softcap = 0.0;
  // (left, right): query i sees up to `left` keys before its position i + query_offset and up to `right` keys after it.
  // -1 means all.
  std::array<int64_t, 2> window_size = {-1, -1};
  // The position of query 0 among the keys. It may be negative. Absent: 0. A query_offset of S - L puts the last query
  // at the last key.
  std::optional<Integers> query_offset = std::nullopt;
  // How many of the S keys are in use. Absent: all. The keys after these are not read, whatever they hold.
  std::optional<Integers> key_lengths = std::nullopt;
  // The slopes of the heads, [Hq] or [B..., Hq], in query's type or float32. Slope times distance is subtracted from
  // scores. The slopes get a gradient.
  std::optional<at::Tensor> alibi_slopes = std::nullopt;
  // The sinks of the heads, with the shapes and types of alibi_slopes. A sink is one more logit, without a value, in
  // every softmax of its head. The sinks get a gradient.
  std::optional<at::Tensor> sinks = std::nullopt;
  // The scales of a key and of a value of 8 bits (int8 or float8_e4m3fn), float32. Such a key stands for key *
  // key_scale[..., None], and such a value stands for value * value_scale[..., None]. A scale broadcasts to the shape
  // of the key or value without the last dimension. Among the functions below, only sdpa and sdpa_with_logsumexp take 8
  // bits, and without derivatives.
  std::optional<at::Tensor> key_scale = std::nullopt;
  std::optional<at::Tensor> value_scale = std::nullopt;
};

// Returns softmax(scale * query key^T + attn_mask) value. The call takes O(L + S) memory beside inputs and outputs, and
// so does its backward. Query i is at position p = i + query_offset. Query i sees the keys that window_size, is_causal,
// key_lengths and attn_mask do not hide. The scores and weights of these keys j are
//
//   scores   softcap tanh(scale <q, k_j> / softcap) - alibi_slopes |p - j| + attn_mask
//   weights  exp(score_j) / (exp(sinks) + sum over j of exp(score_j))
//
// A key and a value of 8 bits stand for key * key_scale[..., None] and value * value_scale[..., None].
//
//   query   [B..., Hq, L, E]   float64, float32, bfloat16 or float16, one type for all three;
//   key     [B..., Hk, S, E]   at least 2 dimensions; leading ones broadcast
//   value   [B..., Hv, S, Ev]
//
// Returns [B..., Hq, L, Ev] in query's type. A query that may attend to no key has an output of 0. Results and
// gradients have the same bits on every run and with any number of threads.
// For no mask, pass std::nullopt or nothing, not an undefined tensor. For no options, pass three arguments only,
// because {} as the fourth fits both overloads.
// Throws c10::Error on input that does not fit. The message names the argument, its value and what is allowed.
ATTN_API at::Tensor sdpa(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                         const std::optional<at::Tensor>& attn_mask, double dropout_p = 0.0, bool is_causal = false,
                         std::optional<double> scale = std::nullopt, bool enable_gqa = false);

ATTN_API at::Tensor sdpa(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                         const Options& options = {});

// The output, and two numbers for every row of scores, float32 (float64 for float64 inputs).
struct OutputAndLogsumexp {
  at::Tensor output;     // [B..., Hq, L, Ev]
  at::Tensor logsumexp;  // [B..., Hq, L], of the scores and the sink, differentiable; -inf with neither keys nor sink
  at::Tensor max_score;  // [B..., Hq, L], without the sink; -inf without keys. No derivatives
};
ATTN_API OutputAndLogsumexp sdpa_with_logsumexp(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                                const Options& options = {});

// Returns (output, weights, scores): sdpa's output, and the matrices from which it is computed. All are differentiable.
// `scores` are scaled and masked. `weights` are the softmax of the scores, before dropout. A row of weights sums to 1
// (less with a sink), or is 0 if every key is masked. `weights` and `scores` are [B..., Hq, L, S] in query's type, so
// they take O(L S) memory.
ATTN_API std::tuple<at::Tensor, at::Tensor, at::Tensor> sdpa_with_weights(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const std::optional<at::Tensor>& attn_mask,
    double dropout_p = 0.0, bool is_causal = false, std::optional<double> scale = std::nullopt,
    bool enable_gqa = false);

ATTN_API std::tuple<at::Tensor, at::Tensor, at::Tensor> sdpa_with_weights(const at::Tensor& query,
                                                                          const at::Tensor& key,
                                                                          const at::Tensor& value,
                                                                          const Options& options = {});

using StatsOptions = Options;  // an earlier name for the options of sdpa_stats

// On a CPU, the bits of a row never depend on the other entries of the batch, nor on how sequences are packed. On a
// GPU, this is true while an object of this class lives, in any thread. While such an object lives, the bits on every
// device also depend neither on the number of queries in the call nor on whether gradients are recorded. So a sequence
// gets the same bits as a whole, in chunks, and token by token from a cache. But decoding takes longer. The environment
// variable ATTN_INVARIANT=1 switches invariance on from the start.
//
//   const auto on = attn::invariant();
class ATTN_API Invariance {
 public:
  Invariance();
  ~Invariance();
  Invariance(const Invariance&) = delete;
  Invariance& operator=(const Invariance&) = delete;
};
[[nodiscard]] inline Invariance invariant() { return {}; }

// Statistics of the scores and weights of every head, float32 (float64 for float64 inputs). Without a sink, a query
// that may attend to no key has largest_score -inf, entropy 0 and logsumexp -inf.
struct Stats {
  at::Tensor largest_score;    // [B..., Hq, L], of the scores, scaled and masked
  at::Tensor entropy;          // [B..., Hq, L], of the weights, in nats
  at::Tensor logsumexp;        // [B..., Hq, L], of the scores and the sink
  at::Tensor received_weight;  // [B..., Hq, S], the sum over the queries of the weight that a key receives
};

// Takes only O(L + S) memory, so it works for sequences whose weights would not fit into memory. The results have no
// derivatives: inputs may require a gradient, but a backward through the results throws. A dropout_p other than 0
// throws, because the statistics describe the weights before dropout.
ATTN_API Stats sdpa_stats(const at::Tensor& query, const at::Tensor& key, const std::optional<at::Tensor>& attn_mask,
                          bool is_causal = false, std::optional<double> scale = std::nullopt, bool enable_gqa = false);

ATTN_API Stats sdpa_stats(const at::Tensor& query, const at::Tensor& key, const Options& options = {});

}  // namespace attn
