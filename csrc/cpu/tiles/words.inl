// The format of pairs for few queries (few_rows.inl, decode.inl). It reads rows of bfloat16 or of 8-bit numbers in
// whole vectors. A vector holds 32 words, which are bfloat16, in the order of memory.
#pragma once

#include "cpu/tiles/formats_bf16.inl"

namespace attn::ATTN_ISA {

// The low and the high bytes of 128 bfloat16.
struct Words128 {
  alignas(64) uint8_t low[128], high[128];
};
template <class Function>
constexpr Words128 words_of(Function f) {
  Words128 found{};
  for (int i = 0; i < 128; ++i) {
    const uint32_t bits = __builtin_bit_cast(uint32_t, static_cast<float>(f(i)));
    found.low[i] = static_cast<uint8_t>(bits >> 16);
    found.high[i] = static_cast<uint8_t>(bits >> 24);
  }
  return found;
}
// The words of the 128 numbers of type S whose sign bit is 0. The index is the low 7 bits of a number. For Int8, index
// 0 holds the word of 128 instead of 0, because the magnitude of -128 is 128, which is not an Int8. The number 0 is not
// looked up.
template <class S>
inline constexpr Words128 kWordsOf = words_of([](int i) { return i == 0 ? 128 : i; });
template <>
inline constexpr Words128 kWordsOf<Float8> = words_of([](int i) {  // divided by kFloat8, as load_as() divides them
  if (i == 127) return __builtin_nanf("");
  const int exponent = i >> 3, mantissa = exponent == 0 ? i : 8 + i % 8;
  return static_cast<float>(mantissa << (exponent == 0 ? 1 : exponent)) * (0x1p-10f / kFloat8);
});

struct WordPairs : Pairs {
  // Reads 2 kWords neighbours.
  static constexpr int kWords = 2 * W;
  static ATTN_INLINE void load_words(const BFloat16* p, Vec<float> (&words)[2]) {
    for (int half = 0; half < 2; ++half) words[half] = load_words(p + half * kWords);
  }
  template <class S>
  static ATTN_INLINE void load_words(const S* p, Vec<float> (&words)[2]) {
    words_of_bytes<S>(_mm512_loadu_si512(p), words);
  }
  // Reads kWords neighbours.
  static ATTN_INLINE Vec<float> load_words(const BFloat16* p) { return load(reinterpret_cast<const float*>(p)); }
  template <class S>
  static ATTN_INLINE Vec<float> load_words(const S* p) {
    Vec<float> words[2];
    words_of_bytes<S>(_mm512_zextsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), words);
    return words[0];
  }
  static ATTN_INLINE Vec<float> rounded(Vec<float> first, Vec<float> second) { return joined_bfloat16(first, second); }

  // Pairs the words of two rows. Lanes 4 i to 4 i + 3 of pairs[half] get columns 8 i + 4 half to 8 i + 4 half + 3.
  static ATTN_INLINE void pairs_of_rows(Vec<float> first, Vec<float> second, Vec<float>* pairs) {
    const __m512i a = bit_cast<__m512i>(first), b = bit_cast<__m512i>(second);
    pairs[0] = bit_cast<Vec<float>>(_mm512_unpacklo_epi16(a, b));
    pairs[1] = bit_cast<Vec<float>>(_mm512_unpackhi_epi16(a, b));
  }

 private:
  template <class S>
  static ATTN_INLINE void words_of_bytes(__m512i bytes, Vec<float> (&words)[2]) {
    // Permutes units of 8 bytes, because unpack treats every 16 bytes separately. The words then come out in the order
    // of memory.
    bytes = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), bytes);
    constexpr bool kInt8 = std::is_same_v<S, Int8>;
    const __m512i magnitude = kInt8 ? _mm512_abs_epi8(bytes) : bytes;
    const __mmask64 filled = kInt8 ? _mm512_test_epi8_mask(bytes, bytes) : ~__mmask64();
    const auto found = [&](const uint8_t* table) {  // looks up 7 bits of each byte
      return _mm512_maskz_permutex2var_epi8(filled, _mm512_load_si512(table), magnitude, _mm512_load_si512(table + 64));
    };
    constexpr int kOrAnd = 0xf8;  // a | (b & c)
    const __m512i low = found(kWordsOf<S>.low),
                  high = _mm512_ternarylogic_epi64(found(kWordsOf<S>.high), bytes, _mm512_set1_epi8(-128), kOrAnd);
    words[0] = bit_cast<Vec<float>>(_mm512_unpacklo_epi8(low, high));
    words[1] = bit_cast<Vec<float>>(_mm512_unpackhi_epi8(low, high));
  }
};
static_assert(Format<WordPairs>);

}  // namespace attn::ATTN_ISA
