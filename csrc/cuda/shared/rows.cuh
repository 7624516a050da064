// Says which rows and keys a block of threads works on, and where they are stored.
#pragma once

#include "cuda/shared/numbers.cuh"
#include "core/score.h"

namespace attn::cuda {

// Returns the address at which a head of a batch entry begins. Its numbers have the type S.
template <class S>
__device__ __forceinline__ const S* head_of(const Problem& p, const Operand& x, int64_t n, int64_t head) {
  return static_cast<const S*>(x.data) + batch_offset(p, x, n) + head * x.head;
}

// These functions count the blocks of a kernel. Each block owns a tile. The tile has up to `most` rows of one group of
// heads, or up to `most` keys of one head. `heads` is the number of heads of K or of V. A block that finds no tile ends
// without reading or writing.
//
// The rows of a group of heads form a list. In this list, a head of a packed sequence has as many rows as the
// sequence has queries. So the rows and keys of a sequence are cut into the same tiles as in a call with this
// sequence alone. The bits of the sequence's results also depend on the kernel, on how many rows a tile has and on
// the splits of the keys. plan_forward() and plan_stats() derive all of these from the largest numbers of queries and
// keys, the number of sequences and the device.
//
// The host knows the sum of the lengths of packed sequences and the longest length, but not each length. So a block is
// given the number of a place, which holds one tile or none. The block finds out which tile is at its place. There are
// two ways to number places, and the one that needs fewer places is taken (are_alike()). In the first way each sequence
// has as many places as the longest sequence has tiles. In the second way the first place of sequence s is start / most
// + s, where `start` is the number of the sequence's first row or key. So a sequence has as many places as it has
// tiles, or one more.
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
// Whether each tile has rows of one head only, in a sequence of `queries` queries. In a sliding window, the keys that
// the last rows of a head see are far from the keys that the first rows of the next head see. A tile with rows of both
// heads would pass over all keys in between.
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
// The number of batch entries. Packed sequences are the last dimension of the batch. Here all sequences along this
// dimension count as one entry, because their places (see places_by_length()) are numbered consecutively.
ATTN_INLINE constexpr int64_t entries_of(const Problem& p) {
  return p.sequences > 0 ? divide(p.batch, p.sequences).quotient : p.batch;
}
ATTN_INLINE constexpr int64_t blocks_of_rows(const Problem& p, int64_t most) {
  return entries_of(p) * p.groups() * tiles_of_rows(p, most);
}
ATTN_INLINE constexpr int64_t blocks_of_keys(const Problem& p, int64_t heads, int64_t most) {
  return entries_of(p) * heads * tiles_of_keys(p, most);
}

// The order of tasks that have `places` places in each of `lists` lists, of which as many are passed over side by side
// as fit into the cache. The tasks of a list pass over the same `read` keys and values, or queries and gradients.
ATTN_INLINE constexpr TaskOrder lists_side_by_side(const Problem& p, int64_t places, int64_t lists, int64_t read) {
  const int64_t parts = p.sequences > 0 && places % p.sequences == 0 ? p.sequences : 1;  // each sequence is a list
  constexpr int64_t kL2 = 32 << 20;  // bytes of them that stay there: an H100 has 50 MB
  const int64_t of_list = larger(1, read * (p.head_dim + p.value_dim) * 2);
  return {places / parts, lists * parts, larger(1, smaller(kL2 / of_list, lists * parts))};
}
// The same; none if all tasks take the same time.
ATTN_INLINE constexpr TaskOrder order_of(const Problem& p, int64_t places, int64_t lists, int64_t read) {
  const Visibility& v = p.visibility;
  if (v.left < 0 && v.right < 0 && !v.key_lengths && !v.query_lengths && p.sequences == 0) return {};
  return lists_side_by_side(p, places, lists, read);
}
// The orders of tasks that own up to `most` rows each, and of tasks that own up to `most` keys of one head each, where
// keys have `heads` heads.
ATTN_INLINE constexpr TaskOrder order_of_rows(const Problem& p, int64_t most) {
  return order_of(p, tiles_of_rows(p, most), entries_of(p) * p.groups(), p.keys);
}
ATTN_INLINE constexpr TaskOrder order_of_keys(const Problem& p, int64_t heads, int64_t most) {
  return order_of(p, tiles_of_keys(p, most), entries_of(p) * heads, p.heads / heads * p.queries);
}

// A tile of a list of rows, or of a list of the keys of a head. `number` is the tile's index in its list.
struct Tile {
  int64_t n;  // the batch entry
  int64_t number;

