// The part of a mask that belongs to a tile of scores.
#pragma once

#include "cpu/tiles/rows.inl"

namespace attn::ATTN_ISA {

// tile[j * kRowTile + lane] = mask(lane, key + j)
template <class T>
void pack_mask(const Problem& p, const Operand& mask, const RowTile& rows, int64_t key, int64_t keys, T* tile) {
  rows.each_head([&](int64_t h, int64_t l, int64_t lane, int64_t count) {
    const int64_t width = lane + count == rows.count ? kRowTile - lane : count;
    pack_transposed<T>(tile + lane, kRowTile, block_of(p, mask, rows.n, h, l, key), count, keys, width);
  });
}

// Whether a mask is read as bits: a byte a score would have to be transposed as a float, a bit need not.
ATTN_INLINE bool mask_in_bits(const Operand& mask) { return mask.dtype == DType::boolean && mask.col == 1; }

// Bit j: whether the row of a mask at `from` shows key j, of up to 64 keys.
ATTN_INLINE uint64_t visible_bits(const uint8_t* from, int64_t keys) {
  if (keys >= kKeyTile) return nonzero_bytes(from);
  uint8_t padded[kKeyTile] = {};
  __builtin_memcpy(padded, from, static_cast<size_t>(keys));
  return nonzero_bytes(padded);
}
ATTN_INLINE uint64_t all_bits(int64_t keys) { return ~uint64_t{} >> (kKeyTile - keys); }

// Whether one of kKeyTile neighbours is not `hidden`; both as the bits of a number.
template <class Bits>
ATTN_INLINE bool any_other(const char* neighbours, Bits hidden) {
  typename VectorOf<Bits, kVectorBytes / sizeof(Bits)>::type v;
  bool other = false;
  for (size_t at = 0; at < kKeyTile * sizeof(Bits); at += sizeof v) {
    __builtin_memcpy(&v, neighbours + at, sizeof v);
    other |= any(v != hidden);
  }
  return other;
}

// Whether the first row of a block of a mask shows one of up to 64 keys: whether it has a number that is not -inf.
template <class T>
bool any_visible_number(const Block& row, int64_t keys) {
  if (row.col == 1 && keys == kKeyTile) switch (row.dtype) {
      case DType::f64:
        return any_other<uint64_t>(row.data, 0xfff0000000000000);
      case DType::f32:
        return any_other<uint32_t>(row.data, 0xff800000);
      case DType::bf16:
        return any_other<uint16_t>(row.data, 0xff80);
      case DType::f16:
        return any_other<uint16_t>(row.data, 0xfc00);
      default:
        break;
    }
  T numbers[kKeyTile];
  pack_rows<T>(numbers, kKeyTile, row, 1, keys);
  for (int64_t j = 0; j < keys; ++j)
    if (numbers[j] != -kInfinity<T>) return true;
  return false;
}

// Fills in p.mask_tiles for one tile of queries of one slice of the mask (see geometry.h). Of a tile that is known to
// have visible and changed scores no more rows are read: a mask that hides keys here and there costs little.
inline void look_at_mask(const Problem& p, int64_t task) {
  const int64_t row_tiles = p.mask.row == 0 ? 1 : divide_up(p.queries, kRowTile);
  const int64_t first_row = task % row_tiles * kRowTile;
  const int64_t last_row = p.mask.row == 0 ? 1 : smaller(first_row + kRowTile, p.queries);
  const Row at = sharer_of_mask(p, p.mask, task / row_tiles, 0);
  const bool in_bits = mask_in_bits(p.mask);
  auto* tiles = reinterpret_cast<uint8_t*>(block_of(p, p.mask_tiles, at.n, at.head, task % row_tiles).data);
  for (int64_t row = first_row; row < last_row; ++row)
    for (int64_t key = 0; key < p.keys; key += kKeyTile) {
      uint8_t& effect = tiles[key / kKeyTile];
      if (effect == (kSomeVisible | kSomeChanged)) continue;
      const int64_t keys = smaller(kKeyTile, p.keys - key);
      const Block block = block_of(p, p.mask, at.n, at.head, row, key);
      if (in_bits) {
        const uint64_t bits = visible_bits(reinterpret_cast<const uint8_t*>(block.data), keys);
        effect |= (bits != 0 ? kSomeVisible : 0) | (bits != all_bits(keys) ? kSomeChanged : 0);
      } else {
        effect |= kSomeChanged;
        if (block.dtype == DType::f64 ? any_visible_number<double>(block, keys)
                                      : any_visible_number<float>(block, keys))
          effect |= kSomeVisible;
      }
    }
}

// What a mask does to a tile of scores. It is read before all else of the tile: where it hides every score, nothing
// else is read or computed.
template <class T>
struct MaskTile {
  static_assert(kRowTile == 64 && kKeyTile == 64);
  enum class Kind { nothing, bits, numbers };

