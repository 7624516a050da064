// Which rows a block of threads works on, and where they are stored.
#pragma once

#include "cuda/shared/numbers.cuh"
#include "core/score.h"

namespace attn::cuda {

// Where a head of a batch entry begins; its numbers have the type S.
template <class S>
__device__ __forceinline__ const S* head_of(const Problem& p, const Operand& x, int64_t n, int64_t head) {
  return static_cast<const S*>(x.data) + batch_offset(p, x, n) + head * x.head;
}

// These functions count the blocks of a kernel. Each block owns a tile: up to `most` rows of a group of heads, or up to
// `most` keys of one of `heads` heads. A block that finds no tile ends without reading or writing.
//
// In its group's list of rows, a head of a packed sequence has as many rows as the sequence has queries. So tiles of
// rows and keys are cut as in a call with this sequence alone. The bits of its results also depend on the size of tiles
// of rows and on the splits of the keys. Both are planned from the largest numbers of queries and keys, the number of
// sequences and the device.
//
// The host knows the sum of the lengths of packed sequences and the longest length, but not each length. So a block has
// the number of a place, and finds out which tile is at that place. Places are numbered in one of two ways, whichever
// needs fewer places (are_alike). In the first way each sequence has as many places as the longest sequence has tiles.
// In the second way each sequence has as many places as it has tiles, or one more: sequence s, which begins with row or
// key `start`, has its first place at start / most + s.
ATTN_INLINE constexpr int64_t places_by_length(const Problem& p, int64_t of_all, int64_t most) {
  return of_all / most + p.sequences;
}
ATTN_INLINE constexpr bool are_alike(const Problem& p, int64_t of_longest, int64_t of_all, int64_t most) {
  return p.sequences * divide_up(of_longest, most) <= places_by_length(p, of_all, most);
}
ATTN_INLINE constexpr int64_t tiles_of(const Problem& p, int64_t of_longest, int64_t of_all, int64_t most) {
  if (p.sequences > 0 && !are_alike(p, of_longest, of_all, most)) return places_by_length(p, of_all, most);
  return larger(1, p.sequences) * divide_up(of_longest, most);
}
// Whether no tile has rows of two heads, in a sequence of `queries` rows. In a window the last rows of a head and the
// first rows of the next head see keys far apart. A tile with both would pass over all keys in between.
ATTN_INLINE constexpr bool heads_apart(const Problem& p, int64_t queries, int64_t most) {
  return p.group > 1 && most_keys(p, most) < smaller(queries, p.keys);
}
ATTN_INLINE constexpr int64_t tiles_of_rows(const Problem& p, int64_t most) {
  return heads_apart(p, p.queries, most) ? p.group * tiles_of(p, p.queries, p.tokens, most)
                                         : tiles_of(p, p.rows(), p.group * p.tokens, most);
}
ATTN_INLINE constexpr int64_t tiles_of_keys(const Problem& p, int64_t most) {
  return tiles_of(p, p.keys, p.key_tokens, most);
}
// The number of batch entries, where packed sequences that share places count as one entry.
ATTN_INLINE constexpr int64_t entries_of(const Problem& p) { return p.sequences > 0 ? p.batch / p.sequences : p.batch; }
ATTN_INLINE constexpr int64_t blocks_of_rows(const Problem& p, int64_t most) {
  return entries_of(p) * p.groups() * tiles_of_rows(p, most);
}
ATTN_INLINE constexpr int64_t blocks_of_keys(const Problem& p, int64_t heads, int64_t most) {
  return entries_of(p) * heads * tiles_of_keys(p, most);
}

// A tile of a list of rows, or of the keys of a head. `number` says which tile of the list it is.
struct Tile {
  int64_t n;  // the batch entry
  int64_t number;

