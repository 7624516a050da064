// Tables that functions of the pair look up: the indices of a tile, vectors of a table that hold the numbers of several
// pairs, and prefetching.
#pragma once

#include "core/program.h"
#include "cpu/tiles/rows.inl"
#include "cpu/tiles/strips.inl"

namespace attn::ATTN_ISA {

// Whether a leaf may index tables.
constexpr bool may_index(Leaf leaf) {
  return leaf == Leaf::distance_number || leaf == Leaf::key_number || leaf == Leaf::row_number || leaf == Leaf::key ||
         leaf == Leaf::query;
}

// An integer leaf that indexes tables. numbers[place(key, row)] is the index of a pair. least[n] and most[n] are the
// least and the largest of the W indices from place n on.
template <class T>
struct Indices {
  static constexpr int W = kLanes<T>;
  static constexpr int64_t kRoom = 4 * kRowTile + kKeyTile + W;  // of least, most and numbers of keys

  const T* numbers;
  const UInt<T>*least, *most;
  bool of_distances, of_keys;
  bool are_same;  // whether all pairs of the tile have one index; then `least` and `most` hold nothing
  int step = 0;   // 1 or -1 if all neighbouring indices differ by this number, else 0
  int64_t place(int64_t key, int64_t row) const {
    return of_distances ? kKeyTile - 1 + row - key : of_keys ? key : row;
  }

  static Indices of(Leaf leaf, const Values<T>& values, int64_t rows, int64_t keys, T* room) {
    auto* const least = reinterpret_cast<UInt<T>*>(room);
    UInt<T>* const most = least + 2 * kRowTile;
    T* const of_each_key = reinterpret_cast<T*>(most + 2 * kRowTile);
    const bool of_distances = leaf == Leaf::distance_number, of_keys = leaf == Leaf::key_number || leaf == Leaf::key;
    Indices found = {
        of_distances ? values.data - (kKeyTile - 1) : values.data, least, most, of_distances, of_keys, true};
    if (of_keys && values.step != 1) {
      for (int64_t j = 0; j < keys; ++j) of_each_key[j] = values.data[j * values.step];
      for (int64_t j = keys; j < kKeyTile; ++j) of_each_key[j] = T{};
      found.numbers = of_each_key;
    }
    const T* const first = found.numbers + found.place(found.of_distances ? keys - 1 : 0, 0);
    const int64_t count = found.of_distances ? rows + keys - 1 : found.of_keys ? keys : rows;
    const Vec<UInt<T>> one = splat<UInt<T>>(bit_cast<UInt<T>>(first[0]));
    for (int64_t n = 0; n < count && found.are_same; n += W) {
      const auto counts = lane_numbers<T>() < static_cast<Int<T>>(count - n);
      found.are_same = !any((bits<T>(load<T>(first + n)) != one) & counts);
    }
    if (found.are_same) return found;
    const Vec<UInt<T>> step = splat<UInt<T>>(bit_cast<UInt<T>>(first[1]) - one[0]);
    if (count > 1 && (step[0] == 1 || step[0] == ~UInt<T>{}))
      found.step = static_cast<int>(static_cast<Int<T>>(step[0]));
    for (int64_t n = 0; n < count - 1 && found.step != 0; n += W) {
      const auto counts = lane_numbers<T>() < static_cast<Int<T>>(count - 1 - n);
      if (any((bits<T>(load<T>(first + n + 1)) - bits<T>(load<T>(first + n)) != step) & counts)) found.step = 0;
    }
    if (of_distances)
      find_least_and_most<2 * kRowTile>(found.numbers, least, most);
    else
      find_least_and_most<kRowTile>(found.numbers, least, most);
    return found;
  }

