// Every wrapper of ptx.cuh, and divide(), against what its comment says.
#include <bit>
#include <cmath>

#include "check.h"
#include "cuda/shared/ptx.cuh"

namespace attn::cuda {
namespace {

struct Buffers {
  const float* floats;
  const uint16_t* numbers;
  uint32_t* words;
  float* results;
};

struct Divisions {
  const int64_t* a;
  const int64_t* b;
  Quotient* results;
};
__global__ void divide_all(const __grid_constant__ Divisions x) {
  const int i = blockIdx.x * 32 + threadIdx.x;
  x.results[i] = divide(x.a[i], x.b[i]);
}
void check_divide() {
  constexpr int kBlocks = 8, kSize = 32 * kBlocks;
  Array<int64_t> a(kSize), b(kSize);
  Array<Quotient> results(kSize);
  std::mt19937_64 random(1);
  for (int i = 0; i < kSize; ++i) {
    a[i] = static_cast<int64_t>(random() >> (1 + random() % 63));  // numbers of 0 to 63 bits
    b[i] = larger(1, static_cast<int64_t>(random() >> (1 + random() % 63)));
  }
  run([&] { return launch<Nothing>(divide_all, Divisions{a.data(), b.data(), results.data()}, kBlocks, 32, nullptr); });
  for (int i = 0; i < kSize; ++i)
    require(results[i].quotient == a[i] / b[i] && results[i].remainder == a[i] % b[i], "divide");
}

template <class S>
__global__ void convert_all(const __grid_constant__ Buffers b) {
  const int i = blockIdx.x * 32 + threadIdx.x;
  b.words[i] = from_float<S>(b.floats[i]).bits;
  b.words[gridDim.x * 32 + i] = pack<S>(b.floats[i], -b.floats[i]);
  b.results[i] = to_float(S{b.numbers[i]});
  b.results[gridDim.x * 32 + i] = exp2_approx(b.floats[i]);
  b.results[2 * gridDim.x * 32 + i] = reciprocal_approx(b.floats[i]);
}

template <class S, bool kIsHalf>
void check_conversions() {
  constexpr int kBlocks = 4, kSize = 32 * kBlocks;
  Array<float> floats(kSize), results(3 * kSize);
  Array<uint16_t> numbers(kSize);
  Array<uint32_t> words(2 * kSize);
  std::mt19937 random(1);
  for (int i = 0; i < kSize; ++i) {
    numbers[i] = static_cast<uint16_t>(random() % 0x7000 | (random() % 2 << 15));
    if (!kIsHalf) numbers[i] = static_cast<uint16_t>((numbers[i] & 0x87ff) | 0x3800);
    floats[i] = host_float(numbers[i], kIsHalf);
    // a tie between it and the next; then what is above the tie
    const float next = host_float(static_cast<uint16_t>(numbers[i] + 1), kIsHalf);
    if (i % 3 == 1) floats[i] = (floats[i] + next) / 2;
    if (i % 3 == 2) floats[i] = std::nextafter((floats[i] + next) / 2, next);
  }
  floats[0] = 1e30f;
  floats[3] = -INFINITY;
  run([&] {
    return launch<Nothing>(convert_all<S>, Buffers{floats.data(), numbers.data(), words.data(), results.data()},
                           kBlocks, 32, nullptr);
  });
  for (int i = 0; i < kSize; ++i) {
    uint32_t bits = numbers[i];
    if (i % 3 == 1) bits += bits & 1;  // a tie goes to the even one
    if (i % 3 == 2) bits += 1;
    if (i == 0) bits = kIsHalf ? 0x7c00 : std::bit_cast<uint32_t>(1e30f * (1 + 0x1p-9f)) >> 16;
    if (i == 3) bits = kIsHalf ? 0xfc00 : 0xff80;
    if (i != 0 || kIsHalf) {
      require(words[i] == bits, "from_float");
      require(words[kSize + i] == (bits | (bits ^ 0x8000) << 16), "pack");
    }
    require(results[i] == host_float(numbers[i], kIsHalf), "to_float");
    const double exact = std::exp2(static_cast<double>(floats[i]));
    if (exact < 0x1p-126)
      require(results[kSize + i] == 0, "exp2_approx of a small number");
    else if (exact < 0x1p127)
      require(std::fabs(results[kSize + i] - exact) <= exact * 0x1p-21, "exp2_approx");
    const double reciprocal = 1 / static_cast<double>(floats[i]), found = results[2 * kSize + i];
    require(found == reciprocal || std::fabs(found - reciprocal) <= std::fabs(reciprocal) * 0x1p-22,
            "reciprocal_approx");
  }
}

// Bytes of a boolean mask, and numbers that are no normal float16: small ones are not taken for 0.
__global__ void fill(const __grid_constant__ Buffers b) {
  b.words[blockIdx.x * 32 + threadIdx.x] = fill_halves(b.words[blockIdx.x * 32 + threadIdx.x]);
}
void check_fill() {
  const uint32_t halves[] = {0, 1, 2, 0x80, 0xff, 0x100, 0x3ff, 0x7c00};
  constexpr int kHalves = 8;
  Array<uint32_t> words(kHalves * kHalves);
  const auto pair = [&](int i) { return halves[i / kHalves] | halves[i % kHalves] << 16; };
  for (int i = 0; i < kHalves * kHalves; ++i) words[i] = pair(i);
  run([&] { return launch<Nothing>(fill, Buffers{nullptr, nullptr, words.data(), nullptr}, 2, 32, nullptr); });
  for (int i = 0; i < kHalves * kHalves; ++i)
    require(words[i] == ((pair(i) & 0xffff ? 0xffff : 0) | (pair(i) >> 16 ? 0xffff0000 : 0)), "fill_halves");
}

// Shared memory holds a 32 x 8 matrix of numbers 0 ... 255, row by row.
__global__ void load_fragments(const __grid_constant__ Buffers b) {
  auto* rows = reinterpret_cast<uint16_t*>(shared_memory());
  for (int i = thread_index(); i < 256; i += 32) rows[i] = static_cast<uint16_t>(i);
  __syncthreads();
  uint32_t plain[4], transposed[4];
  load_matrices(plain, shared_address(rows + 8 * threadIdx.x));
  load_matrices_transposed(transposed, shared_address(rows + 8 * threadIdx.x));
  for (int m = 0; m < 4; ++m) {
    b.words[32 * m + threadIdx.x] = plain[m];
    b.words[128 + 32 * m + threadIdx.x] = transposed[m];
  }
}

void check_fragments() {
  Array<uint32_t> words(256);
  run([&] {
    return launch<uint32_t[128]>(load_fragments, Buffers{nullptr, nullptr, words.data(), nullptr}, 1, 32, nullptr);
  });
  for (uint32_t m = 0; m < 4; ++m)
    for (uint32_t l = 0; l < 32; ++l) {
      const uint32_t i = l / 4, j = 2 * (l % 4);
      const auto number = [&](uint32_t row, uint32_t col) { return 64 * m + 8 * row + col; };
      require(words[32 * m + l] == (number(i, j) | number(i, j + 1) << 16), "load_matrices");
      require(words[128 + 32 * m + l] == (number(j, i) | number(j + 1, i) << 16), "load_matrices_transposed");
    }
}

// C = C0 + A B, A [16 x 16] and B [16 x 8] in `numbers`, C0 [16 x 8] in `floats`.
template <class S>
__global__ void multiply(const __grid_constant__ Buffers b) {
  const int group = threadIdx.x / 4, place = threadIdx.x % 4;
  const auto pair = [&](int first, int second) {
    return b.numbers[first] | static_cast<uint32_t>(b.numbers[second]) << 16;
  };
  const auto of_a = [&](int i, int k) { return pair(16 * i + k, 16 * i + k + 1); };
  const auto of_b = [&](int k, int j) { return pair(256 + 8 * k + j, 256 + 8 * (k + 1) + j); };
  const uint32_t a[4] = {of_a(group, 2 * place), of_a(group + 8, 2 * place), of_a(group, 2 * place + 8),
                         of_a(group + 8, 2 * place + 8)};
  float c[4];
  for (int i = 0; i < 4; ++i) c[i] = b.floats[8 * (group + i / 2 * 8) + 2 * place + i % 2];
  multiply_add<S>(c, a, of_b(2 * place, group), of_b(2 * place + 8, group));
  for (int i = 0; i < 4; ++i) b.results[8 * (group + i / 2 * 8) + 2 * place + i % 2] = c[i];
}

template <class S, bool kIsHalf>
void check_products() {
  Array<uint16_t> numbers(16 * 16 + 16 * 8);
  Array<float> floats(16 * 8), results(16 * 8);
  std::mt19937 random(2);
  // Small whole numbers: sums are exact in any order.
  for (int64_t i = 0; i < numbers.size(); ++i) {
    const float x = static_cast<float>(random() % 17) - 8;
    const uint32_t bits = std::bit_cast<uint32_t>(x);
    const uint32_t half = (bits >> 31 << 15) | (((bits >> 23 & 255) - 112) << 10) | (bits >> 13 & 1023);
    numbers[i] = static_cast<uint16_t>(!kIsHalf ? bits >> 16 : x == 0 ? 0 : half);
  }
  for (int64_t i = 0; i < floats.size(); ++i) floats[i] = static_cast<float>(random() % 100);
  run([&] {
    return launch<Nothing>(multiply<S>, Buffers{floats.data(), numbers.data(), nullptr, results.data()}, 1, 32,
                           nullptr);
  });
  for (int i = 0; i < 16; ++i)
    for (int j = 0; j < 8; ++j) {
      float sum = floats[8 * i + j];
      for (int k = 0; k < 16; ++k)
        sum += host_float(numbers[16 * i + k], kIsHalf) * host_float(numbers[256 + 8 * k + j], kIsHalf);
      require(results[8 * i + j] == sum, "multiply_add");
    }
}

// A [16 x 16], B [16 x 8] and C [16 x 8], row by row: C + A B.
template <class S>
struct Product {
  Array<uint16_t> numbers{16 * 16 + 16 * 8};
  Array<float> floats{16 * 8}, results{16 * 8};