  // Returns the tile at `place` of an entry (entries_of). `starts` holds the first token of each packed sequence. The
  // sequences of an entry have `tokens` tokens together, the longest sequence has `longest` tokens, and each token is
  // `of_token` rows or keys. The tile's number is less than 0 if sequences are not in order.
  static __device__ __forceinline__ Tile at(const Problem& p, int64_t entry, int64_t place, const int64_t* starts,
                                            int64_t longest, int64_t tokens, int64_t of_token, int64_t most) {
    if (p.sequences == 0) return {entry, place};
    if (are_alike(p, longest * of_token, tokens * of_token, most)) {
      const int64_t tiles = divide_up(longest * of_token, most);
      return {entry * p.sequences + place / tiles, place % tiles};
    }
    starts += entry * p.sequences;
    const auto first_place = [&](int64_t sequence) { return starts[sequence] * of_token / most + sequence; };
    int64_t sequence = 0;
    for (int64_t end = p.sequences; end - sequence > 1;) {
      const int64_t middle = (sequence + end) / 2;
      (first_place(middle) <= place ? sequence : end) = middle;
    }
    return {entry * p.sequences + sequence, place - first_place(sequence)};
  }
  // Where the tile begins in a list of `count` rows or keys. The result is `count` or more if the tile is beyond the
  // end.
  __device__ __forceinline__ int64_t first(int64_t count, int64_t most) const {
    return number < 0 ? count : number * most;
  }
};

// Up to kRows consecutive rows of a group of heads (Problem::group), in shared memory.
template <int kRows>
struct RowTile {
  int64_t head[kRows];
  int64_t position[kRows];

  // Sets row i, of `count` rows from `first` on. One thread per row calls it; a barrier follows.
  __device__ __forceinline__ void set(int i, const Sequence& s, Row first, int count) {
    set(i, row_after(s.queries, first, last_repeated(i, count)));
  }
  __device__ __forceinline__ void set(int i, Row row) {
    head[i] = row.head;
    position[i] = row.position;
  }
  // Rows past the end repeat the last row and are never written.
  static __device__ __forceinline__ int last_repeated(int i, int count) { return i < count ? i : count - 1; }

  // Returns where row i begins within its batch entry, in elements.
  __device__ __forceinline__ int64_t offset(const Operand& x, int i) const {
    return head[i] * x.head + position[i] * x.row;
  }
  // Row i of batch entry n, and the number of that row.
  __device__ __forceinline__ Row at(int64_t n, int i) const { return {n, head[i], position[i]}; }
  __device__ __forceinline__ int64_t number(const Problem& p, int64_t n, int i) const {
    return row_number(p, n, head[i], position[i]);
  }
};

// Returns the positions of `count` rows from `first` on: all positions of the sequence if the rows are of more than one
// head.
__device__ __forceinline__ Range positions_of_rows(const Sequence& s, Row first, int64_t count) {
  const int64_t end = first.position + count;
  return end > s.queries ? Range{0, s.queries} : Range{first.position, end};
}

// Returns the number of rows, rounded down to whole tiles, from a row at `position` to the next row whose position is
// in `seen`. The range `seen` is not empty. Returns `left`, the number of rows left in the list of heads, if there is
// no such row.
__device__ __forceinline__ int64_t rows_until(Range seen, int64_t position, int64_t queries, int64_t left,
                                              int64_t tile) {
  if (position < seen.last) return larger(0, seen.first - position) / tile * tile;
  const int64_t of_next_head = queries - position + seen.first;
  return of_next_head < left ? of_next_head / tile * tile : left;
}

// The part of a range of keys in the tile that begins with `key`. Keys are counted from the start of the tile.
struct TileRange {
  int first;
  unsigned count;

  __device__ __forceinline__ TileRange(Range keys, int64_t key) {
    first = static_cast<int>(smaller(larger(0, keys.first - key), kMostKeys));
    count = static_cast<unsigned>(larger(first, smaller(keys.last - key, kMostKeys)) - first);
  }
  __device__ __forceinline__ bool contains(int j) const { return static_cast<unsigned>(j - first) < count; }
  // The range of another lane of the warp. Called by all lanes.
  __device__ __forceinline__ TileRange of_lane(int lane) const {
    TileRange other = *this;
    other.first = __shfl_sync(~0u, first, lane);
    other.count = __shfl_sync(~0u, count, lane);
    return other;
  }

 private:
  static constexpr int64_t kMostKeys = 1 << 16;  // more than a tile has
};

// One block's share of the problem, in shared memory, so that one thread computes it and no register keeps it. Blocks
// that read the same keys are neighbours. Under causality the blocks that read most keys come first.
struct Task {
  Sequence sequence;   // of the batch entry
  int64_t n;           // the batch entry
  int64_t first_head;  // of the group
  int64_t key_head, value_head;
  int64_t first_row;  // of the group's list
  int rows;           // 0: there is nothing to do, and only the batch entry is set
  int64_t split;
  int64_t first_key, last_key;  // the tile's rows see no other keys
  Range positions;              // contains the positions of the tile's rows
  Range seen_by_all;            // the keys that every row sees