 private:
  // Numbers from place kCount on count as 0.
  template <int64_t kCount>
  static void find_least_and_most(const T* numbers, UInt<T>* least, UInt<T>* most) {
    constexpr int kVectors = kCount / W;
    Vec<T> of_least[kVectors + 1] = {}, of_most[kVectors + 1] = {};
    for (int n = 0; n < kVectors; ++n) of_least[n] = of_most[n] = load<T>(numbers + n * W);
    // Each step doubles the number of indices that a lane has seen.
    const auto take_next = [&]<int kBy>(std::integral_constant<int, kBy>) __attribute__((always_inline)) {
      if constexpr (kBy < W)
#pragma GCC unroll 8
        for (int n = 0; n < kVectors; ++n) {
          const auto a = bits<T>(of_least[n]), b = bits<T>(shifted<T, kBy>(of_least[n], of_least[n + 1]));
          const auto c = bits<T>(of_most[n]), d = bits<T>(shifted<T, kBy>(of_most[n], of_most[n + 1]));
          of_least[n] = as_number<T>(a < b ? a : b);
          of_most[n] = as_number<T>(c > d ? c : d);
        }
    };
    take_next(std::integral_constant<int, 1>());
    take_next(std::integral_constant<int, 2>());
    take_next(std::integral_constant<int, 4>());
    take_next(std::integral_constant<int, 8>());
    static_assert(W <= 16);
    for (int n = 0; n < kVectors; ++n) {
      store<T>(reinterpret_cast<T*>(least + n * W), of_least[n]);
      store<T>(reinterpret_cast<T*>(most + n * W), of_most[n]);
    }
  }
};

// A table and the operand that indexes it. Pair (j, lane) of a strip looks up table[(first + j) * key + lane * row +
// index_at(j, lane)].
template <class T, class Number = const T>  // T: a gradient, which kernels add to
struct Lookup {
  static constexpr int W = kLanes<T>;
  Number* table;
  int64_t row, key;
  UInt<T> size;
  Values<T> index;
  const Indices<T>* indices;  // null if the index is no leaf
  int64_t first;              // the tile's key with which the strip begins
  // Table::transposed_at: the index belongs to a key, and number i of row `lane` is at table[i * kRowTile + lane].
  bool is_transposed;

  UInt<T> index_at(int64_t j, int64_t lane) const {
    return bit_cast<UInt<T>>(index.data[j * index.step + (lane & index.lanes)]);
  }

