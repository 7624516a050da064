// attn/sdpa.h: named and flat options, formulas, validation, dispatch, threads, exceptions, memory.
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <attn/sdpa.h>
#include <c10/core/InferenceMode.h>
#include <malloc.h>
#include <torch/csrc/autograd/autograd.h>

#include <atomic>
#include <cmath>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "helpers.h"

namespace {

using at::Tensor;

struct Sdpa : testing::Test {
  Sdpa() { at::manual_seed(0); }

  const at::TensorOptions f64 = at::TensorOptions(at::kDouble);
  const Tensor query = at::randn({2, 4, 70, 16}, f64);  // [B, Hq, L, E]
  const Tensor key = at::randn({2, 2, 90, 16}, f64);    // [B, Hk, S, E]
  const Tensor value = at::randn({2, 2, 90, 8}, f64);   // [B, Hv, S, Ev]
  const Tensor mask = at::randn({70, 90}, f64);
};

// The output, and the gradients of its sum.
std::vector<Tensor> output_and_gradients(const std::vector<Tensor>& inputs, const attn::Options& options) {
  std::vector<Tensor> leaves;
  for (const Tensor& t : inputs) leaves.push_back(t.detach().requires_grad_());
  const Tensor output = attn::sdpa(leaves[0], leaves[1], leaves[2], options);
  auto results = torch::autograd::grad({output.sum()}, leaves);
  results.push_back(output.detach());
  return results;
}

TEST_F(Sdpa, NamedOptionsAreTheFlatOnes) {
  const auto named =
      attn::sdpa(query, key, value, {.attn_mask = mask, .is_causal = true, .scale = 0.3, .enable_gqa = true});
  expect_same_bits(named, attn::sdpa(query, key, value, mask, 0.0, true, 0.3, true));
  at::manual_seed(1);
  const auto dropped = attn::sdpa(query, key, value, {.dropout_p = 0.5, .enable_gqa = true});
  at::manual_seed(1);
  expect_same_bits(dropped, attn::sdpa(query, key, value, std::nullopt, 0.5, false, std::nullopt, true));
  EXPECT_FALSE(at::equal(dropped, attn::sdpa(query, key, value, {.enable_gqa = true})));

  attn::Options options = {.attn_mask = mask, .is_causal = true, .scale = 0.3, .enable_gqa = true};
  const attn::Stats stats = attn::sdpa_stats(query, key, options);
  const attn::Stats flat = attn::sdpa_stats(query, key, mask, /*is_causal=*/true, 0.3, /*enable_gqa=*/true);
  expect_same_bits(flat.entropy, stats.entropy);
  expect_same_bits(flat.received_weight, stats.received_weight);
  options.is_causal = false;
  EXPECT_FALSE(at::equal(attn::sdpa_stats(query, key, options).entropy, stats.entropy));
}

// ALiBi as torch_attn.score_program prints it; a program made in Python needs its string and its leaves.
TEST_F(Sdpa, FunctionsOfThePairComeAsStrings) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("attn::flex_attention", "");
  const Tensor slopes = at::rand({4}, f64), distances = at::arange(-89, 70, f64).abs().neg();
  const Tensor terms = (slopes.view({4, 1}) * distances).view({1, 4, -1, 1}).requires_grad_();
  const std::map<std::string, c10::IValue> given = {
      {"query", query},
      {"key", key},
      {"value", value},
      {"enable_gqa", true},
      {"score_mod", "attn.program 1\n%0 f score\n%1 f distance 0\n%2 f add %0 %1\nreturn %2"},
      {"distance_terms", terms}};
  torch::jit::Stack stack;
  for (const c10::Argument& argument : op.schema().arguments()) {
    const auto found = given.find(argument.name());
    stack.push_back(found != given.end() ? found->second : argument.default_value().value_or(c10::IValue()));
  }
  op.callBoxed(stack);
  const Tensor output = stack[0].toTensor();
  attn::Options options{.enable_gqa = true};
  options.alibi_slopes = slopes;
  EXPECT_TRUE(at::allclose(output, attn::sdpa(query, key, value, options)));
  const auto grad = torch::autograd::grad({output.sum()}, {terms})[0];
  EXPECT_TRUE(at::allclose(grad.sum(), at::zeros({}, f64), 0, 1e-10));  // softmax ignores what is added to all
  EXPECT_GT(grad.abs().max().item<double>(), 1e-3);
}

