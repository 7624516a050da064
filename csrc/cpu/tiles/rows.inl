// The rows of a tile of scores: which queries they are, and how tensors of these queries become tiles.
//
// Tiles are transposed, so each lane is a query. The maximum, the sum and the rescaling of a row then need no reduction
// across the lanes of a vector.
#pragma once

#include "cpu/tiles/logsumexp.inl"
#include "cpu/tiles/formats.inl"

namespace attn::ATTN_ISA {

// Up to kRowTile consecutive rows of a group of heads (Problem::group). Each row is a lane of a tile.
struct RowTile {
  int64_t n;  // the batch entry
  Sequence sequence;
  int64_t count;    // the number of rows
  Range positions;  // holds the positions of all rows, counted within the sequence
  int64_t head[kRowTile];
  int64_t position[kRowTile];
  // The numbers of these rows in tables with Table::transposed_at, and the sums of their gradients, in the compute
  // dtype. Null if the kernel does not keep them.
  void *tables, *grad_tables;

  // Sets the tile's rows to `rows`, which are counted in the group of heads that begins with `first_head`.
  void set(const Problem& p, int64_t batch_entry, int64_t first_head, Range rows) {
    n = batch_entry;
    sequence = sequence_of(p, n);
    count = rows.size();
    tables = grad_tables = nullptr;
    positions = {};  // grows to hold the positions of all rows
    if (count == 0) return;
    Row at = row_after(p, {n, first_head, 0}, rows.first);
    for (int64_t i = 0; i < count; ++i) {
      head[i] = at.head;
      position[i] = at.position;
      positions = hull(positions, {at.position, at.position + 1});
      at = row_after(p, at, 1);
    }
  }

  // Calls f(head, position, lane, rows) for every run of rows of one head. `position` and `lane` belong to the run's
  // first row.
  template <class F>
  ATTN_INLINE void each_head(F f) const {
    for (int64_t lane = 0; lane < count;) {
      int64_t end = lane + 1;
      while (end < count && head[end] == head[lane]) ++end;
      f(head[lane], position[lane], lane, end - lane);
      lane = end;
    }
  }

  // Calls f(block, lane, rows) for every run of rows that lie equally far apart in x. These are the rows of one head
  // or, if each head has one query, the rows of neighbouring heads. A block begins at column `first_col`.
  template <class F>
  ATTN_INLINE void each_run(const Problem& p, const Operand& x, int64_t first_col, F f) const {
    if (sequence.queries == 1) {
      Block block = block_of(p, x, n, head[0], 0, first_col);
      block.row = x.head;
      return f(block, 0, count);
    }
    each_head(
        [&](int64_t h, int64_t l, int64_t lane, int64_t rows) { f(block_of(p, x, n, h, l, first_col), lane, rows); });
  }

  // Returns the number of a lane's row, which is the index of the row's statistics.
  int64_t number(const Problem& p, int64_t lane) const { return row_number(p, n, head[lane], position[lane]); }

  // Returns the number of rows, rounded up to whole vectors.
  template <class T>
  int64_t lanes() const {
    return round_up(count, kLanes<T>);
  }

  // Sets the lanes of tile[key][lane] that have no row to `value`, so that all lanes may be added up. Such a lane may
  // hold a NaN, because its query is 0, and 0 times a NaN in a key is NaN.
  template <class T>
  void fill_empty_lanes(T* tile, int64_t keys, T value) const {
    for (int64_t j = 0; j < keys; ++j)
      for (int64_t i = count; i < lanes<T>(); ++i) tile[j * kRowTile + i] = value;
  }

  // tile[d * kRowTile + lane] = x(lane, first_col + d)
  template <class T>
  void pack_transposed(const Problem& p, const Operand& x, int64_t cols, T* tile, int64_t first_col = 0) const {
    each_run(p, x, first_col, [&](const Block& block, int64_t lane, int64_t rows) {
      const int64_t width = lane + rows == count ? lanes<T>() - lane : rows;
      ATTN_ISA::pack_transposed<T>(tile + lane, kRowTile, block, rows, cols, width);
    });
  }
  // The reverse: x(lane, first_col + d) = tile[d * kRowTile + lane]
  template <class T>
  void unpack_transposed(const Problem& p, const Operand& x, int64_t cols, const T* tile, int64_t first_col = 0) const {
    each_run(p, x, first_col, [&](const Block& block, int64_t lane, int64_t rows) {
      ATTN_ISA::unpack_transposed<T>(block, tile + lane, kRowTile, rows, cols);
    });
  }

  // Does what unpack_transposed() does, but reads a tile [lane][ld].
  template <class T>
  void unpack_rows(const Problem& p, const Operand& x, int64_t cols, const T* tile, int64_t ld,
                   int64_t first_col = 0) const {
    each_run(p, x, first_col, [&](const Block& block, int64_t lane, int64_t rows) {
      ATTN_ISA::unpack_rows<T>(block, tile + lane * ld, ld, rows, cols);
    });
  }

