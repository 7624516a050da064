// The switch for torch.nn.attention.varlen: gives kernels for CPU tensors to the aten operators that this module calls.
//
// PyTorch has kernels of aten::_flash_attention_forward and related operators for GPUs only. The first use of the
// switch adds kernels for the CPU, below autograd, that call attn::attention. The arguments of these operators differ
// between releases of torch, so arguments are looked up by name. An unknown argument is refused unless it has its
// default value.
#include <ATen/ATen.h>

#include <algorithm>
#include <initializer_list>
#include <string_view>

#include "operators/ops.h"
#include "operators/replace.h"

namespace attn {
namespace {

using at::Tensor;
using c10::IValue;

constexpr const char* kOurs = "; `import torch_attn` and call torch_attn.varlen_attn instead";

// The arguments of one call, by name. An argument that this release of torch lacks is None.
class FlashArguments {
 public:
  FlashArguments(const c10::OperatorHandle& op, const torch::jit::Stack& stack)
      : schema_(op.schema()), values_(torch::jit::last(stack, schema_.arguments().size())) {}

  const std::string& name() const { return schema_.name(); }

  void check(size_t returns, std::initializer_list<std::string_view> known) const {
    TORCH_CHECK_NOT_IMPLEMENTED(is_switched_on(), "Could not run '", name(),
                                "' with arguments from the 'CPU' backend, for which torch has no kernel. attn has one: "
                                "turn torch_attn.replace_sdpa() on, or call torch_attn.varlen_attn");
    TORCH_CHECK_NOT_IMPLEMENTED(schema_.returns().size() == returns, name(), ": this release of torch expects ",
                                schema_.returns().size(), " results, and attn has ", returns, kOurs);
    for (size_t i = 0; i < values_.size(); ++i) {
      const c10::Argument& argument = schema_.arguments()[i];
      const bool by_default = argument.default_value() && *argument.default_value() == values_[i];
      TORCH_CHECK_NOT_IMPLEMENTED(by_default || std::ranges::find(known, argument.name()) != known.end(), name(),
                                  ": attn does not know the argument ", argument.name(), kOurs);
    }
    TORCH_CHECK(get("dropout_p").toDouble() == 0, name(), ": dropout_p is ", get("dropout_p").toDouble(),
                "; on a CPU it must be 0", kOurs);
  }

  const IValue& get(const char* name) const {
    static const IValue none;
    const auto i = schema_.argumentIndexWithName(name);
    return i ? values_[*i] : none;
  }
  std::optional<Tensor> tensor_if_any(const char* name) const {
    const IValue& value = get(name);
    return value.isTensor() && value.toTensor().defined() ? std::optional(value.toTensor()) : std::nullopt;
  }
  const Tensor& tensor(const char* name) const { return get(name).toTensor(); }

 private:
  const c10::FunctionSchema& schema_;
  at::ArrayRef<IValue> values_;
};

// Swaps heads and length. Flash attention's layout is [tokens, heads, E] or [batch, length, heads, E]; in attn's layout
// the heads stand before the tokens.
Tensor swap_heads(const Tensor& t) { return t.transpose(-3, -2); }

// The window of the call. A causal call has the window (left, 0).
std::array<int64_t, 2> window_of(const FlashArguments& a) {
  const auto size = [](const IValue& value) { return value.isNone() ? -1 : value.toInt(); };
  return {size(a.get("window_size_left")), a.get("is_causal").toBool() ? 0 : size(a.get("window_size_right"))};
}

// Flash attention gives the last query the position of the last key. By default attn does so for packed sequences only,
// so other calls get a query_offset.
Call call_of(const FlashArguments& a) {
  const auto cu_seq_q = a.tensor_if_any("cum_seq_q"), lengths = a.tensor_if_any("seqused_k");
  std::optional<Tensor> offset;
  if (!cu_seq_q) {
    const Tensor keys = lengths ? *lengths : at::scalar_tensor(a.tensor("key").size(-3), at::dtype(at::kLong));
    offset = keys - a.tensor("query").size(-3);
  }
  // Torch passes max_q and max_k for dense sequences too, but attn takes them for packed sequences only.
  const auto length = [&](const char* name) { return cu_seq_q ? a.get(name).toSymInt() : c10::SymInt(0); };
  return {.query = swap_heads(a.tensor("query")),
          .key = swap_heads(a.tensor("key")),
          .value = swap_heads(a.tensor("value")),
          .scale = a.get("scale").toOptional<double>(),
          .enable_gqa = true,
          .window_size = window_of(a),
          .query_offset = offset,
          .key_lengths = lengths,
          .cu_seq_q = cu_seq_q,
          .cu_seq_k = a.tensor_if_any("cum_seq_k"),
          .max_q = length("max_q"),
          .max_k = length("max_k"),
          .block_table = a.tensor_if_any("block_table"),
          .alibi_slopes = a.tensor_if_any("alibi_slopes")};
}

// Returns t with the strides of `like`. Torch's fake results have these strides, and compiled graphs rely on them.
Tensor with_strides_of(const Tensor& like, const Tensor& t) {
  const Tensor result = at::empty_like(like);
  return t.strides() == result.strides() ? t : result.copy_(t);
}

// Returns the output, in query's layout, and the logsumexp, [heads, tokens] or [batch, heads, length].
std::pair<Tensor, Tensor> flash_forward(const FlashArguments& a) {
  const auto &query = a.tensor("query"), &value = a.tensor("value");
  const Call call = call_of(a);
  TORCH_CHECK(!a.get("return_debug_mask").toBool(), a.name(), ": return_debug_mask must be False on a CPU");
  TORCH_CHECK(query.dim() == (call.is_packed() ? 3 : 4), a.name(), ": query has shape ", query.sizes(),
              "; it must be [tokens, heads, head_dim] beside cum_seq_q, else [batch, length, heads, head_dim]");
  TORCH_CHECK(value.size(-1) == query.size(-1), a.name(), ": value has head_dim ", value.size(-1), " but query has ",
              query.size(-1), "; here they must be equal", kOurs);
  // Torch's callers have already cast their tensors.
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastCPU);
  const auto [output, rows] = AttentionOp::call(call);
  count_replaced_call();
  return {with_strides_of(query, swap_heads(output)), rows.logsumexp.to(at::kFloat)};
}

void flash_forward_kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const FlashArguments a(op, *stack);
  a.check(5, {"query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal",
              "return_debug_mask", "scale", "window_size_left", "window_size_right", "seqused_k", "alibi_slopes",
              "block_table", "num_splits"});
  const auto [output, logsumexp] = flash_forward(a);
  const auto numbers = output.options().dtype(at::kUInt64);
  // Torch's formula of the derivative does not pass these three arguments to the backward. But it passes the fourth
  // result, so this result says whether any of the three arguments was given.
  const bool more = !a.get("seqused_k").isNone() || !a.get("alibi_slopes").isNone() || !a.get("block_table").isNone();
  torch::jit::drop(*stack, op.schema().arguments().size());
  torch::jit::push(*stack, output, logsumexp, at::zeros({2}, numbers), at::full({}, more, numbers),
                   at::empty({0}, output.options()));
}

