// Evaluates lists of operations (core/program.h) over tiles of scores.
//
// A strip is kStrip keys of a tile, with all rows of the tile. All operations of a list run over one strip before the
// next strip begins. So their results, 4 KiB for each operation in float32, stay in the L1 cache. The rows of a tile
// belong to one head.
#pragma once

#include "core/program.h"
#include "cpu/simd/exp.inl"
#include "cpu/simd/transpose.inl"
#include "cpu/tiles/bounds.inl"
#include "cpu/tiles/rows.inl"

namespace attn::ATTN_ISA {

constexpr int64_t kStrip = 16;

// whole() reinterprets numbers as signed integers of the same size, and bits() as unsigned integers. as_number() does
// the reverse. Unsigned integers wrap around, as PyTorch's integers do.
template <class T>
ATTN_INLINE Vec<Int<T>> whole(Vec<T> x) {
  return bit_cast<Vec<Int<T>>>(x);
}
template <class T>
ATTN_INLINE Vec<UInt<T>> bits(Vec<T> x) {
  return bit_cast<Vec<UInt<T>>>(x);
}
template <class T, class V>
ATTN_INLINE Vec<T> as_number(V x) {
  return bit_cast<Vec<T>>(x);
}

template <class T>
ATTN_INLINE Vec<T> bounded(Vec<T> x, Vec<T> least, Vec<T> most) {
  const Vec<T> above = x < least ? least : x;
  return above > most ? most : above;
}

// Calls f for each lane, for operations that vectors lack.
template <class T, class F>
ATTN_INLINE Vec<T> each_lane(Vec<T> x, F f) {
  for (int i = 0; i < kLanes<T>; ++i) x[i] = static_cast<T>(f(x[i]));
  return x;
}
template <class T, class F>
ATTN_INLINE Vec<T> each_whole(Vec<T> x, Vec<T> y, F f) {
  Vec<Int<T>> a = whole<T>(x), b = whole<T>(y);
  for (int i = 0; i < kLanes<T>; ++i) a[i] = f(a[i], b[i]);
  return as_number<T>(a);
}

// Returns 2^x for every x, even where the result is infinite.
template <class T>
ATTN_INLINE Vec<T> exp2_of_any(Vec<T> x) {
  constexpr T kMost = sizeof(T) == 4 ? 190 : 1086, kLarge = sizeof(T) == 4 ? 120 : 1000, kPart = 64;
  const Vec<T> bounded = x > kMost ? splat<T>(kMost) : x;
  const auto is_large = bounded > kLarge;
  const Vec<T> power = exp2<T>(is_large ? bounded - kPart : bounded);
  return is_large ? power * static_cast<T>(0x1p64) : power;
}
// e^x = 2^(x log2(e)). Corrects the result by the rounding error of the product.
template <class T>
ATTN_INLINE Vec<T> exp_of_any(Vec<T> x) {
  constexpr T kHigh = static_cast<T>(kLog2E), kLow = static_cast<T>(kLog2E - static_cast<double>(kHigh));
  const Vec<T> y = x * kHigh;
  Vec<T> rest = x * kHigh - y;  // one fused operation, if the instruction set has it
  rest += x * (sizeof(T) == 4 ? kLow : static_cast<T>(2.0355273740931033e-17));
  const Vec<T> power = exp2_of_any<T>(y);
  const auto is_usual = absolute<T>(y) < (sizeof(T) == 4 ? T{1000} : T{10000});
  return is_usual ? power + power * (rest * static_cast<T>(0.69314718055994530942)) : power;
}

// An operand. Number (j, lane) of a strip is at data[j * step + (lane & lanes)].
template <class T>
struct Values {
  const T* data;
  int64_t step;
  int64_t lanes;  // all bits, or 0 if all lanes are the same
};

// The leaves of a list that are tiles [key][kRowTile]. (Leaves with one number for each row, key or distance are in the
// tensors PairProgram::terms.) A pointer is null if the list does not read its tile.
template <class T>
struct PairTiles {
  const T* product = nullptr;
  const T* grad = nullptr;
  const T* tangent = nullptr;
  const T* tangent_grad = nullptr;
  const T* pair = nullptr;
  const T* pair_tangent = nullptr;
};

ATTN_INLINE uint64_t all_lanes(int64_t count) { return ~uint64_t{} >> (kRowTile - count); }

// These functions sum a strip: add_rows() for each lane, add_lanes() for each key, and add_diagonals() for each
// diagonal, on which all pairs have the same distance. A sum over lanes leaves out the lanes without a row. These lanes
// may hold a NaN, because a function of their terms, which are 0, may be NaN (0 / 0).
template <class T>
void add_rows(const Values<T>& x, int64_t count, int64_t lanes, T* sums) {
  for (int64_t i = 0; i < lanes; i += kLanes<T>) {
    Vec<T> sum{};
    for (int64_t j = 0; j < count; ++j) sum += load<T>(x.data + j * x.step + i);
    store<T>(sums + i, load<T>(sums + i) + sum);
  }
}
template <class T>
void add_lanes(const Values<T>& x, int64_t count, int64_t rows, T* sums, int64_t step) {
  constexpr int W = kLanes<T>;
  const int64_t whole = rows / W * W;
  const auto has_row = lane_numbers<T>() < static_cast<Int<T>>(rows - whole);
  for (int64_t first = 0; first < count; first += W) {
    const int64_t keys = smaller(W, count - first);
    T of_keys[W * W];
    for (int64_t k = 0; k < W; ++k) {
      const T* const from = x.data + (first + smaller(k, keys - 1)) * x.step;
      Vec<T> sum{};
      for (int64_t i = 0; i < whole; i += W) sum += load<T>(from + i);
      if (whole < rows) sum += has_row ? load<T>(from + whole) : Vec<T>{};
      store<T>(of_keys + k * W, sum);
    }
    store<T>(of_keys, sums_of_rows<T>([&](int i) { return load<T>(of_keys + i * kLanes<T>); }));
    for (int64_t k = 0; k < keys; ++k) sums[(first + k) * step] += of_keys[k];
  }
}

// Adds number (j, i) of the strip to sums[i - j].
template <class T>
void add_diagonals(const Values<T>& x, int64_t count, int64_t rows, T* sums) {
  constexpr int64_t W = kLanes<T>;
  const auto numbers = lane_numbers<T>();
  const int64_t diagonals = rows + count - 1;
  for (int64_t first = 0; first < diagonals; first += W) {  // `first` is i - j of the first diagonal, plus count - 1
    Vec<T> sum{};
    for (int64_t j = 0; j < count; ++j) {
      const int64_t lane = first - (count - 1) + j;
      if (lane <= -W || lane >= rows) continue;
      const Vec<T> found = load<T>(x.data + j * x.step + lane);
      const auto row = numbers + static_cast<Int<T>>(lane);
      const bool inside = lane >= 0 && lane + W <= rows;
      sum += inside ? found : ((row >= 0) & (row < static_cast<Int<T>>(rows))) ? found : Vec<T>{};
    }
    T* const to = sums + first - (count - 1);
    if (first + W <= diagonals) {
      store<T>(to, load<T>(to) + sum);
    } else {
      for (int64_t i = 0; i < diagonals - first; ++i) to[i] += sum[i];
    }
  }
}

template <class T>
class Evaluation {
 public:
  static constexpr int W = kLanes<T>;
  // A leaf has room for a number per row of a tile, a number per distance, or W copies of a number per key.
  static constexpr int64_t kLeaf = larger(kKeyTile * W, 2 * kRowTile), kSlot = kStrip * kRowTile;

