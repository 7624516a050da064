// The forward with keys and values of 8 bits against a plain loop, without torch; and every number of 8 bits.
#include "check_forward.h"
#include "cuda/mma/decode.cuh"
#include "cuda/mma/forward.cuh"

namespace attn::cuda {
namespace {

// What widen() makes of the four numbers in each word.
struct Words {
  const uint32_t* four;
  uint32_t *in_order, *in_turns;
};
template <class S, bool kE4m3, bool kByInstruction>
__global__ void widen_words(const __grid_constant__ Words p) {
  constexpr bool kConverts = kByInstruction && kConvertsE4m3;  // the host does not know what the GPU has
  const auto i = threadIdx.x;
  widen<S, kE4m3, false, kConverts>(p.four[i], p.in_order[2 * i], p.in_order[2 * i + 1]);
  widen<S, kE4m3, true, kConverts>(p.four[i], p.in_turns[2 * i], p.in_turns[2 * i + 1]);
}

// kByInstruction: whether by the instruction of some GPUs.
template <class S, class N, bool kByInstruction = false>
void check_every_number() {
  constexpr int kWords = 64;
  Array<uint32_t> four(kWords), in_order(2 * kWords), in_turns(2 * kWords);
  for (int i = 0; i < 4 * kWords; ++i) four[i / 4] |= static_cast<uint32_t>(i) << i % 4 * 8;
  run([&] {
    const Words p{four.data(), in_order.data(), in_turns.data()};
    return launch<Nothing>(widen_words<S, std::is_same_v<N, E4m3>, kByInstruction>, p, 1, kWords, nullptr);
  });
  for (int i = 0; i < 4 * kWords; ++i) {
    N number;
    number.bits = static_cast<decltype(number.bits)>(i);
    const auto right = [&](Array<uint32_t>& found, int at) {
      const uint32_t two = found[at / 2];
      const double x = value_of(S{static_cast<uint16_t>(at % 2 ? two >> 16 : two)}), y = value_of(number);
      // host_float() has no NaN of float16: it finds a number beyond the largest one.
      return y != y ? std::fabs(x) > 65504 || x != x : x == y && std::signbit(x) == std::signbit(y);
    };
    require(right(in_order, i), "a number, in order");
    require(right(in_turns, i / 4 * 4 + i % 4 / 2 + i % 2 * 2), "a number, in turns");
  }
}

template <class S, class N, int kDim, class V = N>
void check(const Case& c, bool decodes = false) {
  const int64_t rows = decodes ? kDecodeRows : forward_mma_rows(1);
  check_forward<S, N, V>(c, rows, kKeysPerTile, decodes, [&](const ForwardParams& p) {
    if (decodes)
      return c.page ? launch_decode_eight_bits<S, kDim, true>(p, nullptr)
                    : launch_decode_eight_bits<S, kDim, false>(p, nullptr);
    return c.page ? launch_forward_eight_bits<S, kDim, true>(p, nullptr)
                  : launch_forward_eight_bits<S, kDim, false>(p, nullptr);
  });
}
template <class S, class N, int kDim, class V = N>
void check_decoding(const Case& c) {
  check<S, N, kDim, V>(c, true);
}

}  // namespace
}  // namespace attn::cuda

