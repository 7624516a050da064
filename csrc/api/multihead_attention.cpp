// The module attn::MultiheadAttention of the C++ API.
#include "attn/multihead_attention.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/nn/init.h>

#include <algorithm>
#include <limits>

#include "api/options.h"
#include "operators/validate.h"

namespace attn {
namespace {

using at::Tensor;

void check_divides(const char* name, int64_t number, const char* divisor_name, int64_t divisor) {
  TORCH_CHECK(number % divisor == 0, "attn::MultiheadAttention: ", divisor_name, " is ", divisor, "; it must divide ",
              name, ", ", number);
}

// The size that a dimension must have, or the letter of a dimension that may have any size.
struct Size {
  Size(int64_t size) : size(size) {}
  Size(const char* letter) : letter(letter) {}

  int64_t size = 0;
  const char* letter = nullptr;
};
using Sizes = std::vector<Size>;

std::ostream& operator<<(std::ostream& out, const Sizes& sizes) {
  out << '[';
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (d) out << ", ";
    sizes[d].letter ? out << sizes[d].letter : out << sizes[d].size;
  }
  return out << ']';
}

bool has_shape(const Tensor& t, const Sizes& sizes) {
  return std::equal(t.sizes().begin(), t.sizes().end(), sizes.begin(), sizes.end(),
                    [](int64_t own, const Size& wanted) { return wanted.letter || own == wanted.size; });
}

void check_shape(const char* name, const Tensor& t, const Sizes& sizes, const Sizes& or_sizes = {}) {
  TORCH_CHECK(t.defined(), "attn::MultiheadAttention: ", name, " is undefined; it must have shape ", sizes);
  const bool two = !or_sizes.empty();
  TORCH_CHECK(has_shape(t, sizes) || (two && has_shape(t, or_sizes)), "attn::MultiheadAttention: ", name, " has shape ",
              t.sizes(), "; it must have shape ", sizes, two ? c10::str(" or ", or_sizes) : "");
}

void check_kind(const char* name, const Tensor& x, const Tensor& weight) {
  if (!x.defined()) return;  // check_shape reports it
  TORCH_CHECK(!x.is_nested(), "attn::MultiheadAttention: ", name, " is a nested tensor; it must be dense");
  TORCH_CHECK(x.scalar_type() == weight.scalar_type() || at::autocast::is_autocast_enabled(x.device().type()),
              "attn::MultiheadAttention: ", name, " has dtype ", x.scalar_type(),
              "; it must be that of the parameters, ", weight.scalar_type());
}

void check_mask_dtype(const char* name, const Tensor& mask) {
  const auto dtype = mask.scalar_type();
  TORCH_CHECK(dtype == at::kBool || at::isFloatingType(dtype), "attn::MultiheadAttention: ", name, " has dtype ", dtype,
              "; it must be Bool (true hides a key) or floating (added to the scores)");
}

// Merges both masks into one, which broadcasts to [B, H, L, S]. In a mask, true or -inf hides a key.
Tensor merge(const Tensor& attn_mask, const Tensor& key_padding_mask) {
  if (!key_padding_mask.defined()) return attn_mask;
  const Tensor padding = key_padding_mask.unsqueeze(-2).unsqueeze(-2);
  if (!attn_mask.defined()) return padding;
  constexpr double kHidden = -std::numeric_limits<double>::infinity();
  const bool boolean = attn_mask.scalar_type() == at::kBool, boolean_padding = padding.scalar_type() == at::kBool;
  if (boolean && boolean_padding) return attn_mask.logical_or(padding);
  if (boolean) return padding.masked_fill(attn_mask, kHidden);
  if (boolean_padding) return attn_mask.masked_fill(padding, kHidden);
  return attn_mask + padding;
}

}  // namespace

MultiheadAttentionImpl::MultiheadAttentionImpl(const MultiheadAttentionOptions& options) : options(options) { reset(); }