  static int64_t room(const List* list) {
    return list ? room_of_places(*list) + (list->leaf_count + list->lookups) * kLeaf +
                      (reads_tables(*list) ? list->leaf_count * kIndices : 0) + list->slots * kSlot
                : 0;
  }

  Evaluation(const Problem& p, const List& list, const auto& tile, const PairTiles<T>& tiles, T* workspace)
      : Evaluation(p, list, tile.rows->n, tile.rows->head[0],
                   {tile.rows->position[0], tile.rows->position[0] + tile.rows->count}, tile.keys, tiles, workspace) {}
  Evaluation(const Problem& p, const List& list, int64_t n, int64_t head, Range rows, Range keys,
             const PairTiles<T>& tiles, T* workspace)
      : program_(*p.program),
        list_(list),
        entry_(p.first_entry + n),
        head_(head),
        leaves_(reinterpret_cast<Values<T>*>(workspace)),
        lookups_(leaves_ + list.leaf_count),
        indices_(reinterpret_cast<Indices*>(lookups_ + list.lookups)),
        rows_(rows),
        first_key_(keys.first),
        lanes_(round_up(rows.size(), W)) {
    workspace += room_of_places(list);
    T* const indices = workspace + (list.leaf_count + list.lookups) * kLeaf;
    const bool has_tables = reads_tables(list);
    slots_ = indices + (has_tables ? list.leaf_count * kIndices : 0);
    for (int i = 0; i < list.leaf_count; ++i) {
      const Leaf leaf = list.leaves[i].leaf;
      T* const numbers = workspace + i * kLeaf;
      leaves_[i] = read(p, list.leaves[i], entry_, head, rows, keys, tiles, numbers);
      if (has_tables && is_number(leaf))
        indices_[i] = indices_of(leaf, numbers, rows.size(), keys.size(), indices + i * kIndices);
    }
    for (int i = 0; i < list.step_count; ++i) {
      const Step& step = list.steps[i];
      if (step.op == Op::lookup || step.op == Op::lookup_tangent)
        look_up_once(step, terms_of(step), keys.size(), workspace + (list.leaf_count + step.lookup) * kLeaf);
    }
    // If the result of an operation is the same for all pairs, evaluates it once and stores one vector.
    const int64_t lanes = lanes_;
    lanes_ = W;
    for (int i = 0; i < list.uniform_slots; ++i) apply(i, 1, nullptr);
    lanes_ = lanes;
  }

  // Evaluates keys [first, first + count) of the tile. Writes the last operation's result to `to`, and the list's
  // second result to `kept`, unless these pointers are null.
  void run(int64_t first, int64_t count, T* to = nullptr, T* kept = nullptr) {
    first_ = first;
    kept_ = kept;
    for (int i = list_.uniform_slots; i < list_.step_count; ++i)
      apply(i, count, i + 1 == list_.step_count ? to : nullptr);
  }

