// attn::varlen_attention: packed sequences in the layout of torch.nn.attention.varlen, [T, heads, E]. This operator
// calls attn::attention with the same tensors viewed as [heads, T, E].
#include <ATen/ATen.h>
#include <torch/library.h>

#include "operators/validate.h"

namespace attn {
namespace {

using at::Tensor;

void check_dense(const char* name, const Tensor& t) {
  TORCH_CHECK(t.layout() == at::kStrided && !t.is_nested(), VarlenOp::name, ": ", name, " has layout ", t.layout(),
              "; it must be a dense (strided) tensor");
}

// Checks shapes before heads and tokens are swapped, because errors after the swap would show sizes in another order
// than the caller's.
void check_shapes(const Call& c) {
  const auto check = [](const char* name, const Tensor& t, int64_t dims) {
    TORCH_CHECK(t.defined(), VarlenOp::name, ": ", name, " is undefined; a tensor is needed");
    check_dense(name, t);
    TORCH_CHECK(t.dim() == dims, VarlenOp::name, ": ", name, " has shape ", t.sym_sizes(), "; it must have ", dims,
                " dimensions: ",
                dims == 3 ? "[tokens, heads, head_dim]" : "[pages, page_size, heads, head_dim], beside a block_table");
  };
  TORCH_CHECK(c.is_packed(), VarlenOp::name, ": cu_seq_q is None; it says where each sequence begins");
  const auto check_if_given = [&]<class T>(size_t i, const T& t) {
    if constexpr (std::is_same_v<T, std::optional<Tensor>>)
      if (t) check_dense(Tensors::about(i).name_in_varlen, *t);
  };
  for_each_of(check_if_given, Tensors::fields(c));
  check("query", c.query, 3);
  check("key", c.key, c.block_table ? 4 : 3);
  check("value", c.value, c.block_table ? 4 : 3);
  check_scale_of_8_bits(VarlenOp::name, "key", c.key_scale, c.key);
  check_scale_of_8_bits(VarlenOp::name, "value", c.value_scale, c.value);
}

OutputAndRows varlen_attention(const Call& tokens_first) {
  check_shapes(tokens_first);
  const auto swap_heads_and_tokens = [](Tensor& t) { t = t.transpose(-3, -2); };
  Call call = tokens_first;
  const auto swap_in_scale = [](std::optional<Tensor>& scale, const Tensor& of) {
    if (scale) scale = scale->expand_symint(of.sym_sizes().slice(0, of.dim() - 1)).transpose(-2, -1);
  };
  swap_in_scale(call.key_scale, call.key);
  swap_in_scale(call.value_scale, call.value);
  for (Tensor* t : {&call.query, &call.key, &call.value}) swap_heads_and_tokens(*t);
  OutputAndRows results = AttentionOp::call(call);
  swap_heads_and_tokens(results.output);
  return results;
}

}  // namespace

TORCH_LIBRARY_IMPL(attn, CompositeImplicitAutograd, m) {
  m.impl("varlen_attention", VarlenOp::kernel<varlen_attention>);
}

// varlen_attention is decomposed under vmap too, because torch 2.15 would otherwise call it once for each sample.
TORCH_LIBRARY_IMPL(attn, FuncTorchBatchedDecomposition, m) {
  m.impl("varlen_attention", VarlenOp::kernel<varlen_attention>);
}

}  // namespace attn
