// Gradients of a kernel against plain loops in double, without torch.
#pragma once

#include <cmath>
#include <vector>

#include "check.h"

namespace attn::cuda {
constexpr int kHeads = 4;

// All gradients that are asked for; `delta` is there.
using Kernel = Error (*)(const BackwardParams& p, Stream stream);

// What a kernel takes. rows_of_tile, rows_under_mask: a tile of rows of which none sees a key is not read.
struct Takes {
  int rows_of_tile = kScoreTile, rows_under_mask = kScoreTile;
  bool options = true;    // dropout beside others, other key heads than value heads, the gradient of a mask
  bool one_pass = false;  // see takes_one_pass(); the results of a second launch are compared, too
};

struct Case {
  const char* name;
  int queries, keys, head_dim, value_dim;
  int key_heads = kHeads, value_heads = kHeads;
  bool causal = false, mask = false, dropout = false;
  bool shared = false;                                 // one gradient of the masks of all heads
  bool transposed = false;                             // columns of the mask and of gradients are not neighbours
  int left = -1, right = -1, offset = 0, length = -1;  // see Visibility
  bool far = false;                                    // scores are so far below 0 that exp(0 - logsumexp) is infinite
  double softcap = 0;
  bool alibi = false;
  bool boolean = false;  // the mask
  bool tiles = false;    // the mask hides some tiles and changes nothing in others

  // Whether the mask hides the key from all queries.
  bool hides(int j) const { return mask && !shared && !tiles && j >= 40; }
  bool sees(int i, int j) const {
    const int ahead = j - i - offset;
    return (!causal || ahead <= 0) && (left < 0 || ahead >= -left) && (right < 0 || ahead <= right) &&
           (length < 0 || j < length);
  }
};

// Whole numbers / 8 below 2: every dtype holds them.
inline float draw(std::mt19937& random) { return static_cast<float>(static_cast<int>(random() % 31) - 15) / 8; }

inline void store(float* to, float x) { *to = x; }
inline void store(BFloat16* to, float x) { to->bits = static_cast<uint16_t>(std::bit_cast<uint32_t>(x) >> 16); }
inline void store(Half* to, float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const int exponent = std::isinf(x) ? 31 : static_cast<int>(bits >> 23 & 255) - 127 + 15;
  to->bits = static_cast<uint16_t>(bits >> 16 & 0x8000) |
             static_cast<uint16_t>(x == 0 ? 0 : exponent << 10 | (bits >> 13 & 1023));
}

inline void store_nan(float* to) { *to = NAN; }
template <class S>
void store_nan(S* to) {
  to->bits = 0x7fff;
}

// [heads, rows, cols], and what the kernel is told of it. Rows are filled up with zeros to whole vectors.
template <class S>
struct Matrices {
  int rows, cols, width;
  bool transposed;
  Array<S> array;