int main() {
  using namespace attn::cuda;
  check_every_number<BFloat16, Int8>();
  check_every_number<BFloat16, E4m3>();
  check_every_number<BFloat16, E4m3, true>();
  check_every_number<Half, Int8>();
  check_every_number<Half, E4m3>();
  check_every_number<Half, E4m3, true>();

  check_decoding<BFloat16, Int8, 128>({.name = "one query", .queries = 1, .keys = 391});
  check_decoding<Half, E4m3, 128>({.name = "fewer keys than warps have", .queries = 1, .keys = 21});
  check_decoding<BFloat16, E4m3, 64>(
      {.name = "64, grouped", .heads = 8, .group = 8, .queries = 2, .keys = 700, .dim = 64, .value_dim = 64});
  check_decoding<Half, Int8, 256>(
      {.name = "256, grouped", .heads = 6, .group = 3, .queries = 5, .keys = 300, .dim = 256, .value_dim = 256});
  check_decoding<Half, Int8, 64>({.name = "64, padded", .queries = 16, .keys = 200, .dim = 48, .value_dim = 16});
  check_decoding<BFloat16, E4m3, 256>({.name = "256, padded", .queries = 1, .keys = 200, .dim = 144, .value_dim = 208});
  check_decoding<BFloat16, Int8, 128>({.name = "keys in use", .group = 2, .queries = 1, .keys = 300, .in_use = 141});
  check_decoding<Half, E4m3, 64>({.name = "splits, some without keys",
                                  .heads = 6,
                                  .group = 2,
                                  .queries = 2,
                                  .keys = 900,
                                  .dim = 64,
                                  .value_dim = 64,
                                  .right = 0,
                                  .offset = 500,
                                  .in_use = 700,
                                  .splits = 7,
                                  .has_sinks = true});
  check_decoding<BFloat16, E4m3, 64>(
      {.name = "pages, 64", .queries = 2, .keys = 300, .dim = 64, .value_dim = 64, .in_use = 250, .page = 16});
  check_decoding<Half, Int8, 128>(
      {.name = "pages, 128", .group = 2, .queries = 1, .keys = 520, .in_use = 490, .page = 8});
  check_decoding<BFloat16, Int8, 256>(
      {.name = "pages, 256", .queries = 1, .keys = 200, .dim = 256, .value_dim = 256, .page = 24});
  check_decoding<Half, E4m3, 128>(
      {.name = "cap, boolean mask", .queries = 9, .keys = 300, .softcap = 3, .mask_bytes = 1});
  check_decoding<BFloat16, Int8, 64>({.name = "slopes and a mask",
                                      .heads = 4,
                                      .group = 2,
                                      .queries = 2,
                                      .keys = 300,
                                      .dim = 64,
                                      .value_dim = 64,
                                      .right = 0,
                                      .offset = 298,
                                      .has_slopes = true,
                                      .mask_bytes = 2});
  check_decoding<Half, Int8, 64, E4m3>({.name = "values of the other dtype, small scales",
                                        .queries = 3,
                                        .keys = 200,
                                        .dim = 64,
                                        .value_dim = 64,
                                        .value_scale = 0x1p-10});
  check_decoding<Half, E4m3, 128, Int8>(
      {.name = "values of the other dtype, large scales", .queries = 1, .keys = 200, .value_scale = 0x1p13});
  // BFloat16 has no place for the last digit of this number. With a scale of 4 one key has nearly all the weight.
  constexpr float kDigits = 1 + 0x1p-8f + 0x1p-12f;
  check_decoding<Half, Int8, 64>({.name = "digits of scales",
                                  .queries = 1,
                                  .keys = 200,
                                  .dim = 64,
                                  .value_dim = 64,
                                  .scale = 4,
                                  .value_scale = kDigits});
  check<Half, E4m3, 64>(
      {.name = "a prompt, digits of scales", .dim = 64, .value_dim = 64, .scale = 4, .value_scale = kDigits});
  check_decoding<BFloat16, Int8, 128, E4m3>(
      {.name = "values of the other dtype", .queries = 1, .keys = 200, .value_scale = 0x1p-40});

  check<BFloat16, Int8, 128>({.name = "a prompt"});
  check<Half, Int8, 64, E4m3>({.name = "a prompt, small scales", .dim = 64, .value_dim = 64, .value_scale = 0x1p-10});
  check<Half, E4m3, 64>({.name = "a prompt, 64", .keys = 300, .dim = 64, .value_dim = 48});
  check<BFloat16, E4m3, 256>({.name = "a prompt, 256", .queries = 70, .dim = 256, .value_dim = 144});
  check<Half, Int8, 128>({.name = "a prompt, causal",
                          .heads = 4,
                          .group = 2,
                          .queries = 70,
                          .keys = 200,
                          .right = 0,
                          .offset = 130,
                          .in_use = 190,
                          .has_sinks = true});
  check<BFloat16, E4m3, 128>({.name = "a prompt, splits", .queries = 40, .keys = 500, .splits = 3});
  check<Half, Int8, 64>(
      {.name = "a prompt, pages", .queries = 70, .keys = 300, .dim = 64, .value_dim = 64, .in_use = 250, .page = 16});
  check<BFloat16, Int8, 256>(
      {.name = "a prompt, pages, 256", .queries = 20, .keys = 200, .dim = 256, .value_dim = 256, .page = 24});
  check<Half, E4m3, 128>(
      {.name = "a prompt, cap and slopes", .queries = 40, .keys = 200, .softcap = 3, .has_slopes = true});
  check<BFloat16, E4m3, 64>(
      {.name = "a prompt, mask", .queries = 70, .keys = 300, .dim = 64, .value_dim = 64, .mask_bytes = 2});
  check<Half, Int8, 256>({.name = "a prompt, boolean mask, pages",
                          .queries = 20,
                          .keys = 200,
                          .dim = 256,
                          .value_dim = 256,
                          .page = 8,
                          .mask_bytes = 1});
  std::printf("right\n");
}
