// A small GPT that goes on with texts, character by character, from a cache of keys and values in pages: the model of
// examples/demo/gpt.py, whose weights Python has trained. First with one prompt, whose text is checked against Python's
// if the prompt is not your own; then with many at once, and with the same one by one. The cache is in float32, or in 8
// bits with scales. Commands: ../README.md.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <attn/varlen.h>
#include <torch/serialize.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <exception>
#include <fstream>
#include <iterator>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace {

// What torch.save wrote.
c10::IValue load(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  TORCH_CHECK(file, "cannot read ", path, ": python -m examples.cpp.generate.train --out FILE writes it");
  return torch::pickle_load({std::istreambuf_iterator<char>(file), {}});
}

using Tokens = std::vector<int64_t>;

// A text: its prompt and what has been written.
struct Sequence {
  Tokens tokens;
  int64_t cached = 0;               // how many of the tokens have their keys and values in the cache,
  std::vector<int64_t> pages = {};  // on these pages
};

// The keys of a layer in pages, or its values.
struct Pool {
  at::Tensor numbers;                // [pages, page_size, H, D]
  std::optional<at::Tensor> scales;  // [pages, page_size, H], with int8: a key is about its numbers times its scale

  Pool(at::IntArrayRef shape, at::ScalarType dtype) : numbers(at::empty(shape, dtype)) {
    if (dtype == at::kChar) {
      scales = at::empty(shape.slice(0, 3));
    }
  }

  // Puts the keys of new tokens, [T, H, D], into these rows of the pages. With int8, rounds them: only once, here.
  void store(const at::Tensor& row, at::Tensor keys) {
    if (scales) {
      const at::Tensor scale = keys.abs().amax(-1) / 127;
      scales->flatten(0, 1).index_copy_(0, row, scale);
      // A key of zeros has the scale 0; clamp_min avoids 0 / 0.
      keys = (keys / scale.unsqueeze(-1).clamp_min(std::numeric_limits<float>::min())).round().to(at::kChar);
    }
    numbers.flatten(0, 1).index_copy_(0, row, keys);
  }
};

// Keys and values of many texts, in pages that are handed out as the texts grow. A server has fewer pages than all
// texts would fill at full length, and lets prompts wait while none is free.
struct PageCache {
  static constexpr int64_t kPageSize = 16;  // tokens

  std::vector<Pool> keys, values;  // of each layer
  std::vector<int64_t> free;       // pages that no text has

  PageCache(int64_t layers, int64_t pages, int64_t heads, int64_t head_dim, at::ScalarType dtype) {
    for (int64_t layer = 0; layer < layers; ++layer) {
      keys.emplace_back(at::IntArrayRef{pages, kPageSize, heads, head_dim}, dtype);
      values.emplace_back(at::IntArrayRef{pages, kPageSize, heads, head_dim}, dtype);
    }
    for (int64_t page = pages; page-- > 0;) {
      free.push_back(page);
    }
  }

  static int64_t pages_for(int64_t tokens) { return (tokens + kPageSize - 1) / kPageSize; }

  // Gives a text the pages that all of its tokens need.
  void reserve(Sequence& sequence) {
    while (std::ssize(sequence.pages) < pages_for(sequence.tokens.size())) {
      TORCH_CHECK(!free.empty(), "all ", keys[0].numbers.size(0), " pages are in use");
      sequence.pages.push_back(free.back());
      free.pop_back();
    }
  }

  // Takes them back from a text that has ended.
  void release(Sequence& sequence) {
    free.insert(free.end(), sequence.pages.begin(), sequence.pages.end());
    sequence.pages.clear();
    sequence.cached = 0;
  }

  size_t bytes() const {
    size_t sum = 0;
    for (const auto* pools : {&keys, &values}) {
      for (const Pool& pool : *pools) {
        sum += pool.numbers.nbytes() + (pool.scales ? pool.scales->nbytes() : 0);
      }
    }
    return sum;
  }
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

  // Room for `texts` texts of any length.
  PageCache cache_for(int64_t texts, at::ScalarType dtype) const {
    return {layers_, texts * PageCache::pages_for(context()), heads_, weight("token.weight").size(1) / heads_, dtype};
  }

