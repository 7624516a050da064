// Gives each option at each door of the C++ API a value that matters, and prints "door argument" where the result is
// another, or an error names it. tests/test_cpp.py compares these lines with the schema of attn::attention.
#include <ATen/ATen.h>
#include <attn/multihead_attention.h>
#include <attn/varlen.h>

#include <iostream>
#include <string>

namespace {

using at::Tensor;

constexpr int64_t kHeads = 4, kKeyHeads = 2, kLength = 8, kDim = 8, kPage = 4;
const auto f64 = at::TensorOptions(at::kDouble);

void tell(const std::string& door, const char* argument, const auto& call, const auto& without, const auto& with) {
  if (!at::equal(call(without), call(with))) std::cout << door << ' ' << argument << '\n';
}

void tell_error(const std::string& door, const std::string& argument, const auto& call) {
  try {
    call();
  } catch (const c10::Error& error) {
    if (std::string(error.what_without_backtrace()).find(argument) != std::string::npos)
      std::cout << door << ' ' << argument << '\n';
  }
}

// Takes Options or VarlenOptions; `base` is causal.
void tell_options(const std::string& door, const auto& base, const auto& call) {
  const auto wrong = [&](const char* argument, const auto& change) {
    auto options = base;
    change(options);
    tell_error(door, argument, [&] { call(options); });
  };
  wrong("key_scale", [](auto& o) { o.key_scale = at::ones({}); });  // of keys that need none
  wrong("value_scale", [](auto& o) { o.value_scale = at::ones({}); });
  const auto one = [&](const char* argument, const auto& change) {
    auto options = base;
    change(options);
    tell(door, argument, call, base, options);
  };
  one("softcap", [](auto& o) { o.softcap = 0.5; });
  one("window_size", [](auto& o) { o.window_size = {1, 0}; });
  one("query_offset", [](auto& o) { o.query_offset = 2; });
  one("key_lengths", [](auto& o) {
    if constexpr (requires { o.key_lengths; })
      o.key_lengths = 6;
    else
      o.seqused_k = at::tensor({6});
  });
  one("alibi_slopes", [](auto& o) { o.alibi_slopes = at::arange(1, kHeads + 1, f64); });
  one("sinks", [](auto& o) { o.sinks = at::arange(kHeads, f64); });
}

void dense() {
  const Tensor query = at::randn({1, kHeads, kLength, kDim}, f64);
  const Tensor key = at::randn({1, kKeyHeads, kLength, kDim}, f64), value = at::randn_like(key);
  const attn::Options causal = {.is_causal = true, .enable_gqa = true};
  tell_options("sdpa", causal, [&](const auto& o) { return attn::sdpa(query, key, value, o); });
  tell_options("sdpa_with_logsumexp", causal,
               [&](const auto& o) { return attn::sdpa_with_logsumexp(query, key, value, o).logsumexp; });
  tell_options("sdpa_with_weights", causal,
               [&](const auto& o) { return std::get<1>(attn::sdpa_with_weights(query, key, value, o)); });
  tell_options("sdpa_stats", causal, [&](const auto& o) { return attn::sdpa_stats(query, key, o).entropy; });
}

void packed() {
  const Tensor query = at::randn({kLength, kHeads, kDim}, f64);
  const Tensor key = at::randn({kLength, kKeyHeads, kDim}, f64), value = at::randn_like(key);
  const Tensor whole = at::tensor({int64_t{0}, kLength}), halves = at::tensor({int64_t{0}, kLength / 2, kLength});
  const Tensor early = at::tensor({int64_t{0}, int64_t{3}, kLength});
  const attn::VarlenOptions causal = {.window_size = {-1, 0}, .enable_gqa = true};
  const auto call = [&](const Tensor& cu_seq_q, const Tensor& cu_seq_k, int64_t max_q, int64_t max_k) {
    return attn::varlen(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, causal);
  };
  tell_options("varlen", causal,
               [&](const auto& o) { return attn::varlen(query, key, value, whole, whole, kLength, kLength, o); });
  tell("varlen", "cu_seq_q", [&](const Tensor& t) { return call(t, halves, kLength, kLength); }, halves, early);
  tell("varlen", "cu_seq_k", [&](const Tensor& t) { return call(halves, t, kLength, kLength); }, halves, early);
  tell_error("varlen", "max_q", [&] { call(halves, halves, 1, kLength); });
  tell_error("varlen", "max_k", [&] { call(halves, halves, kLength, 1); });
  const auto from_pages = [&](const Tensor& table) {
    const auto pages = [](const Tensor& t) { return t.view({kLength / kPage, kPage, kKeyHeads, kDim}); };
    attn::VarlenOptions options = causal;
    options.block_table = table;
    options.seqused_k = at::tensor({kLength});
    return attn::varlen(query, pages(key), pages(value), whole, std::nullopt, kLength, kLength, options);
  };
  tell("varlen", "block_table", from_pages, at::tensor({0, 1}).unsqueeze(0), at::tensor({1, 1}).unsqueeze(0));
}

// The module lacks sinks and slopes: a program that names them does not compile.
void module(bool need_weights) {
  struct Call {
    attn::MultiheadAttentionOptions options = attn::MultiheadAttentionOptions(kHeads * kDim, kHeads).batch_first(true);
    Tensor query_offset, key_lengths;
  };
  const Tensor x = at::randn({1, kLength, kHeads * kDim});
  const auto call = [&](const Call& c) {
    at::manual_seed(0);
    attn::MultiheadAttention attention(c.options);
    return std::get<0>(
        attention(x, x, x, Tensor(), need_weights, Tensor(), true, /*is_causal=*/true, c.query_offset, c.key_lengths));
  };
  const auto one = [&](const char* argument, const auto& change) {
    Call changed;
    change(changed);
    tell(need_weights ? "MultiheadAttention_with_weights" : "MultiheadAttention", argument, call, Call(), changed);
  };
  one("softcap", [](Call& c) { c.options.softcap(0.1); });
  one("window_size", [](Call& c) { c.options.window_size({1, 0}); });
  one("query_offset", [](Call& c) { c.query_offset = at::tensor({2}); });
  one("key_lengths", [](Call& c) { c.key_lengths = at::tensor({6}); });
}

}  // namespace

int main() {
  at::manual_seed(0);
  dense();
  packed();
  for (const bool need_weights : {false, true}) module(need_weights);
}