  // Does what unpack_transposed() does. Also writes the rounding error to `residual`, unless residual.data is null. If
  // `rest` is not null, adds the tile `rest` to this error. Overwrites `tile`. `scratch` has room for
  // kKeyTile * kRowTile numbers.
  template <class T>
  void unpack_rounded(const Problem& p, const Operand& x, const Operand& residual, int64_t cols, T* tile, T* scratch,
                      const T* rest = nullptr) const {
    unpack_transposed(p, x, cols, tile);
    if (!residual.data) return;
    for (int64_t d = 0; d < cols; d += kKeyTile) {
      const int64_t depth = smaller(kKeyTile, cols - d);
      T* exact = tile + d * kRowTile;
      pack_transposed(p, x, depth, scratch, d);
      for (int64_t j = 0; j < depth * kRowTile; j += kRowTile)
        for (int64_t i = j; i < j + lanes<T>(); i += kLanes<T>) {
          const Vec<T> rounded_off = load<T>(exact + i) - load<T>(scratch + i);
          store<T>(exact + i, rest ? rounded_off + load<T>(rest + d * kRowTile + i) : rounded_off);
        }
      unpack_transposed(p, residual, depth, exact, d);
    }
  }

  template <class T>
  void load_logsumexp(const Problem& p, const void* logsumexp, Logsumexp<T>& lanes_of) const {
    for (int64_t i = 0; i < kRowTile; ++i) {
      const T* pair = static_cast<const T*>(logsumexp) + 2 * (i < count ? number(p, i) : 0);
      const bool empty = i >= count || pair[0] == -kInfinity<T>;
      lanes_of.reference[i] = empty ? kInfinity<T> : pair[0];
      lanes_of.log2_sum[i] = empty ? 0 : pair[1];
    }
  }
  template <class T>
  void load_two_per_row(const Problem& p, const void* pairs, T* high, T* low) const {
    for (int64_t i = 0; i < kRowTile; ++i) {
      const T* pair = static_cast<const T*>(pairs) + 2 * (i < count ? number(p, i) : 0);
      high[i] = i < count ? pair[0] : 0;
      low[i] = i < count ? pair[1] : 0;
    }
  }

  // Packs an operand of format F with slots along the columns: tile[slot * kRowTile + lane].
  template <class F>
  void pack_columns(const Problem& p, const Operand& x, int64_t cols, typename F::Number* tile,
                    int64_t first_col = 0) const {
    each_run(p, x, first_col, [&](const Block& block, int64_t lane, int64_t rows) {
      const int64_t width = lane + rows == count ? lanes<typename F::Number>() - lane : rows;
      F::pack_transposed(block, rows, cols, tile + lane, width);
    });
  }
  // Packs an operand of format F with slots along the lanes: tile[slot * ld + column].
  template <class F>
  void pack_lanes(const Problem& p, const Operand& x, int64_t cols, typename F::Number* tile, int64_t ld) const {
    each_run(p, x, 0, [&](const Block& block, int64_t lane, int64_t rows) {
      F::pack_along_rows(block, lane, rows, cols, tile, ld);
    });
  }
};

// Returns a range that holds the positions of all these rows of a group of heads.
ATTN_INLINE Range positions_of(const Problem& p, Range rows) {
  const int64_t first_head = rows.first / p.queries * p.queries;
  return rows.last - first_head <= p.queries ? Range{rows.first - first_head, rows.last - first_head}
                                             : Range{0, p.queries};
}

// A task that goes over keys. It has some rows of a group of heads in one batch entry, and one split of the keys.
struct RowTask {
  int64_t n, first_head;
  Range rows;
  int64_t split = 0;
  Range keys;

  RowTask(const RowParams& p, int64_t task) {
    split = task % p.splits;
    task /= p.splits;
    const int64_t first_row = task % p.row_tasks() * p.rows_per_task, group = task / p.row_tasks();
    n = group / p.groups();
    first_head = group % p.groups() * p.group;
    const Sequence sequence = sequence_of(p, n);
    rows = {first_row, smaller(first_row + p.rows_per_task, p.rows())};
    // The first split begins at the first key that the rows see, so that keys outside of a window cost nothing.
    const Range seen = in_tiles(visible_keys(sequence, positions_of(p, rows)), kKeyTile);
    const int64_t first = seen.first + split * p.keys_per_split;
    keys = p.splits == 1 ? seen : Range{first, smaller(first + p.keys_per_split, seen.last)};
  }
  RowTask(int64_t n, int64_t first_head, Range rows, Range keys)
      : n(n), first_head(first_head), rows(rows), keys(keys) {}

  // Returns the keys that rows at these positions see in the task's split. The range begins where a tile of keys
  // begins.
  Range keys_seen(const Problem& p, Range positions) const {
    return in_tiles(common(visible_keys(sequence_of(p, n), positions), keys), kKeyTile);
  }
};

// The tiles of rows of a task. A kernel keeps a `State` for each tile of rows from one tile of keys to the next. A
// State has a member `rows`, which is a RowTile.
template <class State>
struct RowTiles {
  State* states;
  int64_t count = 0;
  Range positions = {};  // of all rows

  // Cuts the task's rows into tiles of up to `at_once` rows. Calls load(state) for each tile once the tile's rows are
  // set.
  template <class Load>
  RowTiles(const Problem& p, const RowTask& own, State* states, Load load, int64_t at_once = kRowTile)
      : states(states) {
    for (int64_t r = own.rows.first; r < own.rows.last; r += at_once) {
      State& state = states[count++];
      state.rows.set(p, own.n, own.first_head, {r, smaller(r + at_once, own.rows.last)});
      load(state);
      positions = hull(positions, state.rows.positions);
    }
  }
  State* begin() const { return states; }
  State* end() const { return states + count; }
};

// Calls f(tile) for each tile of a range of keys.
template <class Function>
ATTN_INLINE void each_tile_of_keys(Range keys, Function f) {
  for (int64_t key = keys.first; key < keys.last; key += kKeyTile) f(Range{key, smaller(key + kKeyTile, keys.last)});
}

}  // namespace attn::ATTN_ISA
