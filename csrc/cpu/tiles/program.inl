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

// whole() and bits() reinterpret numbers as whole numbers of the same size, signed or unsigned. as_number() does the
// reverse. Unsigned numbers wrap around, as PyTorch's integers do.
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
  int64_t lanes;  // all bits, or 0 where all lanes are the same
};

// The tiles [key][kRowTile] that a list reads, apart from leaves in tensors. A pointer is null if the list does not
// read its tile.
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

template <class T>
class Evaluation {
 public:
  static constexpr int W = kLanes<T>;
  // A leaf has room for a number per row of a tile, a number per distance, or W copies of a number per key.
  static constexpr int64_t kLeaf = larger(kKeyTile * W, 2 * kRowTile), kSlot = kStrip * kRowTile;

  static int64_t room(const List* list) {
    return list ? room_of_places(*list) + (list->leaf_count + list->lookups) * kLeaf + list->slots * kSlot : 0;
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
        runs_(reinterpret_cast<uint8_t*>(lookups_ + list.lookups)),
        rows_(rows),
        first_key_(keys.first),
        lanes_(round_up(rows.size(), W)) {
    workspace += room_of_places(list);
    slots_ = workspace + (list.leaf_count + list.lookups) * kLeaf;
    for (int i = 0; i < list.leaf_count; ++i) {
      const Leaf leaf = list.leaves[i].leaf;
      T* const numbers = workspace + i * kLeaf;
      leaves_[i] = read(p, list.leaves[i], entry_, head, rows, keys, tiles, numbers);
      if (!reads_tables(list) || !is_number(leaf)) continue;
      const bool of_keys = leaf == Leaf::key_number || leaf == Leaf::key,
                 of_rows = leaf == Leaf::row_number || leaf == Leaf::query;
      follow(numbers,
             of_keys   ? keys.size()
             : of_rows ? kRowTile
                       : 2 * kRowTile,
             of_keys ? W : 1, runs_ + i * 2 * kRowTile);
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

  // Evaluates the list at keys [first, first + count) of the tile. The last operation writes to `to`, unless `to` is
  // null.
  void run(int64_t first, int64_t count, T* to = nullptr) {
    first_ = first;
    for (int i = list_.uniform_slots; i < list_.step_count; ++i)
      apply(i, count, i + 1 == list_.step_count ? to : nullptr);
  }

  // Copies a result to a strip of `count` keys of a tile. run() may have read this tile.
  void copy(int16_t from, int64_t count, T* to) const {
    const Values<T> x = at(from);
    for (int64_t j = 0; j < count; ++j)
      for (int64_t i = 0; i < lanes_; i += W)
        store<T>(to + j * kRowTile + i, load<T>(x.data + j * x.step + (i & x.lanes)));
  }
  // Returns an operand, or a result after run() has computed it.
  Values<T> at(int16_t from) const {
    if (from >= list_.uniform_slots) return {slots_ + from * kSlot, kRowTile, -1};
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
    const auto of = [&](int64_t j, int64_t i)
                        __attribute__((always_inline)) { return load<T>(x.data + j * x.step + i); };
    const auto one_by_one = [&](int64_t j, int64_t i, const Indices& found) {
      const T* const from = x.data + j * x.step + i;
      for (int64_t k = 0; k < smaller(W, rows_.size() - i); ++k)
        if (found.index[k] < at.size) table[j * at.key + (i + k) * at.row + found.index[k]] += from[k];
    };
    for (int64_t i = 0; i < lanes_; i += W)
      for (int64_t j = 0; j < count;) {
        const Indices found = indices(at, j, i, count, W);
        T* const to = table + j * at.key + i * at.row;
        if (!found.are_inside || i + W > rows_.size()) {  // a lane without a row may hold a NaN
          one_by_one(j, i, found);
          j += 1;
          continue;
        }
        if (at.key != 0) {
          for (int64_t k = 0; k < found.count; ++k) add_to(to + k * at.key + k * found.step, found, of(j + k, i));
        } else if (found.step == 0) {
          Vec<T> sum = of(j, i);
          for (int64_t k = 1; k < found.count; ++k) sum += of(j + k, i);
          if (at.row == 0)
            add_to(to, found, sum);
          else
            for (int k = 0; k < W; ++k) to[k * at.row + found.index[k]] += sum[k];
        } else {
          Vec<T> columns[W];
          for (int k = 0; k < W; ++k) columns[k] = of(j + (found.step > 0 ? k : W - 1 - k), i);
          transpose<T>(columns);
          for (int k = 0; k < W; ++k) {
            T* const number = to + k * at.row + found.least(k);
            store<T>(number, load<T>(number) + columns[k]);
          }
        }
        j += found.count;
      }
  }

 private:
  static int64_t room_of_places(const List& list) {
    constexpr int64_t kPlaces = divide_up(sizeof(Values<T>), sizeof(T)), kRuns = 2 * kRowTile / sizeof(T);
    return round_up((list.leaf_count + list.lookups) * kPlaces + list.leaf_count * kRuns, W);
  }
  // Whether a list reads tables, or computes gradients of tables.
  static bool reads_tables(const List& list) {
    bool reads = list.lookups > 0;
    for (int i = 0; i < list.result_count; ++i) reads |= list.results[i].table >= 0;
    return reads;
  }
  const Terms& terms_of(const Step& step) const {
    const Table& table = program_.tables[step.table];
    return step.op == Op::lookup ? table.numbers : table.tangent;
  }

  // Sets runs[n] to how many numbers follow number n at equal differences. Numbers are `step` apart in memory.
  static void follow(const T* numbers, int64_t count, int64_t step, uint8_t* runs) {
    const auto difference = [&](int64_t n) {
      return bit_cast<UInt<T>>(numbers[(n + 1) * step]) - bit_cast<UInt<T>>(numbers[n * step]);
    };
    runs[count - 1] = 0;
    for (int64_t n = count - 2; n >= 0; --n)
      runs[n] = n + 2 < count && difference(n) == difference(n + 1) ? static_cast<uint8_t>(runs[n + 1] + 1) : 1;
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
      case Leaf::boolean:
        return everywhere(as_lane(leaf.number != 0 ? -1 : 0));
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
    if (!to) to = slots_ + step.to * kSlot;
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

  // A table and an index into it. Number (j, lane) of a strip is table[(first_ + j) * key + lane * row + index]. If the
  // index is a number per row, per key or per distance, `runs` says how far it goes on in equal steps.
  struct Lookup {
    const T* table;
    int64_t row, key;
    UInt<T> size;
    Values<T> index;
    Leaf of;
    const uint8_t* runs;  // see follow(); null if it is another index
    Vec<UInt<T>> at(int64_t j, int64_t i) const {
      return bits<T>(load<T>(index.data + j * index.step + (i & index.lanes)));
    }
  };
  static constexpr bool is_number(Leaf leaf) {
    return leaf == Leaf::distance_number || leaf == Leaf::key_number || leaf == Leaf::row_number || leaf == Leaf::key ||
           leaf == Leaf::query;
  }
  Lookup lookup(int number, const Terms& terms, int16_t index) const {
    const Table& table = program_.tables[number];
    const T* data = static_cast<const T*>(terms.data);
    Lookup found = {data, 0, 0, static_cast<UInt<T>>(table.size), at(index), Leaf::score, nullptr};
    if (table.of == TableOf::queries) found.row = terms.row;
    if (table.of == TableOf::keys) found.key = terms.row;
    found.table += entry_ * terms.entry + head_ * terms.head + rows_.first * found.row + first_key_ * found.key;
    if (index < 0) found.of = list_.leaves[-1 - index].leaf;
    if (is_number(found.of)) found.runs = runs_ + (-1 - index) * 2 * kRowTile;
    return found;
  }

  // How the index changes from lane to lane: it ascends by 1, descends by 1, stays the same, or changes in any other
  // way.
  enum class Along { ascending, descending, same, any };
  static Along along(Int<T> step) {
    return step == 0 ? Along::same : step == 1 ? Along::ascending : step == -1 ? Along::descending : Along::any;
  }
  // The indices of W lanes and `count` keys. From key to key they change by `step`, which is -1, 0 or 1.
  struct Indices {
    UInt<T> index[W];  // of the first key
    int64_t count;
    int step;
    Along along;      // those of each key
    bool are_inside;  // of the table, with all numbers that are read as vectors
    UInt<T> least(int lane) const { return index[lane] - static_cast<UInt<T>>(step < 0 ? count - 1 : 0); }
  };
  // Returns indices from key j of a strip of `keys` keys on. If all keys share the table's numbers, a step other than 0
  // must hold for at least `least_steps` keys. Otherwise returns the indices of key j alone.
  ATTN_INLINE Indices indices(const Lookup& lookup, int64_t j, int64_t i, int64_t keys, int64_t least_steps) const {
    Indices found{{}, 1, 0, Along::any, true};
    const int64_t key = first_ + j, most = keys - j;
    const auto number = [&](int64_t at_key, int64_t lane) {
      return bit_cast<Int<T>>(lookup.index.data[at_key * lookup.index.step + lane]);
    };
    const auto go_on = [&](int64_t count, Int<T> step) {
      if (count < 2 || step < -1 || step > 1) return;
      found.count = count;
      found.step = static_cast<int>(step);
    };
    if (!lookup.runs) {
      const Vec<UInt<T>> here = lookup.at(j, i);
      if (most > 1) {
        const Vec<UInt<T>> steps = lookup.at(j + 1, i) - here;
        int64_t count = 2;
        if (any(steps - steps[0])) count = 1;
        while (count > 1 && count < most && !any(lookup.at(j + count, i) - lookup.at(j + count - 1, i) - steps))
          ++count;
        go_on(count, static_cast<Int<T>>(steps[0]));
      }
      const Vec<UInt<T>> of_lanes = here - here[0], numbers = bit_cast<Vec<UInt<T>>>(lane_numbers<T>());
      if (!any(of_lanes)) found.along = Along::same;
      if (!any(of_lanes - numbers)) found.along = Along::ascending;
      if (!any(of_lanes + numbers)) found.along = Along::descending;
    } else if (lookup.index.lanes == 0) {  // a number of keys
      const int64_t count = smaller(most, lookup.runs[key] + 1);
      go_on(count, count > 1 ? number(j + 1, 0) - number(j, 0) : 0);
      found.along = Along::same;
    } else if (lookup.index.step == 0) {  // of rows
      go_on(most, 0);
      if (lookup.runs[i] >= W - 1) found.along = along(number(0, i + 1) - number(0, i));
    } else {  // of distances, which descend from key to key
      const int64_t place = kKeyTile - 1 + i - key;
      const bool is_block = lookup.runs[place - most + 1] >= W + most - 2;
      if (is_block || lookup.runs[place] >= W - 1) found.along = along(number(j, i + 1) - number(j, i));
      if (is_block) go_on(most, -(number(j, i + 1) - number(j, i)));
    }
    const bool shares = lookup.key == 0;
    if (shares && found.step != 0) found.count = smaller(found.count, W);
    if (shares && found.step != 0 && found.count < least_steps) found.count = 1, found.step = 0;
    find(lookup, j, i, shares, found);
    if (!found.are_inside && found.count > 1) {
      found.count = 1, found.step = 0;
      find(lookup, j, i, shares, found);
    }
    return found;
  }
  // Fills in the indices of the first key, and whether all indices are inside the table.
  ATTN_INLINE void find(const Lookup& lookup, int64_t j, int64_t i, bool shares, Indices& found) const {
    const auto size = Vec<UInt<T>>{} + lookup.size;
    const Vec<UInt<T>> first = lookup.at(j, i);
    const auto others = static_cast<UInt<T>>(found.step == 0 ? 0 : found.count - 1);
    const Vec<UInt<T>> least = found.step < 0 ? first - others : first;
    const Vec<UInt<T>> most = found.step == 0 ? least : least + (shares ? static_cast<UInt<T>>(W - 1) : others);
    found.are_inside = !any((least >= size) | (most >= size));
    __builtin_memcpy(found.index, &first, sizeof first);
  }

  void look_up(const Step& step, const Terms& terms, int64_t count, T* to) const {
    const Values<T> z = at(step.from[2]);
    const auto put = [&](int64_t j, int64_t i, Vec<T> found) __attribute__((always_inline)) {
      store<T>(to + j * kRowTile + i, load<T>(z.data + j * z.step + (i & z.lanes)) + found);
    };
    if (Values<T> same = lookups_[step.lookup]; same.data) {
      same.data += first_ * same.step;
      for (int64_t j = 0; j < count; ++j)
        for (int64_t i = 0; i < lanes_; i += W) put(j, i, load<T>(same.data + j * same.step + (i & same.lanes)));
      return;
    }
    const Lookup at = lookup(step.table, terms, step.from[0]);
    const T* const table = at.table + first_ * at.key;
    const int64_t last = rows_.size() - 1;
    for (int64_t i = 0; i < lanes_; i += W)
      for (int64_t j = 0; j < count;) {
        const Indices found = indices(at, j, i, count, W / 2);
        const T* const from = table + j * at.key + i * at.row;
        const auto row = [&](int k) { return from + smaller(k, last - i) * at.row; };  // also of lanes without a row
        if (!found.are_inside) {
          Vec<T> numbers{};
          for (int k = 0; k < W; ++k) {
            if (found.index[k] < at.size)
              numbers[k] = row(k)[found.index[k]];
            else if (i + k <= last)
              report(rows_.first + i + k, first_key_ + first_ + j, static_cast<Int<T>>(found.index[k]), at.size);
          }
          put(j, i, numbers);
        } else if (at.key != 0) {
          for (int64_t k = 0; k < found.count; ++k)
            put(j + k, i, numbers_at(from + k * at.key + k * found.step, found));
        } else if (found.step == 0) {
          Vec<T> numbers{};
          if (at.row == 0)
            numbers = numbers_at(from, found);
          else
            for (int k = 0; k < W; ++k) numbers[k] = row(k)[found.index[k]];
          for (int64_t k = 0; k < found.count; ++k) put(j + k, i, numbers);
        } else {
          Vec<T> columns[W];
          for (int k = 0; k < W; ++k) columns[k] = load<T>(row(k) + found.least(k));
          transpose<T>(columns);
          for (int64_t k = 0; k < found.count; ++k) put(j + k, i, columns[found.step > 0 ? k : found.count - 1 - k]);
        }
        j += found.count;
      }
  }
  static ATTN_INLINE Vec<T> numbers_at(const T* table, const Indices& found) {
    switch (found.along) {
      case Along::same:
        return splat<T>(table[found.index[0]]);
      case Along::ascending:
        return load<T>(table + found.index[0]);
      case Along::descending:
        return reversed<T>(load<T>(table + found.index[W - 1]));
      case Along::any:
        break;
    }
    Vec<T> numbers{};
    for (int k = 0; k < W; ++k) numbers[k] = table[found.index[k]];
    return numbers;
  }
  static ATTN_INLINE void add_to(T* table, const Indices& found, Vec<T> x) {
    T* const first = table + found.index[0];
    T* const last = table + found.index[W - 1];
    T sum{};
    switch (found.along) {
      case Along::same:
        for (int k = 0; k < W; ++k) sum += x[k];
        *first += sum;
        return;
      case Along::ascending:
        return store<T>(first, load<T>(first) + x);
      case Along::descending:
        return store<T>(last, load<T>(last) + reversed<T>(x));
      case Along::any:
        break;
    }
    for (int k = 0; k < W; ++k) table[found.index[k]] += x[k];
  }

  // If an index is the same in the whole tile, reads one number for each row, or for each key, once for all strips.
  void look_up_once(const Step& step, const Terms& terms, int64_t keys, T* to) {
    Values<T>& same = lookups_[step.lookup];
    same = {nullptr, 0, 0};
    if (!terms.data) {  // of a direction without a derivative of this table
      store<T>(to, Vec<T>{});
      same.data = to;
    }
    if (step.from[0] >= 0 || same.data) return;
    const Lookup at = lookup(step.table, terms, step.from[0]);
    if (!at.runs) return;
    const int64_t rows = rows_.size();
    const bool of_keys = at.index.lanes == 0, of_rows = at.index.step == 0;
    const int64_t numbers = of_keys   ? keys
                            : of_rows ? rows
                                      : rows + keys - 1,
                  first = of_keys || of_rows ? 0 : kKeyTile - keys;
    const T* const last = at.index.data + (of_keys || of_rows ? 0 : 1 - keys);  // the number at `first`
    const auto index = bit_cast<UInt<T>>(*last);
    const int64_t next = of_keys ? W : 1;
    if (index >= at.size || (numbers > 1 && (at.runs[first] < numbers - 1 || bit_cast<UInt<T>>(last[next]) != index)))
      return;
    if (at.key != 0) {
      for (int64_t j = 0; j < keys; ++j) store<T>(to + j * W, splat<T>(at.table[j * at.key + index]));
      same = {to, W, 0};
    } else {
      for (int64_t i = 0; i < kRowTile; ++i) to[i] = at.table[smaller(i, rows - 1) * at.row + index];
      same = {to, 0, -1};
    }
  }

  // Remembers the least pair with a wrong index, because a kernel must not throw.
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

  // Whole numbers wrap around, as PyTorch's do.
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
  uint8_t* runs_;  // [leaf][2 * kRowTile]
  T* slots_;
  Range rows_;
  int64_t first_key_;
  int64_t lanes_;
  int64_t first_ = 0;
};

// The room for all lists of a problem, in numbers. It includes more than the lists need, because add_diagonals() reads
// up to a vector past a tile's end.
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

// These functions sum the numbers of a strip per lane, per key, or per diagonal. All pairs of a diagonal have the same
// distance. A lane without a row may hold a NaN, because its terms are 0. Such a lane adds nothing to keys and
// diagonals.
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
  const int64_t whole = rows / kLanes<T> * kLanes<T>;
  const auto has_row = lane_numbers<T>() < static_cast<Int<T>>(rows - whole);
  for (int64_t j = 0; j < count; ++j) {
    Vec<T> sum{};
    for (int64_t i = 0; i < whole; i += kLanes<T>) sum += load<T>(x.data + j * x.step + i);
    if (whole < rows) sum += has_row ? load<T>(x.data + j * x.step + whole) : Vec<T>{};
    for (int i = 0; i < kLanes<T>; ++i) sums[j * step] += sum[i];
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
