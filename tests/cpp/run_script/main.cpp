// Runs a model of TorchScript and names no symbol of attn: linkers told --as-needed would drop the library.
#include <ATen/ATen.h>
#include <torch/csrc/jit/serialization/import.h>

#include <iostream>

int main(int, char** argv) {
  auto model = torch::jit::load(argv[1]);
  std::cout << model.forward({at::ones({1, 2, 3, 4})}).toTensor().sum().item<double>() << '\n';
}
