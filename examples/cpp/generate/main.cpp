// A small GPT that writes text, character by character, with a key-value cache: the model of examples/demo/gpt.py,
// whose weights Python has trained. Without a prompt of your own the text is checked against Python's. Commands:
// ../README.md.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <attn/sdpa.h>
#include <torch/serialize.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <exception>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <vector>

namespace {

// What torch.save wrote.
c10::IValue load(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  TORCH_CHECK(file, "cannot read ", path, ": python -m examples.cpp.generate.train --out FILE writes it");
  return torch::pickle_load({std::istreambuf_iterator<char>(file), {}});
}

// Keys and values of the tokens so far, allocated once for as many as the model can read.
struct Cache {
  std::vector<at::Tensor> keys, values;  // of each layer: [1, H, context, D]
  int64_t length = 0;                    // tokens that are there
};

class Gpt {
 public:
  explicit Gpt(const c10::impl::GenericDict& file) : heads_(file.at("heads").toInt()) {
    for (const auto& weight : file.at("weights").toGenericDict()) {
      weights_[weight.key().toStringRef()] = weight.value().toTensor();
    }
    while (weights_.count("blocks." + std::to_string(layers_) + ".qkv.weight")) {
      ++layers_;
    }
  }

  int64_t context() const { return weight("position.weight").size(0); }

  Cache empty_cache() const {
    const int64_t head_dim = weight("token.weight").size(1) / heads_;
    Cache cache;
    for (int64_t layer = 0; layer < layers_; ++layer) {
      cache.keys.push_back(at::empty({1, heads_, context(), head_dim}));
      cache.values.push_back(at::empty({1, heads_, context(), head_dim}));
    }
    return cache;
  }

  // Logits of the character after `tokens`, int64 [1, L], which follow those in the cache and are added to it: all of a
  // prompt at once (prefill), then one by one (decode). Returns [1, alphabet].
  at::Tensor next(const at::Tensor& tokens, Cache& cache) const {
    const int64_t start = cache.length, end = start + tokens.size(1);
    TORCH_CHECK(end <= context(), "the model reads at most ", context(), " characters, not ", end);
    // is_causal counts queries and keys from the first on: right for a prompt, and superfluous for the newest token.
    TORCH_CHECK(start == 0 || tokens.size(1) == 1, "tokens after a prompt come one by one, not ", tokens.size(1));

    at::Tensor x = at::embedding(weight("token.weight"), tokens) + weight("position.weight").slice(0, start, end);
    for (int64_t layer = 0; layer < layers_; ++layer) {
      const std::string block = "blocks." + std::to_string(layer) + ".";
      // [1, L, 3 * width] -> query, key and value: three views [1, H, L, D]
      const at::Tensor qkv =
          linear(block + "qkv", norm(block + "norms.0", x)).unflatten(-1, {3, heads_, -1}).permute({2, 0, 3, 1, 4});
      cache.keys[layer].slice(2, start, end).copy_(qkv[1]);
      cache.values[layer].slice(2, start, end).copy_(qkv[2]);
      // The part of the cache that is filled is read where it lies.
      const at::Tensor attended = attn::sdpa(qkv[0], cache.keys[layer].slice(2, 0, end),
                                             cache.values[layer].slice(2, 0, end), {.is_causal = start == 0});
      x = x + linear(block + "out", attended.transpose(1, 2).flatten(-2));
      x = x + linear(block + "mlp.2", at::gelu(linear(block + "mlp.0", norm(block + "norms.1", x))));
    }
    cache.length = end;
    return at::linear(norm("norm", x.select(1, -1)), weight("head.weight"));
  }