// The members of Options, by the names of the operators' arguments.
std::map<std::string, c10::IValue> members(const attn::Options& options) {
  const auto& o = options;
  return {
      {"attn_mask", absent(o.attn_mask)},
      {"dropout_p", o.dropout_p},
      {"is_causal", o.is_causal},
      {"scale", absent(o.scale)},
      {"enable_gqa", o.enable_gqa},
      {"softcap", o.softcap},
      {"window_size", at::IntArrayRef(o.window_size)},
      {"query_offset", absent(o.query_offset)},
      {"key_lengths", absent(o.key_lengths)},
      {"alibi_slopes", absent(o.alibi_slopes)},
      {"sinks", absent(o.sinks)},
      {"key_scale", absent(o.key_scale)},
      {"value_scale", absent(o.value_scale)},
  };
}

TEST_F(Sdpa, DefaultsAreTheOperators) {
  expect_defaults("attn::sdpa_with_weights", 3, members(attn::Options()));
  auto of_statistics = members(attn::Options());
  for (const char* refused : {"dropout_p", "key_scale", "value_scale"}) of_statistics.erase(refused);
  expect_defaults("attn::sdpa_stats", 2, of_statistics);
  expect_same_bits(attn::sdpa(query, query, query), attn::sdpa(query, query, query, std::nullopt));
}

TEST_F(Sdpa, IsTheFormula) {
  const attn::Options options = {.attn_mask = mask, .scale = 0.3, .enable_gqa = true};
  const Tensor k = key.repeat_interleave(2, 1), v = value.repeat_interleave(2, 1);
  const Tensor scores = query.matmul(k.transpose(-2, -1)) * 0.3 + mask, weights = scores.softmax(-1);
  const auto [output, given_weights, given_scores] = attn::sdpa_with_weights(query, key, value, options);
  expect_close(given_scores, scores);
  expect_close(given_weights, weights);
  expect_close(output, weights.matmul(v));
  expect_close(attn::sdpa(query, key, value, options), output);

  const attn::Stats stats = attn::sdpa_stats(query, key, options);
  expect_close(stats.largest_score, scores.amax(-1));
  expect_close(stats.entropy, -at::xlogy(weights, weights).sum(-1));
  expect_close(stats.logsumexp, scores.logsumexp(-1));
  expect_close(stats.received_weight, weights.sum(-2));
}

// All options that the built-in lacks, at once, against the formula.
struct WithOptions : Sdpa {
  static constexpr double kCap = 1.5;
  static constexpr int64_t kLeft = 20, kRight = 3, kOffset = 20;

  const Tensor slopes = at::rand({4}, f64), sinks = at::randn({4}, f64);
  const Tensor lengths = at::tensor({90, 41});
  const attn::Options options = {.attn_mask = mask,
                                 .enable_gqa = true,
                                 .softcap = kCap,
                                 .window_size = {kLeft, kRight},
                                 .query_offset = kOffset,
                                 .key_lengths = lengths,
                                 .alibi_slopes = slopes,
                                 .sinks = sinks};
};

TEST_F(WithOptions, IsTheFormula) {
  const auto of_heads = [](const Tensor& t) { return t.view({4, 1, 1}); };
  const Tensor k = key.repeat_interleave(2, 1), v = value.repeat_interleave(2, 1);
  const Tensor ahead = at::arange(90) - (at::arange(70).unsqueeze(1) + kOffset);  // [L, S]
  const Tensor hidden =
      (ahead < -kLeft).logical_or(ahead > kRight).logical_or(at::arange(90) >= lengths.view({2, 1, 1, 1}));
  const Tensor capped = kCap * (query.matmul(k.transpose(-2, -1)) / 4 / kCap).tanh();
  const Tensor scores = (capped - of_heads(slopes) * ahead.abs() + mask).masked_fill(hidden, -INFINITY);
  const Tensor logsumexp = at::cat({scores, of_heads(sinks).expand({2, 4, 70, 1})}, -1).logsumexp(-1);
  const Tensor weights = (scores - logsumexp.unsqueeze(-1)).exp();

  const attn::OutputAndLogsumexp results = attn::sdpa_with_logsumexp(query, key, value, options);
  expect_close(results.output, weights.matmul(v));
  expect_close(results.logsumexp, logsumexp);
  const Tensor largest = scores.amax(-1);  // -inf, in both, where nothing is seen
  expect_same_bits(results.max_score.isinf(), largest.isinf());
  expect_close(results.max_score.nan_to_num(), largest.nan_to_num());
  expect_same_bits(attn::sdpa(query, key, value, options), results.output);
  const auto [output, given_weights, given_scores] = attn::sdpa_with_weights(query, key, value, options);
  expect_close(output, results.output);
  expect_close(given_weights, weights);
  expect_same_bits(given_scores.isinf(), hidden.expand({2, 4, 70, 90}));

  const attn::Stats stats = attn::sdpa_stats(query, key, options);
  expect_close(stats.logsumexp, logsumexp);
  expect_close(stats.entropy, -at::xlogy(weights, weights).sum(-1));
  expect_close(stats.received_weight, weights.sum(-2));
  EXPECT_THROW(attn::sdpa_stats(query, key, {.dropout_p = 0.1, .enable_gqa = true}), c10::Error);
}

