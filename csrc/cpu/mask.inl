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

// What a mask does to a tile of scores. It is read before all else of the tile: where it hides every score, nothing else
// is read or computed.
template <class T>
struct MaskTile {
  static_assert(kRowTile == 64 && kKeyTile == 64);
  enum class Kind { nothing, bits, numbers };

  Kind kind = Kind::nothing;
  uint64_t bits[kKeyTile];     // bit `lane` of row j: whether the lane sees the key
  const T* numbers = nullptr;  // [kKeyTile][kRowTile], to be added; -inf where a lane does not see a key

  // Returns whether some row sees some key. `workspace`: a tile, where p.has_mask.
  bool read(const Problem& p, const RowTile& rows, int64_t key, int64_t keys, T* workspace) {
    kind = Kind::nothing;
    if (!p.has_mask) return true;
    // A byte a score would have to be transposed as a float; a bit need not.
    if (p.mask.dtype == DType::boolean && p.mask.col == 1) return read_bits(p, rows, key, keys);
    kind = Kind::numbers;
    numbers = workspace;
    pack_mask<T>(p, p.mask, rows, key, keys, workspace);
    return any_number_visible(rows.count, keys);
  }

 private:
  bool read_bits(const Problem& p, const RowTile& rows, int64_t key, int64_t keys) {
    uint64_t some = 0, all = ~uint64_t{};
    for (int64_t i = rows.count; i < kRowTile; ++i) bits[i] = all;
    rows.each_head([&](int64_t h, int64_t l, int64_t lane, int64_t count) {
      const Block block = block_of(p, p.mask, rows.n, h, l, key);
      uint64_t seen = 0;
      for (int64_t i = 0; i < count; ++i) {
        if (i == 0 || block.row != 0) {
          const auto* from = reinterpret_cast<const uint8_t*>(block.data) + i * block.row;
          uint8_t padded[kKeyTile] = {};
          if (keys < kKeyTile) __builtin_memcpy(padded, from, static_cast<size_t>(keys));
          seen = nonzero_bytes(keys < kKeyTile ? padded : from);
          some |= seen;
          all &= seen;
        }
        bits[lane + i] = seen;
      }
    });
    if (some == 0) return false;
    if (all == ~uint64_t{} >> (kKeyTile - keys)) return true;  // nothing is hidden
    kind = Kind::bits;
    transpose_bits(bits);
    return true;
  }

  bool any_number_visible(int64_t rows, int64_t keys) const {
    const Vec<T> hidden = splat<T>(-kInfinity<T>);
    for (int64_t j = 0; j < keys; ++j) {
      const T* row = numbers + j * kRowTile;
      int64_t i = 0;
      for (; i + kLanes<T> <= rows; i += kLanes<T>)
        if (any(load<T>(row + i) != hidden)) return true;
      for (; i < rows; ++i)
        if (row[i] != -kInfinity<T>) return true;
    }
    return false;
  }
};

}  // namespace attn::ATTN_ISA
