// attn/varlen.h against attn::sdpa of each sequence alone; pages; attn::invariant().
#include <ATen/core/dispatch/Dispatcher.h>
#include <attn/varlen.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "helpers.h"

namespace {

using at::Tensor;

struct Varlen : testing::Test {
  Varlen() { at::manual_seed(0); }

  static constexpr int64_t kSequences = 5, kTokens = 90, kKeys = 240, kMaxQ = 70, kMaxK = 130;

  const at::TensorOptions f64 = at::TensorOptions(at::kDouble);
  const Tensor cu_seq_q = at::tensor({0, 5, 5, 75, 82, 83}, at::kInt);  // the last 7 are of no sequence
  const Tensor cu_seq_k = at::tensor({0, 9, 12, 102, 109, 239}, at::kInt);
  const Tensor query = at::randn({kTokens, 4, 16}, f64);  // [T_q, Hq, E]
  const Tensor key = at::randn({kKeys, 2, 16}, f64);      // [T_k, Hk, E]
  const Tensor value = at::randn({kKeys, 2, 8}, f64);     // [T_k, Hv, Ev]
  const attn::VarlenOptions causal = {.window_size = {-1, 0}, .enable_gqa = true};

  Tensor call(const attn::VarlenOptions& options) const {
    return attn::varlen(query, key, value, cu_seq_q, cu_seq_k, kMaxQ, kMaxK, options);
  }
};

// Sequence n of a tensor [T, heads, D], as sdpa takes it: [heads, L, D].
Tensor sequence(const Tensor& t, const Tensor& cu_seq, int64_t n) {
  return t.slice(0, cu_seq[n].item<int64_t>(), cu_seq[n + 1].item<int64_t>()).transpose(0, 1);
}

TEST_F(Varlen, DefaultsAreTheOperators) {
  const attn::VarlenOptions o;
  const std::map<std::string, c10::IValue> members = {
      {"scale", absent(o.scale)},
      {"window_size", at::IntArrayRef(o.window_size)},
      {"enable_gqa", o.enable_gqa},
      {"seqused_k", absent(o.seqused_k)},
      {"block_table", absent(o.block_table)},
      {"softcap", o.softcap},
      {"alibi_slopes", absent(o.alibi_slopes)},
      {"sinks", absent(o.sinks)},
      {"query_offset", absent(o.query_offset)},
      {"dropout_p", o.dropout_p},
      {"attn_mask", absent(o.attn_mask)},
      {"key_scale", absent(o.key_scale)},
      {"value_scale", absent(o.value_scale)},
      {"with_rows", true},  // the function that is called says it
  };
  expect_defaults("attn::varlen_attention", 7, members);
}

// Every option at once, in results and gradients.
TEST_F(Varlen, BitsOfEachSequenceAreThoseOfSdpa) {
  const Tensor slopes = at::rand({4}, f64), sinks = at::randn({4}, f64);
  const Tensor mask = at::randn({1, kTokens, kMaxK}, f64), used = at::tensor({9, 2, 80, 7, 130});
  const Tensor q = query.clone().requires_grad_(), k = key.clone().requires_grad_(), v = value.clone().requires_grad_();
  const attn::OutputAndLogsumexp packed = attn::varlen_with_logsumexp(q, k, v, cu_seq_q, cu_seq_k, kMaxQ, kMaxK,
                                                                      {.scale = 0.3,
                                                                       .window_size = {20, 0},
                                                                       .enable_gqa = true,
                                                                       .seqused_k = used,
                                                                       .softcap = 1.5,
                                                                       .alibi_slopes = slopes,
                                                                       .sinks = sinks,
                                                                       .attn_mask = mask});
  EXPECT_EQ(packed.output.sizes(), at::IntArrayRef({kTokens, 4, 8}));
  EXPECT_EQ(packed.logsumexp.sizes(), at::IntArrayRef({4, kTokens}));
  const auto loss = [](const attn::OutputAndLogsumexp& results) {
    return results.output.sum() + results.logsumexp.sum();
  };
  const std::vector<Tensor> inputs = {q, k, v};
  const auto gradients = torch::autograd::grad({loss(packed)}, inputs);

  std::vector<Tensor> alone;
  for (const Tensor& t : inputs) alone.push_back(at::zeros_like(t));
  for (int64_t n = 0; n < kSequences; ++n) {
    const int64_t first = cu_seq_q[n].item<int64_t>(), queries = cu_seq_q[n + 1].item<int64_t>() - first;
    const int64_t keys = (cu_seq_k[n + 1] - cu_seq_k[n]).item<int64_t>(), in_use = used[n].item<int64_t>();
    const auto results =
        attn::sdpa_with_logsumexp(sequence(q, cu_seq_q, n), sequence(k, cu_seq_k, n), sequence(v, cu_seq_k, n),
                                  {.attn_mask = mask.slice(1, first, first + queries).slice(2, 0, keys),
                                   .scale = 0.3,
                                   .enable_gqa = true,
                                   .softcap = 1.5,
                                   .window_size = {20, 0},
                                   .query_offset = in_use - queries,
                                   .key_lengths = in_use,
                                   .alibi_slopes = slopes,
                                   .sinks = sinks});
    expect_same_bits(sequence(packed.output, cu_seq_q, n), results.output);
    expect_same_bits(packed.logsumexp.slice(1, first, first + queries), results.logsumexp);
    expect_same_bits(packed.max_score.slice(1, first, first + queries), results.max_score);
    const auto own = torch::autograd::grad({loss(results)}, inputs);
    for (size_t i = 0; i < own.size(); ++i) alone[i] += own[i];  // 0 outside of the sequence
  }
  expect_same_bits(gradients, alone);
  EXPECT_TRUE(packed.output.slice(0, 83).eq(0).all().item<bool>());
}

TEST_F(Varlen, GradientsOfHeadNumbersAndMask) {
  attn::VarlenOptions options = causal;
  options.alibi_slopes = at::rand({4}, f64).requires_grad_();
  options.sinks = at::randn({4}, f64).requires_grad_();
  options.attn_mask = at::randn({4, kTokens, kMaxK}, f64).requires_grad_();
  const auto grads =
      torch::autograd::grad({call(options).sum()}, {*options.alibi_slopes, *options.sinks, *options.attn_mask});
  EXPECT_TRUE(grads[0].ne(0).all().item<bool>() && grads[1].ne(0).all().item<bool>());
  EXPECT_EQ(grads[2].sizes(), options.attn_mask->sizes());
  EXPECT_TRUE(grads[2].slice(1, 83).eq(0).all().item<bool>());
}

TEST_F(Varlen, OneOffsetIsThatOfEverySequence) {
  attn::VarlenOptions moved = causal;
  moved.query_offset = 3;
  const Tensor output = call(moved);
  EXPECT_FALSE(at::equal(output, call(causal)));
  moved.query_offset = at::full({kSequences}, 3, at::kInt);
  expect_same_bits(output, call(moved));
}

TEST_F(Varlen, DropoutIsOfTheDefaultGenerator) {
  attn::VarlenOptions dropped = causal;
  dropped.dropout_p = 0.5;
  at::manual_seed(1);
  const Tensor output = call(dropped);
  EXPECT_FALSE(at::equal(call(dropped), output));
  at::manual_seed(1);
  expect_same_bits(call(dropped), output);
}

// The keys and values of the sequences in pages, in any order; what is not in use is NaN.
struct Pages : Varlen {
  static constexpr int64_t kPage = 16, kPages = 22, kPerSequence = 9;

