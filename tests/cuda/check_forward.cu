// One forward of each kernel against a plain loop, without torch: for compute-sanitizer, and to see that an error put
// into a kernel is found.
#include <bit>
#include <cmath>
#include <type_traits>
#include <vector>

#include "check.h"
#include "cuda/simt/forward.cuh"
#include "cuda/mma/forward.cuh"

namespace attn::cuda {
namespace {

// Whole numbers / 8 below 2: every dtype holds them.
float draw(std::mt19937& random) { return static_cast<float>(static_cast<int>(random() % 31) - 15) / 8; }

void store(float* to, float x) { *to = x; }
void store(BFloat16* to, float x) { to->bits = static_cast<uint16_t>(std::bit_cast<uint32_t>(x) >> 16); }

void store_nan(float* to) { *to = NAN; }
void store_nan(BFloat16* to) { to->bits = 0x7fff; }

// What is added to scores.
template <class M>
void store_bias(M* to, float x) {
  if constexpr (std::is_same_v<M, bool>)
    *to = x == 0;
  else
    store(to, x);
}

// `causal`, with keys left over in the last tile and rows in the last block. M: the type of the mask, if there is one;
// it hides a tile of keys wholly. `paged`: keys and values are stored in pages.
template <class S, class M = void>
void check(const char* name, DType dtype, Error (*kernel)(const ForwardParams&, Stream), double tolerance,
           int rows_per_task = sizeof(S) == 2 ? 128 : 64, bool paged = false) {
  constexpr bool mask = !std::is_void_v<M>;
  using Mask = std::conditional_t<mask, M, bool>;
  constexpr int kQueries = 150, kKeys = 150, kDim = 64, kHeads = 2;
  constexpr int kMaskStride = 160;  // whole vectors
  Array<S> query(kHeads * kQueries * kDim), key(kHeads * kKeys * kDim), value(kHeads * kKeys * kDim);
  Array<float> output(kHeads * kQueries * kDim);
  Array<Mask> of_mask(kQueries * kMaskStride);
  std::vector<float> bias(kQueries * kKeys);
  std::vector<float> q(query.size()), k(key.size()), v(value.size());
  std::mt19937 random(3);
  const auto fill = [&](Array<S>& array, std::vector<float>& copy) {
    for (int64_t i = 0; i < array.size(); ++i) store(&array[i], copy[i] = draw(random));
  };
  fill(query, q);
  fill(key, k);
  fill(value, v);
  for (int i = 0; i < kQueries * kKeys; ++i) {
    const int row = i / kKeys, tile = i % kKeys / 64;
    // Hides all rows of the first warp and, in the first tile of keys, the first half of each warp's rows.
    const bool hidden = i % 7 == 3 || tile == 1 || row < 32 || (tile == 0 && row < 128 && row % 32 < 16);
    bias[i] = hidden ? -INFINITY : std::is_same_v<Mask, bool> ? 0 : draw(random);
    store_bias(&of_mask[i / kKeys * kMaskStride + i % kKeys], bias[i]);
  }
  if (mask)
    for (int h = 0; h < kHeads; ++h)
      for (auto* x : {&key, &value})
        for (int i = 64 * kDim; i < 128 * kDim; ++i) store_nan(&(*x)[h * kKeys * kDim + i]);

  ForwardParams p;
  p.heads = p.key_heads = p.value_heads = kHeads;
  p.queries = kQueries;
  p.keys = kKeys;
  p.head_dim = p.value_dim = kDim;
  p.scale = 0.125;
  p.visibility.right = 0;
  p.has_mask = mask;
  const auto operand = [](auto& array, DType type, int rows, int cols) {
    Operand x;
    x.data = array.data();
    x.dtype = type;
    x.head = int64_t{rows} * cols;
    x.row = cols;
    x.col = 1;
    return x;
  };
  p.query = operand(query, dtype, kQueries, kDim);
  p.key = operand(key, dtype, kKeys, kDim);
  p.value = operand(value, dtype, kKeys, kDim);
  p.output = operand(output, DType::f32, kQueries, kDim);
  p.mask = operand(of_mask, std::is_same_v<Mask, bool> ? DType::boolean : dtype, 0, kKeys);
  p.mask.row = kMaskStride;
  // A pool [pages, heads, kPage, kDim]: no sequence has the first page, and the others are in disorder.
  constexpr int kPage = 8, kInUse = (kKeys + kPage - 1) / kPage;
  Array<S> key_pool((kInUse + 1) * kHeads * kPage * kDim), value_pool(key_pool.size());
  Array<int32_t> table(kInUse);
  for (int64_t i = 0; i < key_pool.size(); ++i) store_nan(&key_pool[i]), store_nan(&value_pool[i]);
  for (int i = 0; i < kInUse; ++i) table[i] = 1 + i * 7 % kInUse;
  for (int i = 0; i < kHeads * kKeys * kDim; ++i) {
    const int head = i / kDim / kKeys, row = i / kDim % kKeys;
    const int to = ((table[row / kPage] * kHeads + head) * kPage + row % kPage) * kDim + i % kDim;
    key_pool[to] = key[i];
    value_pool[to] = value[i];
  }
  if (paged) {
    p.paging = {.table = table.data(), .per_entry = kInUse, .per_page = 1, .page_size = kPage, .pages = kInUse + 1};
    p.key = operand(key_pool, dtype, kPage, kDim);
    p.value = operand(value_pool, dtype, kPage, kDim);
    p.key.page = p.value.page = int64_t{kHeads} * kPage * kDim;
  }
  p.rows_per_task = rows_per_task;
  p.keys_per_split = 192;
  run([&] { return kernel(p, nullptr); });

  for (int h = 0; h < kHeads; ++h)
    for (int i = 0; i < kQueries; ++i) {
      double sum = 0, expected[kDim] = {};
      for (int j = 0; j <= i; ++j) {
        double score = 0;
        for (int d = 0; d < kDim; ++d)
          score += static_cast<double>(q[(h * kQueries + i) * kDim + d]) * k[(h * kKeys + j) * kDim + d];
        const double weight = std::exp(score * p.scale + (mask ? bias[i * kKeys + j] : 0));
        sum += weight;
        for (int d = 0; d < kDim; ++d) expected[d] += weight * v[(h * kKeys + j) * kDim + d];
      }
      for (int d = 0; d < kDim; ++d)
        require(std::fabs(output[(h * kQueries + i) * kDim + d] - (sum == 0 ? 0 : expected[d] / sum)) <= tolerance,
                name);
    }

  if constexpr (sizeof(S) == 2) {  // the same in 16 bits, which are written in vectors
    Array<S> rounded(output.size());
    p.output = operand(rounded, dtype, kQueries, kDim);
    run([&] { return kernel(p, nullptr); });
    for (int64_t i = 0; i < output.size(); ++i)
      require(std::fabs(host_float(rounded[i].bits, false) - output[i]) <= 0x1p-8 * std::fabs(output[i]), name);
  }
}

}  // namespace
}  // namespace attn::cuda