  Matrices(int heads, int rows, int cols, bool transposed = false)
      : rows(rows),
        cols(cols),
        width(static_cast<int>(round_up(cols, sizeof(S) == 1 ? 2 * kVector : kVector))),
        transposed(transposed),
        array(int64_t{heads} * rows * width) {}
  int64_t at(int h, int i, int d) const {
    return transposed ? (int64_t{h} * width + d) * rows + i : (int64_t{h} * rows + i) * width + d;
  }
  Operand operand(DType dtype) {
    Operand x;
    x.data = array.data();
    x.dtype = dtype;
    x.head = int64_t{rows} * width;
    x.row = transposed ? 1 : width;
    x.col = transposed ? rows : 1;
    return x;
  }
};

template <class S>
struct Input : Matrices<S> {
  std::vector<double> values;
  Input(int heads, int rows, int cols, std::mt19937& random)
      : Matrices<S>(heads, rows, cols), values(static_cast<size_t>(this->array.size())) {
    for (size_t i = 0; i < values.size(); ++i) {
      const float x = static_cast<int>(i) % this->width < cols ? draw(random) : 0;
      values[i] = x;
      store(&this->array[static_cast<int64_t>(i)], x);
    }
  }
  void set(int d, float x) {  // a column
    for (size_t i = static_cast<size_t>(d); i < values.size(); i += static_cast<size_t>(this->width)) {
      values[i] = x;
      store(&this->array[static_cast<int64_t>(i)], x);
    }
  }
  double operator()(int h, int i, int d) const { return values[static_cast<size_t>(this->at(h, i, d))]; }
  const double* row(int h, int i) const { return &values[static_cast<size_t>(this->at(h, i, 0))]; }
};

// A sum, and how far from it a result may be: factors are rounded to S, the rest is the rounding of float32.
struct Sum {
  double value = 0, error = 0;
  ATTN_NOT_WATCHED void add(double factor, double error_of_factor, double x, double unit) {
    value += factor * x;
    error += (std::fabs(factor) * (unit + 0x1p-17) + error_of_factor) * std::fabs(x);
  }
};
// To sums that are `stride` apart: the factor times each of x.
ATTN_NOT_WATCHED inline void add_row(Sum* to, int64_t stride, const double* x, int size, double factor,
                                     double error_of_factor, double unit) {
  for (int i = 0; i < size; ++i) to[i * stride].add(factor, error_of_factor, x[i], unit);
}

// unit: of rounding a factor to nearest; smallest: the same of a factor that is not normal.
template <class S>
void check(const Case& c, Kernel kernel, DType dtype, double unit, double smallest, const Takes& takes) {
  std::mt19937 random(3);
  const int queries = c.queries, keys = c.keys;
  Input<S> query(kHeads, queries, c.head_dim, random), key(c.key_heads, keys, c.head_dim, random),
      value(c.value_heads, keys, c.value_dim, random), grad_output(kHeads, queries, c.value_dim, random);
  if (c.far) query.set(0, 32), key.set(0, -24);
  Matrices<S> mask(kHeads, queries, keys, c.transposed && sizeof(S) == 4);  // tensor cores read vectors
  Matrices<float> grad_query(kHeads, queries, c.head_dim, c.transposed),
      grad_key(c.key_heads, keys, c.head_dim, c.transposed), grad_value(c.value_heads, keys, c.value_dim, c.transposed),
      grad_mask(kHeads, queries, keys, c.transposed);
  Matrices<uint8_t> booleans(kHeads, queries, keys);
  Array<float> grad_slopes(kHeads * queries);
  std::vector<float> bias(static_cast<size_t>(mask.array.size()));
  const auto at_mask = [&](int h, int i, int j) { return mask.at(c.shared ? 0 : h, i, j); };
  const auto bias_of = [&](int h, int i, int j) -> float& { return bias[static_cast<size_t>(at_mask(h, i, j))]; };
  for (int h = 0; h < kHeads; ++h)
    for (int i = 0; i < queries; ++i)
      for (int j = 0; j < keys; ++j) {
        // Keys that no query sees, some that it does not, and a row without any key.
        const bool hidden = c.hides(j) || at_mask(h, i, j) % 7 == 3 || (h == 1 && i == queries / 2);
        const int tile = c.tiles ? (i / 64 + j / 64 + (c.shared ? 0 : h)) % 3 : 2;
        const bool hides = tile == 0 || (tile == 2 && hidden);
        bias_of(h, i, j) = hides ? -INFINITY : tile == 1 || c.boolean ? 0 : draw(random);
        store(&mask.array[at_mask(h, i, j)], bias_of(h, i, j));
        // Where a tile is read, true has other bytes than 1, too, as a view of bytes as booleans may have.
        const int shown = tile == 2 && j % 3 == 0 ? 1 << (i + j) % 8 : 1;
        booleans.array[booleans.at(c.shared ? 0 : h, i, j)] = static_cast<uint8_t>(hides ? 0 : shown);
      }
  // Nothing comes of keys that no query sees.
  for (auto* x : {&key, &value})
    for (int j = 0; j < keys; ++j) {
      bool seen = false;
      for (int i = 0; i < queries; ++i) seen |= c.sees(i, j) && !c.hides(j);
      if (seen) continue;
      for (int h = 0; h < (x == &key ? c.key_heads : c.value_heads); ++h) store_nan(&x->array[x->at(h, j, 0)]);
    }
  // Nor of the last rows of those that read the same key, if they see none: of their queries, and from a tile's first
  // one on of their output's gradients.
  const int group = kHeads / (c.key_heads > c.value_heads ? c.key_heads : c.value_heads), rows = group * queries;
  const auto sees_some = [&](int i) {
    bool some = false;
    for (int j = 0; j < keys; ++j) some |= c.sees(i, j);
    return some;
  };
  int rows_end = rows;
  while (rows_end > 0 && !sees_some((rows_end - 1) % queries)) --rows_end;
  for (int row = rows_end; row < rows; ++row)
    for (int h = row / queries; h < kHeads; h += group) {
      store_nan(&query.array[query.at(h, row % queries, 0)]);
      if (row >= round_up(rows_end, c.mask ? takes.rows_under_mask : takes.rows_of_tile))
        store_nan(&grad_output.array[grad_output.at(h, row % queries, 0)]);
    }
  Array<float> logsumexp(2 * kHeads * queries), delta(kHeads * queries);
  Array<int64_t> rng(3);
  rng[0] = 12345678901234, rng[1] = 7, rng[2] = kHeads - 1;

  BackwardParams p;
  p.heads = kHeads;
  p.key_heads = c.key_heads;
  p.value_heads = c.value_heads;
  p.group = group;
  p.queries = queries;
  p.keys = keys;
  p.head_dim = c.head_dim;
  p.value_dim = c.value_dim;
  p.scale = 0.125;
  const auto kept = [&](int h, int i, int j) { return keeps(rng, p.keep_below, h, i, j); };
  Array<int64_t> offset(1), length(1);
  offset[0] = c.offset;
  length[0] = c.length;
  p.visibility = {c.left, c.causal ? 0 : c.right, offset.data(), c.length < 0 ? nullptr : length.data()};
  p.has_mask = c.mask;
  p.has_dropout = c.dropout;
  p.softcap = c.softcap;
  Array<float> slopes(kHeads);
  for (int h = 0; h < kHeads; ++h) slopes[h] = 0.25f / static_cast<float>(h + 1);
  if (c.alibi) p.alibi_slopes = slopes.data();
  const bool learned = c.alibi && !takes.one_pass && (takes.options || c.softcap == 0);  // see uses_backward_wgmma()
  if (learned) p.grad_slopes = grad_slopes.data();
  p.rng.data = rng.data();
  p.rng.col = 1;
  p.keep_below = uint64_t{3} << 30;
  p.keep_scale = c.dropout ? 1 / 0.75 : 1;
  p.query = query.operand(dtype);
  p.key = key.operand(dtype);
  p.value = value.operand(dtype);
  p.grad_output = grad_output.operand(dtype);
  p.mask = c.boolean ? booleans.operand(DType::boolean) : mask.operand(dtype);
  p.grad_query = grad_query.operand(DType::f32);
  p.grad_key = grad_key.operand(DType::f32);
  p.grad_value = grad_value.operand(DType::f32);
  const bool of_mask = c.mask && takes.options;
  if (of_mask) p.grad_mask = grad_mask.operand(DType::f32);
  if (c.shared) p.mask.head = p.grad_mask.head = 0;
  p.mask_is_shared = c.shared;
  p.mask_slices = c.shared ? 1 : kHeads;
  p.mask_row_tasks = divide_up(queries, kScoreTile);
  p.mask_key_tasks = divide_up(keys, kScoreTile);
  p.logsumexp = logsumexp.data();
  p.delta = delta.data();
  p.few_rows = queries < 128;
  const auto sums_of = [](auto& gradient) { return std::vector<Sum>(static_cast<size_t>(gradient.array.size())); };
  std::vector<Sum> to_query = sums_of(grad_query), to_key = sums_of(grad_key), to_value = sums_of(grad_value),
                   to_mask = sums_of(grad_mask), to_slopes(kHeads * queries);
  for (int h = 0; h < kHeads; ++h) {
    const int kh = h / (kHeads / c.key_heads), vh = h / (kHeads / c.value_heads);
    for (int i = 0; i < queries; ++i) {
      std::vector<double> weight(keys), slope(keys), factor(keys), of_cap(keys, 1);  // of_cap: its derivative
      const double *const q = query.row(h, i), *const g = grad_output.row(h, i);
      double total = 0, dot = 0, size = 0;
      for (int j = 0; j < keys; ++j) {
        const double *const k = key.row(kh, j), *const v = value.row(vh, j);
        double score = inner_product(q, k, c.head_dim) * p.scale;
        if (c.softcap > 0) {
          const double y = std::tanh(score / c.softcap);
          score = c.softcap * y;
          of_cap[j] = 1 - y * y;
        }
        if (c.alibi) score -= slopes[h] * std::abs(j - i - c.offset);
        weight[j] = !c.sees(i, j) ? 0 : std::exp(score + (c.mask ? bias_of(h, i, j) : 0));
        total += weight[j];
        factor[j] = !c.dropout || kept(h, i, j) ? p.keep_scale : 0;
        slope[j] = inner_product(g, v, c.value_dim) * factor[j];
      }
      for (int j = 0; j < keys; ++j) {
        if (total > 0) weight[j] /= total;
        dot += weight[j] * slope[j];
        size += weight[j] * std::fabs(slope[j]);
      }
      const int row = h * queries + i;
      logsumexp[2 * row] = static_cast<float>(std::log(total));
      logsumexp[2 * row + 1] = total > 0 ? static_cast<float>(std::log(total) - logsumexp[2 * row]) : 0;
      delta[row] = static_cast<float>(dot);
      for (int j = 0; j < keys; ++j) {
        double ds = weight[j] * (slope[j] - dot);
        const double error = weight[j] * (std::fabs(slope[j]) + size) * 0x1p-17 + smallest;
        to_mask[static_cast<size_t>(grad_mask.at(c.shared ? 0 : h, i, j))].add(ds, error, 1, 0);
        to_slopes[static_cast<size_t>(row)].add(ds, error, -std::abs(j - i - c.offset), 0);
        ds *= of_cap[j];
        const auto add = [&](auto& to, auto& at, int head, int row, const double* x, int size, double by, double off) {
          Sum* const first = &to[static_cast<size_t>(at.at(head, row, 0))];
          add_row(first, at.operand(DType::f32).col, x, size, by, off, unit);
        };
        add(to_query, grad_query, h, i, key.row(kh, j), c.head_dim, ds * p.scale, error);
        add(to_key, grad_key, kh, j, q, c.head_dim, ds * p.scale, error);
        add(to_value, grad_value, vh, j, g, c.value_dim, weight[j] * factor[j], smallest);
      }
    }
  }

  run([&] { return kernel(p, nullptr); });
  if (takes.one_pass) {
    std::vector<float> first;
    const auto each = [&](auto f) {
      for (auto* gradient : {&grad_query, &grad_key, &grad_value})
        for (int64_t i = 0; i < gradient->array.size(); ++i) f(gradient->array[i]);
    };
    each([&](float x) { first.push_back(x); });
    run([&] { return kernel(p, nullptr); });
    size_t i = 0;
    each([&](float x) { require(std::bit_cast<uint32_t>(x) == std::bit_cast<uint32_t>(first[i++]), "the same bits"); });
  }
  const auto compare = [&](const char* what, Array<float>& actual, const std::vector<Sum>& expected) {
    for (size_t i = 0; i < expected.size(); ++i) {
      const double error = std::fabs(actual[static_cast<int64_t>(i)] - expected[i].value);
      if (error <= expected[i].error + 1e-9) continue;
      std::printf("%s, element %zu: %g, not %g\n", what, i, static_cast<double>(actual[static_cast<int64_t>(i)]),
                  expected[i].value);
      require(false, c.name);
    }
  };
  compare("grad_query", grad_query.array, to_query);
  compare("grad_key", grad_key.array, to_key);
  compare("grad_value", grad_value.array, to_value);
  if (of_mask) compare("grad_mask", grad_mask.array, to_mask);
  if (learned) compare("grad_slopes", grad_slopes, to_slopes);
}

// Checks head sizes that are padded to kDim.
template <class S, int kDim>
void check_all(Kernel kernel, DType dtype, double unit, double smallest, const Takes& takes = {}) {
  check_philox();
  constexpr int kOdd = kDim - 11;
  const Case cases[] = {
      {.name = "plain", .queries = 128, .keys = 128, .head_dim = kDim, .value_dim = kDim},
      {.name = "causal", .queries = 70, .keys = 90, .head_dim = kDim, .value_dim = kDim, .causal = true},
      {.name = "scores far below 0", .queries = 70, .keys = 90, .head_dim = kDim, .value_dim = kDim, .far = true},
      {.name = "causal, more queries than keys",
       .queries = 150,
       .keys = 70,
       .head_dim = kDim,
       .value_dim = kOdd,
       .key_heads = 2,
       .value_heads = 2,
       .causal = true},
      {.name = "mask", .queries = 70, .keys = 90, .head_dim = kOdd, .value_dim = kDim, .mask = true},
      {.name = "mask, causal, heads that read different keys and values",
       .queries = 37,
       .keys = 70,
       .head_dim = kOdd,
       .value_dim = kDim,
       .key_heads = 2,
       .value_heads = 1,
       .causal = true,
       .mask = true},
      {.name = "dropout, few queries",
       .queries = 5,
       .keys = 133,
       .head_dim = kDim,
       .value_dim = kDim,
       .key_heads = 1,
       .value_heads = 1,
       .dropout = true},
      {.name = "all, transposed",
       .queries = 67,
       .keys = 70,
       .head_dim = kDim,
       .value_dim = kOdd,
       .key_heads = 1,
       .value_heads = 2,
       .causal = true,
       .mask = true,
       .dropout = true,
       .transposed = true},
      {.name = "window, offset and a short length",
       .queries = 150,
       .keys = 290,
       .head_dim = kDim,
       .value_dim = kDim,
       .key_heads = 2,
       .value_heads = 2,
       .left = 17,
       .right = 5,
       .offset = 71,
       .length = 203},
      {.name = "window, queries beyond the last key, a length that is none",
       .queries = 200,
       .keys = 70,
       .head_dim = kDim,
       .value_dim = kDim,
       .key_heads = 2,
       .value_heads = 2,
       .left = 5,
       .length = 1000},
      {.name = "window and dropout, queries before the first key",
       .queries = 90,
       .keys = 70,
       .head_dim = kDim,
       .value_dim = kOdd,
       .dropout = true,
       .left = 30,
       .offset = -40},
      {.name = "window of one head, offset and a short length",
       .queries = 300,
       .keys = 290,
       .head_dim = kDim,
       .value_dim = kOdd,
       .left = 20,
       .right = 50,
       .offset = -30,
       .length = 203},
      {.name = "causal, grouped, several blocks of keys",
       .queries = 190,
       .keys = 420,
       .head_dim = kOdd,
       .value_dim = kDim,
       .key_heads = 1,
       .value_heads = 1,
       .causal = true,
       .offset = 230},
      {.name = "a cap, causal",
       .queries = 150,
       .keys = 170,
       .head_dim = kDim,
       .value_dim = kOdd,
       .causal = true,
       .softcap = 1.5},
      {.name = "a large cap", .queries = 70, .keys = 90, .head_dim = kDim, .value_dim = kDim, .softcap = 1e6},
      {.name = "ALiBi, grouped, window, offset and a short length",
       .queries = 150,
       .keys = 290,
       .head_dim = kDim,
       .value_dim = kDim,
       .key_heads = 2,
       .value_heads = 2,
       .left = 90,
       .right = 50,
       .offset = 71,
       .length = 203,
       .alibi = true},
      {.name = "a cap, ALiBi, a mask and dropout",
       .queries = 67,
       .keys = 70,
       .head_dim = kDim,
       .value_dim = kDim,
       .causal = true,
       .mask = true,
       .dropout = true,
       .softcap = 2,
       .alibi = true},
      {.name = "a cap and ALiBi",
       .queries = 200,
       .keys = 150,
       .head_dim = kDim,
       .value_dim = kDim,
       .softcap = 2,
       .alibi = true},
      {.name = "one mask of all heads, more than a tile",
       .queries = 70,
       .keys = 150,
       .head_dim = kDim,
       .value_dim = kOdd,
       .key_heads = 2,
       .causal = true,
       .mask = true,
       .dropout = true,
       .shared = true},
      {.name = "dropout, causal, grouped",
       .queries = 200,
       .keys = 300,
       .head_dim = kDim,
       .value_dim = kDim,
       .key_heads = 2,
       .value_heads = 2,
       .causal = true,
       .dropout = true},
      {.name = "a mask that hides tiles, grouped",
       .queries = 170,
       .keys = 400,
       .head_dim = kDim,
       .value_dim = kDim,
       .key_heads = 2,
       .value_heads = 2,
       .mask = true,
       .left = 300,
       .tiles = true},
      {.name = "a mask of more rows than one look finds",
       .queries = 550,
       .keys = 140,
       .head_dim = kDim,
       .value_dim = kDim,
       .key_heads = 1,
       .value_heads = 1,
       .mask = true,
       .tiles = true},
      {.name = "a mask of more keys than one look finds",
       .queries = 20,
       .keys = 2200,
       .head_dim = kDim,
       .value_dim = kDim,
       .key_heads = 1,
       .value_heads = 1,
       .mask = true,
       .boolean = true,
       .tiles = true},
      {.name = "a boolean mask that hides tiles, causal",
       .queries = 300,
       .keys = 300,
       .head_dim = kDim,
       .value_dim = kOdd,
       .causal = true,
       .mask = true,
       .boolean = true,
       .tiles = true},
      {.name = "a boolean mask of all heads, a cap",
       .queries = 130,
       .keys = 150,
       .head_dim = kOdd,
       .value_dim = kDim,
       .key_heads = 2,
       .value_heads = 2,
       .mask = true,
       .shared = true,
       .softcap = 1.5,
       .boolean = true,
       .tiles = true},
      {.name = "a mask and ALiBi",
       .queries = 130,
       .keys = 150,
       .head_dim = kDim,
       .value_dim = kDim,
       .mask = true,
       .alibi = true,
       .tiles = true},
  };
  for (const Case& c : cases)
    if (takes.one_pass && (c.mask || c.dropout || (c.left >= 0 && c.key_heads < kHeads)))
      continue;
    else if (takes.options || (c.key_heads == c.value_heads && !(c.dropout && (c.mask || c.alibi || c.softcap > 0))))
      check<S>(c, kernel, dtype, unit, smallest, takes);
}

}  // namespace attn::cuda
