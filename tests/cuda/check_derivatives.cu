// What the other programs leave out: tangents, second derivatives, statistics and a mask that heads share, of a problem
// with every option. Identities hold between them.
#include <cmath>
#include <vector>

#include "check.h"
#include "cuda/simt/backward.cuh"
#include "cuda/simt/forward.cuh"
#include "cuda/simt/merge.cuh"
#include "cuda/simt/stats.cuh"
#include "cuda/simt/tangent.cuh"

namespace attn::cuda {
namespace {

constexpr int kHeads = 4, kKeyHeads = 2, kQueries = 70, kKeys = 150, kDim = 40,
              kValueDim = 72;  // several tiles of each
constexpr int kRows = kHeads * kQueries, kSplits = 3, kChunks = 2;

Operand operand(Array<float>& array, int rows, int cols) {
  Operand x;
  x.data = array.data();
  x.head = int64_t{rows} * cols;
  x.row = cols;
  x.col = 1;
  return x;
}
Operand mask_operand(Array<float>& array) {
  Operand x = operand(array, kQueries, kKeys);
  x.head = 0;  // the same for all
  return x;
}

// Inputs, a direction in their space, or gradients: the gradients by slopes and sinks have a number per row.
struct Point {
  Array<float> query{kRows * kDim}, key{kKeyHeads * kKeys * kDim}, value{kKeyHeads * kKeys * kValueDim};
  Array<float> mask{kQueries * kKeys}, slopes, sinks;