void MultiheadAttentionImpl::reset() {
  const int64_t embed_dim = options.embed_dim(), heads = options.num_heads();
  const int64_t kv_heads = options.num_kv_heads().value_or(heads);
  const int64_t kdim = options.kdim().value_or(embed_dim), vdim = options.vdim().value_or(embed_dim);
  const std::pair<const char*, int64_t> sizes[] = {
      {"embed_dim", embed_dim}, {"num_heads", heads}, {"num_kv_heads", kv_heads}, {"kdim", kdim}, {"vdim", vdim}};
  for (const auto& [name, size] : sizes)
    TORCH_CHECK(size > 0, "attn::MultiheadAttention: ", name, " is ", size, "; it must be positive");
  check_divides("embed_dim", embed_dim, "num_heads", heads);
  check_divides("num_heads", heads, "num_kv_heads", kv_heads);
  check_allowed("attn::MultiheadAttention", "dropout", options.dropout(), kProbability);
  check_allowed("attn::MultiheadAttention", "softcap", options.softcap(), kCap);
  const auto& [left, right] = options.window_size();
  TORCH_CHECK(left >= -1 && right >= -1, "attn::MultiheadAttention: window_size is (", left, ", ", right,
              "); each of (left, right) must be -1 (no bound) or more");

  head_dim_ = embed_dim / heads;
  rows_ = {embed_dim, kv_heads * head_dim_, kv_heads * head_dim_};
  const int64_t all_rows = embed_dim + 2 * rows_[1];
  // Creates out_proj first, as torch.nn does, so that a seed gives the same parameters.
  out_proj = register_module("out_proj",
                             torch::nn::Linear(torch::nn::LinearOptions(embed_dim, embed_dim).bias(options.bias())));
  const auto weight = [&](const char* name, int64_t rows, int64_t columns) {
    return torch::nn::init::xavier_uniform_(register_parameter(name, at::empty({rows, columns})));
  };
  if (kdim == embed_dim && vdim == embed_dim) {
    in_proj_weight = weight("in_proj_weight", all_rows, embed_dim);
  } else {
    q_proj_weight = weight("q_proj_weight", embed_dim, embed_dim);
    k_proj_weight = weight("k_proj_weight", rows_[1], kdim);
    v_proj_weight = weight("v_proj_weight", rows_[2], vdim);
  }
  if (options.bias()) {
    in_proj_bias = register_parameter("in_proj_bias", at::zeros({all_rows}));
    torch::nn::init::zeros_(out_proj->bias);
  }
}

std::tuple<Tensor, Tensor> MultiheadAttentionImpl::forward(const Tensor& query, const Tensor& key, const Tensor& value,
                                                           const Tensor& key_padding_mask, bool need_weights,
                                                           const Tensor& attn_mask, bool average_attn_weights,
                                                           bool is_causal, const Tensor& query_offset,
                                                           const Tensor& key_lengths) {
  check(query, key, value, key_padding_mask, attn_mask);
  const int64_t length_dim = options.batch_first() && query.dim() == 3 ? 1 : 0;
  auto projected = project(query, key, value);
  for (Tensor& t : projected)  // [B, H or Hk, L or S, head_dim]
    t = t.unflatten(-1, {-1, head_dim_}).movedim(length_dim, -2);
  const bool mask_per_head = attn_mask.defined() && attn_mask.dim() == 3 && query.dim() == 3;
  const Tensor hidden =
      merge(mask_per_head ? attn_mask.unflatten(0, {-1, options.num_heads()}) : attn_mask, key_padding_mask);
  Options call{.dropout_p = is_training() ? options.dropout() : 0.0,
               .is_causal = is_causal,
               .enable_gqa = true,
               .softcap = options.softcap(),
               .window_size = options.window_size()};
  if (hidden.defined()) call.attn_mask = hidden.scalar_type() == at::kBool ? hidden.logical_not() : hidden;
  if (query_offset.defined()) call.query_offset = query_offset;
  if (key_lengths.defined()) call.key_lengths = key_lengths;
  const auto [output, weights] =
      attend(projected[0], projected[1], projected[2], need_weights, average_attn_weights, call);
  // The operator's output has the query's layout, so nothing is copied here.
  return {out_proj(output.movedim(-2, length_dim).flatten(-2)), weights};
}

