// attn::varlen_attention: packed sequences, token by token as torch.nn.attention.varlen has them, [T, heads, E]. It is
// attn::attention of the same numbers seen as [heads, T, E].
#include <ATen/ATen.h>
#include <torch/library.h>

#include "operators/ops.h"

namespace attn {
namespace {

using at::Tensor;

void check_dense(const char* name, const Tensor& t) {
  TORCH_CHECK(t.layout() == at::kStrided && !t.is_nested(), VarlenOp::name, ": ", name, " has layout ", t.layout(),
              "; it must be a dense (strided) tensor");
}

// What attention would say of the shapes in its own order of dimensions, and of layouts in its own name.
void check_shapes(const VarlenCall& c) {
  const auto check = [](const char* name, const Tensor& t, int64_t dims) {
    TORCH_CHECK(t.defined(), VarlenOp::name, ": ", name, " is undefined; a tensor is needed");
    check_dense(name, t);
    TORCH_CHECK(t.dim() == dims, VarlenOp::name, ": ", name, " has shape ", t.sym_sizes(), "; it must have ", dims,
                " dimensions: ",
                dims == 3 ? "[tokens, heads, head_dim]" : "[pages, page_size, heads, head_dim], beside a block_table");
  };
  for (const auto& [name, t] : {std::pair("cu_seq_k", &c.cu_seq_k), std::pair("seqused_k", &c.seqused_k),
                                std::pair("block_table", &c.block_table), std::pair("attn_mask", &c.attn_mask),
                                std::pair("alibi_slopes", &c.alibi_slopes), std::pair("sinks", &c.sinks),
                                std::pair("query_offset", &c.query_offset)})
    if (*t) check_dense(name, **t);
  check_dense("cu_seq_q", c.cu_seq_q);
  check("query", c.query, 3);
  check("key", c.key, c.block_table ? 4 : 3);
  check("value", c.value, c.block_table ? 4 : 3);
}

OutputAndRows varlen_attention(const VarlenCall& c) {
  check_shapes(c);
  const auto heads_first = [](const Tensor& t) { return t.transpose(-3, -2); };
  CallOptions options{.dropout_p = c.dropout_p,
                      .scale = c.scale,
                      .enable_gqa = c.enable_gqa,
                      .softcap = c.softcap,
                      .window = c.window,
                      .query_offset = c.query_offset,
                      .key_lengths = c.seqused_k,
                      .packing = {c.cu_seq_q, c.cu_seq_k, c.max_q, c.max_k, c.block_table}};
  OutputAndRows results =
      AttentionOp::call({{heads_first(c.query), heads_first(c.key), heads_first(c.value), c.attn_mask, {}, {}}},
                        options, {c.alibi_slopes, c.sinks});
  results.output = heads_first(results.output);
  return results;
}

}  // namespace

TORCH_LIBRARY_IMPL(attn, CompositeImplicitAutograd, m) {
  m.impl("varlen_attention", VarlenOp::kernel<varlen_attention>);
}

// See formulas.cpp.
TORCH_LIBRARY_IMPL(attn, FuncTorchBatchedDecomposition, m) {
  m.impl("varlen_attention", VarlenOp::kernel<varlen_attention>);
}

}  // namespace attn
