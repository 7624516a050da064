// The kernels of instruction sets without torch, for processors that are only emulated: check_kernels default neon
//
// In float64 the forward is held to plain loops, the tangent and the second derivatives to differences of what they are
// derivatives of, and the gradients to <u, J t> = <J'u, t>. The other types are held to float64.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "cpu/isa.h"

namespace attn {

// Stand for cpu/parallel.cpp, which needs torch. One chunk of keys never waits.
void wait_for_turn(int32_t*, int32_t) {}
void end_turn(int32_t*) {}

namespace {

// How far before query 0 key 0 stands.
const int64_t kOffset = std::getenv("ATTN_OFFSET") ? std::atoi(std::getenv("ATTN_OFFSET")) : 0;
constexpr int64_t kHeads = 4, kKeyHeads = 2, kQueries = 70, kKeys = 150, kDim = 36, kValueDim = 20;

// One of the four inputs, of the gradients, or of the outputs: [heads, rows, cols].
struct Tensor {
  int64_t heads, rows, cols;
  std::vector<double> numbers;
  Tensor(int64_t heads, int64_t rows, int64_t cols)
      : heads(heads), rows(rows), cols(cols), numbers(static_cast<size_t>(heads * rows * cols)) {}
};
struct Point {
  Tensor query{kHeads, kQueries, kDim}, key{kKeyHeads, kKeys, kDim}, value{kKeyHeads, kKeys, kValueDim},
      mask{kHeads, kQueries, kKeys};
  std::vector<Tensor*> all() { return {&query, &key, &value, &mask}; }
};

// Whole numbers / 8 below 2: every dtype holds them.
void fill(Tensor& x, std::mt19937& random) {
  for (double& number : x.numbers) number = (static_cast<int>(random() % 31) - 15) / 8.0;
}

double dot(const Tensor& a, const Tensor& b) {
  double sum = 0;
  for (size_t i = 0; i < a.numbers.size(); ++i) sum += a.numbers[i] * b.numbers[i];
  return sum;
}

uint16_t bits_of(double x, DType dtype) {  // of a number that the dtype holds
  const auto value = static_cast<float>(x);
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if (dtype == DType::bf16) return static_cast<uint16_t>(bits >> 16);
  const int exponent = static_cast<int>(bits >> 23 & 255) - 127 + 15;
  return static_cast<uint16_t>((bits >> 16 & 0x8000) | (value == 0 ? 0 : exponent << 10 | (bits >> 13 & 1023)));
}

double number_of(uint16_t bits, DType dtype) {
  if (dtype == DType::bf16) {
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &wide, sizeof value);
    return value;
  }
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const double size = exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
  return bits >> 15 ? -size : size;
}

// The kernels of one instruction set for one dtype.
struct Operators {
  const Kernels& kernels;
  DType dtype;
  Visibility visibility;
  bool boolean_mask;
  // What operands point to.
  std::vector<std::vector<char>> memory = {};

  DType compute_dtype() const { return dtype == DType::f64 ? DType::f64 : DType::f32; }
  int64_t compute_size() const { return dtype == DType::f64 ? 8 : 4; }

