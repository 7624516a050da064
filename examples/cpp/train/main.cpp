// A small transformer that learns to continue a text, character by character, in C++ alone.
//
//   train TEXT [STEPS]           learns from the file, 200 steps unless told otherwise
//   train TEXT STATE GRADIENTS   one backward over the beginning of the file, to compare with Python: reads what
//                                torch.save(dict(model.state_dict()), STATE) has written, and writes the gradients,
//                                which dict(torch.load(GRADIENTS)) reads
//
// Modules and parameters have the same names as in the Python model (tests/test_cpp.py has it).
#include <attn/multihead_attention.h>
#include <torch/torch.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <iterator>
#include <string>
#include <vector>

namespace nn = torch::nn;
using torch::Tensor;

constexpr int64_t kBatch = 16, kLength = 64, kEmbedDim = 64, kHeads = 4, kBlocks = 2;

struct BlockImpl : nn::Module {
  attn::MultiheadAttention attention{attn::MultiheadAttentionOptions(kEmbedDim, kHeads).batch_first(true)};
  nn::LayerNorm attention_norm{nn::LayerNormOptions({kEmbedDim})}, mlp_norm{nn::LayerNormOptions({kEmbedDim})};
  nn::Linear up{kEmbedDim, 4 * kEmbedDim}, down{4 * kEmbedDim, kEmbedDim};

  BlockImpl() {
    register_module("attention", attention);
    register_module("attention_norm", attention_norm);
    register_module("mlp_norm", mlp_norm);
    register_module("up", up);
    register_module("down", down);
  }

  Tensor forward(const Tensor& x) {  // [B, L, E] -> [B, L, E]
    const Tensor normed = attention_norm(x);
    const auto [attended, no_weights] = attention(normed, normed, normed, /*key_padding_mask=*/Tensor(),
                                                  /*need_weights=*/false, /*attn_mask=*/Tensor(),
                                                  /*average_attn_weights=*/true, /*is_causal=*/true);
    const Tensor h = x + attended;
    return h + down(torch::gelu(up(mlp_norm(h))));
  }
};
TORCH_MODULE(Block);

struct ModelImpl : nn::Module {
  nn::Embedding token, position{kLength, kEmbedDim};
  nn::Sequential blocks;
  nn::LayerNorm norm{nn::LayerNormOptions({kEmbedDim})};
  nn::Linear head;

  explicit ModelImpl(int64_t vocabulary) : token(vocabulary, kEmbedDim), head(kEmbedDim, vocabulary) {
    for (int64_t i = 0; i < kBlocks; ++i) blocks->push_back(Block());
    register_module("token", token);
    register_module("position", position);
    register_module("blocks", blocks);
    register_module("norm", norm);
    register_module("head", head);
  }

  // The mean of -log p(next token) over windows of tokens, [B, L + 1].
  Tensor loss(const Tensor& windows) {
    const int64_t length = windows.size(1) - 1;
    const Tensor x = token(windows.narrow(1, 0, length)) + position(torch::arange(length));
    const Tensor logits = head(norm(blocks->forward(x)));
    return torch::cross_entropy_loss(logits.flatten(0, 1), windows.narrow(1, 1, length).flatten());
  }
};
TORCH_MODULE(Model);

std::vector<char> read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  TORCH_CHECK(file, "cannot read ", path);
  return {std::istreambuf_iterator<char>(file), {}};
}

// Numbers from 0 for the bytes that occur, in their order; how many there are.
std::pair<Tensor, int64_t> tokens_of(const std::vector<char>& text) {
  const Tensor bytes =
      torch::from_blob(const_cast<char*>(text.data()), {static_cast<int64_t>(text.size())}, torch::kU8);
  const auto [vocabulary, tokens, counts] = at::unique_dim(bytes, 0, /*sorted=*/true, /*return_inverse=*/true);
  return {tokens, vocabulary.size(0)};
}

void train(Model& model, const Tensor& tokens, int64_t steps) {
  torch::optim::Adam optimizer(model->parameters(), torch::optim::AdamOptions(3e-3));
  const Tensor window = torch::arange(kLength + 1);
  const auto start = std::chrono::steady_clock::now();
  for (int64_t step = 1; step <= steps; ++step) {
    const Tensor begin = torch::randint(tokens.size(0) - kLength, {kBatch, 1}, torch::kLong);
    const Tensor loss = model->loss(tokens.index({begin + window}));
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
    if (step > 1 && step < steps && step % 20) continue;
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    std::printf("step %4ld of %ld   loss %.4f   %.1f steps a second\n", step, steps, loss.item<double>(),
                step / seconds.count());
    std::fflush(stdout);
  }
}

void write_gradients(Model& model, const Tensor& tokens, const std::string& state_path, const std::string& path) {
  const auto state = torch::pickle_load(read(state_path)).toGenericDict();
  for (auto& parameter : model->named_parameters()) parameter->set_data(state.at(parameter.key()).toTensor());
  model->loss(tokens.narrow(0, 0, 2 * (kLength + 1)).unflatten(0, {2, -1})).backward();
  std::vector<torch::IValue> gradients;  // as tuples, which torch.load takes from whom it does not trust
  for (const auto& parameter : model->named_parameters())
    gradients.emplace_back(std::make_tuple(parameter.key(), parameter->grad()));
  const auto bytes = torch::pickle_save(c10::ivalue::Tuple::create(std::move(gradients)));
  std::ofstream(path, std::ios::binary).write(bytes.data(), bytes.size());
}

int main(int argc, char** argv) try {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  if (arguments.empty() || arguments.size() > 3) {
    std::cerr << "usage: train TEXT [STEPS] | train TEXT STATE GRADIENTS\n";
    return 2;
  }
  const int64_t steps = arguments.size() == 2 ? std::atol(arguments[1].c_str()) : 200;
  TORCH_CHECK(steps > 0, "STEPS is ", arguments[1], "; it must be a positive number");
  torch::manual_seed(0);
  const auto text = read(arguments[0]);
  const auto [tokens, vocabulary] = tokens_of(text);
  TORCH_CHECK(tokens.size(0) > 2 * (kLength + 1), arguments[0], " has ", tokens.size(0), " characters; too few");
  Model model(vocabulary);
  if (arguments.size() == 3)
    write_gradients(model, tokens, arguments[1], arguments[2]);
  else
    train(model, tokens, steps);
} catch (const c10::Error& error) {
  std::cerr << "train: " << error.what_without_backtrace() << '\n';
  return 1;
}