  Kind kind = Kind::nothing;
  uint64_t bits[kKeyTile];  // bit `lane` of row j: whether the lane sees the key

  // Returns whether some row sees some key. `workspace`: a tile, where p.has_mask.
  bool read(const Problem& p, const RowTile& rows, int64_t key, int64_t keys, T* workspace) {
    kind = Kind::nothing;
    if (!p.has_mask) return true;
    const bool is_known = p.mask_tiles.data;
    if (is_known) {
      const uint8_t effect = effect_on(p, rows, key / kKeyTile);
      if (!(effect & kSomeVisible)) return false;
      if (!(effect & kSomeChanged)) return true;
    }
    if (mask_in_bits(p.mask)) return read_bits(p, rows, key, keys, is_known);
    kind = Kind::numbers;
    numbers_ = workspace;
    is_packed_ = !is_known;
    if (is_known) return true;
    pack_mask<T>(p, p.mask, rows, key, keys, workspace);
    return any_number_visible(rows.count, keys);
  }

  // [kKeyTile][kRowTile], to be added; -inf where a lane does not see a key.
  const T* numbers(const Problem& p, const RowTile& rows, int64_t key, int64_t keys) const {
    if (!is_packed_) pack_mask<T>(p, p.mask, rows, key, keys, numbers_);
    return numbers_;
  }

 private:
  // Union of p.mask_tiles over all tiles that contain one of the rows.
  static uint8_t effect_on(const Problem& p, const RowTile& rows, int64_t key_tile) {
    uint8_t effect = 0;
    rows.each_head([&](int64_t h, int64_t l, int64_t, int64_t count) {
      for (int64_t tile = l / kRowTile; tile <= (l + count - 1) / kRowTile; ++tile)
        effect |= *block_of(p, p.mask_tiles, rows.n, h, tile, key_tile).data;
    });
    return effect;
  }

  bool read_bits(const Problem& p, const RowTile& rows, int64_t key, int64_t keys, bool is_known) {
    for (int64_t i = rows.count; i < kRowTile; ++i) bits[i] = 0;
    rows.each_head([&](int64_t h, int64_t l, int64_t lane, int64_t count) {
      const Block block = block_of(p, p.mask, rows.n, h, l, key);
      const auto* from = reinterpret_cast<const uint8_t*>(block.data);
      for (int64_t i = 0; i < count; ++i) bits[lane + i] = visible_bits(from + i * block.row, keys);
    });
    if (!is_known) {
      uint64_t some = 0, all = ~uint64_t{};
      for (int64_t i = 0; i < rows.count; ++i) {
        some |= bits[i];
        all &= bits[i];
      }
      if (some == 0) return false;
      if (all == all_bits(keys)) return true;
    }
    kind = Kind::bits;
    transpose_bits(bits);
    return true;
  }

  bool any_number_visible(int64_t rows, int64_t keys) const {
    const Vec<T> hidden = splat<T>(-kInfinity<T>);
    for (int64_t j = 0; j < keys; ++j) {
      const T* row = numbers_ + j * kRowTile;
      int64_t i = 0;
      for (; i + kLanes<T> <= rows; i += kLanes<T>)
        if (any(load<T>(row + i) != hidden)) return true;
      for (; i < rows; ++i)
        if (row[i] != -kInfinity<T>) return true;
    }
    return false;
  }

  T* numbers_ = nullptr;
  bool is_packed_ = false;
};

}  // namespace attn::ATTN_ISA