  char* allocate(int64_t bytes) {
    memory.emplace_back(static_cast<size_t>(bytes + 128));
    return reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(memory.back().data()) + 63) / 64 * 64);
  }
  Operand operand(const Tensor& x, DType type) {
    const int64_t count = static_cast<int64_t>(x.numbers.size());
    Operand o;
    o.dtype = type;
    o.data = allocate(count * 8);
    o.head = x.rows * x.cols;
    o.row = x.cols;
    o.col = 1;
    for (int64_t i = 0; i < count; ++i) {
      const double number = x.numbers[static_cast<size_t>(i)];
      switch (type) {
        case DType::f64:
          static_cast<double*>(o.data)[i] = number;
          break;
        case DType::f32:
          static_cast<float*>(o.data)[i] = static_cast<float>(number);
          break;
        case DType::boolean:
          static_cast<uint8_t*>(o.data)[i] = number > -1;
          break;
        default:
          static_cast<uint16_t*>(o.data)[i] = bits_of(number, type);
      }
    }
    return o;
  }
  Operand result(const Tensor& x) { return operand(x, dtype); }
  static void read(Tensor& x, const Operand& o) {
    for (size_t i = 0; i < x.numbers.size(); ++i) switch (o.dtype) {
        case DType::f64:
          x.numbers[i] = static_cast<double*>(o.data)[i];
          break;
        case DType::f32:
          x.numbers[i] = static_cast<float*>(o.data)[i];
          break;
        default:
          x.numbers[i] = number_of(static_cast<uint16_t*>(o.data)[i], o.dtype);
      }
  }

  void describe(Problem& p, Point& x) {
    p.heads = kHeads;
    p.key_heads = p.value_heads = kKeyHeads;
    p.group = kHeads / kKeyHeads;
    p.queries = kQueries;
    p.keys = kKeys;
    p.head_dim = kDim;
    p.value_dim = kValueDim;
    p.scale = 0.25;
    p.visibility = visibility;
    p.visibility.offsets = &kOffset;
    p.has_mask = true;
    p.factor_bits = dtype == DType::f64 ? 53 : dtype == DType::f32 ? 24 : dtype == DType::f16 ? 16 : 8;
    p.query = operand(x.query, dtype);
    p.key = operand(x.key, dtype);
    p.value = operand(x.value, dtype);
    p.mask = operand(x.mask, boolean_mask ? DType::boolean : compute_dtype());
  }

  template <class Params, class Kernel>
  static void run_tasks(const Params& p, const Kernel& k, char* own) {
    if (k.on_thread.begin) k.on_thread.begin();
    for (int64_t task = 0; task < p.tasks(); ++task) k.run(p, task, own);
    if (k.on_thread.end) k.on_thread.end();
  }
  struct Forward {
    Tensor output{kHeads, kQueries, kValueDim};
    Operand output_operand;
    void* logsumexp;
  };
  Forward forward(Point& x) {
    ForwardParams p;
    describe(p, x);
    Forward f;
    p.output = f.output_operand = result(f.output);
    p.logsumexp = f.logsumexp = allocate(kHeads * kQueries * 2 * compute_size());
    p.rows_per_task = 2 * kRowTile;
    p.keys_per_split = kKeys;
    const ForwardKernels& k = *kernels.forward(p);
    char* own = allocate(k.workspace(p));
    run_tasks(p, k, own);
    read(f.output, p.output);
    return f;
  }
  struct Tangent {
    Tensor output{kHeads, kQueries, kValueDim};
    Operand output_operand;
    void* logsumexp;
  };
  void describe(Tangents& t, Point& direction) {
    t.query = operand(direction.query, dtype);
    t.key = operand(direction.key, dtype);
    t.value = operand(direction.value, dtype);
    if (!boolean_mask) t.mask = operand(direction.mask, compute_dtype());
  }
  Tangent tangent(Point& x, Point& direction, const Forward& f) {
    TangentParams p;
    describe(p, x);
    describe(p.t, direction);
    Tangent t;
    p.output = f.output_operand;
    p.logsumexp = f.logsumexp;
    p.tangent_output = t.output_operand = result(t.output);
    p.tangent_logsumexp = t.logsumexp = allocate(kHeads * kQueries * 2 * compute_size());
    p.rows_per_task = kRowTile;
    const OnePassKernels<TangentParams>& k = *kernels.tangent(p);
    char* own = allocate(k.workspace(p));
    run_tasks(p, k, own);
    read(t.output, p.tangent_output);
    return t;
  }
  // Gradients, or their derivative for SecondParams.
  template <class Params>
  Point gradients(Params& p, const BackwardKernels<Params>* (*kernels_of)(const Params&), Point& x, Tensor& grad_output,
                  const Forward& f) {
    describe(p, x);
    Point g;
    p.output = f.output_operand;
    p.logsumexp = f.logsumexp;
    p.grad_output = operand(grad_output, dtype);
    p.grad_query = result(g.query);
    p.grad_key = result(g.key);
    p.grad_value = result(g.value);
    if (!boolean_mask) p.grad_mask = result(g.mask);
    p.span = p.group;
    p.rows_per_pass = 2 * kRowTile;
    p.chunks = 1;
    p.keys_per_chunk = kKeys;
    const BackwardKernels<Params>& k = *kernels_of(p);
    char* own = allocate(k.workspace(p));
    run_tasks(p, k, own);
    read(g.query, p.grad_query);
    read(g.key, p.grad_key);
    read(g.value, p.grad_value);
    if (!boolean_mask) read(g.mask, p.grad_mask);
    return g;
  }
  Point backward(Point& x, Tensor& grad_output, const Forward& f) {
    BackwardParams p;
    return gradients(p, kernels.backward, x, grad_output, f);
  }
  Point second(Point& x, Tensor& grad_output, Point& direction, const Forward& f, const Tangent& t) {
    SecondParams p;
    describe(p.t, direction);
    p.tangent_output = t.output_operand;
    p.tangent_logsumexp = t.logsumexp;
    return gradients(p, kernels.second, x, grad_output, f);
  }
};