  // Copies a result to a strip of `count` keys of a tile. The tile may be one that run() has read.
  void copy(int16_t from, int64_t count, T* to) const {
    const Values<T> x = at(from);
    if (x.data == to) return;
    for (int64_t j = 0; j < count; ++j)
      for (int64_t i = 0; i < lanes_; i += W)
        store<T>(to + j * kRowTile + i, load<T>(x.data + j * x.step + (i & x.lanes)));
  }
  // Returns an operand, or a result after run() has computed it.
  Values<T> at(int16_t from) const {
    if (from >= list_.uniform_slots) return {slot(from), kRowTile, -1};
    if (from >= 0) return {slots_ + from * kSlot, 0, 0};
    Values<T> leaf = leaves_[-1 - from];
    leaf.data += first_ * leaf.step;
    return leaf;
  }
  int64_t lanes() const { return lanes_; }
  // Returns the booleans of key j of the strip as bits.
  uint64_t word(int16_t from, int64_t j) const {
    const Values<T> x = at(from);
    uint64_t word = 0;
    for (int64_t i = 0; i < lanes_; i += W)
      word |= bits_of(whole<T>(load<T>(x.data + j * x.step + (i & x.lanes)))) << i;
    return word & all_lanes(rows_.size());
  }
  // Adds a strip of gradients to the gradient of a table. Adds the gradient of each pair to the number that the pair
  // looks up. `begin`: where a copy of the table's gradient begins.
  void scatter(const Values<T>& x, const ResultOfList& result, int64_t count, const Terms& grad, int64_t begin) const {
    const Lookup at = lookup(result.table, grad, result.index);
    T* const table = const_cast<T*>(at.table) + begin + first_ * at.key;
    const int64_t rows = rows_.size();
    if (at.indices && at.indices->are_same && at.index_at(0, 0) < at.size) {
      T* const to = table + at.index_at(0, 0);
      if (at.key != 0) return add_lanes<T>(x, count, rows, to, at.key);
      T sums[kRowTile] = {};
      add_rows<T>(x, count, lanes_, sums);
      for (int64_t i = 0; i < rows; ++i) to[i * at.row] += sums[i];
      return;
    }
    for (int64_t i = 0; i < lanes_; i += W)
      for (int64_t j = 0; j < count; j += W) {
        const int64_t of_keys = smaller(W, count - j), of_rows = smaller(W, rows - i);
        // A lane without a row may hold a NaN.
        const int step = of_keys == W && of_rows == W ? step_of(at, j, i) : 0;
        if (step != 0 && at.key != 0) {
          for (int64_t k = j; k < j + W; ++k) {
            T* const to = table + k * at.key + smaller(at.index_at(k, i), at.index_at(k, i + W - 1));
            const Vec<T> added = load<T>(x.data + k * x.step + i);
            store<T>(to, load<T>(to) + (step > 0 ? added : reversed<T>(added)));
          }
        } else if (step != 0) {
          Vec<T> columns[W];
          for (int k = 0; k < W; ++k) columns[k] = load<T>(x.data + (j + (step > 0 ? k : W - 1 - k)) * x.step + i);
          transpose<T>(columns);
          for (int k = 0; k < W; ++k) {
            T* const to = table + (i + k) * at.row + smaller(at.index_at(j, i + k), at.index_at(j + W - 1, i + k));
            store<T>(to, load<T>(to) + columns[k]);
          }
        } else {
          // If rows or keys own tables, consecutive additions go to tables of different owners, so that no addition
          // waits for the previous one.
          const auto add = [&](int64_t key, int64_t row) __attribute__((always_inline)) {
            const UInt<T> index = at.index_at(key, row);
            if (index < at.size) table[key * at.key + row * at.row + index] += x.data[key * x.step + row];
          };
          if (at.key != 0) {
            for (int64_t row = i; row < i + of_rows; ++row)
              for (int64_t key = j; key < j + of_keys; ++key) add(key, row);
          } else {
            for (int64_t key = j; key < j + of_keys; ++key)
              for (int64_t row = i; row < i + of_rows; ++row) add(key, row);
          }
        }
      }
  }

 private:
  // An integer leaf that indexes tables. numbers[place(key, row)] is the index of a pair. least[n] and most[n] are the
  // least and the largest of the W indices from place n on.
  struct Indices {
    const T* numbers;
    const UInt<T>*least, *most;
    bool of_distances, of_keys;
    bool are_same;  // whether all pairs of the tile have one index; then `least` and `most` hold nothing
    int64_t place(int64_t key, int64_t row) const {
      return of_distances ? kKeyTile - 1 + row - key : of_keys ? key : row;
    }
  };
  static constexpr int64_t kIndices = 2 * (2 * kRowTile + W) + kKeyTile + W;
  static int64_t room_of_places(const List& list) {
    const size_t bytes = (list.leaf_count + list.lookups) * sizeof(Values<T>) + list.leaf_count * sizeof(Indices);
    return round_up(divide_up(static_cast<int64_t>(bytes), sizeof(T)), W);
  }
  // Whether a list reads tables, or computes gradients of tables.
  static bool reads_tables(const List& list) {
    bool reads = list.lookups > 0;
    for (int i = 0; i < list.result_count; ++i) reads |= list.results[i].table >= 0;
    return reads;
  }
  T* slot(int16_t n) const { return kept_ && n == list_.results[1].from ? kept_ : slots_ + n * kSlot; }
  const Terms& terms_of(const Step& step) const {
    const Table& table = program_.tables[step.table];
    return step.op == Op::lookup ? table.numbers : table.tangent;
  }

