// A compiled sentence model in C++: MiniLM as AOTInductor packages, with attn and with the built-in attention, on the
// token ids of real sentences. Checks the embeddings against Python's and prints both speeds. Commands: ../README.md.
//
// attn.pt2 calls the operator attn::sdpa, which libattn registers when it is loaded. Linking attn::attn is all that a
// program has to do for it: no header of attn is included here.
#include <ATen/Parallel.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/serialize.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <exception>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

namespace {

using Model = torch::inductor::AOTIModelPackageLoader;

constexpr double kTolerance = 1e-4;  // of vectors of length 1

std::ifstream open(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  TORCH_CHECK(file, "cannot read ", path, ": python -m examples.cpp.infer.export --out DIR writes it");
  return file;
}

// What torch.save wrote.
c10::IValue load(const std::string& path) {
  std::ifstream file = open(path);
  return torch::pickle_load({std::istreambuf_iterator<char>(file), {}});
}

std::string package(const std::string& path) {
  open(path);  // the loader would not say which file it misses
  return path;
}

double milliseconds(Model& model, const std::vector<at::Tensor>& inputs) {
  const auto start = std::chrono::steady_clock::now();
  model.run(inputs);
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
}

double median(std::vector<double> values) {
  const auto middle = values.begin() + values.size() / 2;
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// The first sentences, padded to the longest of them. Contiguous, because a package is compiled for the strides of its
// example, which is contiguous, and does not check them.
std::vector<at::Tensor> first(int64_t sentences, const at::Tensor& input_ids, const at::Tensor& attention_mask) {
  const at::Tensor mask = attention_mask.narrow(0, 0, sentences);
  const int64_t length = mask.sum(1).max().item<int64_t>();
  return {input_ids.narrow(0, 0, sentences).narrow(1, 0, length).contiguous(), mask.narrow(1, 0, length).contiguous()};
}

int run(const std::string& directory) {
  const c10::InferenceMode no_gradients;
  const auto data = load(directory + "/sentences.pt").toGenericDict();
  const at::Tensor input_ids = data.at("input_ids").toTensor();            // [N, L], int64
  const at::Tensor attention_mask = data.at("attention_mask").toTensor();  // [N, L], 0 in padding
  const at::Tensor expected = data.at("embeddings").toTensor();            // [N, 384], Python's

  struct Candidate {
    const char* name;
    Model model;
    std::vector<double> times = {};
  } candidates[] = {{"attn", Model(package(directory + "/attn.pt2"))},
                    {"built-in", Model(package(directory + "/builtin.pt2"))}};

  bool equal = true;
  std::printf("MiniLM, threads: %d\n", at::get_num_threads());
  std::printf("sentences  length  attention  ms (median)  sentences/s  largest difference from Python\n");
  for (const int64_t sentences : {1, 8, 64}) {
    const auto inputs = first(sentences, input_ids, attention_mask);
    for (auto& [name, model, times] : candidates) {
      times.clear();
      milliseconds(model, inputs);  // the first call of a size is slower
    }
    // In turns, so that both meet the same machine.
    for (int64_t round = 0; round < 3 + 64 / sentences; ++round) {
      for (auto& [name, model, times] : candidates) {
        times.push_back(milliseconds(model, inputs));
      }
    }
    for (auto& [name, model, times] : candidates) {
      const at::Tensor embeddings = model.run(inputs).at(0);
      const double difference = (embeddings - expected.narrow(0, 0, sentences)).abs().max().item<double>();
      const double time = median(times);
      std::printf("%9ld  %6ld  %-9s  %11.2f  %11.1f  %.1e\n", sentences, inputs[0].size(1), name, time,
                  1000 * sentences / time, difference);
      equal &= difference <= kTolerance;
    }
  }
  std::printf("the embeddings %s Python's within %.0e\n", equal ? "equal" : "do not equal", kTolerance);
  return equal ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: %s DIR   (that examples.cpp.infer.export has written)\n", argv[0]);
    return 2;
  }
  try {
    return run(argv[1]);
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "%s\n", error.what_without_backtrace());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
  }
  return 1;
}