  explicit Point(int terms) : slopes(terms), sinks(terms) {}
  Point(std::mt19937& random, float size) : Point(kHeads) {
    for (auto* x : {&query, &key, &value, &mask, &slopes, &sinks})
      for (int64_t i = 0; i < x->size(); ++i) (*x)[i] = size * std::uniform_real_distribution<float>(-1, 1)(random);
  }
  template <class P>
  void set(P& p) {
    p.query = operand(query, kQueries, kDim);
    p.key = operand(key, kKeys, kDim);
    p.value = operand(value, kKeys, kValueDim);
    p.mask = mask_operand(mask);
    p.alibi_slopes = slopes.data();
    p.sinks = sinks.data();
  }
};

// Sums of products, and of their sizes.
struct Dot {
  double value = 0, size = 0;
  Dot& add(Array<float>& a, Array<float>& b) {
    const int64_t each = a.size() / b.size();
    for (int64_t i = 0; i < a.size(); ++i) {
      value += double{a[i]} * b[i / each];
      size += std::fabs(double{a[i]} * b[i / each]);
    }
    return *this;
  }
  Dot& add(Point& a, Point& b) {
    add(a.query, b.query).add(a.key, b.key).add(a.value, b.value).add(a.mask, b.mask);
    return add(a.slopes, b.slopes).add(a.sinks, b.sinks);
  }
};
void require_equal(Dot a, Dot b, const char* what) {
  require(std::fabs(a.value - b.value) <= 1e-6 * (a.size + b.size), what);
}

void check() {
  std::mt19937 random(5);
  Point x(random, 1.5), t[] = {{random, 1}, {random, 1}}, gradients(kRows), second[] = {Point(kRows), Point(kRows)};
  for (int i = 3; i < kQueries * kKeys; i += 7) x.mask[i] = -INFINITY;
  Array<float> output(kRows * kValueDim), grad_output(kRows * kValueDim), logsumexp(2 * kRows), row_logsumexp(kRows),
      partial_output(kSplits * kRows * kValueDim), partial_logsumexp(2 * kSplits * kRows), delta(kRows);
  for (int64_t i = 0; i < grad_output.size(); ++i) grad_output[i] = static_cast<float>(random() % 15) / 8 - 1;
  Array<int64_t> rng(3);
  rng[0] = 12345678901234, rng[1] = 7, rng[2] = kHeads;

  Problem problem;
  problem.heads = kHeads, problem.key_heads = problem.value_heads = problem.group = kKeyHeads;
  problem.queries = kQueries, problem.keys = kKeys, problem.head_dim = kDim, problem.value_dim = kValueDim;
  problem.scale = 0.25, problem.softcap = 3, problem.visibility.right = 60;
  problem.has_mask = problem.has_dropout = true;
  problem.rng.data = rng.data(), problem.rng.col = 1;
  problem.keep_below = uint64_t{3} << 30, problem.keep_scale = 1 / 0.75;
  x.set(problem);

  ForwardParams forward;
  static_cast<Problem&>(forward) = problem;
  forward.output = operand(output, kQueries, kValueDim);
  forward.logsumexp = logsumexp.data(), forward.row_logsumexp = row_logsumexp.data();
  forward.splits = kSplits, forward.keys_per_split = forward.rows_per_task = 64;
  forward.partial_output = partial_output.data(), forward.partial_logsumexp = partial_logsumexp.data();
  run([&] { return launch_forward_simt<float>(forward, nullptr); });
  run([&] { return launch_merge_splits<float>(forward, nullptr); });

  SecondParams p;
  const auto compute = [&](auto& params, Point& to) {
    params.grad_query = operand(to.query, kQueries, kDim);
    params.grad_key = operand(to.key, kKeys, kDim);
    params.grad_value = operand(to.value, kKeys, kValueDim);
    params.grad_mask = mask_operand(to.mask);
    params.grad_slopes = to.slopes.data(), params.grad_sinks = to.sinks.data();
    run([&] { return launch_delta_simt<float>(params, nullptr); });
    run([&] { return launch_gradients_simt<float>(params, nullptr); });
  };
  BackwardParams& backward = p;
  static_cast<Problem&>(p) = problem;
  p.output = forward.output;
  p.grad_output = operand(grad_output, kQueries, kValueDim);
  p.logsumexp = logsumexp.data(), p.delta = delta.data();
  p.mask_is_shared = true, p.mask_slices = 1;
  p.mask_row_tasks = divide_up(kQueries, kScoreTile), p.mask_key_tasks = divide_up(kKeys, kScoreTile);
  compute(backward, gradients);

  for (int d = 0; d < 2; ++d) {
    Array<float> tangent_output(output.size()), tangent_logsumexp(2 * kRows), tangent_delta(kRows);
    TangentParams tangent;
    static_cast<Problem&>(tangent) = problem;
    t[d].set(tangent.t);
    tangent.rows_per_task = 64;
    tangent.output = p.output, tangent.logsumexp = p.logsumexp;
    p.tangent_output = tangent.tangent_output = operand(tangent_output, kQueries, kValueDim);
    p.tangent_logsumexp = tangent.tangent_logsumexp = tangent_logsumexp.data();
    run([&] { return launch_tangent_simt<float>(tangent, nullptr); });
    require_equal(Dot().add(grad_output, tangent_output), Dot().add(gradients, t[d]), "<u, J t> = <J' u, t>");
    p.t = tangent.t, p.tangent_delta = tangent_delta.data();
    compute(p, second[d]);
  }
  require_equal(Dot().add(second[0], t[1]), Dot().add(second[1], t[0]), "second derivatives are symmetric");

  Array<float> largest(kRows), entropy(kRows), stats_logsumexp(kRows), received(kHeads * kKeys),
      partial(4 * kSplits * kRows), pairs(2 * kRows), partial_received(kChunks * kHeads * kKeys);
  StatsParams stats;
  static_cast<Problem&>(stats) = problem;
  stats.has_dropout = false;
  stats.rows_per_task = stats.keys_per_task = stats.keys_per_split = stats.rows_per_chunk = 64;
  stats.splits = kSplits, stats.chunks = kChunks;
  stats.largest_score = largest.data(), stats.entropy = entropy.data(), stats.logsumexp = stats_logsumexp.data();
  stats.received_weight = received.data(), stats.partial_received = partial_received.data();
  stats.partial = partial.data(), stats.pairs = pairs.data();
  run([&] { return launch_stats_simt<float>(stats, nullptr); });
  double of_keys = 0, of_rows = 0;
  for (int64_t i = 0; i < received.size(); ++i) of_keys += received[i];
  for (int i = 0; i < kRows; ++i) {
    require(std::fabs(stats_logsumexp[i] - row_logsumexp[i]) <= 1e-5, "logsumexp");
    of_rows += 1 - std::exp(double{x.sinks[i / kQueries]} - row_logsumexp[i]);
  }
  require(std::fabs(of_keys - of_rows) <= 1e-6 * kRows, "the weights that keys receive");
}

}  // namespace
}  // namespace attn::cuda

int main() {
  attn::cuda::check();
  std::printf("right\n");
}