  static Indices indices_of(Leaf leaf, const T* numbers, int64_t rows, int64_t keys, T* room) {
    auto* const least = reinterpret_cast<UInt<T>*>(room);
    UInt<T>* const most = least + 2 * kRowTile + W;
    T* const of_each_key = reinterpret_cast<T*>(most + 2 * kRowTile + W);
    Indices found = {numbers, least, most, leaf == Leaf::distance_number, leaf == Leaf::key_number || leaf == Leaf::key,
                     true};
    if (found.of_keys) {
      for (int64_t j = 0; j < keys; ++j) of_each_key[j] = numbers[j * W];
      for (int64_t j = keys; j < kKeyTile; ++j) of_each_key[j] = T{};
      found.numbers = of_each_key;
    }
    const T* const first = found.numbers + found.place(found.of_distances ? keys - 1 : 0, 0);
    const int64_t count = found.of_distances ? rows + keys - 1 : found.of_keys ? keys : rows;
    const int64_t all = found.of_distances ? 2 * kRowTile : kRowTile;
    const Vec<UInt<T>> one = splat<UInt<T>>(bit_cast<UInt<T>>(first[0]));
    for (int64_t n = 0; n < count && found.are_same; n += W) {
      const auto counts = lane_numbers<T>() < static_cast<Int<T>>(count - n);
      found.are_same = !any((bits<T>(load<T>(first + n)) != one) & counts);
    }
    if (found.are_same) return found;
    for (int64_t n = 0; n < all; n += W) {
      store<T>(reinterpret_cast<T*>(least + n), load<T>(found.numbers + n));
      store<T>(reinterpret_cast<T*>(most + n), load<T>(found.numbers + n));
    }
    for (int64_t n = 0; n < W; ++n) least[all + n] = most[all + n] = 0;
    for (int64_t next = 1; next < W; next *= 2)
      for (int64_t n = 0; n < all; n += W) {
        const auto a = load<UInt<T>>(least + n), b = load<UInt<T>>(least + n + next);
        const auto c = load<UInt<T>>(most + n), d = load<UInt<T>>(most + n + next);
        store<UInt<T>>(least + n, a < b ? a : b);
        store<UInt<T>>(most + n, c > d ? c : d);
      }
    return found;
  }

  static T as_lane(Int<T> x) { return bit_cast<T>(x); }

  static Values<T> read(const Problem& p, const LeafOfList& leaf, int64_t n, int64_t head, Range rows, Range keys,
                        const PairTiles<T>& tiles, T* to) {
    const auto everywhere = [&](T x) {
      for (int i = 0; i < W; ++i) to[i] = x;
      return Values<T>{to, 0, 0};
    };
    const auto of_rows = [&](auto number) {
      for (int64_t i = 0; i < kRowTile; ++i) to[i] = i < rows.size() ? number(rows.first + i) : T{};
      return Values<T>{to, 0, -1};
    };
    const auto of_keys = [&](auto number) {
      for (int64_t j = 0; j < keys.size(); ++j) {
        const T x = number(keys.first + j);
        for (int i = 0; i < W; ++i) to[j * W + i] = x;
      }
      return Values<T>{to, W, 0};
    };
    const auto of_distances = [&](auto number) {
      const int64_t first = rows.first - keys.first - (kKeyTile - 1) + p.program->keys - 1;
      const int64_t last = p.program->queries + p.program->keys - 1;
      fill_zero(to, 2 * kRowTile);
      for (int64_t i = larger(0, -first); i < smaller(2 * kRowTile, last - first); ++i) to[i] = number(first + i);
      return Values<T>{to + kKeyTile - 1, -1, -1};
    };
    const auto tile = [](const T* data) { return Values<T>{data, kRowTile, -1}; };
    const int kind = static_cast<int>(leaf.leaf) - static_cast<int>(Leaf::row_term);
    const Terms t = 0 <= kind && kind < kTermKinds ? p.program->terms[kind] : Terms{};
    const int64_t column = n * t.entry + head * t.head + leaf.column * t.col;
    const auto term = [&](int64_t row) { return static_cast<const T*>(t.data)[column + row * t.row]; };
    const auto number = [&](int64_t row) { return as_lane(static_cast<const int32_t*>(t.data)[column + row * t.row]); };
    switch (leaf.leaf) {
      case Leaf::number:
        return everywhere(static_cast<T>(leaf.number));
      case Leaf::whole_number:
        return everywhere(as_lane(static_cast<Int<T>>(leaf.number)));
      case Leaf::scale:
        return everywhere(static_cast<T>(p.scale));
      case Leaf::score:
        break;
      case Leaf::product:
        return tile(tiles.product);
      case Leaf::grad:
        return tile(tiles.grad);
      case Leaf::tangent:
        return tile(tiles.tangent);
      case Leaf::tangent_grad:
        return tile(tiles.tangent_grad);
      case Leaf::pair_term:
        return tile(tiles.pair);
      case Leaf::pair_tangent:
        return tile(tiles.pair_tangent);
      case Leaf::row_term:
      case Leaf::row_tangent:
        return of_rows(term);
      case Leaf::key_term:
      case Leaf::key_tangent:
        return of_keys(term);
      case Leaf::distance_term:
      case Leaf::distance_tangent:
        return of_distances(term);
      case Leaf::row_number:
        return of_rows(number);
      case Leaf::key_number:
        return of_keys(number);
      case Leaf::distance_number:
        return of_distances(number);
      case Leaf::query:
        return of_rows([](int64_t i) { return as_lane(static_cast<Int<T>>(i)); });
      case Leaf::key:
        return of_keys([](int64_t j) { return as_lane(static_cast<Int<T>>(j)); });
    }
    __builtin_unreachable();
  }