void flash_forward_out_kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const FlashArguments a(op, *stack);
  a.check(1, {"out", "query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal",
              "return_debug_mask", "scale", "window_size_left", "window_size_right", "seqused_k", "alibi_slopes",
              "block_table", "num_splits"});
  const auto &out = a.tensor("out"), &query = a.tensor("query");
  TORCH_CHECK(out.sizes() == query.sizes() && out.scalar_type() == query.scalar_type(), a.name(), ": out has dtype ",
              out.scalar_type(), " and shape ", out.sizes(), " but query has ", query.scalar_type(), " and ",
              query.sizes(), "; they must be equal");
  const auto [output, logsumexp] = flash_forward(a);
  out.copy_(output);
  torch::jit::drop(*stack, op.schema().arguments().size());
  torch::jit::push(*stack, logsumexp);
}

// Computes the forward a second time, because our backward needs a pair of numbers per row, and torch saves only one
// number.
void flash_backward_kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const FlashArguments a(op, *stack);
  a.check(3, {"grad_out", "query", "key", "value", "out", "logsumexp", "cum_seq_q", "cum_seq_k", "max_q", "max_k",
              "dropout_p", "is_causal", "rng_state", "unused", "scale", "window_size_left", "window_size_right"});
  const auto &query = a.tensor("query"), &key = a.tensor("key"), &value = a.tensor("value");
  TORCH_CHECK(!a.tensor("unused").to(at::kBool).any().item<bool>(), a.name(),
              ": with seqused_k, alibi_slopes or block_table, torch's formula of the derivative is wrong", kOurs);
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastCPU);
  const Call call = call_of(a);
  const Saved saved = ForwardOp::call(without_rows(call), std::nullopt, /*exact_residual=*/false).saved;
  const Gradients grads =
      BackwardOp::call({swap_heads(a.tensor("grad_out")), std::nullopt}, saved, call, {true, true, true});
  const Tensor of_query = with_strides_of(query, swap_heads(grads.query));
  const Tensor of_key = with_strides_of(key, swap_heads(grads.key));
  const Tensor of_value = with_strides_of(value, swap_heads(grads.value));
  torch::jit::drop(*stack, op.schema().arguments().size());
  torch::jit::push(*stack, of_query, of_key, of_value);
}

}  // namespace

torch::Library put_flash_attention_in_place() {
  torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::CPU, __FILE__, __LINE__);
  const auto fill = [&](const char* name, torch::CppFunction kernel) {
    const auto op = c10::Dispatcher::singleton().findSchema({std::string("aten::") + name, ""});
    if (op && !op->hasComputedKernelForDispatchKey(c10::DispatchKey::CPU)) library.impl(name, std::move(kernel));
  };
  using torch::CppFunction;
  fill("_flash_attention_forward", CppFunction::makeFromBoxedFunction<flash_forward_kernel>());
  fill("_flash_attention_forward_no_dropout_inplace", CppFunction::makeFromBoxedFunction<flash_forward_out_kernel>());
  fill("_flash_attention_backward", CppFunction::makeFromBoxedFunction<flash_backward_kernel>());
  return library;
}

}  // namespace attn