  Tensor keys = at::full({kPages, kPage, 2, 16}, NAN, f64), values = at::full({kPages, kPage, 2, 8}, NAN, f64);
  Tensor table = at::full({kSequences, kPerSequence}, -1, at::kInt);
  const Tensor lengths = cu_seq_k.diff();

  Pages() {
    const Tensor order = at::randperm(kPages);
    for (int64_t n = 0, next = 0; n < kSequences; ++n) {
      const int64_t first = cu_seq_k[n].item<int64_t>(), end = cu_seq_k[n + 1].item<int64_t>();
      for (int64_t start = first; start < end; start += kPage) {
        const int64_t page = order[next++].item<int64_t>(), rows = std::min(kPage, end - start);
        keys[page].slice(0, 0, rows).copy_(key.slice(0, start, start + rows));
        values[page].slice(0, 0, rows).copy_(value.slice(0, start, start + rows));
        table[n][(start - first) / kPage] = page;
      }
    }
  }

  Tensor from_pages(attn::VarlenOptions options, const std::optional<Tensor>& used) const {
    options.block_table = table;
    options.seqused_k = used;
    return attn::varlen(query, keys, values, cu_seq_q, std::nullopt, kMaxQ, kMaxK, options);
  }
};

TEST_F(Pages, GiveTheBitsOfKeysInARow) {
  expect_same_bits(from_pages(causal, lengths), call(causal));
  attn::VarlenOptions options = {.window_size = {30, 2}, .enable_gqa = true, .softcap = 1.5};
  expect_same_bits(from_pages(options, lengths), call(options));
}

TEST_F(Pages, MayBeShared) {
  // Two sequences with the same keys, from one page; each query as if it were there alone.
  const Tensor q = at::randn({2, 4, 16}, f64), shared = table.slice(0, 0, 1);
  const auto output =
      attn::varlen(q, keys, values, at::tensor({0, 1, 2}), std::nullopt, 1, 9,
                   {.enable_gqa = true, .seqused_k = at::tensor({9, 9}), .block_table = shared.repeat({2, 1})});
  for (int64_t n = 0; n < 2; ++n)
    expect_same_bits(output.slice(0, n, n + 1),
                     attn::varlen(q.slice(0, n, n + 1), keys, values, at::tensor({0, 1}), std::nullopt, 1, 9,
                                  {.enable_gqa = true, .seqused_k = at::tensor({9}), .block_table = shared}));
}

TEST_F(Pages, ErrorsNameTheArgument) {
  expect_error("seqused_k is None; beside a block_table", [&] { from_pages(causal, std::nullopt); });
  expect_error("seqused_k is 131 at entry 4", [&] { from_pages(causal, lengths + at::tensor({0, 0, 0, 0, 1})); });
  table[2][1] = kPages;
  expect_error("block_table is 22 at [2, 1], which is in use; it must be between 0 and 21",
               [&] { from_pages(causal, lengths); });
}

TEST_F(Varlen, ErrorsNameTheArgument) {
  const auto with = [&](const Tensor& q, const Tensor& starts, const std::optional<Tensor>& starts_k, int64_t max_q,
                        const attn::VarlenOptions& options) {
    return [=, this] { attn::varlen(q, key, value, starts, starts_k, max_q, kMaxK, options); };
  };
  const Tensor undefined, reversed = at::tensor({0, 5, 4, 75, 82, 83});
  expect_error("query is undefined", with(undefined, cu_seq_q, cu_seq_k, kMaxQ, causal));
  expect_error("query has shape [4, 90, 4, 16]",
               with(query.expand({4, -1, -1, -1}), cu_seq_q, cu_seq_k, kMaxQ, causal));
  expect_error("cu_seq_q is undefined", with(query, undefined, cu_seq_k, kMaxQ, causal));
  expect_error("cu_seq_k is undefined", with(query, cu_seq_q, undefined, kMaxQ, causal));
  expect_error("cu_seq_k is None", with(query, cu_seq_q, std::nullopt, kMaxQ, causal));
  expect_error("cu_seq_q is 4 at entry 2, after 5; it must not decrease",
               with(query, reversed, cu_seq_k, kMaxQ, causal));
  expect_error("max_q is 69, but sequence 2 of cu_seq_q has length 70", with(query, cu_seq_q, cu_seq_k, 69, causal));
  expect_error("key has 2 heads but the others have 4", with(query, cu_seq_q, cu_seq_k, kMaxQ, {}));
  expect_error("softcap is -1", with(query, cu_seq_q, cu_seq_k, kMaxQ, {.enable_gqa = true, .softcap = -1}));
}

// Times that the switch is on.
int64_t invariances() {
  return c10::Dispatcher::singleton().findSchemaOrThrow("attn::_invariant", "").typed<int64_t(int64_t)>().call(0);
}

// A text as a whole, and token by token from pages that fill: bits are equal while the switch is on.
struct Invariant : testing::TestWithParam<at::ScalarType> {
  static constexpr int64_t kLength = 300, kPage = 16, kPages = (kLength + kPage - 1) / kPage;
};
TEST_P(Invariant, TokenByTokenIsTheWhole) {
  at::manual_seed(0);
  const int64_t before = invariances();
  const auto draw = [&] { return at::randn({kLength, 4, 64}).to(GetParam()); };
  const Tensor query = draw(), key = draw(), value = draw(), cu_seq = at::tensor({int64_t{0}, kLength});
  const auto whole = [&] {
    return attn::varlen(query, key, value, cu_seq, cu_seq, kLength, kLength, {.window_size = {-1, 0}});
  };
  const auto by_token = [&] {
    const Tensor keys = at::full({kPages * kPage, 4, 64}, NAN, query.options()), values = keys.clone();
    const auto pages = [&](const Tensor& rows) { return rows.view({kPages, kPage, 4, 64}); };
    std::vector<Tensor> outputs;
    for (int64_t i = 0; i < kLength; ++i) {
      keys[i].copy_(key[i]);
      values[i].copy_(value[i]);
      outputs.push_back(
          attn::varlen(query.slice(0, i, i + 1), pages(keys), pages(values), at::tensor({0, 1}), std::nullopt, 1, i + 1,
                       {.seqused_k = at::tensor({i + 1}), .block_table = at::arange(kPages).unsqueeze(0)}));
    }
    return at::cat(outputs);
  };
  {
    const auto on = attn::invariant();
    EXPECT_EQ(invariances(), before + 1);
    expect_same_bits(by_token(), whole());
  }
  EXPECT_EQ(invariances(), before);
}
INSTANTIATE_TEST_SUITE_P(Types, Invariant, testing::Values(at::kDouble, at::kFloat, at::kBFloat16, at::kHalf),
                         [](const auto& info) { return std::string(c10::toString(info.param)); });

}  // namespace