  uint16_t& a(int i, int k) { return numbers[16 * i + k]; }
  uint16_t& b(int k, int j) { return numbers[256 + 8 * k + j]; }
  float& c(int i, int j) { return floats[8 * i + j]; }
  float operator()(int i, int j) { return results[8 * i + j]; }
  void compute() {
    run([&] {
      return launch<Nothing>(multiply<S>, Buffers{floats.data(), numbers.data(), nullptr, results.data()}, 1, 32,
                             nullptr);
    });
  }
};

// What the kernels rest on: tensor cores give the bits of a product whatever its place in a tile is and whichever
// factor comes first, and adding zeros changes nothing. How they round is printed: PTX does not say it.
template <class S, bool kIsHalf>
void check_rounding() {
  std::mt19937 random(3);
  const uint16_t one = kIsHalf ? 0x3c00 : 0x3f80;
  const uint16_t fraction = kIsHalf ? 0x3ff : 0x7f;
  Product<S> x, swapped, moved, zeros;
  double most = 0, mean = 0;
  constexpr int kRounds = 64;
  for (int round = 0; round < kRounds; ++round) {
    const bool one_sign = round % 2 == 0;
    const auto draw = [&] {  // between 1 and 2
      return static_cast<uint16_t>((one | (random() & fraction)) ^ (one_sign ? 0 : random() % 2 << 15));
    };
    for (int64_t i = 0; i < x.numbers.size(); ++i) x.numbers[i] = draw();
    for (int64_t i = 0; i < x.floats.size(); ++i) x.floats[i] = static_cast<float>(random() % 4096) / 37;
    for (int i = 0; i < 16; ++i)
      for (int k = 0; k < 16; ++k) {
        moved.a((i + 5) % 16, k) = x.a(i, k);
        zeros.a(i, k) = 0;
        if (i < 8) swapped.b(k, i) = x.a(i, k);
        for (int j = 0; j < 8; ++j) {
          moved.b(k, (j + 3) % 8) = zeros.b(k, j) = x.b(k, j);
          swapped.a(j, k) = x.b(k, j);
          moved.c((i + 5) % 16, (j + 3) % 8) = x.c(i, j);
          if (i < 8) swapped.c(j, i) = x.c(i, j);
          zeros.c(i, j) = round % 4 == 3 ? x.c(i, j) * 0x1p-140f : x.c(i, j);
        }
      }
    for (Product<S>* product : {&x, &swapped, &moved, &zeros}) product->compute();
    for (int i = 0; i < 16; ++i)
      for (int j = 0; j < 8; ++j) {
        require(moved((i + 5) % 16, (j + 3) % 8) == x(i, j), "multiply_add depends on the place in a tile");
        require(i >= 8 || swapped(j, i) == x(i, j), "multiply_add depends on which factor comes first");
        require(zeros(i, j) == zeros.c(i, j), "multiply_add of zeros changes a number");
        double exact = x.c(i, j), size = std::fabs(exact);
        for (int k = 0; k < 16; ++k) {
          const double term = static_cast<double>(host_float(x.a(i, k), kIsHalf)) * host_float(x.b(k, j), kIsHalf);
          exact += term;
          size += std::fabs(term);
        }
        const double error = (x(i, j) - exact) / (size * 0x1p-24);
        most = std::max(most, std::fabs(error));
        if (one_sign) mean += error / (kRounds / 2 * 16 * 8);
      }
  }
  std::printf("%s: sums of 16 products are off by at most %.2f units (2^-24 of the sum of sizes), %+.3f in the mean\n",
              kIsHalf ? "float16" : "bfloat16", most, mean);
  require(most <= 16, "multiply_add is less accurate than sixteen sums");
}

// Lane l copies 16 bytes, of them those that `l % 17` says, in one of two groups.
__global__ void copy(const __grid_constant__ Buffers b) {
  auto* shared = reinterpret_cast<uint32_t*>(shared_memory());
  const int lane = threadIdx.x;
  copy_async(shared + 4 * lane, b.numbers + 8 * lane, lane % 3 > 0);
  commit_copies();
  copy_async(shared + 4 * (lane + 32), b.numbers + 8 * lane, true);
  commit_copies();
  wait_for_copies<1>();
  __syncthreads();
  for (int i = lane; i < 128; i += 32) b.words[i] = shared[i];
  wait_for_copies<0>();
  __syncthreads();
  for (int i = lane; i < 128; i += 32) b.words[128 + i] = shared[128 + i];
}

void check_copies() {
  Array<uint16_t> numbers(256);
  Array<uint32_t> words(256);
  for (int i = 0; i < 256; ++i) numbers[i] = static_cast<uint16_t>(257 * i + 3);
  run([&] {
    return launch<uint32_t[256]>(copy, Buffers{nullptr, numbers.data(), words.data(), nullptr}, 1, 32, nullptr);
  });
  const auto* from = reinterpret_cast<const unsigned char*>(&numbers[0]);
  const auto* to = reinterpret_cast<const unsigned char*>(&words[0]);
  for (int i = 0; i < 512; ++i) {
    require(to[i] == (i / 16 % 3 > 0 ? from[i] : 0), "copy_async of what is not there");
    require(to[512 + i] == from[i], "copy_async");
  }
}

}  // namespace
}  // namespace attn::cuda

int main() {
  using namespace attn::cuda;
  check_conversions<Half, true>();
  check_conversions<BFloat16, false>();
  check_fill();
  check_fragments();
  check_products<Half, true>();
  check_products<BFloat16, false>();
  check_rounding<Half, true>();
  check_rounding<BFloat16, false>();
  check_divide();
  check_copies();
  std::printf("right\n");
}
