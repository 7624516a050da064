// Packed sequences in the C++ API.
#include "attn/varlen.h"

#include <algorithm>

#include "api/options.h"

namespace attn {

using at::Tensor;

namespace {

Call packed_call(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& cu_seq_q,
                 const std::optional<Tensor>& cu_seq_k, int64_t max_q, int64_t max_k, const VarlenOptions& o) {
  const int64_t sequences = std::max<int64_t>(cu_seq_q.numel() - 1, 0);
  Call call = call_of(query, key, value, o, {sequences});
  call.cu_seq_q = cu_seq_q;
  call.cu_seq_k = cu_seq_k;
  call.max_q = max_q;
  call.max_k = max_k;
  return call;
}

}  // namespace

OutputAndLogsumexp varlen_with_logsumexp(const Tensor& query, const Tensor& key, const Tensor& value,
                                         const Tensor& cu_seq_q, const std::optional<Tensor>& cu_seq_k, int64_t max_q,
                                         int64_t max_k, const VarlenOptions& options) {
  const auto [output, rows] = VarlenOp::call(packed_call(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, options));
  return {output, rows.logsumexp, rows.max_score};
}

Tensor varlen(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& cu_seq_q,
              const std::optional<Tensor>& cu_seq_k, int64_t max_q, int64_t max_k, const VarlenOptions& options) {
  const Call call = packed_call(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, options);
  return VarlenOp::call(without_rows(call)).output;
}

}  // namespace attn