  // Compares the indices of W rows and W keys. The step is the difference between the indices of neighbouring keys if
  // each row has a table of its own, else of neighbouring rows. Returns the step if it is 1 everywhere or -1
  // everywhere, and all of these indices lie inside the table. Otherwise returns 0.
  ATTN_INLINE int step(int64_t j, int64_t i) const {
    const bool of_distances = indices && indices->of_distances;
    if (!indices || !(of_distances || (indices->of_keys ? row : key) != 0)) return 0;
    const int64_t place = indices->place(first + j + (of_distances ? W - 1 : 0), i);
    const T* const numbers = indices->numbers + place;
    const Vec<UInt<T>> here = bits<T>(load<T>(numbers)), steps = bits<T>(load<T>(numbers + 1)) - here;
    const auto one = static_cast<Int<T>>(steps[0]);
    if (one != 1 && one != -1) return 0;
    const auto is_other = [&](Vec<UInt<T>> found) {
      return any((found - steps[0] != Vec<UInt<T>>{}) & (lane_numbers<T>() < W - 1));
    };
    if (is_other(steps)) return 0;
    if (of_distances && is_other(bits<T>(load<T>(numbers + W)) - bits<T>(load<T>(numbers + W - 1)))) return 0;
    const UInt<T> least = here[0], last = least + static_cast<UInt<T>>(one * (of_distances ? 2 * W - 2 : W - 1));
    if (least >= size || last >= size) return 0;
    return row != 0 && of_distances ? -one : one;
  }
  // Each of W rows looks up W numbers in its table. Returns, for each row, an index of its table. The vector that
  // begins there holds these W numbers. Returns kScattered if some row has no such vector inside its table. `one`: all
  // rows look up the W indices from `place` on. Otherwise row k looks up the W indices from `place` + k on.
  static constexpr UInt<T> kScattered = ~UInt<T>{};
  ATTN_INLINE Vec<UInt<T>> first_of(int64_t place, bool one) const {
    const auto many = [&](const UInt<T>* x) { return one ? splat<UInt<T>>(x[place]) : load<UInt<T>>(x + place); };
    const Vec<UInt<T>> least = many(indices->least), most = many(indices->most);
    const Vec<UInt<T>> last = splat<UInt<T>>(size - W), base = least < last ? least : last;
    return any((most > last + (W - 1)) | (most - base >= UInt<T>{W})) ? splat<UInt<T>>(kScattered) : base;
  }
};

// Calls f(numbers, row, place, size) for each table with Table::transposed_at. `numbers` are the numbers of these rows,
// `row` is the distance from one row to the next, and `place` is where they begin when transposed. of_table(t) returns
// the terms of table t, or their gradients. Number is const T or T.
template <class Number, class F>
ATTN_INLINE void each_transposed_table(const Problem& p, const RowTile& rows, auto of_table, F f) {
  for (int t = 0; t < kMostTables; ++t) {
    const Table& table = p.program->tables[t];
    const auto& terms = of_table(t);
    if (table.transposed_at < 0 || !terms.data) continue;
    Number* const numbers = static_cast<Number*>(terms.data) + (p.first_entry + rows.n) * terms.entry +
                            rows.head[0] * terms.head + rows.position[0] * terms.row;
    f(numbers, terms.row, table.transposed_at, table.size);
  }
}
// Reads the tables of a tile's rows, and keeps them transposed in `to`.
template <class T>
void load_tables(const Problem& p, RowTile& rows, T* to) {
  if (size_transposed(p) == 0) return;
  rows.tables = to;
  each_transposed_table<const T>(
      p, rows, [&](int t) -> const Terms& { return p.program->tables[t].numbers; },
      [&](const T* numbers, int64_t row, int64_t place, int64_t size) {
        const Block block{reinterpret_cast<char*>(const_cast<T*>(numbers)), dtype_of<T>, row, 1};  // is only read
        pack_transposed<T>(to + place, kRowTile, block, rows.count, size, rows.lanes<T>());
      });
}
// Adds the gradients that a tile's rows have collected, and which begin `begin` numbers after the gradients in `grads`.
template <class T>
void add_tables(const Problem& p, const RowTile& rows, const GradTerms* grads, int64_t begin) {
  constexpr int W = kLanes<T>;
  if (!rows.grad_tables) return;
  each_transposed_table<T>(
      p, rows, [&](int t) -> const GradTerms& { return grads[t]; },
      [&](T* numbers, int64_t row, int64_t place, int64_t size) {
        T* const to = numbers + begin;
        for (int64_t i = 0; i < rows.count; i += W)
          for (int64_t j = 0; j < size; j += W) {
            Vec<T> sums[W];
            for (int k = 0; k < W; ++k)
              sums[k] = load<T>(static_cast<const T*>(rows.grad_tables) + place + (j + k) * kRowTile + i);
            transpose<T>(sums);
            for (int64_t k = 0; k < smaller(W, rows.count - i); ++k) {
              T* const at = to + (i + k) * row + j;
              const int64_t count = smaller(W, size - j);
              if (count == W)
                store<T>(at, load<T>(at) + sums[k]);
              else
                store_some<T>(at, load_some<T>(at, count) + sums[k], count);
            }
          }
      });
}

// Prefetches the numbers that the pairs of a tile look up in tables, or the gradients of these numbers. Fetches some of
// them after each register tile of a product. Processors by themselves do not read ahead here, because tables are large
// and their rows lie far apart.
template <class T>
class TablesAhead {
 public:
  // Chooses what to prefetch: the tables that the list reads or, if `gradients` is not null, the gradients of tables to
  // which the list's results are added. Leaves out tables that stay in the cache from tile to tile.
  TablesAhead(const Problem& p, const List* list, const RowTile& tile, Range keys, const GradTerms* gradients,
              int64_t begin)
      : rows_(tile.count), keys_(keys.size()) {
    for (int i = 0; list && i < (gradients ? list->result_count : list->step_count); ++i) {
      if (gradients) {
        const ResultOfList& result = list->results[i];
        if (result.table >= 0 && gradients[result.table].data)
          add(p, *list, result.index, result.table, gradients[result.table], begin, tile, keys);
      } else if (list->steps[i].op == Op::lookup) {
        const int table = list->steps[i].table;
        add(p, *list, list->steps[i].from[0], table, p.program->tables[table].numbers, 0, tile, keys);
      }
    }
  }
  ATTN_INLINE void operator()() {
    for (int n = 0; n < kAtOnce && next_ < count_ * kRowTile; ++n, ++next_)
      ask(places_[next_ / kRowTile], next_ % kRowTile);
  }

