// Attention forward and backward in LibTorch, checked against the textbook formula. Build and run:
//
//   cmake -S examples/cpp -B build/example -DCMAKE_PREFIX_PATH="<where attn is>;<where torch is>"
//   cmake --build build/example && build/example/example
#include <attn/sdpa.h>
#include <torch/torch.h>

#include <cmath>
#include <iostream>

int main() {
  torch::manual_seed(0);
  const int64_t batch = 2, heads = 4, queries = 100, keys = 150, head_dim = 32;
  const auto options = torch::dtype(torch::kFloat64).requires_grad(true);
  const auto query = torch::randn({batch, heads, queries, head_dim}, options);
  const auto key = torch::randn({batch, heads, keys, head_dim}, options);
  const auto value = torch::randn({batch, heads, keys, head_dim}, options);
  const auto mask = torch::randn({queries, keys}, options);  // one for all heads, with a gradient
  const auto grad_output = torch::randn({batch, heads, queries, head_dim}, torch::kFloat64);

  const auto output = attn::sdpa(query, key, value, mask);
  const auto scores = torch::matmul(query, key.transpose(-2, -1)) / std::sqrt(head_dim) + mask;
  const auto expected = torch::matmul(torch::softmax(scores, -1), value);

  const torch::autograd::variable_list inputs = {query, key, value, mask};
  auto results = torch::autograd::grad({output}, inputs, {grad_output});
  auto expected_results = torch::autograd::grad({expected}, inputs, {grad_output});
  results.push_back(output);
  expected_results.push_back(expected);

  bool correct = true;
  const char* names[] = {"grad_query", "grad_key", "grad_value", "grad_mask", "output"};
  for (size_t i = 0; i < results.size(); ++i) {
    const double difference = (results[i] - expected_results[i]).abs().max().item<double>();
    correct &= difference < 1e-12;
    std::cout << names[i] << ": largest difference " << difference << '\n';
  }
  return correct ? 0 : 1;
}