  // Runs step number n for `count` keys. Writes the result to `to`, or to the step's slot if `to` is null.
  void apply(int n, int64_t count, T* to) const {
    using V = Vec<T>;
    const Step& step = list_.steps[n];
    const Values<T> x = at(step.from[0]), y = at(step.from[1]), z = at(step.from[2]);
    if (!to) to = slot(step.to);
    const auto each = [&, lanes = lanes_](auto f) __attribute__((always_inline)) {
      for (int64_t j = 0; j < count; ++j)
        for (int64_t i = 0; i < lanes; i += W) {
          const auto of = [&](const Values<T>& v)
                              __attribute__((always_inline)) { return load<T>(v.data + j * v.step + (i & v.lanes)); };
          V result;
          if constexpr (std::is_invocable_v<decltype(f), V&, V, V, V>)
            f(result, of(x), of(y), of(z));
          else if constexpr (std::is_invocable_v<decltype(f), V&, V, V>)
            f(result, of(x), of(y));
          else
            f(result, of(x));
          store<T>(to + j * kRowTile + i, result);
        }
    };
// These macros compute an operation's result from its operands a, b and c. Their lambdas are always inlined, because
// GCC compiles lambdas in templates for the oldest processor.
#define ATTN_EACH(result, ...) \
  return each([](V& to, __VA_ARGS__) __attribute__((always_inline)) { to = as_number<T>(result); })
#define ATTN_WHOLE(result) \
  ATTN_EACH(each_whole<T>(a, b, [](Int<T> m, Int<T> n) { return static_cast<Int<T>>(result); }), const V& a, const V& b)
    switch (step.op) {
      case Op::add:
        ATTN_EACH(a + b, const V& a, const V& b);
      case Op::sub:
        ATTN_EACH(a - b, const V& a, const V& b);
      case Op::mul:
        ATTN_EACH(a * b, const V& a, const V& b);
      case Op::div:
        ATTN_EACH(a / b, const V& a, const V& b);
      case Op::neg:
        ATTN_EACH(-a, const V& a);
      case Op::abs:
        ATTN_EACH(absolute<T>(a), const V& a);
      case Op::minimum:
        ATTN_EACH((a < b ? a : b < a ? b : a == b ? a : a + b), const V& a, const V& b);
      case Op::maximum:
        ATTN_EACH((a > b ? a : b > a ? b : a == b ? a : a + b), const V& a, const V& b);
      case Op::clamp:
        ATTN_EACH(bounded<T>(a, b, c), const V& a, const V& b, const V& c);
      case Op::sqrt:
        ATTN_EACH(each_lane<T>(a, [](T n) { return sizeof(T) == 4 ? __builtin_sqrtf(n) : __builtin_sqrt(n); }),
                  const V& a);
      case Op::exp:
        ATTN_EACH(exp_of_any<T>(a), const V& a);
      case Op::exp2:
        ATTN_EACH(exp2_of_any<T>(a), const V& a);
      case Op::log:
        ATTN_EACH(each_lane<T>(a, [](T n) { return __builtin_log(n); }), const V& a);
      case Op::log1p:
        ATTN_EACH(each_lane<T>(a, [](T n) { return __builtin_log1p(n); }), const V& a);
      case Op::tanh:
        ATTN_EACH(tanh_of_exponent<T>(a * (b * static_cast<T>(2 * kLog2E)), c[0]), const V& a, const V& b, const V& c);
      case Op::floor:
        ATTN_EACH(each_lane<T>(a, [](T n) { return sizeof(T) == 4 ? __builtin_floorf(n) : __builtin_floor(n); }),
                  const V& a);
      case Op::times:
        ATTN_EACH((a == V{} ? V{} : a * b), const V& a, const V& b);
      case Op::fma:
        ATTN_EACH(a * b + c, const V& a, const V& b, const V& c);
      case Op::fms:
        ATTN_EACH(a * b - c, const V& a, const V& b, const V& c);
      case Op::fnma:
        ATTN_EACH(c - a * b, const V& a, const V& b, const V& c);
      case Op::add_whole:
        ATTN_EACH(bits<T>(a) + bits<T>(b), const V& a, const V& b);
      case Op::sub_whole:
        ATTN_EACH(bits<T>(a) - bits<T>(b), const V& a, const V& b);
      case Op::mul_whole:
        ATTN_EACH(bits<T>(a) * bits<T>(b), const V& a, const V& b);
      case Op::minimum_whole:
        ATTN_EACH((whole<T>(a) < whole<T>(b) ? a : b), const V& a, const V& b);
      case Op::maximum_whole:
        ATTN_EACH((whole<T>(a) > whole<T>(b) ? a : b), const V& a, const V& b);
      case Op::floor_divide:
        ATTN_WHOLE(quotient(m, n));
      case Op::remainder:
        ATTN_WHOLE(n == 0 ? 0 : unsigned_of(m) - unsigned_of(quotient(m, n)) * unsigned_of(n));
      case Op::bit_and:
        ATTN_EACH(whole<T>(a) & whole<T>(b), const V& a, const V& b);
      case Op::bit_or:
        ATTN_EACH(whole<T>(a) | whole<T>(b), const V& a, const V& b);
      case Op::bit_xor:
        ATTN_EACH(whole<T>(a) ^ whole<T>(b), const V& a, const V& b);
      case Op::bit_not:
        ATTN_EACH(~whole<T>(a), const V& a);
      case Op::eq:
        ATTN_EACH(a == b, const V& a, const V& b);
      case Op::ne:
        ATTN_EACH(a != b, const V& a, const V& b);
      case Op::lt:
        ATTN_EACH(a < b, const V& a, const V& b);
      case Op::le:
        ATTN_EACH(a <= b, const V& a, const V& b);
      case Op::eq_whole:
        ATTN_EACH(whole<T>(a) == whole<T>(b), const V& a, const V& b);
      case Op::ne_whole:
        ATTN_EACH(whole<T>(a) != whole<T>(b), const V& a, const V& b);
      case Op::lt_whole:
        ATTN_EACH(whole<T>(a) < whole<T>(b), const V& a, const V& b);
      case Op::le_whole:
        ATTN_EACH(whole<T>(a) <= whole<T>(b), const V& a, const V& b);
      case Op::where:
        ATTN_EACH((whole<T>(a) ? b : c), const V& a, const V& b, const V& c);
      case Op::lookup:
      case Op::lookup_tangent:
        return look_up(step, terms_of(step), count, to);
      case Op::float_of:
        ATTN_EACH(__builtin_convertvector(whole<T>(a), V), const V& a);
      case Op::whole_of:
        ATTN_EACH(__builtin_convertvector(a, Vec<Int<T>>), const V& a);
      case Op::leaf:
        break;
    }
#undef ATTN_EACH
#undef ATTN_WHOLE
    __builtin_unreachable();
  }