  // Logits of the token after each text, [texts, alphabet]. One call reads all tokens that the cache lacks and adds
  // them to it: the whole prompt of one text (prefill), the newest token of another (decode).
  at::Tensor next(const std::vector<Sequence*>& batch, PageCache& cache) const {
    // The new tokens, one text behind the other: T in all.
    Tokens tokens, positions, rows;  // rows: where in the pools their keys and values go
    std::vector<int64_t> starts = {0}, lengths, pages;
    const int64_t most_pages = PageCache::pages_for(context());
    int64_t longest = 0;
    for (Sequence* text : batch) {
      const int64_t length = text->tokens.size();
      TORCH_CHECK(length <= context(), "the model reads at most ", context(), " characters, not ", length);
      cache.reserve(*text);
      longest = std::max(longest, length - text->cached);
      for (int64_t i = text->cached; i < length; ++i) {
        tokens.push_back(text->tokens[i]);
        positions.push_back(i);
        rows.push_back(text->pages[i / PageCache::kPageSize] * PageCache::kPageSize + i % PageCache::kPageSize);
      }
      text->cached = length;
      starts.push_back(tokens.size());
      lengths.push_back(length);
      pages.insert(pages.end(), text->pages.begin(), text->pages.end());
      pages.resize(lengths.size() * most_pages, -1);  // the rest of this text's row in the table
    }
    const at::Tensor row = at::tensor(rows), cu_seq = at::tensor(starts), seqused = at::tensor(lengths);
    const at::Tensor table = at::tensor(pages).view({-1, most_pages});

    at::Tensor x = at::embedding(weight("token.weight"), at::tensor(tokens)) +
                   at::embedding(weight("position.weight"), at::tensor(positions));  // [T, width]
    for (int64_t layer = 0; layer < layers_; ++layer) {
      const std::string block = "blocks." + std::to_string(layer) + ".";
      // [T, 3 * width] -> query, key and value: three views [T, H, D]
      const auto qkv = linear(block + "qkv", norm(block + "norms.0", x)).unflatten(-1, {3, heads_, -1}).unbind(1);
      Pool &keys = cache.keys[layer], &values = cache.values[layer];
      keys.store(row, qkv[1]);
      values.store(row, qkv[2]);
      // Every query sees the keys of its own text up to itself, which are read in place: the last query of a text
      // stands at its last key.
      const at::Tensor attended =
          attn::varlen(qkv[0], keys.numbers, values.numbers, cu_seq, std::nullopt, longest, context(),
                       {.window_size = {-1, 0},
                        .seqused_k = seqused,
                        .block_table = table,
                        .key_scale = keys.scales,
                        .value_scale = values.scales});
      x = x + linear(block + "out", attended.flatten(-2));
      x = x + linear(block + "mlp.2", at::gelu(linear(block + "mlp.0", norm(block + "norms.1", x))));
    }
    return at::linear(norm("norm", x.index_select(0, cu_seq.slice(0, 1) - 1)), weight("head.weight"));
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

std::string decode(const Tokens& tokens, const std::vector<std::string>& alphabet) {
  std::string text;
  for (const int64_t token : tokens) {
    text += alphabet.at(token);
  }
  return text;
}

Tokens encode(const std::string& text, const std::vector<std::string>& alphabet) {
  Tokens tokens;
  for (const std::string& character : characters(text)) {
    const auto found = std::find(alphabet.begin(), alphabet.end(), character);
    TORCH_CHECK(found != alphabet.end(), "the model does not know the character '", character, "' of the prompt");
    tokens.push_back(found - alphabet.begin());
  }
  TORCH_CHECK(!tokens.empty(), "the prompt is empty: it has to have at least one character");
  return tokens;
}

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Goes on with one text and prints what comes, with the tokens a second.
Tokens write_one(const Gpt& gpt, const Tokens& prompt, const std::vector<std::string>& alphabet, PageCache& cache) {
  // The first call, which is slower, before the clock runs.
  Sequence text = {.tokens = prompt};
  gpt.next({&text}, cache);

  text.cached = 0;
  auto start = std::chrono::steady_clock::now();
  at::Tensor logits = gpt.next({&text}, cache);
  const double prefill = seconds_since(start);

  std::printf("%s", decode(prompt, alphabet).c_str());
  start = std::chrono::steady_clock::now();
  int64_t decoded = 0;
  for (;; ++decoded) {
    text.tokens.push_back(logits.argmax().item<int64_t>());  // the likeliest
    std::printf("%s", alphabet.at(text.tokens.back()).c_str());
    std::fflush(stdout);
    if (std::ssize(text.tokens) >= gpt.context()) {
      break;
    }
    logits = gpt.next({&text}, cache);
  }
  const double decode = seconds_since(start);
  cache.release(text);
  std::printf("\n\nprefill: %zu tokens, %.0f a second\ndecode: %ld tokens, %.0f a second\nthreads: %d\n", prompt.size(),
              prompt.size() / prefill, decoded, decoded / decode, at::get_num_threads());
  return text.tokens;
}

// Goes on with all prompts in one batch, until the texts are as long as the model reads. One that ends leaves the
// batch, and others may have its pages.
std::vector<Tokens> write_all(const Gpt& gpt, const std::vector<Tokens>& prompts, PageCache& cache) {
  std::vector<Sequence> texts;
  for (const Tokens& prompt : prompts) {
    texts.push_back({.tokens = prompt});
  }
  std::vector<Sequence*> batch;
  for (Sequence& text : texts) {
    batch.push_back(&text);
  }
  while (!batch.empty()) {
    const at::Tensor likeliest = gpt.next(batch, cache).argmax(-1);
    const int64_t* token = likeliest.const_data_ptr<int64_t>();
    for (Sequence* text : batch) {
      text->tokens.push_back(*token++);
    }
    std::erase_if(batch, [&](Sequence* text) {
      const bool ended = std::ssize(text->tokens) >= gpt.context();
      if (ended) {
        cache.release(*text);
      }
      return ended;
    });
  }
  std::vector<Tokens> written;
  for (Sequence& text : texts) {
    written.push_back(std::move(text.tokens));
  }
  return written;
}

// Prints how fast many texts are written at once and one by one; whether both are the same texts.
bool compare(const Gpt& gpt, const std::vector<Tokens>& prompts, PageCache& cache) {
  auto start = std::chrono::steady_clock::now();
  const std::vector<Tokens> together = write_all(gpt, prompts, cache);
  const double at_once = seconds_since(start);

  start = std::chrono::steady_clock::now();
  std::vector<Tokens> alone;
  for (const Tokens& prompt : prompts) {
    alone.push_back(write_all(gpt, {prompt}, cache)[0]);
  }
  const double one_by_one = seconds_since(start);

  int64_t written = 0;
  for (size_t n = 0; n < prompts.size(); ++n) {
    written += together[n].size() - prompts[n].size();
  }
  std::printf("\n%zu prompts: %ld tokens written\nat once: %.0f a second\none by one: %.0f a second\n", prompts.size(),
              written, written / at_once, written / one_by_one);
  std::printf("the texts %s\n", together == alone ? "are the same" : "differ");
  return together == alone;
}

int run(const std::string& path, const char* own_prompt, const std::string& kind) {
  const c10::InferenceMode no_gradients;
  TORCH_CHECK(kind == "float" || kind == "int8", "--cache is '", kind, "': it must be float or int8");
  const c10::IValue loaded = load(path);
  TORCH_CHECK(loaded.isGenericDict() && loaded.toGenericDict().contains("weights"), path,
              " is not what examples.cpp.generate.train writes");
  const auto file = loaded.toGenericDict();
  const Gpt gpt(file);
  std::vector<std::string> alphabet;
  for (const c10::IValue& character : file.at("alphabet").toListRef()) {
    alphabet.push_back(character.toStringRef());
  }
  const std::string prompt = own_prompt ? own_prompt : file.at("prompt").toStringRef();

  constexpr int64_t kPrompts = 32;
  PageCache cache = gpt.cache_for(kPrompts, kind == "int8" ? at::kChar : at::kFloat);

  const Tokens text = write_one(gpt, encode(prompt, alphabet), alphabet, cache);
  std::printf("cache: %s, %zu bytes\n", kind.c_str(), cache.bytes());
  bool right = true;
  if (!own_prompt) {
    const std::string& expected = file.at("text").toStringRef();
    right = decode(text, alphabet) == expected;
    std::printf("%s\n", right ? "the text equals Python's" : ("the text differs from Python's:\n" + expected).c_str());
  }

  // Pieces of that text are the prompts of many, the longest half as long as what the model reads.
  std::vector<Tokens> prompts;
  for (int64_t n = 0; n < kPrompts; ++n) {
    const int64_t part = n * gpt.context() / (2 * kPrompts);
    prompts.emplace_back(text.begin() + part, text.begin() + 2 * part + 1);
  }
  return compare(gpt, prompts, cache) && right ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<const char*> words;
  std::string cache = "float";
  for (int n = 1; n < argc; ++n) {
    if (std::string(argv[n]) == "--cache") {
      cache = ++n < argc ? argv[n] : "";
    } else {
      words.push_back(argv[n]);
    }
  }
  if (words.empty() || words.size() > 2) {
    std::fprintf(
        stderr, "usage: %s FILE [PROMPT] [--cache float|int8]   (FILE: what examples.cpp.generate.train has written)\n",
        argv[0]);
    return 2;
  }
  try {
    return run(words[0], words.size() == 2 ? words[1] : nullptr, cache);
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "%s\n", error.what_without_backtrace());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
  }
  return 1;
}