  // Sets up to `most` rows, from `first` on, of the list that begins with `head`. Called by one thread, followed by a
  // barrier.
  __device__ void set_rows(const Problem& p, int64_t batch_entry, int64_t head, int64_t first, int64_t most) {
    n = batch_entry;
    sequence = sequence_of(p, n);
    rows = static_cast<int>(larger(0, smaller(most, rows_of_group(p) - first)));
    if (rows == 0) return;
    first_head = head;
    key_head = key_head_of(p, head);
    value_head = value_head_of(p, head);
    first_row = first;
    positions = positions_of_rows(sequence, row_at(), rows);
    seen_by_all = common(visible_keys(sequence, {positions.first, positions.first + 1}),
                         visible_keys(sequence, {positions.last - 1, positions.last}));
  }
  // Says whether every row sees all `count` keys from `key` on, apart from the mask.
  __device__ __forceinline__ bool all_visible(int64_t key, int count) const {
    return seen_by_all.first <= key && key + count <= seen_by_all.last;
  }
  // The number of rows in the list of a group of heads, in this batch entry.
  __device__ __forceinline__ int64_t rows_of_group(const Problem& p) const { return p.group * sequence.queries; }
  // The first of the rows.
  __device__ __forceinline__ Row row_at() const { return row_after(sequence.queries, {n, first_head, 0}, first_row); }

  // Sets all members for block `number` of a kernel. The block owns up to `most` rows. It passes over the keys that
  // these rows see, or over a split of those keys, in tiles of `tile` keys. Called by one thread, followed by a
  // barrier.
  template <class Params>
  __device__ void set(const Params& p, int64_t number, int64_t most, int64_t tile) {
    const int64_t places = tiles_of_rows(p, most), place = number % places;
    number /= places;
    if constexpr (requires { p.splits; }) {
      split = number % p.splits;
      number /= p.splits;
    }
    const int64_t turns = heads_apart(p, p.queries, most) ? p.group : 1;  // the tiles of a place
    const Tile at = Tile::at(p, number / p.groups(), place / turns, p.query_starts, p.queries, p.tokens,
                             turns > 1 ? 1 : p.group, most);
    const int64_t queries = length_of(p.visibility.query_lengths, at.n, p.queries);
    const int64_t parts = heads_apart(p, queries, most) ? p.group : 1;
    const int64_t part_rows = parts > 1 ? queries : p.group * queries, tiles = divide_up(part_rows, most);
    const int64_t behind = at.number * turns + place % turns;  // the number of tiles behind this one
    n = at.n;
    rows = 0;
    first_key = last_key = 0;
    if (behind < 0 || behind >= parts * tiles) return;
    const int64_t own = parts * tiles - 1 - behind, row = own % tiles * most;
    set_rows(p, n, number % p.groups() * p.group, own / tiles * part_rows + row, smaller(most, part_rows - row));
    Range keys = in_tiles(visible_keys(sequence, positions), tile);
    if constexpr (requires { p.splits; }) {
      const int64_t first = keys.first + split * p.keys_per_split;
      keys = in_tiles(common(keys, {first, first + p.keys_per_split}), tile);
    }
    first_key = keys.first;
    last_key = keys.last;
  }
  // Sets batch entry and keys for block `number`, which owns up to `most` keys of one of `heads` heads; returns that
  // head. set_rows() sets the rows afterwards, tile by tile. Called by one thread, followed by a barrier.
  __device__ int64_t set_own_keys(const Problem& p, int64_t number, int64_t heads, int64_t most) {
    const int64_t places = tiles_of_keys(p, most), head = number / places;
    const Tile at = Tile::at(p, head / heads, number % places, p.key_starts, p.keys, p.key_tokens, 1, most);
    n = at.n;
    sequence = sequence_of(p, n);
    first_key = at.first(sequence.keys, most);
    last_key = smaller(first_key + most, sequence.keys);
    return head % heads;
  }
};

}  // namespace attn::cuda
