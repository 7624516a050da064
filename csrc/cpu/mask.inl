// The part of a mask that belongs to a tile of scores.
#pragma once

#include "cpu/rows.inl"

namespace attn::ATTN_ISA {

// tile[j * kRowTile + lane] = mask(lane, key + j)
template <class T>
void pack_mask(const Problem& p, const Operand& mask, const RowTile& rows, int64_t key, int64_t keys, T* tile) {
  rows.each_head([&](int64_t h, int64_t l, int64_t lane, int64_t count) {
    const int64_t width = lane + count == rows.count ? kRowTile - lane : count;
    pack_transposed<T>(tile + lane, kRowTile, block_of(p, mask, rows.n, h, l, key), count, keys, width);
  });
}

// The same of a boolean mask whose keys are neighbours, in bits: bit `lane` of row j. A byte a score would have to be
// transposed as a float.
struct MaskBits {
  static_assert(kRowTile == 64 && kKeyTile == 64);
  uint64_t row[kKeyTile];

  static bool holds(const Operand& mask) { return mask.dtype == DType::boolean && mask.col == 1; }

  MaskBits(const Problem& p, const RowTile& rows, int64_t key, int64_t keys) {
    for (uint64_t& bits : row) bits = ~uint64_t{};
    rows.each_head([&](int64_t h, int64_t l, int64_t lane, int64_t count) {
      const Block block = block_of(p, p.mask, rows.n, h, l, key);
      for (int64_t i = 0; i < count; ++i) {
        const auto* from = reinterpret_cast<const uint8_t*>(block.data) + i * block.row;
        uint8_t some[kKeyTile] = {};
        if (keys < kKeyTile) __builtin_memcpy(some, from, static_cast<size_t>(keys));
        row[lane + i] = nonzero_bytes(keys < kKeyTile ? some : from);
      }
    });
    transpose_bits(row);
  }
};

}  // namespace attn::ATTN_ISA
