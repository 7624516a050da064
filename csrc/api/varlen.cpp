// Packed sequences in the C++ API.
#include "attn/varlen.h"

#include <algorithm>

#include "api/options.h"

namespace attn {

using at::Tensor;

OutputAndLogsumexp varlen_with_logsumexp(const Tensor& query, const Tensor& key, const Tensor& value,
                                         const Tensor& cu_seq_q, const std::optional<Tensor>& cu_seq_k, int64_t max_q,
                                         int64_t max_k, const VarlenOptions& o) {
  const int64_t sequences = std::max<int64_t>(cu_seq_q.numel() - 1, 0);
  const auto [output, rows] = VarlenOp::call({.query = query,
                                              .key = key,
                                              .value = value,
                                              .cu_seq_q = cu_seq_q,
                                              .cu_seq_k = cu_seq_k,
                                              .max_q = max_q,
                                              .max_k = max_k,
                                              .scale = o.scale,
                                              .window = o.window_size,
                                              .enable_gqa = o.enable_gqa,
                                              .seqused_k = o.seqused_k,
                                              .block_table = o.block_table,
                                              .softcap = o.softcap,
                                              .alibi_slopes = o.alibi_slopes,
                                              .sinks = o.sinks,
                                              .query_offset = as_tensor(o.query_offset, {sequences}, query),
                                              .dropout_p = o.dropout_p,
                                              .attn_mask = o.attn_mask});
  return {output, rows.logsumexp, rows.max_score};
}

Tensor varlen(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& cu_seq_q,
              const std::optional<Tensor>& cu_seq_k, int64_t max_q, int64_t max_k, const VarlenOptions& options) {
  return varlen_with_logsumexp(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, options).output;
}

}  // namespace attn