// The forward of the textbook.
Tensor textbook(Point& x, Visibility visibility, bool boolean_mask) {
  const int64_t left = visibility.left, right = visibility.right;
  Tensor output(kHeads, kQueries, kValueDim);
  for (int64_t h = 0; h < kHeads; ++h)
    for (int64_t i = 0; i < kQueries; ++i) {
      const int64_t of_key = h / (kHeads / kKeyHeads) * kKeys;
      double total = 0;
      double* const row = &output.numbers[static_cast<size_t>((h * kQueries + i) * kValueDim)];
      for (int64_t j = 0; j < kKeys; ++j) {
        double product = 0;
        for (int64_t d = 0; d < kDim; ++d)
          product += x.query.numbers[static_cast<size_t>((h * kQueries + i) * kDim + d)] *
                     x.key.numbers[static_cast<size_t>((of_key + j) * kDim + d)];
        const double mask = x.mask.numbers[static_cast<size_t>((h * kQueries + i) * kKeys + j)];
        const int64_t ahead = j - (i + kOffset);  // of the query's position
        if ((left >= 0 && ahead < -left) || (right >= 0 && ahead > right) || (boolean_mask && !(mask > -1))) continue;
        const double weight = std::exp(0.25 * product + (boolean_mask ? 0 : mask));
        total += weight;
        for (int64_t d = 0; d < kValueDim; ++d)
          row[d] += weight * x.value.numbers[static_cast<size_t>((of_key + j) * kValueDim + d)];
      }
      for (int64_t d = 0; d < kValueDim && total > 0; ++d) row[d] /= total;
    }
  return output;
}

Point moved(Point x, Point& direction, double step) {
  const auto from = direction.all();
  for (size_t n = 0; n < 4; ++n)
    for (size_t i = 0; i < from[n]->numbers.size(); ++i) x.all()[n]->numbers[i] += step * from[n]->numbers[i];
  return x;
}

void expect(const std::string& what, const Tensor& actual, const Tensor& expected, double tolerance) {
  double largest = 1;
  for (const double x : expected.numbers) largest = std::fmax(largest, std::fabs(x));
  for (size_t i = 0; i < expected.numbers.size(); ++i) {
    if (std::fabs(actual.numbers[i] - expected.numbers[i]) <= tolerance * largest) continue;
    std::printf("wrong: %s, number %zu is %.9g, not %.9g\n", what.c_str(), i, actual.numbers[i], expected.numbers[i]);
    std::exit(1);
  }
}

