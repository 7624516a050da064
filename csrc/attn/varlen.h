// Attention over packed sequences, which have different lengths and follow one another, and over a cache in pages.
//
//   // Sequence n consists of tokens cu_seq[n] to cu_seq[n + 1] - 1, and sees no other tokens.
//   at::Tensor output = attn::varlen(query, key, value, cu_seq, cu_seq, longest, longest, {.window_size = {-1, 0}});
//
// attn::varlen is Python's torch_attn.varlen_attn, and takes the arguments of torch.nn.attention.varlen.varlen_attn.
#pragma once

#include <attn/sdpa.h>

#include <array>
#include <optional>

namespace attn {

// Options of a call, by name. An option that sdpa also has means the same here.
struct VarlenOptions {
  // Factor of query key^T. Absent: 1 / sqrt(E).
  std::optional<double> scale = std::nullopt;
  // (left, right): a query sees up to `left` keys before its position and up to `right` keys after it. -1 means all.
  // {-1, 0} is causality.
  std::array<int64_t, 2> window_size = {-1, -1};
  // Allows Hk and Hv that divide Hq.
  bool enable_gqa = false;
  // Integers [N]: how many keys of each sequence are in use. Further keys are not read.
  std::optional<at::Tensor> seqused_k = std::nullopt;
  // Integers [N, pages of the longest sequence]. With them, key and value are pools of pages. Row r of sequence n is
  // stored in row r % page_size of page block_table[n][r / page_size]. Sequences may share pages. Needs seqused_k.
  // Entries after the last page in use are not read. No derivatives.
  std::optional<at::Tensor> block_table = std::nullopt;
  // c > 0: a scaled score x becomes c tanh(x / c), before a mask is added. 0: scores are not capped.
  double softcap = 0.0;
  // The slopes and sinks of the heads, [Hq], as in Options. They get a gradient.
  std::optional<at::Tensor> alibi_slopes = std::nullopt;
  std::optional<at::Tensor> sinks = std::nullopt;
  // The position of a sequence's first query among its keys: one number for all, or integers [N]. Absent: the number of
  // keys in use minus the number of queries, so that the last query stands at the last key. (sdpa's default is 0.)
  std::optional<Integers> query_offset = std::nullopt;
  // Probability in [0, 1] that a weight is zeroed.
  double dropout_p = 0.0;
  // [Hq or 1, T_q, max_k], boolean or floating. Each query has a row, whose column j is for key j of the query's own
  // sequence. A floating mask gets a gradient.
  std::optional<at::Tensor> attn_mask = std::nullopt;
  // The scales of a key and of a value of 8 bits, float32, as in Options. They broadcast to [T_k, heads], or with a
  // block_table to [pages, page_size, heads]. Here heads is Hk or Hv.
  std::optional<at::Tensor> key_scale = std::nullopt;
  std::optional<at::Tensor> value_scale = std::nullopt;
};

//   query     [T_q, Hq, E]    float64, float32, bfloat16 or float16, one type for all three
//   key       [T_k, Hk, E]    with a block_table: [pages, page_size, Hk, E], any strides
//   value     [T_k, Hv, Ev]   likewise
//   cu_seq_q  int32 or int64 [N + 1]: 0, then the end of each of the N sequences. Sequences may be empty. The output is
//             0 for tokens after the last sequence.
//   cu_seq_k  the same for keys; std::nullopt is allowed with a block_table only
//   max_q     the number of queries of the longest sequence, or more; max_k likewise for keys. Neither changes results.
//
// Returns [T_q, Hq, Ev] in query's type. A query that sees no key has an output of 0. Without dropout, the output and
// gradients of a sequence have the same bits as if sdpa computed this sequence alone, with query_offset = S - L. On a
// GPU the bits are the same only while an Invariance (sdpa.h) lives.
// Throws c10::Error on input that does not fit. The message names the argument, its value and what is allowed. On a GPU
// the numbers in cu_seq_q, cu_seq_k, seqused_k and block_table are clamped instead, because checking them would
// synchronise. Nothing outside the tensors is read or written.
ATTN_API at::Tensor varlen(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                           const at::Tensor& cu_seq_q, const std::optional<at::Tensor>& cu_seq_k, int64_t max_q,
                           int64_t max_k, const VarlenOptions& options = {});

// Also returns logsumexp and max_score, [Hq, T_q], as sdpa_with_logsumexp does.
ATTN_API OutputAndLogsumexp varlen_with_logsumexp(const at::Tensor& query, const at::Tensor& key,
                                                  const at::Tensor& value, const at::Tensor& cu_seq_q,
                                                  const std::optional<at::Tensor>& cu_seq_k, int64_t max_q,
                                                  int64_t max_k, const VarlenOptions& options = {});

}  // namespace attn