TEST_F(WithOptions, OneOffsetIsThatOfEveryEntry) {
  attn::Options moved = {.is_causal = true, .enable_gqa = true, .query_offset = kOffset};
  const Tensor output = attn::sdpa(query, key, value, moved);
  moved.query_offset = at::full({2}, kOffset, at::kInt);
  expect_same_bits(output, attn::sdpa(query, key, value, moved));
}

TEST_F(WithOptions, Gradients) {
  const Tensor s = slopes.clone().requires_grad_(), t = sinks.clone().requires_grad_();
  attn::Options call = options;
  call.alibi_slopes = s;
  call.sinks = t;
  const auto results = attn::sdpa_with_logsumexp(query, key, value, call);
  const auto grads = torch::autograd::grad({results.output.sum() + results.logsumexp.sum()}, {s, t});
  EXPECT_EQ(grads[0].sizes(), slopes.sizes());
  EXPECT_TRUE(grads[0].ne(0).all().item<bool>() && grads[1].ne(0).all().item<bool>());
}

TEST_F(WithOptions, ErrorsNameTheArgument) {
  const auto call = [&](attn::Options changed) {
    changed.enable_gqa = true;
    return [=, this] { attn::sdpa(query, key, value, changed); };
  };
  expect_error("softcap is -1", call({.softcap = -1}));
  expect_error("window_size is (-2, 0)", call({.window_size = {-2, 0}}));
  expect_error("key_lengths is 91; it must be between 0 and 90", call({.key_lengths = 91}));
  expect_error("key_lengths is -1 at entry 1", call({.key_lengths = at::tensor({3, -1})}));
  expect_error("query_offset has dtype Double", call({.query_offset = at::zeros({2}, f64)}));
  expect_error("alibi_slopes has shape [3]", call({.alibi_slopes = slopes.narrow(0, 0, 3)}));
  expect_error("sinks has dtype Float", call({.sinks = sinks.to(at::kFloat)}));
  expect_error("query is undefined", [&] { attn::sdpa(Tensor(), key, value, {.query_offset = 1}); });
}

TEST_F(Sdpa, StatisticsHaveNoDerivative) {
  const Tensor leaf = query.detach().requires_grad_();
  const attn::Stats stats = attn::sdpa_stats(leaf, leaf);
  expect_same_bits(stats.entropy.detach(), attn::sdpa_stats(query, query).entropy);
  expect_error("sdpa_stats: its results have no derivatives",
               [&] { torch::autograd::grad({stats.entropy.sum()}, {leaf}); });
  expect_error("key has 2 heads but the others have 4", [&] { attn::sdpa_stats(query, key); });
}

TEST_F(Sdpa, ErrorsNameTheArgument) {
  const Tensor undefined;
  const auto call = [&](const Tensor& q, const Tensor& k, const Tensor& v, const attn::Options& options = {}) {
    return [=] { attn::sdpa(q, k, v, options); };
  };
  expect_error("key has 2 heads but the others have 4", call(query, key, value));
  expect_error("key has head_dim 8 but query has 16", call(query, query.narrow(-1, 0, 8), query));
  expect_error("value has length 69 but key has 70", call(query, query, query.narrow(-2, 0, 69)));
  expect_error("key is undefined", call(query, undefined, value));
  expect_error("attn_mask is undefined", call(query, query, query, {.attn_mask = undefined}));
  expect_error("attn_mask has shape [70, 90]", call(query, query, query, {.attn_mask = mask}));
  expect_error("dropout_p is 1.5", call(query, query, query, {.dropout_p = 1.5}));
  expect_error("scale is nan", call(query, query, query, {.scale = std::nan("")}));
  expect_error("key has 3 heads but query has 4", call(query, query.narrow(1, 0, 3), query, {.enable_gqa = true}));
  expect_error("dropout_p is -1", [&] { attn::sdpa_with_weights(query, query, query, {.dropout_p = -1}); });
}