  // A table and the operand that indexes it. Pair (j, lane) of a strip looks up table[(first_ + j) * key + lane * row +
  // index_at(j, lane)].
  struct Lookup {
    const T* table;
    int64_t row, key;
    UInt<T> size;
    Values<T> index;
    const Indices* indices;  // null if the index is no leaf
    UInt<T> index_at(int64_t j, int64_t lane) const {
      return bit_cast<UInt<T>>(index.data[j * index.step + (lane & index.lanes)]);
    }
  };
  static constexpr bool is_number(Leaf leaf) {
    return leaf == Leaf::distance_number || leaf == Leaf::key_number || leaf == Leaf::row_number || leaf == Leaf::key ||
           leaf == Leaf::query;
  }
  Lookup lookup(int number, const Terms& terms, int16_t index) const {
    const Table& table = program_.tables[number];
    const T* data = static_cast<const T*>(terms.data);
    Lookup found = {data, 0, 0, static_cast<UInt<T>>(table.size), at(index), nullptr};
    if (table.of == TableOf::queries) found.row = terms.row;
    if (table.of == TableOf::keys) found.key = terms.row;
    found.table += entry_ * terms.entry + head_ * terms.head + rows_.first * found.row + first_key_ * found.key;
    if (index < 0 && is_number(list_.leaves[-1 - index].leaf)) found.indices = &indices_[-1 - index];
    return found;
  }

  // Compares the indices of W rows and W keys. The step is the difference between the indices of neighbouring keys if
  // each row has a table of its own, else of neighbouring rows. Returns the step if it is 1 everywhere or -1
  // everywhere, and all of these indices lie inside the table. Otherwise returns 0.
  ATTN_INLINE int step_of(const Lookup& at, int64_t j, int64_t i) const {
    const bool of_distances = at.indices && at.indices->of_distances;
    if (!at.indices || !(of_distances || (at.indices->of_keys ? at.row : at.key) != 0)) return 0;
    const int64_t place = at.indices->place(first_ + j + (of_distances ? W - 1 : 0), i);
    const T* const numbers = at.indices->numbers + place;
    const Vec<UInt<T>> here = bits<T>(load<T>(numbers)), steps = bits<T>(load<T>(numbers + 1)) - here;
    const auto step = static_cast<Int<T>>(steps[0]);
    if (step != 1 && step != -1) return 0;
    const auto is_other = [&](Vec<UInt<T>> found) {
      return any((found - steps[0] != Vec<UInt<T>>{}) & (lane_numbers<T>() < W - 1));
    };
    if (is_other(steps)) return 0;
    if (of_distances && is_other(bits<T>(load<T>(numbers + W)) - bits<T>(load<T>(numbers + W - 1)))) return 0;
    const UInt<T> first = here[0], last = first + static_cast<UInt<T>>(step * (of_distances ? 2 * W - 2 : W - 1));
    if (first >= at.size || last >= at.size) return 0;
    return at.row != 0 && of_distances ? -step : step;
  }