int main() {
  using namespace attn;
  using namespace attn::cuda;
  // For values up to 2: weights are rounded to bfloat16 (2^-9), the rest is float32's rounding.
  check<float>("simt", DType::f32, launch_forward_simt<float>, 1e-5);
  check<float, float>("simt, mask", DType::f32, launch_forward_simt<float>, 1e-5);
  check<BFloat16>("mma", DType::bf16, launch_forward_mma<BFloat16, 64, false>, 0x1p-8);
  check<BFloat16, BFloat16>("mma, mask", DType::bf16, launch_forward_mma<BFloat16, 64, false>, 0x1p-8);
  check<BFloat16, bool>("mma, boolean mask", DType::bf16, launch_forward_mma<BFloat16, 64, false>, 0x1p-8);
  check<BFloat16, BFloat16>("mma 128, mask", DType::bf16, launch_forward_mma<BFloat16, 128, false>, 0x1p-8);
  check<BFloat16, bool>("mma 128, boolean mask", DType::bf16, launch_forward_mma<BFloat16, 128, false>, 0x1p-8);
  check<BFloat16, bool>("mma, few rows, boolean mask", DType::bf16, launch_forward_mma<BFloat16, 64, false>, 0x1p-8,
                        64);
  check<BFloat16, BFloat16>("mma 256, mask", DType::bf16, launch_forward_mma<BFloat16, 256, false>, 0x1p-8, 64);
  check<float>("simt, pages", DType::f32, launch_forward_simt<float>, 1e-5, 64, true);
  check<BFloat16>("mma, pages", DType::bf16, launch_forward_mma<BFloat16, 64, true>, 0x1p-8, 128, true);
  check<BFloat16>("mma, few rows, pages", DType::bf16, launch_forward_mma<BFloat16, 64, true>, 0x1p-8, 64, true);
  check<BFloat16, bool>("mma, mask, pages", DType::bf16, launch_forward_mma<BFloat16, 64, true>, 0x1p-8, 64, true);
  std::printf("right\n");
}