 private:
  const at::Tensor& weight(const std::string& name) const {
    const auto found = weights_.find(name);
    TORCH_CHECK(found != weights_.end(), "the model has no weight ", name);
    return found->second;
  }
  at::Tensor linear(const std::string& name, const at::Tensor& x) const {
    return at::linear(x, weight(name + ".weight"), weight(name + ".bias"));
  }
  at::Tensor norm(const std::string& name, const at::Tensor& x) const {
    return at::layer_norm(x, {x.size(-1)}, weight(name + ".weight"), weight(name + ".bias"));
  }

  std::map<std::string, at::Tensor> weights_;
  int64_t heads_, layers_ = 0;
};

// The characters of a text in UTF-8: a byte 10xxxxxx belongs to the one before it.
std::vector<std::string> characters(const std::string& text) {
  std::vector<std::string> found;
  for (const char byte : text) {
    if ((byte & 0xC0) == 0x80 && !found.empty()) {
      found.back() += byte;
    } else {
      found.emplace_back(1, byte);
    }
  }
  return found;
}

// The tokens of a text, int64 [1, L].
at::Tensor encode(const std::string& text, const std::vector<std::string>& alphabet) {
  std::vector<int64_t> tokens;
  for (const std::string& character : characters(text)) {
    const auto found = std::find(alphabet.begin(), alphabet.end(), character);
    TORCH_CHECK(found != alphabet.end(), "the model does not know the character '", character, "' of the prompt");
    tokens.push_back(found - alphabet.begin());
  }
  TORCH_CHECK(!tokens.empty(), "the prompt is empty: it has to have at least one character");
  return at::tensor(tokens).unsqueeze(0);
}

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

int run(const std::string& path, const char* own_prompt) {
  const c10::InferenceMode no_gradients;
  const c10::IValue loaded = load(path);
  TORCH_CHECK(loaded.isGenericDict() && loaded.toGenericDict().contains("weights"), path,
              " is not what examples.cpp.generate.train writes");
  const auto file = loaded.toGenericDict();
  const Gpt gpt(file);
  std::vector<std::string> alphabet;
  for (const c10::IValue& character : file.at("alphabet").toListRef()) {
    alphabet.push_back(character.toStringRef());
  }
  std::string text = own_prompt ? own_prompt : file.at("prompt").toStringRef();

  // Allocates the cache, and makes the first call, which is slower, before the clock runs.
  const at::Tensor prompt = encode(text, alphabet);
  Cache cache = gpt.empty_cache();
  gpt.next(prompt, cache);

  cache.length = 0;
  auto start = std::chrono::steady_clock::now();
  at::Tensor logits = gpt.next(prompt, cache);
  const double prefill = seconds_since(start);

  start = std::chrono::steady_clock::now();
  int64_t decoded = 0;
  std::printf("%s", text.c_str());
  for (;; ++decoded) {
    const int64_t token = logits.argmax().item<int64_t>();  // the likeliest
    text += alphabet.at(token);
    std::printf("%s", alphabet[token].c_str());
    std::fflush(stdout);
    if (cache.length + 1 >= gpt.context()) {
      break;
    }
    logits = gpt.next(at::full({1, 1}, token, at::kLong), cache);
  }
  const double decode = seconds_since(start);

  std::printf("\n\nprefill: %ld tokens, %.0f a second\ndecode: %ld tokens, %.0f a second\nthreads: %d\n",
              prompt.size(1), prompt.size(1) / prefill, decoded, decoded / decode, at::get_num_threads());
  if (own_prompt) {
    return 0;
  }
  const std::string& expected = file.at("text").toStringRef();
  if (text != expected) {
    std::printf("the text differs from Python's:\n%s\n", expected.c_str());
    return 1;
  }
  std::printf("the text equals Python's\n");
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2 && argc != 3) {
    std::fprintf(stderr, "usage: %s FILE [PROMPT]   (FILE: what examples.cpp.generate.train has written)\n", argv[0]);
    return 2;
  }
  try {
    return run(argv[1], argc == 3 ? argv[2] : nullptr);
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "%s\n", error.what_without_backtrace());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
  }
  return 1;
}
