// A tile of scores: its rows and keys, and which rows see which keys by their positions and by a mask.
#pragma once

#include "core/program.h"
#include "cpu/tiles/rows.inl"

namespace attn::ATTN_ISA {

// tile[j * kRowTile + lane] = mask(lane, keys.first + j)
template <class T>
void pack_mask(const Problem& p, const Operand& mask, const RowTile& rows, Range keys, T* tile) {
  rows.each_run(p, mask, keys.first, [&](const Block& block, int64_t lane, int64_t count) {
    const int64_t width = lane + count == rows.count ? kRowTile - lane : count;
    pack_transposed<T>(tile + lane, kRowTile, block, count, keys.size(), width);
  });
}

// Whether a mask is read as bits, because transposing one bit per score is faster than transposing one float per score.
ATTN_INLINE bool mask_in_bits(const Operand& mask) { return mask.dtype == DType::boolean && mask.col == 1; }

// Returns a word whose bit j says whether the row of a mask at `from` shows key j. There are up to 64 keys.
ATTN_INLINE uint64_t visible_bits(const uint8_t* from, int64_t keys) {
  if (keys >= kKeyTile) return nonzero_bytes(from);
  uint8_t padded[kKeyTile] = {};
  __builtin_memcpy(padded, from, static_cast<size_t>(keys));
  return nonzero_bytes(padded);
}
ATTN_INLINE uint64_t all_bits(int64_t keys) { return ~uint64_t{} >> (kKeyTile - keys); }

// Whether one of kKeyTile neighbouring numbers differs from `hidden`. Compares their bits.
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

// Whether the first row of a mask's block shows at least one key, that is, holds a number other than -inf. Looks at the
// first `keys` numbers of the row, at most 64.
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

// Fills in p.mask_tiles for one tile of queries of one slice of the mask (see geometry.h). Stops reading a tile after
// finding one score that the mask shows and one score that the mask changes, so a mask that hides keys here and there
// costs little.
inline void look_at_mask(const Problem& p, int64_t task) {
  const int64_t row_tiles = p.mask.row == 0 ? 1 : divide_up(p.queries, kRowTile);
  const int64_t first_row = task % row_tiles * kRowTile;
  const int64_t last_row = p.mask.row == 0 ? 1 : smaller(first_row + kRowTile, p.queries);
  const int64_t slice = task / row_tiles, sharers = p.batch * p.heads / number_of_slices(p);
  const Row at = sharer_of_mask(p, p.mask, slice, 0);
  int64_t all_keys = 0;  // the most keys of a sequence; the mask is not read beyond them
  for (int64_t i = 0; i < sharers && all_keys < p.keys; ++i)
    all_keys = larger(all_keys, sequence_of(p, sharer_of_mask(p, p.mask, slice, i).n).keys);
  const bool in_bits = mask_in_bits(p.mask);
  auto* tiles = reinterpret_cast<uint8_t*>(block_of(p, p.mask_tiles, at.n, at.head, task % row_tiles).data);
  for (int64_t row = first_row; row < last_row; ++row)
    for (int64_t key = 0; key < all_keys; key += kKeyTile) {
      uint8_t& effect = tiles[key / kKeyTile];
      if (effect == (kSomeVisible | kSomeChanged)) continue;
      const int64_t keys = smaller(kKeyTile, all_keys - key);
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

// Up to kRowTile rows and kKeyTile keys, and what the mask does to their scores.
template <class T>
struct ScoreTile {
  static_assert(kRowTile == 64 && kKeyTile == 64);
  enum class Mask { nothing, bits, numbers };

  const RowTile* rows;
  Range keys;
  Mask mask;
  bool invariant;           // Problem::invariant
  int64_t shown;            // the mask hides all keys from number `shown` on
  uint64_t bits[kKeyTile];  // for Mask::bits: bit `lane` of word j says whether the lane sees the key
  T* workspace;             // room_of_tile()

  // Sets rows and keys, and reads the mask. Must be called before every other function of the tile. Returns whether
  // some row sees some key. If no row does, the caller skips the tile. `room` has room for room_of_tile() numbers.
  bool set(const Problem& p, const RowTile& its_rows, Range its_keys, T* room) {
    rows = &its_rows;
    keys = its_keys;
    workspace = room;
    mask = Mask::nothing;
    shown = keys.size();
    invariant = p.invariant;
    if (!any_visible(rows->sequence, rows->positions, keys)) return false;
    if (p.program && p.program->mask) return copy_bits(p, *p.program->mask);
    if (!p.has_mask) return true;
    const bool is_known = p.mask_tiles.data;
    if (is_known) {
      const uint8_t effect = effect_of_mask(p);
      if (!(effect & kSomeVisible)) return false;
      if (!(effect & kSomeChanged)) return true;
    }
    if (mask_in_bits(p.mask)) return read_bits(p, is_known);
    mask = Mask::numbers;
    numbers_ = room;
    is_packed_ = !is_known;
    if (is_known) return true;
    pack_mask<T>(p, p.mask, *rows, keys, room);
    return any_number_visible();
  }

  // Whether causality, window and lengths show all scores.
  bool all_visible() const { return attn::all_visible(rows->sequence, rows->positions, keys); }
  // Returns the keys of the tile that rows at these positions see. Ignores the mask.
  Range keys_seen(Range positions) const { return common(visible_keys(rows->sequence, positions), keys); }
  int64_t lanes() const { return rows->template lanes<T>(); }

  // For Mask::numbers: returns the numbers to be added to scores, [kKeyTile][kRowTile]. They are -inf where the mask
  // hides a key from a lane.
  const T* numbers(const Problem& p) const {
    if (!is_packed_) pack_mask<T>(p, p.mask, *rows, keys, numbers_);
    return numbers_;
  }

 private:
  // Returns the union of p.mask_tiles over all tiles that contain one of the rows.
  uint8_t effect_of_mask(const Problem& p) const {
    uint8_t effect = 0;
    rows->each_head([&](int64_t h, int64_t l, int64_t, int64_t count) {
      for (int64_t tile = l / kRowTile; tile <= (l + count - 1) / kRowTile; ++tile)
        effect |= *block_of(p, p.mask_tiles, rows->n, h, tile, keys.first / kKeyTile).data;
    });
    return effect;
  }

  // Copies the bits of a mask_mod. `m` holds the bits of tiles of kRowTile rows. The rows of this tile lie in one tile
  // of `m`, and may be only some of that tile's rows.
  bool copy_bits(const Problem& p, const PairMask& m) {
    const int64_t entry = m.entries == 1 ? 0 : p.first_entry + rows->n, head = m.heads == 1 ? 0 : rows->head[0];
    const int64_t row_tile = (entry * m.heads + head) * m.row_tiles + rows->position[0] / kRowTile;
    const int32_t at = m.tiles[row_tile * m.key_tiles + keys.first / kKeyTile];
    if (at < 0) return at == kAllPairs;
    const int64_t shift = rows->position[0] % kRowTile;
    for (int64_t j = 0; j < keys.size(); ++j) bits[j] = m.bits[at * kKeyTile + j] >> shift & all_bits(rows->count);
    return find_shown();
  }

  // Sets `shown` to the number of keys up to the last key that the bits show. Returns whether the bits show any key.
  bool find_shown() {
    mask = Mask::bits;
    while (shown > 0 && bits[shown - 1] == 0) --shown;
    return shown > 0;
  }

  bool read_bits(const Problem& p, bool is_known) {
    for (int64_t i = rows->count; i < kRowTile; ++i) bits[i] = 0;
    rows->each_run(p, p.mask, keys.first, [&](const Block& block, int64_t lane, int64_t count) {
      const auto* from = reinterpret_cast<const uint8_t*>(block.data);
      for (int64_t i = 0; i < count; ++i) bits[lane + i] = visible_bits(from + i * block.row, keys.size());
    });
    if (!is_known) {
      uint64_t some = 0, all = ~uint64_t{};
      for (int64_t i = 0; i < rows->count; ++i) {
        some |= bits[i];
        all &= bits[i];
      }
      if (some == 0) return false;
      if (all == all_bits(keys.size())) return true;
    }
    transpose_bits(bits);
    return find_shown();
  }

  bool any_number_visible() const {
    const Vec<T> hidden = splat<T>(-kInfinity<T>);
    for (int64_t j = 0; j < keys.size(); ++j) {
      const T* row = numbers_ + j * kRowTile;
      int64_t i = 0;
      for (; i + kLanes<T> <= rows->count; i += kLanes<T>)
        if (any(load<T>(row + i) != hidden)) return true;
      for (; i < rows->count; ++i)
        if (row[i] != -kInfinity<T>) return true;
    }
    return false;
  }

  T* numbers_;
  bool is_packed_;
};

// Calls visit(state, tile) for every tile of scores in which some row sees some key, one tile of keys after the other.
// Calls load(keys) before the first visit of a tile of keys.
template <class T, class State, class Load, class Visit>
ATTN_INLINE void each_visible_tile(const Problem& p, const RowTiles<State>& rows, Range keys, T* workspace, Load load,
                                   Visit visit) {
  each_tile_of_keys(keys, [&](Range tile_keys) {
    bool is_loaded = false;
    for (State& state : rows) {
      ScoreTile<T> tile;
      if (!tile.set(p, state.rows, tile_keys, workspace)) continue;
      if (!is_loaded) load(tile_keys);
      is_loaded = true;
      visit(state, tile);
    }
  });
}

}  // namespace attn::ATTN_ISA