  // Returns the tile at `place` of an entry (entries_of()). `starts` holds the first token of each packed sequence. All
  // sequences of an entry together have `tokens` tokens, and the longest sequence has `longest` tokens. The list has
  // `of_token` rows or keys for each token. The tile's number may be less than 0 if `starts` is not in ascending order.
  static __device__ __forceinline__ Tile at(const Problem& p, int64_t entry, int64_t place, const int64_t* starts,
                                            int64_t longest, int64_t tokens, int64_t of_token, int64_t most) {
    if (p.sequences == 0) return {entry, place};
    if (are_alike(p, longest * of_token, tokens * of_token, most)) {
      const auto [sequence, number] = divide(place, divide_up(longest * of_token, most));
      return {entry * p.sequences + sequence, number};
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
  // Returns where the tile begins in a list of `count` rows or keys. The result is `count` or more if the tile is
  // beyond the end.
  __device__ __forceinline__ int64_t first(int64_t count, int64_t most) const {
    return number < 0 ? count : number * most;
  }
};

// Up to kRows consecutive rows of a group of heads (Problem::group), in shared memory.
template <int kRows>
struct RowTile {
  int64_t head[kRows];
  int64_t position[kRows];

  // Sets row i of a tile that has `count` rows, from `first` on. One thread per row calls this function, and a barrier
  // must follow.
  __device__ __forceinline__ void set(int i, const Sequence& s, Row first, int count) {
    set(i, row_after(s.queries, first, last_repeated(i, count)));
  }
  __device__ __forceinline__ void set(int i, Row row) {
    head[i] = row.head;
    position[i] = row.position;
  }
  // A tile has `count` rows. Each further row i repeats row `count` - 1. Kernels never write the results of these
  // repetitions.
  static __device__ __forceinline__ int last_repeated(int i, int count) { return i < count ? i : count - 1; }

  // Returns where row i begins within its batch entry, in elements.
  __device__ __forceinline__ int64_t offset(const Operand& x, int i) const {
    return head[i] * x.head + position[i] * x.row;
  }
  // at() returns row i, which is a row of batch entry n. number() returns the number of this row among all rows.
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

// Returns the distance in rows from a row at `position` to the next row whose position is in `seen`, rounded down to
// whole tiles. The distance is 0 if `position` itself is in `seen`. The range `seen` must not be empty. If the list of
// rows has no such row, returns `left`, the number of rows that are left in the list.
__device__ __forceinline__ int64_t rows_until(Range seen, int64_t position, int64_t queries, int64_t left,
                                              int64_t tile) {
  if (position < seen.last) return larger(0, seen.first - position) / tile * tile;
  const int64_t of_next_head = queries - position + seen.first;
  return of_next_head < left ? of_next_head / tile * tile : left;
}

// The part of a range of keys that lies in the tile which begins with `key`. Keys are counted from the start of the
// tile.
struct TileRange {
  int first;
  unsigned count;

  __device__ __forceinline__ TileRange(Range keys, int64_t key) {
    first = static_cast<int>(smaller(larger(0, keys.first - key), kMostKeys));
    count = static_cast<unsigned>(larger(first, smaller(keys.last - key, kMostKeys)) - first);
  }
  __device__ __forceinline__ bool contains(int j) const { return static_cast<unsigned>(j - first) < count; }
  // Returns the range that another lane of the warp holds. Called by all lanes.
  __device__ __forceinline__ TileRange of_lane(int lane) const {
    TileRange other = *this;
    other.first = __shfl_sync(~0u, first, lane);
    other.count = __shfl_sync(~0u, count, lane);
    return other;
  }

 private:
  static constexpr int64_t kMostKeys = 1 << 16;  // more than a tile has
};

// One block's share of the problem. One thread computes it into shared memory for the whole block, so that it takes no
// registers. Blocks that read the same keys have neighbouring numbers. Under causality the blocks that read the most
// keys come first.
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

  // Gives the task up to `most` rows, from row `first` on, of the list of rows that begins with `head`. Called by one
  // thread, followed by a barrier.
  __device__ void set_rows(const Problem& p, int64_t batch_entry, int64_t head, int64_t first, int64_t most) {
    n = batch_entry;
    sequence = sequence_of(p, n);
    read_again();
    rows = static_cast<int>(larger(0, smaller(most, rows_of_group(p) - first)));
    if (rows == 0) return;
    first_head = head;
    key_head = key_head_of(p, head);
    value_head = value_head_of(p, head);
    first_row = first;
    read_again();
    positions = positions_of_rows(sequence, row_at(), rows);
    read_again();
    seen_by_all = common(visible_keys(sequence, {positions.first, positions.first + 1}),
                         visible_keys(sequence, {positions.last - 1, positions.last}));
  }
  // Says whether every row sees all `count` keys from `key` on, unless the mask hides them.
  __device__ __forceinline__ bool all_visible(int64_t key, int count) const {
    return seen_by_all.first <= key && key + count <= seen_by_all.last;
  }
  // The number of rows in the list of a group of heads, in this batch entry.
  __device__ __forceinline__ int64_t rows_of_group(const Problem& p) const { return p.group * sequence.queries; }
  // Row i of the task.
  __device__ __forceinline__ Row row_at(int64_t i = 0) const {
    return row_after(sequence.queries, {n, first_head, first_row}, i);
  }

  // Sets all members for block `number` of a kernel. The block owns up to `most` rows. It passes over the keys that
  // these rows see, or over a split of those keys, in tiles of `tile` keys. Called by one thread, followed by a
  // barrier.
  template <class Params>
  __device__ void set(const Params& p, int64_t number, int64_t most, int64_t tile) {
    auto [list, place] = divide(number, tiles_of_rows(p, most));
    if constexpr (requires { p.splits; }) {
      const auto [of_splits, own_split] = divide(list, p.splits);
      split = own_split;
      list = of_splits;
    }
    const auto [entry, group] = divide(list, p.groups());
    first_head = group * p.group;
    const int64_t turns = heads_apart(p, p.queries, most) ? p.group : 1;  // the tiles of a place
    const auto [tile_place, turn] = divide(place, turns);
    const Tile at = Tile::at(p, entry, tile_place, p.query_starts, p.queries, p.tokens, turns > 1 ? 1 : p.group, most);
    const int64_t queries = length_of(p.visibility.query_lengths, at.n, p.queries);
    const int64_t parts = heads_apart(p, queries, most) ? p.group : 1;
    const int64_t part_rows = parts > 1 ? queries : p.group * queries, tiles = divide_up(part_rows, most);
    const int64_t behind = at.number * turns + turn;  // the number of tiles behind this one
    n = at.n;
    rows = 0;
    first_key = last_key = 0;
    read_again();
    if (behind < 0 || behind >= parts * tiles) return;
    const auto [part, own] = parts > 1 ? divide(parts * tiles - 1 - behind, tiles) : Quotient{0, tiles - 1 - behind};
    set_rows(p, n, first_head, part * part_rows + own * most, smaller(most, part_rows - own * most));
    read_again();
    Range keys = in_tiles(visible_keys(sequence, positions), tile);
    if constexpr (requires { p.splits; }) {
      const int64_t first = keys.first + split * p.keys_per_split;
      keys = in_tiles(common(keys, {first, first + p.keys_per_split}), tile);
    }
    first_key = keys.first;
    last_key = keys.last;
  }
  // Sets the batch entry and the keys for block `number`, which owns up to `most` keys of one of `heads` heads. Returns
  // this head. Sets no rows, because the kernel passes over them tile by tile. Called by one thread, followed by a
  // barrier.
  __device__ int64_t set_own_keys(const Problem& p, int64_t number, int64_t heads, int64_t most) {
    const auto [list, place] = divide(number, tiles_of_keys(p, most));
    const auto [entry, head] = divide(list, heads);
    const Tile at = Tile::at(p, entry, place, p.key_starts, p.keys, p.key_tokens, 1, most);
    n = at.n;
    sequence = sequence_of(p, n);
    first_key = at.first(sequence.keys, most);
    last_key = smaller(first_key + most, sequence.keys);
    return head;
  }
};

// Finds the scales of the keys and values of a task, if they have 8 bits.
struct Scales {
  const float *key, *value;  // of the batch entry and head; null if there are none

  // Called by one thread, followed by a barrier.
  __device__ void set(const ForwardParams& p, const Task& task) {
    key = p.key_scale.data ? head_of<float>(p, p.key_scale, task.n, task.key_head) : nullptr;
    value = p.value_scale.data ? head_of<float>(p, p.value_scale, task.n, task.value_head) : nullptr;
  }
  // Returns the scale of a key, or of its value. Returns 0 for keys that the task's rows do not see.
  __device__ __forceinline__ float of(const ForwardParams& p, const Task& task, bool is_key, int64_t row) const {
    const float* const data = is_key ? key : value;
    const Operand& x = is_key ? p.key_scale : p.value_scale;
    if (!data) return 1;
    if (row >= task.last_key) return 0;
    return data[p.paging.table ? offset_in_pages(p, x.page, x.row, task.n, row) : row * x.row];
  }
};

}  // namespace attn::cuda
