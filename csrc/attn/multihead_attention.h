// Attention of several heads between learned projections, as a torch::nn module.
//
//   attn::MultiheadAttention attention(attn::MultiheadAttentionOptions(64, 8).num_kv_heads(2).batch_first(true));
//   auto [output, weights] = attention(x, x, x);
//
// Replaces torch::nn::MultiheadAttention. The arguments are the same, and the parameters have the same names. The same
// seed gives the parameters the same values. The Python modules torch.nn.MultiheadAttention and
// torch_attn.nn.MultiheadAttention have these parameters too, so their state_dict fits this module (docs/cpp.md loads
// one). The C++ module lacks add_bias_kv and add_zero_attn.
//
// Source: Vaswani et al., Attention Is All You Need, 2017, section 3.2.2, https://arxiv.org/abs/1706.03762; grouped
// heads: Ainslie et al., GQA, 2023, https://arxiv.org/abs/2305.13245.
#pragma once

#include <attn/sdpa.h>
#include <torch/arg.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <array>
#include <optional>
#include <tuple>
#include <vector>

namespace attn {

struct MultiheadAttentionOptions {
  MultiheadAttentionOptions(int64_t embed_dim, int64_t num_heads) : embed_dim_(embed_dim), num_heads_(num_heads) {}

  // Size of a query and of the output, a multiple of num_heads.
  TORCH_ARG(int64_t, embed_dim);
  // The number of query heads, H. Each head has head_dim = embed_dim / num_heads features.
  TORCH_ARG(int64_t, num_heads);
  // The number of key heads and of value heads, Hk. It must divide num_heads. Absent: num_heads. H / Hk consecutive
  // query heads share a key head and a value head.
  TORCH_ARG(std::optional<int64_t>, num_kv_heads) = std::nullopt;
  // In training, the probability in [0, 1] that a weight is zeroed.
  TORCH_ARG(double, dropout) = 0.0;
  // Whether the projections have biases.
  TORCH_ARG(bool, bias) = true;
  // The sizes of a key and of a value. Absent: embed_dim.
  TORCH_ARG(std::optional<int64_t>, kdim) = std::nullopt;
  TORCH_ARG(std::optional<int64_t>, vdim) = std::nullopt;
  // If true, tensors are [B, L, embed_dim]. If false, tensors are [L, B, embed_dim].
  TORCH_ARG(bool, batch_first) = false;
  // Both options are as in attn::Options. window_size is (left, right): a query sees up to `left` keys before its
  // position and up to `right` keys after it. -1 means all. softcap is the bound of scores. 0 means no bound.
  using Window = std::array<int64_t, 2>;
  TORCH_ARG(Window, window_size) = { -1, -1 };
  TORCH_ARG(double, softcap) = 0.0;
};

class ATTN_API MultiheadAttentionImpl : public torch::nn::Cloneable<MultiheadAttentionImpl> {
 public:
  // Throws c10::Error if a size or a number of heads is not positive, if num_heads does not divide embed_dim, if
  // num_kv_heads does not divide num_heads, or if dropout, window_size or softcap is out of range. The message names
  // the option, its value and what is allowed.
  MultiheadAttentionImpl(int64_t embed_dim, int64_t num_heads)
      : MultiheadAttentionImpl(MultiheadAttentionOptions(embed_dim, num_heads)) {}
  explicit MultiheadAttentionImpl(const MultiheadAttentionOptions& options);

  void reset() override;

  // Attends from every query to the keys that masks do not hide.
  //
  //   query                 [B, L, embed_dim], [L, B, embed_dim] without batch_first, or [L, embed_dim]
  //   key, value            likewise, [B, S, kdim] and [B, S, vdim]
  //   key_padding_mask      [B, S], or [S] if query has no batch
  //   need_weights          whether the weights are returned, which takes memory O(L S). It is true by default only
  //                         because torch::nn has this default
  //   attn_mask             [L, S], or [B H, L, S], where the heads of a batch entry are neighbours
  //   average_attn_weights  whether the weights are the mean over the heads
  //   is_causal             query i attends only to keys j <= i + query_offset. The masks may hide more keys
  //   query_offset          the position of query 0 among the keys: an integer, or [B] of them; undefined: 0
  //   key_lengths           how many of the S keys are in use: an integer, or [B] of them; undefined: S. Further keys
  //                         are not read
  //
  // In a boolean mask, true hides a key, as in torch::nn. (In a mask for attn::sdpa, true shows a key.) A floating mask
  // is added to the scores and may require a gradient. An undefined tensor is no mask.
  //
  // Returns the output, which has query's shape, and the weights after dropout. The weights have shape [B, L, S], or
  // [B, H, L, S] without average_attn_weights. If query has no batch, B is left out. Without need_weights, the weights
  // are undefined, and a head takes only O(L + S) memory beside the masks. The output of a query that may attend to no
  // key is the bias of out_proj. Throws c10::Error on input that does not fit. The message names the argument, its
  // value and what is allowed.
  std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                             const at::Tensor& key_padding_mask = {}, bool need_weights = true,
                                             const at::Tensor& attn_mask = {}, bool average_attn_weights = true,
                                             bool is_causal = false, const at::Tensor& query_offset = {},
                                             const at::Tensor& key_lengths = {});

  MultiheadAttentionOptions options;

  // The weight is [(H + 2 Hk) head_dim, embed_dim], and the bias is [(H + 2 Hk) head_dim]. The rows project query, key
  // and value, in this order.
  at::Tensor in_proj_weight, in_proj_bias;
  // If kdim or vdim is not embed_dim, these three weights replace in_proj_weight. They have the shapes [embed_dim,
  // embed_dim], [Hk head_dim, kdim] and [Hk head_dim, vdim].
  at::Tensor q_proj_weight, k_proj_weight, v_proj_weight;
  torch::nn::Linear out_proj{nullptr};  // embed_dim -> embed_dim

 private:
  std::vector<at::Tensor> project(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value) const;
  std::tuple<at::Tensor, at::Tensor> attend(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                            bool need_weights, bool average_attn_weights, Options call) const;
  void check(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
             const at::Tensor& key_padding_mask, const at::Tensor& attn_mask) const;

  int64_t head_dim_ = 0;
  std::vector<int64_t> rows_;  // of the projections of query, key and value
};
TORCH_MODULE(MultiheadAttention);

}  // namespace attn