void check(const std::string& name, const Kernels& kernels, Visibility visibility, bool boolean_mask) {
  std::mt19937 random(3);
  Point x, t;
  for (Tensor* tensor : x.all()) fill(*tensor, random);
  for (Tensor* tensor : t.all()) fill(*tensor, random);
  if (boolean_mask) t.mask = Tensor(kHeads, kQueries, kKeys);
  Tensor u(kHeads, kQueries, kValueDim);
  fill(u, random);

  const Kernels& with_float64 = kernels.falls_back_to ? *kernels_default() : kernels;
  Operators exact{with_float64, DType::f64, visibility, boolean_mask};
  const auto f = exact.forward(x);
  expect(name + ", forward", f.output, textbook(x, visibility, boolean_mask), 1e-13);
  const auto tangent = exact.tangent(x, t, f);
  constexpr double kStep = 1e-5;
  Point up = moved(x, t, kStep), down = moved(x, t, -kStep);
  const auto f_up = exact.forward(up), f_down = exact.forward(down);
  Tensor difference = f_up.output;
  for (size_t i = 0; i < difference.numbers.size(); ++i)
    difference.numbers[i] = (f_up.output.numbers[i] - f_down.output.numbers[i]) / (2 * kStep);
  expect(name + ", tangent", tangent.output, difference, 1e-6);
  Point g = exact.backward(x, u, f);
  Tensor along(1, 1, 1), of_tangent(1, 1, 1);
  of_tangent.numbers[0] = dot(u, tangent.output);
  for (size_t n = 0; n < 4; ++n) along.numbers[0] += dot(*g.all()[n], *t.all()[n]);
  expect(name + ", gradients along a direction", along, of_tangent, 1e-12);
  Point h = exact.second(x, u, t, f, tangent);
  Point g_up = exact.backward(up, u, f_up), g_down = exact.backward(down, u, f_down);
  for (size_t n = 0; n < 4; ++n) {
    Tensor& slope = *g_up.all()[n];
    for (size_t i = 0; i < slope.numbers.size(); ++i)
      slope.numbers[i] = (slope.numbers[i] - g_down.all()[n]->numbers[i]) / (2 * kStep);
    expect(name + ", second derivatives", *h.all()[n], slope, 1e-6);
  }

  // Tolerances: factors are rounded, which are below 2 or weights, which sum to 1, and results.
  const struct {
    DType dtype;
    const char* name;
    double tolerance;
  } types[] = {{DType::f32, "float32", 1e-5}, {DType::f16, "float16", 0x1p-9}, {DType::bf16, "bfloat16", 0x1p-6}};
  for (const auto& type : types) {
    Operators operators{kernels, type.dtype, visibility, boolean_mask};
    const std::string of = name + ", " + type.name;
    const auto rounded = operators.forward(x);
    expect(of + ", forward", rounded.output, f.output, type.tolerance);
    Point gradients = operators.backward(x, u, rounded);
    for (size_t n = 0; n < 4; ++n) expect(of + ", gradients", *gradients.all()[n], *g.all()[n], type.tolerance);
    const auto t_rounded = operators.tangent(x, t, rounded);
    expect(of + ", tangent", t_rounded.output, tangent.output, type.tolerance);
    Point second = operators.second(x, u, t, rounded, t_rounded);
    for (size_t n = 0; n < 4; ++n) expect(of + ", second", *second.all()[n], *h.all()[n], type.tolerance);
  }
}

}  // namespace
}  // namespace attn

int main(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    const attn::Kernels* kernels = name == "default" ? attn::kernels_default() : nullptr;
#if defined(__aarch64__)
    if (name == "neon") kernels = attn::kernels_neon();
#endif
    if (!kernels) {
      std::printf("no instruction set %s here\n", name.c_str());
      return 2;
    }
    // No bound, causality, and windows: the last one is closed at both ends.
    for (const attn::Visibility visibility : {attn::Visibility{-1, -1}, {-1, 0}, {0, 0}, {36, 0}, {20, -1}, {99, 5}})
      for (const bool boolean_mask : {false, true}) attn::check(name, *kernels, visibility, boolean_mask);
    std::printf("%s: right\n", name.c_str());
  }
}