TEST_F(Sdpa, MetaTensorsHaveShapesOnly) {
  const auto meta = [](const Tensor& t) { return t.to(at::kMeta); };
  const Tensor output = attn::sdpa(meta(query), meta(key), meta(value), {.enable_gqa = true});
  EXPECT_TRUE(output.is_meta());
  EXPECT_EQ(output.sizes(), at::IntArrayRef({2, 4, 70, 8}));
}

TEST_F(Sdpa, AutocastGoesToItsType) {
  const Tensor x = query.to(at::kFloat);
  at::autocast::set_autocast_enabled(at::kCPU, true);
  const Tensor output = attn::sdpa(x, x, x);
  at::autocast::set_autocast_enabled(at::kCPU, false);
  at::autocast::clear_cache();
  EXPECT_EQ(output.scalar_type(), at::kBFloat16);
  expect_same_bits(output, attn::sdpa(x.to(at::kBFloat16), x.to(at::kBFloat16), x.to(at::kBFloat16)));
}

TEST_F(Sdpa, InferenceModeGivesTheSame) {
  const Tensor expected = attn::sdpa(query, query, query);
  const c10::InferenceMode guard;
  const Tensor output = attn::sdpa(query, query, query);
  EXPECT_TRUE(output.is_inference());
  expect_same_bits(output, expected);
}

TEST_F(Sdpa, SeveralThreadsAtOnce) {
  constexpr int kThreads = 6;
  std::vector<std::vector<Tensor>> inputs, expected;
  for (int i = 0; i < kThreads; ++i) {
    inputs.push_back({at::randn({4, 40 + i, 16}, f64), at::randn({4, 50, 16}, f64), at::randn({4, 50, 8}, f64)});
    expected.push_back(output_and_gradients(inputs[i], {.is_causal = true}));
  }
  std::atomic<int> wrong = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i)
    threads.emplace_back([&, i] {
      for (int repeat = 0; repeat < 20; ++repeat) {
        const auto results = output_and_gradients(inputs[i], {.is_causal = true});
        for (size_t j = 0; j < results.size(); ++j) wrong += !at::equal(results[j], expected[i][j]);
      }
    });
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

TEST_F(Sdpa, AnErrorLeavesThreadAndLibraryUsable) {
  const Tensor expected = attn::sdpa(query, query, query);
  Tensor output;
  std::thread([&] {
    for (int i = 0; i < 100; ++i) expect_error("key has 2 heads", [&] { attn::sdpa(query, key, value); });
    output = attn::sdpa(query, query, query);
  }).join();
  expect_same_bits(output, expected);

  // One that is thrown while backward runs comes out of grad.
  const Tensor leaf = query.detach().requires_grad_();
  const Tensor through = leaf * 1;
  through.register_hook([](const Tensor&) { TORCH_CHECK(false, "thrown by a hook"); });
  expect_error("thrown by a hook",
               [&] { torch::autograd::grad({attn::sdpa(through, through, through).sum()}, {leaf}); });
  expect_same_bits(output_and_gradients({query, query, query}, {}).back(), expected);
}

size_t bytes_in_use() {
  const auto info = mallinfo2();
  return info.uordblks + info.hblkhd;
}

// 10,000 calls that compute and 10,000 that throw leave the heap as they found it: not one byte a call.
TEST_F(Sdpa, NothingLeaks) {
  const Tensor small = query.narrow(2, 0, 3).contiguous();
  const auto calls = [&](int count) {
    for (int i = 0; i < count; ++i) {
      output_and_gradients({small, small, small}, {.dropout_p = 0.1, .is_causal = true});
      EXPECT_THROW(attn::sdpa(small, key, value), c10::Error);
    }
  };
  calls(100);  // what is made once: caches, threads
  const size_t before = bytes_in_use();
  calls(10000);
  const size_t after = bytes_in_use();
  EXPECT_LT(after, before + 10000) << "of " << before << " bytes";
}

}  // namespace
