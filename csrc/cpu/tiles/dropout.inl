// Which weights dropout keeps: see Problem::rng.
#pragma once

#include "cpu/tiles/rows.inl"

namespace attn::ATTN_ISA {

// Philox4x32-10 (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011), one counter per 64-bit lane.
ATTN_INLINE void philox(Vec<uint64_t> (&c)[4], uint64_t seed) {
  uint32_t key0 = static_cast<uint32_t>(seed);
  uint32_t key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const Vec<uint64_t> a = multiply_low_halves(c[0], splat<uint64_t>(0xd2511f53u));
    const Vec<uint64_t> b = multiply_low_halves(c[2], splat<uint64_t>(0xcd9e8d57u));
    c[0] = (b >> 32) ^ c[1] ^ static_cast<uint64_t>(key0);
    c[1] = b & 0xffffffffu;
    c[2] = (a >> 32) ^ c[3] ^ static_cast<uint64_t>(key1);
    c[3] = a & 0xffffffffu;
    key0 += 0x9e3779b9u;
    key1 += 0xbb67ae85u;
  }
}

// Sets factor[j * kRowTile + lane] to `kept` where dropout keeps the weight, else to 0. keys.first must be a multiple
// of 4.
template <class T>
void dropout_factors(const Problem& p, const RowTile& rows, Range keys, T kept, T* factor) {
  constexpr int W = kLanes<uint64_t>;
  using Narrow = typename VectorOf<UInt<T>, W>::type;
  const Block rng = block_of(p, p.rng, rows.n, 0, 0);
  const auto* state = reinterpret_cast<const int64_t*>(rng.data);
  const auto seed = static_cast<uint64_t>(state[0]);
  const auto offset = static_cast<uint64_t>(state[rng.col]);
  const auto period = static_cast<uint64_t>(larger(1, state[2 * rng.col]));
  const uint64_t bits_if_kept = bit_cast<UInt<T>>(kept);
  for (int64_t lane = 0; lane < rows.count; lane += W) {
    Vec<uint64_t> position{}, head{};
    for (int64_t i = 0; i < smaller(W, rows.count - lane); ++i) {
      position[i] = static_cast<uint64_t>(rows.position[lane + i]);
      head[i] = static_cast<uint64_t>((p.first_entry + rows.n) * p.heads + rows.head[lane + i]) % period;
    }
    for (int64_t j = 0; j < keys.size(); j += 4) {
      Vec<uint64_t> words[4] = {splat<uint64_t>(static_cast<uint64_t>(keys.first + j) / 4), position, head,
                                splat<uint64_t>(offset)};
      philox(words, seed);
      for (int64_t w = 0; w < smaller(4, keys.size() - j); ++w) {
        const Vec<uint64_t> bits =
            words[w] < splat<uint64_t>(p.keep_below) ? splat<uint64_t>(bits_if_kept) : Vec<uint64_t>{};
        const Narrow narrow = __builtin_convertvector(bits, Narrow);
        __builtin_memcpy(factor + (j + w) * kRowTile + lane, &narrow, sizeof narrow);
      }
    }
  }
}

}  // namespace attn::ATTN_ISA
