// A forward of 16-bit numbers, with keys and values of 16 or 8 bits and any of its options, against a plain loop,
// without torch.
#pragma once

#include <bit>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <vector>

#include "check.h"
#include "cuda/shared/rows.cuh"

namespace attn::cuda {

// A number that S holds exactly, and that is not subnormal.
template <class S>
S from_host(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  if constexpr (std::is_same_v<S, BFloat16>) return {static_cast<uint16_t>(bits >> 16)};
  const uint32_t half = (bits >> 31 << 15) | (((bits >> 23 & 255) - 112) << 10) | (bits >> 13 & 1023);
  return {static_cast<uint16_t>(x == 0 ? 0 : half)};
}
// Numbers of 8 bits, as they are stored: int8 and float8_e4m3fn.
struct Int8 {
  int8_t bits;
};
struct E4m3 {
  uint8_t bits;
};
// About a number of type N: its dtype, a NaN or, if it has none, any number, and a factor that makes numbers small.
template <class N>
struct About;
template <>
struct About<Half> {
  static constexpr DType dtype = DType::f16;
  static constexpr Half nan{0x7fff};
  static constexpr bool has_scale = false;
};
template <>
struct About<BFloat16> {
  static constexpr DType dtype = DType::bf16;
  static constexpr BFloat16 nan{0x7fff};
  static constexpr bool has_scale = false;
};
template <>
struct About<Int8> {
  static constexpr DType dtype = DType::i8;
  static constexpr Int8 nan{-128};
  static constexpr bool has_scale = true;
  static constexpr float small = 1.f / 512;
};
template <>
struct About<E4m3> {
  static constexpr DType dtype = DType::e4m3;
  static constexpr E4m3 nan{0x7f};
  static constexpr bool has_scale = true;
  static constexpr float small = 1.f / 2048;
};

inline double value_of(Half x) { return host_float(x.bits, true); }
inline double value_of(BFloat16 x) { return host_float(x.bits, false); }
inline double value_of(Int8 x) { return x.bits; }
inline double value_of(E4m3 x) {
  const int exponent = x.bits >> 3 & 15, fraction = x.bits & 7;
  if ((x.bits & 127) == 127) return NAN;
  const double size = exponent == 0 ? std::ldexp(fraction, -9) : std::ldexp(8 + fraction, exponent - 10);
  return x.bits >> 7 ? -size : size;
}

// Whole numbers / 8 below 2, or any of 8 bits but NaN.
template <class N>
N draw(std::mt19937& random) {
  if constexpr (std::is_same_v<N, Int8>) return {static_cast<int8_t>(random() % 256)};
  if constexpr (std::is_same_v<N, E4m3>) return {static_cast<uint8_t>(random() % 127 + 128 * (random() % 2))};
  if constexpr (!About<N>::has_scale) return from_host<N>(static_cast<float>(static_cast<int>(random() % 31) - 15) / 8);
}

struct Case {
  const char* name;
  int heads = 2, group = 1, queries = 150, keys = 150, dim = 128, value_dim = 128;
  int left = -1, right = -1;  // of the window; -1: unlimited
  int offset = 0;             // query i stands at position i + offset among the keys
  int in_use = -1;            // keys; behind them lie NaNs. -1: all
  int page = 0;               // keys of a page; 0: no pages
  int col = 1;                // in pages: from one number of a row to the next one
  int splits = 1;
  bool has_sinks = false;
  int lists = 0;  // at once; 0: blocks know their tasks from the start
  double scale = 0.125;
  float softcap = 0;
  bool has_slopes = false;
  int mask_bytes = 0;            // of a number: 1, boolean; 2, as the query; 0: no mask. It hides a tile of keys wholly
  bool mask_is_of_rows = false;  // it has one number for all keys of a row, and hides none of them
  bool latent = false;           // values are the first numbers of the keys, in the same memory
  bool dropout = false;          // of a quarter of the weights
  float value_scale = 1;         // of values of 8 bits, beside what makes them as small as others
};

// `merges`: the kernel merges splits itself.
// Query i sees the keys in use from i + offset - left to i + offset + right. launch(p) computes it, with rows_per_task
// rows of a block and tiles of `tile` keys.
// S, N, V: the types of the query, of keys and of values.
template <class S, class N = S, class V = N, class Launch>
void check_forward(const Case& c, int64_t rows_per_task, int64_t tile, bool merges, Launch launch) {
  constexpr bool kIsHalf = std::is_same_v<S, Half>, kScaled = About<N>::has_scale;
  static_assert(kScaled == About<V>::has_scale);
  const int key_heads = c.heads / c.group, in_use = c.in_use < 0 ? c.keys : c.in_use;
  std::mt19937 random(5);
  const int query_stride = static_cast<int>(round_up(c.dim, 8));  // whole vectors
  Array<S> query(c.heads * c.queries * query_stride), output(c.heads * c.queries * c.value_dim);
  Array<N> key(key_heads * c.keys * c.dim);
  Array<V> value(key_heads * c.keys * c.value_dim);
  Array<float> key_scale(key_heads * c.keys), value_scale(key_heads * c.keys);
  Array<float> logsumexp(2 * c.heads * c.queries), row_logsumexp(c.heads * c.queries), sinks(c.heads),
      max_score(c.heads * c.queries), partial_max(c.splits * max_score.size()), partial(c.splits * output.size()),
      partial_logsumexp(c.splits * logsumexp.size());
  for (int64_t i = 0; i < query.size(); ++i) query[i] = draw<S>(random);
  for (int64_t i = 0; i < key.size(); ++i) key[i] = draw<N>(random);
  for (int64_t i = 0; i < value.size(); ++i) value[i] = draw<V>(random);
  if constexpr (std::is_same_v<N, V>)
    for (int64_t i = 0; c.latent && i < value.size(); ++i) value[i] = key[i / c.value_dim * c.dim + i % c.value_dim];
  for (int64_t i = 0; i < key_scale.size(); ++i) {
    key_scale[i] = value_scale[i] = 1;
    if constexpr (kScaled) {
      key_scale[i] = About<N>::small * static_cast<float>(1 + i % 7);
      value_scale[i] = About<V>::small * c.value_scale * static_cast<float>(1 + i % 5);
    }
  }
  for (int h = 0; h < c.heads; ++h) sinks[h] = static_cast<float>(h) - 1;
  const auto make_nan = [&](int h, int j) {
    for (int d = 0; d < c.dim; ++d) key[(h * c.keys + j) * c.dim + d] = About<N>::nan;
    for (int d = 0; d < c.value_dim; ++d) value[(h * c.keys + j) * c.value_dim + d] = About<V>::nan;
    key_scale[h * c.keys + j] = value_scale[h * c.keys + j] = NAN;
  };
  for (int h = 0; h < key_heads; ++h)
    for (int j = in_use; j < c.keys; ++j) make_nan(h, j);

  ForwardParams p;
  p.heads = c.heads;
  p.group = c.group;
  p.key_heads = p.value_heads = key_heads;
  p.queries = c.queries;
  p.keys = c.keys;
  p.head_dim = c.dim;
  p.value_dim = c.value_dim;
  p.scale = c.scale;
  if (c.left >= 0) p.visibility.left = c.left;
  if (c.right >= 0) p.visibility.right = c.right;
  Array<int64_t> offsets(1);
  offsets[0] = c.offset;
  if (c.offset) p.visibility.offsets = offsets.data();
  p.softcap = c.softcap;
  Array<float> slopes(c.heads);
  for (int h = 0; h < c.heads; ++h) slopes[h] = 0.25f / static_cast<float>(h + 1);
  if (c.has_slopes) p.alibi_slopes = slopes.data();
  Array<int64_t> lengths(1);
  lengths[0] = in_use;
  if (c.in_use >= 0) p.visibility.key_lengths = lengths.data();
  const auto operand = []<class T>(Array<T>& array, int rows, int cols) {
    Operand x;
    x.data = array.data();
    if constexpr (requires { About<T>::dtype; }) x.dtype = About<T>::dtype;
    x.head = int64_t{rows} * cols;
    x.row = cols;
    x.col = 1;
    return x;
  };
  p.query = operand(query, c.queries, query_stride);
  p.key = operand(key, c.keys, c.dim);
  p.value = operand(value, c.keys, c.value_dim);
  if (kScaled) p.key_scale = operand(key_scale, c.keys, 1), p.value_scale = operand(value_scale, c.keys, 1);
  p.output = operand(output, c.queries, c.value_dim);
  p.logsumexp = logsumexp.data();
  p.row_logsumexp = row_logsumexp.data();
  p.max_score = max_score.data();
  if (c.has_sinks) p.sinks = sinks.data();
  const int mask_stride = static_cast<int>(round_up(c.keys, 16));  // whole vectors
  Array<unsigned char> mask(c.mask_bytes * c.heads * c.queries * mask_stride);
  // Hides the second half of the first 128 keys and the first half of the third 128 keys. Kernels of all GPUs may not
  // leave out a tile that the last key ends, because they look at what lies behind this key, too.
  const auto hides_tile = [&](int j) { return j / 64 == 1 || (j / 64 == 4 && c.keys >= 320); };
  const auto hides = [&](int h, int i, int j) {
    return c.mask_bytes && !c.mask_is_of_rows && ((i + j + h) % 5 == 1 || hides_tile(j));
  };
  const auto bias = [&](int i, int j) {
    return c.mask_bytes == 2 ? static_cast<float>((i + (c.mask_is_of_rows ? 0 : 3 * j)) % 9 - 4) / 4 : 0;
  };
  if (c.mask_bytes) {
    for (int h = 0; h < key_heads; ++h)
      for (int j = 0; j < c.keys && !c.mask_is_of_rows; ++j)
        if (hides_tile(j)) make_nan(h, j);
    for (int h = 0; h < c.heads; ++h)
      for (int i = 0; i < c.queries; ++i)
        for (int j = 0; j < c.keys; ++j) {
          unsigned char* const to = &mask[c.mask_bytes * ((int64_t{h} * c.queries + i) * mask_stride + j)];
          const int shown = j % 3 == 0 ? 1 << (i + j) % 8 : 1;  // true has other bytes than 1, too
          const uint16_t bits = hides(h, i, j) ? (kIsHalf ? 0xfc00 : 0xff80) : from_host<S>(bias(i, j)).bits;
          if (c.mask_bytes == 1)
            *to = static_cast<unsigned char>(hides(h, i, j) ? 0 : shown);
          else
            std::memcpy(to, &bits, 2);
        }
    p.has_mask = true;
    p.mask = operand(mask, c.queries, mask_stride);
    p.mask.dtype = c.mask_bytes == 1 ? DType::boolean : About<S>::dtype;
    if (c.mask_is_of_rows) p.mask.col = 0;
  }
  Array<int64_t> rng(3);
  rng[0] = 12345678901234, rng[1] = 7, rng[2] = c.heads > 1 ? c.heads - 1 : 1;
  if (c.dropout) {
    check_philox();
    p.has_dropout = true;
    p.rng.data = rng.data();
    p.rng.col = 1;
    p.keep_below = uint64_t{3} << 30;
    p.keep_scale = 1 / 0.75;
  }
  Array<uint8_t> mask_tiles(c.mask_bytes ? set_mask_tiles(p) : 0);
  p.mask_tiles.data = c.mask_bytes ? mask_tiles.data() : nullptr;
  // A pool [pages, heads, page, dim]: no sequence has the first page, and the others are in disorder.
  const int pages = c.page ? (c.keys + c.page - 1) / c.page : 1, per_page = c.page ? c.page : 1;
  const int64_t of_pool = int64_t{pages + 1} * key_heads * per_page * c.col;
  Array<N> key_pool(of_pool * c.dim);
  Array<V> value_pool(of_pool * c.value_dim);
  Array<float> key_scale_pool(of_pool), value_scale_pool(of_pool);
  Array<int32_t> table(pages);
  require(!c.page || pages % 7 != 0, "this table would have pages twice");
  if (c.page) {
    for (int64_t i = 0; i < key_pool.size(); ++i) key_pool[i] = About<N>::nan;
    for (int64_t i = 0; i < value_pool.size(); ++i) value_pool[i] = About<V>::nan;
    for (int64_t i = 0; i < of_pool; ++i) key_scale_pool[i] = value_scale_pool[i] = NAN;
    for (int i = 0; i < pages; ++i) table[i] = 1 + i * 7 % pages;
    const auto put = [&](auto& pool, auto& from, int dim, int col = 1) {
      for (int64_t i = 0; i < from.size(); ++i) {
        const int64_t head = i / dim / c.keys, row = i / dim % c.keys;
        pool[(((table[row / c.page] * key_heads + head) * c.page + row % c.page) * dim + i % dim) * col] = from[i];
      }
    };
    put(key_pool, key, c.dim, c.col);
    put(value_pool, value, c.value_dim, c.col);
    put(key_scale_pool, key_scale, 1);
    put(value_scale_pool, value_scale, 1);
    p.paging = {.table = table.data(), .per_entry = pages, .per_page = 1, .page_size = c.page, .pages = pages + 1};
    p.key = operand(key_pool, c.page, c.dim * c.col);
    p.value = operand(value_pool, c.page, c.value_dim * c.col);
    p.key.page = int64_t{key_heads} * c.page * c.dim * c.col;
    p.value.page = int64_t{key_heads} * c.page * c.value_dim * c.col;
    p.key.col = p.value.col = c.col;
    if (kScaled) p.key_scale = operand(key_scale_pool, c.page, 1), p.value_scale = operand(value_scale_pool, c.page, 1);
    p.key_scale.page = p.value_scale.page = int64_t{key_heads} * c.page;
  }
  if (c.latent) p.value = p.key;
  p.rows_per_task = rows_per_task;
  p.splits = c.splits;
  p.keys_per_split = round_up(divide_up(c.keys, c.splits), tile);
  p.partial_output = partial.data();
  p.partial_logsumexp = partial_logsumexp.data();
  p.partial_max = partial_max.data();
  Array<int> counters(c.heads * c.queries);
  for (int64_t i = 0; i < counters.size(); ++i) counters[i] = 77;  // what another call has left there
  if (merges && c.splits > 1) {
    p.counters = counters.data();
    p.counter_count = counters.size();
  }
  if (c.lists) {
    p.counters = counters.data();
    p.order = order_of_rows(p, p.rows_per_task);
    p.order.at_once = c.lists;
  }
  run([&] { return launch(p); });

  const auto values_of = [](auto& numbers) {
    std::vector<double> values;
    for (int64_t i = 0; i < numbers.size(); ++i) values.push_back(value_of(numbers[i]));
    return values;
  };
  const std::vector<double> queries = values_of(query), keys = values_of(key), values = values_of(value);
  for (int h = 0; h < c.heads; ++h)
    for (int i = 0; i < c.queries; ++i) {
      double best = -INFINITY, sum = c.has_sinks ? std::exp(static_cast<double>(sinks[h])) : 0;
      std::vector<double> expected(c.value_dim);
      const int of_group = h / c.group * c.keys;
      for (int j = 0; j < in_use; ++j) {
        const int distance = i + c.offset - j;
        if ((c.right >= 0 && -distance > c.right) || (c.left >= 0 && distance > c.left) || hides(h, i, j)) continue;
        double score = inner_product(&queries[static_cast<size_t>((h * c.queries + i) * query_stride)],
                                     &keys[static_cast<size_t>((of_group + j) * c.dim)], c.dim);
        score *= key_scale[of_group + j] * p.scale;
        if (c.softcap > 0) score = c.softcap * std::tanh(score / c.softcap);
        if (c.has_slopes) score -= slopes[h] * std::abs(distance);
        score += bias(i, j);
        best = std::max(best, score);
        const double weight = std::exp(score);
        sum += weight;
        if (c.dropout && !keeps(rng, p.keep_below, h, i, j)) continue;
        add_scaled(weight * p.keep_scale * value_scale[of_group + j],
                   &values[static_cast<size_t>((of_group + j) * c.value_dim)], c.value_dim, expected.data());
      }
      const int row = h * c.queries + i;
      if (c.splits == 1 || merges) {
        const auto close = [](double x, double y) {
          return x == y || std::fabs(x - y) <= 2e-5 * std::max(1.0, std::fabs(y));
        };
        const double expected_log = std::log(sum);
        require(close(row_logsumexp[row], expected_log), c.name);
        require(close(double{logsumexp[2 * row]} + logsumexp[2 * row + 1], expected_log), c.name);
        require(close(max_score[row], best), c.name);
      }
      for (int d = 0; d < c.value_dim; ++d) {
        double found = value_of(output[row * c.value_dim + d]);
        if (c.splits > 1 && !merges) {  // what merge_splits() adds
          found = 0;
          double weights = 0;
          for (int s = 0; s < c.splits; ++s) {
            const int64_t at_split = int64_t{s} * c.heads * c.queries + row;
            const double weight = std::exp(static_cast<double>(partial_logsumexp[2 * at_split]));
            weights += weight;
            found += weight * partial[at_split * c.value_dim + d];
          }
          found = weights == 0 ? 0 : found / weights;
        }
        // Weights are rounded to S, and so is the output. All values are below 2 times c.value_scale.
        const double allowed = (kIsHalf ? 0x1p-9 : 0x1p-6) * c.value_scale;
        require(std::fabs(found - (sum == 0 ? 0 : expected[d] / sum)) <= allowed, c.name);
      }
    }
}

}  // namespace attn::cuda
