// Masks that are functions of the pair: which tiles they hide, show or cut, and the bits of those that they cut.
#pragma once

#include "cpu/tiles/program.inl"

namespace attn::ATTN_ISA {

// The room for look_at_pairs(), in bytes.
template <class T>
int64_t room_of_mask(const List* list) {
  if (!list) return 0;
  return Evaluation<T>::room(list) * int64_t{sizeof(T)} +
         (list->leaf_count + list->slots + 1) * int64_t{sizeof(Between)};
}

// Fills in m.tiles for one tile of rows or, if `wants_bits`, the bits of the tiles that have bits.
template <class T>
void look_at_pairs(const Problem& p, const PairMask& m, int64_t task, bool wants_bits, T* workspace) {
  const int64_t row_tile = task % m.row_tiles, head = task / m.row_tiles % m.heads, n = task / m.row_tiles / m.heads;
  const Range rows = {row_tile * kRowTile, smaller((row_tile + 1) * kRowTile, m.program->queries)};
  int32_t* const tiles = m.tiles + task * m.key_tiles;
  Problem whole_call = p;
  whole_call.first_entry = 0;
  whole_call.program = m.program;
  const List nothing{};
  const List& list = m.list ? *m.list : nothing;
  auto* const room = reinterpret_cast<Between*>(workspace + Evaluation<T>::room(m.list));
  const auto block_at = [&](int64_t row, int64_t key) {
    const Terms& t = m.blocks;
    const int64_t at = n * t.entry + head * t.head + row / m.block_rows * t.row + key / m.block_keys * t.col;
    return static_cast<const uint8_t*>(t.data)[at];
  };
  // Cuts the rows where blocks end, and calls f(first, last, kind of the block at `key`) for each part.
  const auto each_part = [&](int64_t key, auto f) {
    for (int64_t row = rows.first; row < rows.last;) {
      const int64_t last = smaller(rows.last, (row / m.block_rows + 1) * m.block_rows);
      f(row - rows.first, last - rows.first, block_at(row, key));
      row = last;
    }
  };
  const auto keys_of = [&](int64_t first, int64_t last) {
    return Range{first * kKeyTile, smaller(last * kKeyTile, m.program->keys)};
  };
  // Whether the list's bounds say what the mask does to all of these tiles. If so, fills them in.
  const auto are_decided = [&](int64_t first, int64_t last) {
    const Between shown = bounds(*m.program, list, n, head, rows, keys_of(first, last), room);
    for (int64_t i = first; shown.is_one() && i < last; ++i) tiles[i] = shown.least != 0 ? kAllPairs : kNoPair;
    return shown.is_one();
  };
  constexpr int64_t kGroup = 8;  // most masks hide or show long runs of tiles
  for (int64_t key_tile = 0; key_tile < m.key_tiles; ++key_tile) {
    if (wants_bits && tiles[key_tile] < 0) continue;
    if (!wants_bits && !m.blocks.data) {
      const int64_t last = smaller(key_tile + kGroup, m.key_tiles);
      if (key_tile % kGroup == 0 && are_decided(key_tile, last)) {
        key_tile = last - 1;
        continue;
      }
      if (are_decided(key_tile, key_tile + 1)) continue;
    }
    const Range keys = keys_of(key_tile, key_tile + 1);
    bool any_partial = !m.blocks.data;
    for (int64_t key = keys.first; m.blocks.data && key < keys.last; key = (key / m.block_keys + 1) * m.block_keys)
      each_part(key, [&](int64_t, int64_t, uint8_t kind) { any_partial |= kind == kPartialBlock; });
    Between shown = any_partial && m.list ? kEither : Between{-1, -1};
    if (m.blocks.data && !shown.is_one() && !wants_bits) shown = bounds(*m.program, list, n, head, rows, keys, room);
    const bool evaluates = !shown.is_one();
    Evaluation<T> pairs(whole_call, evaluates ? list : nothing, n, head, rows, keys, {}, workspace);
    uint64_t* const bits = wants_bits ? m.bits + tiles[key_tile] * kKeyTile : nullptr;
    bool some = false, all = true;
    for (int64_t first = 0; first < keys.size() && (wants_bits || !some || all); first += kStrip) {
      const int64_t count = smaller(kStrip, keys.size() - first);
      pairs.run(first, count);
      for (int64_t j = 0; j < count; ++j) {
        uint64_t word = evaluates ? pairs.word(list.results[0].from, j) : shown.least != 0 ? all_lanes(rows.size()) : 0;
        if (m.blocks.data)
          each_part(keys.first + first + j, [&](int64_t from, int64_t to, uint8_t kind) {
            const uint64_t part = all_lanes(to) & ~(from == 0 ? 0 : all_lanes(from));
            if (kind == kHiddenBlock) word &= ~part;
            if (kind == kFullBlock) word |= part;
          });
        some |= word != 0;
        all &= word == all_lanes(rows.size());
        if (wants_bits) bits[first + j] = word;
      }
    }
    if (!wants_bits) tiles[key_tile] = !some ? kNoPair : all ? kAllPairs : 0;
  }
}

}  // namespace attn::ATTN_ISA