  void look_up(const Step& step, const Terms& terms, int64_t count, T* to) const {
    const Values<T> y = at(step.from[1]), z = at(step.from[2]);
    const auto put = [&](int64_t j, int64_t i, Vec<T> found) __attribute__((always_inline)) {
      const auto of = [&](const Values<T>& v)
                          __attribute__((always_inline)) { return load<T>(v.data + j * v.step + (i & v.lanes)); };
      store<T>(to + j * kRowTile + i, of(y) * of(z) + found);
    };
    if (Values<T> same = lookups_[step.lookup]; same.data) {
      same.data += first_ * same.step;
      for (int64_t j = 0; j < count; ++j)
        for (int64_t i = 0; i < lanes_; i += W) put(j, i, load<T>(same.data + j * same.step + (i & same.lanes)));
      return;
    }
    const Lookup at = lookup(step.table, terms, step.from[0]);
    const T* const table = at.table + first_ * at.key;
    const Indices* const leaf = at.size >= UInt<T>{W} ? at.indices : nullptr;
    const int64_t last = rows_.size() - 1;
    // Lanes without a row read the last row's numbers.
    const auto row = [&](int64_t i) { return table + smaller(i, last) * at.row; };
    for (int64_t i = 0; i < lanes_; i += W)
      for (int64_t j = 0; j < count; j += W) {
        const int64_t keys = smaller(W, count - j);
        if (leaf && at.row != 0 && (leaf->of_distances || leaf->of_keys)) {
          // Each row has its own table. A single vector of this table may hold the numbers of W keys.
          const int64_t place = leaf->place(first_ + j + (leaf->of_distances ? W - 1 : 0), i);
          const Vec<UInt<T>> base = first_of(at, place, leaf->of_keys);
          if (base[0] != kScattered) {
            UInt<T> from[W];
            __builtin_memcpy(from, &base, sizeof base);
            Vec<T> columns[W];
            for (int k = 0; k < W; ++k) {
              const T* const numbers = leaf->numbers + place + (leaf->of_keys ? 0 : k);
              columns[k] = chosen<T>(load<T>(row(i + k) + from[k]), bits<T>(load<T>(numbers)) - from[k]);
            }
            transpose<T>(columns);
            for (int64_t k = 0; k < keys; ++k) put(j + k, i, columns[leaf->of_keys ? k : W - 1 - k]);
            continue;
          }
        }
        for (int64_t key = j; key < j + keys; ++key) {
          const T* const from = row(i) + key * at.key;
          if (leaf && at.key != 0 && !leaf->of_keys) {  // W rows read the table of one key
            const int64_t place = leaf->place(first_ + key, i);
            const UInt<T> base = smaller(leaf->least[place], at.size - W);
            if (leaf->most[place] < at.size && leaf->most[place] - base < W) {
              put(key, i, chosen<T>(load<T>(from + base), bits<T>(load<T>(leaf->numbers + place)) - base));
              continue;
            }
          }
          Vec<T> numbers{};
          for (int k = 0; k < W; ++k) {
            const UInt<T> index = at.index_at(key, i + k);
            if (index < at.size)
              numbers[k] = (row(i + k) + key * at.key)[index];
            else if (i + k <= last)
              report(rows_.first + i + k, first_key_ + first_ + key, static_cast<Int<T>>(index), at.size);
          }
          put(key, i, numbers);
        }
      }
  }
  // Each of W rows looks up W numbers in its table. Returns, for each row, an index of its table. The vector that
  // begins there holds these W numbers. Returns kScattered if some row has no such vector inside its table. `one`: all
  // rows look up the W indices from `place` on. Otherwise row k looks up the W indices from `place` + k on.
  static constexpr UInt<T> kScattered = ~UInt<T>{};
  static ATTN_INLINE Vec<UInt<T>> first_of(const Lookup& at, int64_t place, bool one) {
    const auto many = [&](const UInt<T>* x) { return one ? splat<UInt<T>>(x[place]) : load<UInt<T>>(x + place); };
    const Vec<UInt<T>> least = many(at.indices->least), most = many(at.indices->most);
    const Vec<UInt<T>> last = splat<UInt<T>>(at.size - W), base = least < last ? least : last;
    return any((most > last + (W - 1)) | (most - base >= UInt<T>{W})) ? splat<UInt<T>>(kScattered) : base;
  }

