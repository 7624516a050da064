// First and second derivatives of attn::sdpa against finite differences, in float64.
//
// With x = (query, key, value, mask), f(x) = <u, sdpa(x)> for a fixed u, and a random direction t:
//
//   <grad f(x), t>              against  (f(x + h t) - f(x - h t)) / 2h
//   <grad <grad f(x), t>, s>    against  <grad f(x + h s) - grad f(x - h s), t> / 2h
//
// Both are done for several ways to call it. The error of a central difference is of the order of h^2.
#include <ATen/ATen.h>
#include <attn/sdpa.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <vector>

using at::Tensor;
using Tensors = std::vector<Tensor>;

constexpr double kStep = 1e-5, kLargestError = 1e-8;

Tensors random_like(const Tensors& x) {
  Tensors random;
  for (const Tensor& t : x) random.push_back(at::randn_like(t));
  return random;
}

// x + h t, as leaves that want gradients.
Tensors moved(const Tensors& x, double h, const Tensors& t) {
  Tensors leaves;
  for (size_t i = 0; i < x.size(); ++i) leaves.push_back((x[i].detach() + h * t[i]).requires_grad_());
  return leaves;
}

Tensor dot(const Tensors& a, const Tensors& b) {
  Tensor sum = (a[0] * b[0]).sum();
  for (size_t i = 1; i < a.size(); ++i) sum = sum + (a[i] * b[i]).sum();
  return sum;
}

Tensors gradient(const Tensor& f, const Tensors& x) {
  return torch::autograd::grad({f}, x, /*grad_outputs=*/{}, /*retain_graph=*/true, /*create_graph=*/true);
}

// Relative to their size, or to 1 where they are smaller.
double error(double derivative, double difference) {
  return std::abs(derivative - difference) / std::max(1.0, std::abs(difference));
}

bool check(const char* name, const Tensors& inputs, const attn::Options& options) {
  const auto output = [&](const Tensors& x) {
    attn::Options call = options;
    if (x.size() > 3) call.attn_mask = x[3];
    at::manual_seed(1);  // the same weights are dropped in every call
    return attn::sdpa(x[0], x[1], x[2], call);
  };
  const Tensor u = at::randn_like(output(inputs));
  const auto f = [&](const Tensors& x) { return (u * output(x)).sum(); };
  const Tensors t = random_like(inputs), s = random_like(inputs);

  const Tensors x = moved(inputs, 0, t);
  const Tensor first = dot(gradient(f(x), x), t);
  const Tensor second = dot(gradient(first, x), s);
  const Tensor difference = (f(moved(x, kStep, t)) - f(moved(x, -kStep, t))) / (2 * kStep);
  const auto slope_at = [&](double h) {
    const Tensors y = moved(x, h, s);
    return dot(gradient(f(y), y), t);
  };
  const Tensor second_difference = (slope_at(kStep) - slope_at(-kStep)) / (2 * kStep);

  const double errors[] = {error(first.item<double>(), difference.item<double>()),
                           error(second.item<double>(), second_difference.item<double>())};
  const bool ok = errors[0] < kLargestError && errors[1] < kLargestError;
  std::printf("%-3s %-24s first order %.1e   second order %.1e\n", ok ? "ok" : "NO", name, errors[0], errors[1]);
  return ok;
}

int main() {
  at::manual_seed(0);
  const auto randn = [](at::IntArrayRef sizes) { return at::randn(sizes, at::kDouble); };
  const Tensor query = randn({2, 4, 20, 8}), key = randn({2, 4, 30, 8}), value = randn({2, 4, 30, 5});
  const Tensor shared_key = randn({2, 2, 30, 8}), shared_value = randn({2, 2, 30, 5});
  const Tensor bias = randn({4, 20, 30});  // one for every head, for all of the batch
  const Tensor half = at::rand({2, 1, 20, 30}) < 0.5;

  bool ok = check("plain", {query, key, value}, {});
  ok &= check("causal, scale 0.3", {query, key, value}, {.is_causal = true, .scale = 0.3});
  ok &= check("boolean mask", {query, key, value}, {.attn_mask = half});
  ok &= check("gradient of a bias", {query, key, value, bias}, {});
  ok &= check("grouped heads, causal", {query, shared_key, shared_value}, {.is_causal = true, .enable_gqa = true});
  ok &= check("dropout", {query, key, value, bias}, {.dropout_p = 0.3});
  return ok ? 0 : 1;
}
