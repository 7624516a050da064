// attn/multihead_attention.h against torch::nn::MultiheadAttention, and what that module lacks.
#include <attn/multihead_attention.h>
#include <torch/nn/modules/activation.h>
#include <torch/serialize.h>

#include <cmath>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

#include "helpers.h"

namespace {

using at::Tensor;

constexpr int64_t kBatch = 2, kQueries = 5, kKeys = 7, kEmbedDim = 24, kHeads = 4;

template <class Module, class Options>
Module seeded(const Options& options) {
  at::manual_seed(0);
  Module module(options);
  module->to(at::kDouble);
  return module;
}

attn::MultiheadAttention ours(const attn::MultiheadAttentionOptions& options) {
  return seeded<attn::MultiheadAttention>(options);
}

attn::MultiheadAttentionOptions options() { return {kEmbedDim, kHeads}; }

struct Multihead : testing::Test {
  Multihead() { at::manual_seed(1); }

  const at::TensorOptions f64 = at::TensorOptions(at::kDouble);
  const Tensor query = at::randn({kQueries, kBatch, kEmbedDim}, f64);
  const Tensor key = at::randn({kKeys, kBatch, kEmbedDim}, f64);
  const Tensor value = at::randn({kKeys, kBatch, kEmbedDim}, f64);
  const Tensor padding = at::arange(kKeys).unsqueeze(0) >= at::tensor({7, 4}).unsqueeze(1);  // [B, S]
  const Tensor mask = at::randn({kQueries, kKeys}, f64);
};

// The output, the weights and the gradients of all parameters, by the names of these.
std::vector<std::pair<std::string, Tensor>> all_results(auto& module, const auto&... arguments) {
  auto [output, weights] = module(arguments...);
  module->zero_grad();
  (output.square().sum() + weights.square().sum()).backward();
  std::vector<std::pair<std::string, Tensor>> results = {{"output", output}, {"weights", weights}};
  for (const auto& parameter : module->named_parameters()) results.emplace_back(parameter.key(), parameter->grad());
  std::sort(results.begin(), results.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  return results;
}

void expect_all_close(const auto& a, const auto& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(a[i].first, b[i].first);
    expect_close(a[i].second, b[i].second);
  }
}

TEST_F(Multihead, ParametersAreTorchs) {
  for (const bool bias : {true, false})
    for (const int64_t kdim : {kEmbedDim, int64_t{10}}) {
      const auto theirs = seeded<torch::nn::MultiheadAttention>(
          torch::nn::MultiheadAttentionOptions(kEmbedDim, kHeads).bias(bias).kdim(kdim).vdim(kEmbedDim));
      const auto expected = theirs->named_parameters();
      const auto parameters = ours(options().bias(bias).kdim(kdim))->named_parameters();
      ASSERT_EQ(parameters.size(), expected.size());
      for (const auto& parameter : expected) expect_same_bits(parameters[parameter.key()], *parameter);
    }
}

TEST_F(Multihead, AgreesWithTorch) {
  auto module = ours(options());
  auto theirs = seeded<torch::nn::MultiheadAttention>(torch::nn::MultiheadAttentionOptions(kEmbedDim, kHeads));
  const auto compare = [&](const auto&... arguments) {
    expect_all_close(all_results(module, arguments...), all_results(theirs, arguments...));
  };
  compare(query, query, query);
  compare(query, key, key);
  compare(query, key, value);
  compare(query, key, value, padding);
  compare(query, key, value, Tensor(), true, mask);
  compare(query, key, value, padding, true, mask);
  compare(query, key, value, padding, true, mask, false);  // weights of every head
}

TEST_F(Multihead, GradientOfAMask) {
  auto module = ours(options());
  auto theirs = seeded<torch::nn::MultiheadAttention>(torch::nn::MultiheadAttentionOptions(kEmbedDim, kHeads));
  const auto gradient = [&](auto& each) {
    const Tensor leaf = mask.clone().requires_grad_();
    std::get<0>(each(query, key, value, padding, false, leaf)).square().sum().backward();
    return leaf.grad();
  };
  expect_close(gradient(module), gradient(theirs));
}

// torch::nn refuses these.
TEST_F(Multihead, AMaskForEveryHead) {
  auto module = ours(options());
  const Tensor hidden = at::rand({kBatch * kHeads, kQueries, kKeys}) < 0.3;
  const auto [output, weights] = module(query, key, value, Tensor(), true, hidden, false);
  expect_same_bits(weights.eq(0), hidden.unflatten(0, {kBatch, kHeads}));
  expect_close(std::get<0>(module(query, key, value, Tensor(), false, hidden)), output);
}

TEST_F(Multihead, OtherSizesOfKeyAndValue) {
  auto module = ours(options().kdim(12).vdim(12)), smaller_key = ours(options().kdim(10).vdim(12));
  auto theirs =
      seeded<torch::nn::MultiheadAttention>(torch::nn::MultiheadAttentionOptions(kEmbedDim, kHeads).kdim(12).vdim(12));
  const Tensor k = key.narrow(-1, 0, 12), v = value.narrow(-1, 0, 12);
  expect_all_close(all_results(module, query, k, v), all_results(theirs, query, k, v));

  // Different sizes for both, which torch::nn refuses: as if the last numbers of every key were 0.
  {
    const at::NoGradGuard guard;
    for (const auto& parameter : smaller_key->named_parameters())
      parameter->copy_(module->named_parameters()[parameter.key()].narrow(-1, 0, parameter->size(-1)));
  }
  const Tensor zeroed = at::cat({k.narrow(-1, 0, 10), at::zeros({kKeys, kBatch, 2}, f64)}, -1);
  expect_close(std::get<0>(smaller_key(query, k.narrow(-1, 0, 10), v)), std::get<0>(module(query, zeroed, v)));
}

// True hides, as -infinity does that is added; a boolean and a floating mask mix.
TEST_F(Multihead, BooleanMasksHide) {
  auto module = ours(options());
  const auto as_floating = [&](const Tensor& hidden) {
    return at::zeros(hidden.sizes(), f64).masked_fill(hidden, -INFINITY);
  };
  const Tensor hidden = at::ones({kQueries, kKeys}, at::kBool).triu(2);
  const auto expected = all_results(module, query, key, value, as_floating(padding), true, as_floating(hidden));
  expect_all_close(all_results(module, query, key, value, padding, true, hidden), expected);
  expect_all_close(all_results(module, query, key, value, as_floating(padding), true, hidden), expected);
  expect_all_close(all_results(module, query, key, value, padding, true, as_floating(hidden)), expected);
}

TEST_F(Multihead, CausalWithinTheMask) {
  auto module = ours(options());
  const Tensor later = at::ones({kQueries, kKeys}, at::kBool).triu(1), third = at::arange(kKeys) == 2;
  expect_all_close(all_results(module, query, key, value, Tensor(), true, Tensor(), true, true),
                   all_results(module, query, key, value, Tensor(), true, later));
  const Tensor hidden = third.expand({kQueries, kKeys});
  expect_all_close(all_results(module, query, key, value, Tensor(), true, hidden, true, true),
                   all_results(module, query, key, value, Tensor(), true, later.logical_or(hidden)));
}

// A window, an offset and lengths are what a mask says, with weights and without.
TEST_F(Multihead, WindowOffsetAndLengths) {
  auto windowed = ours(options().window_size({2, 0})), module = ours(options());
  const Tensor offset = at::tensor({2, 1}), lengths = at::tensor({7, 4});
  const Tensor ahead = at::arange(kKeys) - (at::arange(kQueries).unsqueeze(1) + offset.view({2, 1, 1}));  // [B, L, S]
  const Tensor hidden = (ahead < -2).logical_or(ahead > 0).repeat_interleave(kHeads, 0);
  const auto [output, weights] = module(query, key, value, padding, true, hidden);
  const auto call = [&](bool need_weights) {
    return windowed(query, key, value, Tensor(), need_weights, Tensor(), true, false, offset, lengths);
  };
  expect_close(std::get<0>(call(true)), output);
  expect_close(std::get<1>(call(true)), weights);
  expect_close(std::get<0>(call(false)), output);

  const auto causal = [&](const Tensor& mask, bool is_causal, const Tensor& from) {
    return std::get<0>(module(query, key, value, Tensor(), false, mask, true, is_causal, from));
  };
  expect_close(causal({}, true, offset), causal((ahead > 0).repeat_interleave(kHeads, 0), false, {}));
}

TEST_F(Multihead, SoftCap) {
  auto capped = ours(options().softcap(0.05)), module = ours(options());
  const auto of_heads = [&](auto& each) {
    return std::get<1>(each(query, key, value, Tensor(), true, Tensor(), false));
  };
  const auto ratio = [&](auto& each) {
    const Tensor weights = of_heads(each);
    return (weights.amax(-1) / weights.amin(-1)).max().template item<double>();
  };
  EXPECT_LE(ratio(capped), std::exp(2 * 0.05));  // of scores between -0.05 and 0.05
  EXPECT_GT(ratio(module), std::exp(2 * 0.05));
  expect_close(std::get<0>(capped(query, key, value, Tensor(), false)), std::get<0>(capped(query, key, value)));
  const auto copy = std::dynamic_pointer_cast<attn::MultiheadAttentionImpl>(capped->clone());
  expect_same_bits(std::get<0>(copy->forward(query, key, value)), std::get<0>(capped(query, key, value)));
}

TEST_F(Multihead, WithoutWeights) {
  auto module = ours(options());
  const auto [output, weights] = module(query, key, value, padding, false, mask);
  EXPECT_FALSE(weights.defined());
  expect_close(output, std::get<0>(module(query, key, value, padding, true, mask)));
}

TEST_F(Multihead, BatchFirstAndNoBatch) {
  auto module = ours(options()), batch_first = ours(options().batch_first(true));
  const auto [output, weights] = module(query, key, value, padding);
  const auto swapped = [](const Tensor& t) { return t.transpose(0, 1); };
  const auto [first, first_weights] = batch_first(swapped(query), swapped(key), swapped(value), padding);
  expect_close(swapped(first), output);
  expect_close(first_weights, weights);
  for (auto& each : {module, batch_first}) {
    auto unbatched = each;
    const auto [alone, alone_weights] =
        unbatched(query.select(1, 1), key.select(1, 1), value.select(1, 1), padding.select(0, 1));
    expect_close(alone, output.select(1, 1));
    expect_close(alone_weights, weights.select(0, 1));
  }
}

// A key head that two query heads share is one whose parameters stand twice in a module without groups.
TEST_F(Multihead, GroupedHeads) {
  auto grouped = ours(options().num_kv_heads(2)), full = ours(options());
  EXPECT_EQ(grouped->in_proj_weight.sizes(), at::IntArrayRef({kEmbedDim + 2 * 12, kEmbedDim}));
  const at::NoGradGuard guard;
  grouped->in_proj_bias.normal_();
  const auto twice = [](const Tensor& t) {
    const auto parts = t.split_with_sizes({kEmbedDim, 12, 12});
    const auto repeated = [](const Tensor& rows) {
      return rows.unflatten(0, {2, 6}).repeat_interleave(2, 0).flatten(0, 1);
    };
    return at::cat({parts[0], repeated(parts[1]), repeated(parts[2])});
  };
  full->in_proj_weight.copy_(twice(grouped->in_proj_weight));
  full->in_proj_bias.copy_(twice(grouped->in_proj_bias));
  full->out_proj->weight.copy_(grouped->out_proj->weight);
  const auto [output, weights] = grouped(query, key, value, padding, true, mask, false);
  const auto [expected, expected_weights] = full(query, key, value, padding, true, mask, false);
  expect_close(output, expected);
  expect_close(weights, expected_weights);
}

// In training, with weights or without; the weights returned are those that were used.
TEST_F(Multihead, Dropout) {
  auto module = ours(options().dropout(0.5).num_kv_heads(2));
  const auto [output, weights] = module(query, key, value, Tensor(), true, Tensor(), false);
  const int64_t zeros = weights.eq(0).sum().item<int64_t>();
  EXPECT_GT(zeros, weights.numel() / 4);
  EXPECT_LT(zeros, weights.numel() * 3 / 4);
  const Tensor v = at::linear(value, module->in_proj_weight.narrow(0, kEmbedDim + 12, 12));
  const Tensor heads = v.unflatten(-1, {2, 6}).permute({1, 2, 0, 3}).repeat_interleave(2, 1);  // [B, H, S, 6]
  expect_close(output, module->out_proj(weights.matmul(heads).permute({2, 0, 1, 3}).flatten(-2)));

  EXPECT_FALSE(at::equal(std::get<0>(module(query, key, value, Tensor(), false)),
                         std::get<0>(module(query, key, value, Tensor(), false))));
  module->eval();
  EXPECT_TRUE(at::equal(std::get<0>(module(query, key, value, Tensor(), false)),
                        std::get<0>(module(query, key, value, Tensor(), false))));
}

TEST_F(Multihead, CloneSaveAndLoad) {
  auto module = ours(options().num_kv_heads(1)), other = seeded<attn::MultiheadAttention>(module->options);
  const Tensor expected = std::get<0>(module(query, key, value));
  const auto copy = std::dynamic_pointer_cast<attn::MultiheadAttentionImpl>(module->clone());
  ASSERT_TRUE(copy);
  expect_same_bits(std::get<0>(copy->forward(query, key, value)), expected);
  {
    const at::NoGradGuard guard;
    for (Tensor& parameter : other->parameters()) parameter.zero_();
  }
  std::stringstream stream;
  torch::save(module, stream);
  torch::load(other, stream);
  expect_same_bits(std::get<0>(other(query, key, value)), expected);
  expect_same_bits(std::get<0>(copy->forward(query, key, value)), expected);
}

TEST_F(Multihead, ErrorsNameOptions) {
  expect_error("embed_dim is 0; it must be positive", [] { ours({0, 4}); });
  expect_error("num_heads is -1; it must be positive", [] { ours({24, -1}); });
  expect_error("num_heads is 5; it must divide embed_dim, 24", [] { ours({24, 5}); });
  expect_error("num_kv_heads is 3; it must divide num_heads, 4", [] { ours(options().num_kv_heads(3)); });
  expect_error("num_kv_heads is 0; it must be positive", [] { ours(options().num_kv_heads(0)); });
  expect_error("vdim is 0; it must be positive", [] { ours(options().vdim(0)); });
  expect_error("dropout is 1.5; it must be a probability", [] { ours(options().dropout(1.5)); });
  expect_error("MultiheadAttention: window_size is (-2, 0)", [] { ours(options().window_size({-2, 0})); });
  expect_error("MultiheadAttention: softcap is inf", [] { ours(options().softcap(INFINITY)); });
}

TEST_F(Multihead, ErrorsNameArguments) {
  auto module = ours(options());
  const auto call = [&](const auto&... arguments) { return [&, arguments...] { module(arguments...); }; };
  expect_error("query is undefined", call(Tensor(), key, value));
  expect_error("query has shape [5, 2, 23]; it must have shape [L, 24] or [L, B, 24]",
               call(query.narrow(-1, 0, 23), key, value));
  expect_error("key has dtype Half; it must be that of the parameters, Double", call(query, key.to(at::kHalf), value));
  expect_error("value has dtype Half; it must be that of the parameters", call(query, key, value.to(at::kHalf)));
  expect_error("query is a nested tensor; it must be dense",
               call(at::_nested_tensor_from_tensor_list({query[0]}), key, value));
  expect_error("key has shape [7, 1, 24]; it must have shape [S, 2, 24]", call(query, key.narrow(1, 0, 1), value));
  expect_error("value has shape [6, 2, 24]; it must have shape [7, 2, 24]", call(query, key, value.narrow(0, 0, 6)));
  expect_error("key_padding_mask has shape [7, 2]; it must have shape [2, 7]", call(query, key, value, padding.t()));
  expect_error("attn_mask has shape [7, 5]; it must have shape [5, 7] or [8, 5, 7]",
               call(query, key, value, Tensor(), true, mask.t()));
  expect_error("attn_mask has dtype Long; it must be Bool",
               call(query, key, value, Tensor(), true, mask.to(at::kLong)));
  auto batch_first = ours(options().batch_first(true));
  expect_error("key has shape [7, 2, 24]; it must have shape [5, S, 24]", [&] { batch_first(query, key, value); });
}

}  // namespace