  // If all pairs of the tile have the same index, reads the table once for all strips. Reads one number for the tile,
  // or one number for each row (key) if each row (key) has a table of its own.
  void look_up_once(const Step& step, const Terms& terms, int64_t keys, T* to) {
    Values<T>& same = lookups_[step.lookup];
    same = {nullptr, 0, 0};
    if (!terms.data) {  // the direction has no part for this table, so all its numbers are 0
      store<T>(to, Vec<T>{});
      same.data = to;
    }
    if (step.from[0] >= 0 || same.data) return;
    const Lookup at = lookup(step.table, terms, step.from[0]);
    const UInt<T> index = at.index_at(0, 0);
    if (!at.indices || !at.indices->are_same || index >= at.size) return;
    const int64_t rows = rows_.size();
    if (at.key != 0) {
      for (int64_t j = 0; j < keys; ++j) store<T>(to + j * W, splat<T>(at.table[j * at.key + index]));
      same = {to, W, 0};
    } else {
      for (int64_t i = 0; i < kRowTile; ++i) to[i] = at.table[smaller(i, rows - 1) * at.row + index];
      same = {to, 0, -1};
    }
  }

  // Remembers the first pair, counted row by row, that has a wrong index, because a kernel must not throw.
  void report(int64_t row, int64_t key, Int<T> index, int64_t size) const {
    const int64_t pair = row * program_.keys + key;
    int64_t known = __atomic_load_n(&program_.wrong[0], __ATOMIC_RELAXED);
    while ((known < 0 || pair < known) &&
           !__atomic_compare_exchange_n(&program_.wrong[0], &known, pair, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
    if (__atomic_load_n(&program_.wrong[0], __ATOMIC_RELAXED) != pair) return;
    __atomic_store_n(&program_.wrong[1], int64_t{index}, __ATOMIC_RELAXED);
    __atomic_store_n(&program_.wrong[2], size, __ATOMIC_RELAXED);
  }

  // Integers wrap around, as PyTorch's integers do.
  static constexpr UInt<T> unsigned_of(Int<T> x) { return static_cast<UInt<T>>(x); }
  static ATTN_INLINE Int<T> quotient(Int<T> a, Int<T> b) {
    if (b == 0) return 0;
    if (b == -1) return static_cast<Int<T>>(-unsigned_of(a));
    return a / b - (a % b != 0 && (a < 0) != (b < 0) ? 1 : 0);
  }

  const PairProgram& program_;
  const List& list_;
  int64_t entry_, head_;
  Values<T>*leaves_, *lookups_;
  Indices* indices_;  // of leaves
  T* slots_;
  Range rows_;
  int64_t first_key_;
  int64_t lanes_;
  int64_t first_ = 0;
  T* kept_ = nullptr;
};

// Prefetches the numbers that the pairs of a tile look up in tables, or the gradients of these numbers. Fetches some of
// them after each register tile of a product. Processors by themselves do not read ahead here, because tables are large
// and their rows lie far apart.
template <class T>
class TablesAhead {
 public:
  // Chooses what to prefetch: the tables that the list reads or, if `gradients` is not null, the gradients of tables to
  // which the list's results are added. Leaves out tables that stay in the cache from tile to tile.
  TablesAhead(const Problem& p, const List* list, const RowTile& tile, Range keys, const Terms* gradients,
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

  void add(const Problem& p, const List& list, int16_t from, int table, const Terms& terms, int64_t begin,
           const RowTile& tile, Range keys) {
    const Leaf leaf = from < 0 ? list.leaves[-1 - from].leaf : Leaf::score;
    const bool of_distances = leaf == Leaf::distance_number, of_keys = leaf == Leaf::key_number;
    const TableOf of = p.program->tables[table].of;
    constexpr int64_t kSmall = 1024;  // bytes of an owner's part of the table
    if (p.program->tables[table].size * int64_t{sizeof(T)} <= kSmall) return;
    if (count_ == kMost || of == TableOf::all || !(of_distances || of_keys || leaf == Leaf::row_number)) return;
    const bool owned_by_rows = of == TableOf::queries;
    const Terms& t = p.program->terms[static_cast<int>(leaf) - static_cast<int>(Leaf::row_term)];
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

// The room for all lists of a problem, in numbers. The room is larger than the lists need, because add_diagonals()
// reads up to a vector past a tile's end.
template <class T>
int64_t room_of_program(const Problem& p) {
  if (!p.program) return 0;
  int64_t room = 2 * kLanes<T>;
  const PairProgram& program = *p.program;
  const List* const lists[] = {program.score, program.keeping, program.gradient, program.tangent,
                               program.tangent_gradient};
  for (const List* list : lists) room += Evaluation<T>::room(list);
  return room;
}

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
  const Range rows = {row_tile * kRowTile, smaller((row_tile + 1) * kRowTile, p.program->queries)};
  int32_t* const tiles = m.tiles + task * m.key_tiles;
  Problem whole_call = p;
  whole_call.first_entry = 0;
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
  for (int64_t key_tile = 0; key_tile < m.key_tiles; ++key_tile) {
    if (wants_bits && tiles[key_tile] < 0) continue;
    const Range keys = {key_tile * kKeyTile, smaller((key_tile + 1) * kKeyTile, p.program->keys)};
    bool any_partial = !m.blocks.data;
    for (int64_t key = keys.first; m.blocks.data && key < keys.last; key = (key / m.block_keys + 1) * m.block_keys)
      each_part(key, [&](int64_t, int64_t, uint8_t kind) { any_partial |= kind == kPartialBlock; });
    Between shown = any_partial && m.list ? kEither : Between{-1, -1};
    if (!shown.is_one() && !wants_bits) shown = bounds(*p.program, list, n, head, rows, keys, room);
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