// Returns the queries, keys and values of all heads. If all three inputs are the same tensor, one matrix product
// computes them.
std::vector<Tensor> MultiheadAttentionImpl::project(const Tensor& query, const Tensor& key, const Tensor& value) const {
  if (in_proj_weight.defined() && query.is_same(key) && key.is_same(value))
    return at::linear(query, in_proj_weight, in_proj_bias).split_with_sizes(rows_, -1);
  auto weights = in_proj_weight.defined() ? in_proj_weight.split_with_sizes(rows_)
                                          : std::vector<Tensor>{q_proj_weight, k_proj_weight, v_proj_weight};
  const auto biases = options.bias() ? in_proj_bias.split_with_sizes(rows_) : std::vector<Tensor>(3);
  return {at::linear(query, weights[0], biases[0]), at::linear(key, weights[1], biases[1]),
          at::linear(value, weights[2], biases[2])};
}

std::tuple<Tensor, Tensor> MultiheadAttentionImpl::attend(const Tensor& query, const Tensor& key, const Tensor& value,
                                                          bool need_weights, bool average_attn_weights,
                                                          Options call) const {
  if (!need_weights) return {sdpa(query, key, value, call), Tensor()};
  const double dropout_p = std::exchange(call.dropout_p, 0.0);
  if (dropout_p == 0) return ModuleOp::call(call_of(query, key, value, call), average_attn_weights);
  // The operator returns weights before dropout. The module must return the weights that it used. So the module
  // multiplies the values here, and gives the operator values without columns.
  const Tensor dropped =
      at::dropout(std::get<1>(sdpa_with_weights(query, key, value.narrow(-1, 0, 0), call)), dropout_p, true);
  return {dropped.matmul(value.repeat_interleave(query.size(-3) / value.size(-3), -3)),
          average_attn_weights ? dropped.mean(-3) : dropped};
}

void MultiheadAttentionImpl::check(const Tensor& query, const Tensor& key, const Tensor& value,
                                   const Tensor& key_padding_mask, const Tensor& attn_mask) const {
  const int64_t embed_dim = options.embed_dim();
  const bool batch_first = options.batch_first();
  check_kind("query", query, out_proj->weight);
  check_kind("key", key, out_proj->weight);
  check_kind("value", value, out_proj->weight);
  // Returns the sizes [batch, length, features] in the order of the module's dimensions. If there is no batch, leaves
  // it out.
  const auto shape = [&](const std::optional<Size>& batch, const Size& length, int64_t features) -> Sizes {
    if (!batch) return {length, features};
    return batch_first ? Sizes{*batch, length, features} : Sizes{length, *batch, features};
  };
  check_shape("query", query, {"L", embed_dim}, shape("B", "L", embed_dim));
  const bool batched = query.dim() == 3;
  const int64_t batch_dim = batch_first ? 0 : 1, length_dim = batched && batch_first ? 1 : 0;
  const auto batch = batched ? std::optional<Size>(query.size(batch_dim)) : std::nullopt;
  check_shape("key", key, shape(batch, "S", options.kdim().value_or(embed_dim)));
  const int64_t queries = query.size(length_dim), keys = key.size(length_dim);
  check_shape("value", value, shape(batch, keys, options.vdim().value_or(embed_dim)));
  if (key_padding_mask.defined()) {
    check_mask_dtype("key_padding_mask", key_padding_mask);
    check_shape("key_padding_mask", key_padding_mask, batch ? Sizes{*batch, keys} : Sizes{keys});
  }
  if (attn_mask.defined()) {
    check_mask_dtype("attn_mask", attn_mask);
    check_shape("attn_mask", attn_mask, {queries, keys},
                {(batch ? batch->size : 1) * options.num_heads(), queries, keys});
  }
}

}  // namespace attn
