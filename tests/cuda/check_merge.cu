// Splits put together, of numbers that are drawn, against plain sums in double.
#include <cmath>
#include <limits>

#include "check.h"
#include "cuda/simt/merge.cuh"

namespace attn::cuda {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr int kHeads = 3;

template <class T>
bool close(double x, double expected, double size) {
  if (!(std::fabs(expected) < kInfinity)) return x == expected || (std::isnan(x) && std::isnan(expected));
  return std::fabs(x - expected) <= 64 * std::numeric_limits<T>::epsilon() * size;
}

// Row 0 saw no key in any split, row 1 in none but the last, row 2 has a NaN in one. One key of row 3 outweighs all
// others, whose splits have infinite outputs: they have weight 0.
template <class T>
void check_merge(int queries, int splits, int value_dim, bool has_more) {
  std::mt19937 random(7);
  std::uniform_real_distribution<double> uniform(-1, 1);
  const int rows = kHeads * queries;
  const DType dtype = sizeof(T) == 8 ? DType::f64 : DType::f32;
  Array<T> partial(static_cast<int64_t>(splits) * rows * value_dim), largest(splits * rows), sinks(kHeads);
  Array<T> output(rows * value_dim), max_score(rows), row_logsumexp(rows);
  Array<Pair<T>> logsumexps(splits * rows), logsumexp(rows);
  Array<float> residual(rows * value_dim);
  for (int h = 0; h < kHeads; ++h) sinks[h] = static_cast<T>(uniform(random));
  for (int s = 0; s < splits; ++s)
    for (int r = 0; r < rows; ++r) {
      const bool sees_nothing = r == 0 || (r == 1 && s < splits - 1) || (r > 3 && (s + r) % 5 == 0);
      const T high = static_cast<T>(4 * uniform(random)), low = static_cast<T>(uniform(random) * 0x1p-24);
      Pair<T>& at = logsumexps[s * rows + r] =
          sees_nothing ? Pair<T>{static_cast<T>(-kInfinity), 0} : Pair<T>{high, low};
      if (r == 2 && s == splits / 2) at = {std::numeric_limits<T>::quiet_NaN(), 0};
      if (r == 3 && s == splits / 2) at.high = 9000;
      largest[s * rows + r] = at.high - 1;
      for (int d = 0; d < value_dim; ++d)
        partial[(static_cast<int64_t>(s) * rows + r) * value_dim + d] =
            sees_nothing ? 0 : static_cast<T>(r == 3 && s != splits / 2 ? kInfinity : uniform(random));
    }

  ForwardParams p;
  p.heads = kHeads;
  p.queries = queries;
  p.value_dim = value_dim;
  p.splits = splits;
  p.partial_output = partial.data();
  p.partial_logsumexp = logsumexps.data();
  p.output.data = output.data();
  p.output.dtype = dtype;
  p.output.row = p.residual.row = value_dim;
  p.output.head = p.residual.head = queries * value_dim;
  p.output.col = p.residual.col = 1;
  p.logsumexp = logsumexp.data();
  if (has_more) {
    p.residual.data = residual.data();
    p.sinks = sinks.data();
    p.partial_max = largest.data();
    p.max_score = max_score.data();
    p.row_logsumexp = row_logsumexp.data();
  }
  run([&] { return launch_merge_splits<T>(p, nullptr); });

  for (int r = 0; r < rows; ++r) {
    double best = has_more ? sinks[r / queries] : -kInfinity, most = -kInfinity;
    for (int s = 0; s < splits; ++s) {
      const Pair<T> x = logsumexps[s * rows + r];
      best = std::fmax(best, x.high);
      if (!(most >= largest[s * rows + r]) && !std::isnan(most)) most = largest[s * rows + r];
    }
    const double shift = best == -kInfinity ? 0 : best;
    double sum = has_more ? std::exp(sinks[r / queries] - shift) : 0;
    std::vector<double> weights;
    for (int s = 0; s < splits; ++s) {
      const Pair<T> x = logsumexps[s * rows + r];
      weights.push_back(std::exp((x.high - shift) + x.low));
      sum += weights.back();
    }
    const double expected = sum == 0 ? -kInfinity : shift + std::log(sum);
    require(close<T>(static_cast<double>(logsumexp[r].high) + logsumexp[r].low, expected, 1 + std::fabs(best)),
            "logsumexp");
    if (has_more) {
      require(close<T>(row_logsumexp[r], expected, 1 + std::fabs(best)), "logsumexp for the caller");
      require(close<T>(max_score[r], most, 0), "max_score");
    }
    for (int d = 0; d < value_dim; ++d) {
      double total = 0;
      for (int s = 0; s < splits; ++s)
        if (static_cast<T>(weights[s]) != 0)
          total += weights[s] * partial[(static_cast<int64_t>(s) * rows + r) * value_dim + d];
      require(close<T>(output[r * value_dim + d], sum == 0 ? 0 : total / sum, 1), "output");
    }
  }
}

template <class T>
void check_all() {
  for (const int splits : {2, 3, 8, 9, 16, 17, 31, 33, 64, 65, 129, 300})
    for (const bool has_more : {false, true})
      for (const int value_dim : {1, 40, 128, 136}) check_merge<T>(2, splits, value_dim, has_more);
  check_merge<T>(2, 20, 0, true);
  for (const int splits : {2, 7, 20}) check_merge<T>(350, splits, 33, true);  // many rows
}

}  // namespace
}  // namespace attn::cuda

int main() {
  attn::cuda::check_all<float>();
  attn::cuda::check_all<double>();
  std::printf("right\n");
}