 private:
  static constexpr int kMost = 4, kAtOnce = 12;
  static constexpr int64_t kLine = 64 / sizeof(T);
  // A table that has a part for each owner. Either the rows of the tile are the owners, and its keys are the other
  // side, or the reverse.
  struct Place {
    const T* table;
    int64_t step, owners;              // the distance between parts; the number of owners
    const int32_t* index;              // of the first owner's first pair
    int64_t of_owner, of_other, last;  // steps of `index` along owners and the other side; the last one to read there
  };

  void add(const Problem& p, const List& list, int16_t from, int table, const auto& terms, int64_t begin,
           const RowTile& tile, Range keys) {
    const Leaf leaf = from < 0 ? list.leaves[-1 - from].leaf : Leaf::score;
    const bool of_distances = leaf == Leaf::distance_number, of_keys = leaf == Leaf::key_number;
    const TableOf of = p.program->tables[table].of;
    constexpr int64_t kSmall = 1024;  // bytes of an owner's part of the table
    if (p.program->tables[table].size * int64_t{sizeof(T)} <= kSmall) return;
    if (count_ == kMost || of == TableOf::all || !(of_distances || of_keys || leaf == Leaf::row_number)) return;
    const bool owned_by_rows = of == TableOf::queries;
    const Terms& t = p.program->terms[kind_of(leaf)];
    const int64_t n = p.first_entry + tile.n, head = tile.head[0], row = tile.position[0];
    const int64_t first = of_distances ? row - keys.first + p.program->keys - 1 : of_keys ? keys.first : row;
    const int64_t of_row = of_keys ? 0 : t.row, of_key = of_distances ? -t.row : of_keys ? t.row : 0;
    Place& to = places_[count_++];
    to.table = static_cast<const T*>(terms.data) + begin + n * terms.entry + head * terms.head +
               (owned_by_rows ? row : keys.first) * terms.row;
    to.step = terms.row;
    to.owners = owned_by_rows ? rows_ : keys_;
    to.index = static_cast<const int32_t*>(t.data) + n * t.entry + head * t.head +
               list.leaves[-1 - from].column * t.col + first * t.row;
    to.of_owner = owned_by_rows ? of_row : of_key;
    to.of_other = owned_by_rows ? of_key : of_row;
    to.last = (owned_by_rows ? keys_ : rows_) - 1;
    // If two opposite corners of the tile have the same index, probably all pairs of the tile have it.
    if (to.index[to.of_other * to.last] == to.index[to.of_owner * (to.owners - 1)]) to.last = 0;
  }
  ATTN_INLINE void ask(const Place& of, int64_t owner) const {
    if (owner >= of.owners) return;
    const T* const table = of.table + owner * of.step;
    const int32_t* const index = of.index + owner * of.of_owner;
    for (int64_t other = 0; other < of.last; other += kLine)
      __builtin_prefetch(table + index[other * of.of_other], 0, 2);
    __builtin_prefetch(table + index[of.last * of.of_other], 0, 2);
  }

  int64_t rows_, keys_;
  Place places_[kMost];
  int count_ = 0;
  int64_t next_ = 0;
};

}  // namespace attn::ATTN_ISA
