// Evaluates lists of operations (core/program.h) over tiles of scores.
//
// All operations of a list run over one strip (strips.inl) before the next strip begins. So their results, 4 KiB for
// each operation in float32, stay in the L1 cache.
#pragma once

#include "cpu/tiles/tables.inl"

namespace attn::ATTN_ISA {

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

template <class T>
class Evaluation {
 public:
  static constexpr int W = kLanes<T>;
  // A leaf has room for a number per row of a tile, a number per distance, or W copies of a number per key.
  static constexpr int64_t kLeaf = larger(kKeyTile * W, 2 * kRowTile), kSlot = kStrip * kRowTile;

  static int64_t room(const List* list) {
    return list ? room_of_places(*list) + (list->leaf_count + list->lookups) * kLeaf +
                      (reads_tables(*list) ? list->leaf_count * Indices<T>::kRoom : 0) + list->slots * kSlot
                : 0;
  }

  Evaluation(const Problem& p, const List& list, const auto& tile, const PairTiles<T>& tiles, T* workspace)
      : Evaluation(p, list, tile.rows->n, tile.rows->head[0],
                   {tile.rows->position[0], tile.rows->position[0] + tile.rows->count}, tile.keys, tiles, workspace,
                   static_cast<const T*>(tile.rows->tables), static_cast<T*>(tile.rows->grad_tables)) {}
  Evaluation(const Problem& p, const List& list, int64_t n, int64_t head, Range rows, Range keys,
             const PairTiles<T>& tiles, T* workspace, const T* tables = nullptr, T* grad_tables = nullptr)
      : program_(*p.program),
        list_(list),
        entry_(p.first_entry + n),
        head_(head),
        leaves_(reinterpret_cast<Values<T>*>(workspace)),
        lookups_(leaves_ + list.leaf_count),
        indices_(reinterpret_cast<Indices<T>*>(lookups_ + list.lookups)),
        rows_(rows),
        first_key_(keys.first),
        lanes_(round_up(rows.size(), W)),
        tables_(tables),
        grad_tables_(grad_tables) {
    workspace += room_of_places(list);
    T* const indices = workspace + (list.leaf_count + list.lookups) * kLeaf;
    const bool has_tables = reads_tables(list);
    slots_ = indices + (has_tables ? list.leaf_count * Indices<T>::kRoom : 0);
    for (int i = 0; i < list.leaf_count; ++i) {
      const Leaf leaf = list.leaves[i].leaf;
      T* const numbers = workspace + i * kLeaf;
      leaves_[i] = read(p, list.leaves[i], entry_, head, rows, keys, tiles, numbers);
      if (has_tables && may_index(leaf))
        indices_[i] = Indices<T>::of(leaf, leaves_[i], rows.size(), keys.size(), indices + i * Indices<T>::kRoom);
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
  void scatter(const Values<T>& x, const ResultOfList& result, int64_t count, const GradTerms& grad,
               int64_t begin) const {
    const Lookup<T, T> at = lookup(result.table, grad, result.index, grad_tables_);
    if (at.is_transposed) {
      const auto to = [&](int64_t key) { return at.table + at.index_at(key, 0) * kRowTile; };
      if (at.indices->are_same && at.index_at(0, 0) < at.size) return add_rows<T>(x, count, lanes_, to(0));
      for (int64_t j = 0; j < count; ++j)
        for (int64_t i = 0; i < lanes_ && at.index_at(j, 0) < at.size; i += W)
          store<T>(to(j) + i, load<T>(to(j) + i) + load<T>(x.data + j * x.step + i));
      return;
    }
    T* const table = at.table + begin + first_ * at.key;
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
        const int step = of_keys == W && of_rows == W ? at.step(j, i) : 0;
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
  static int64_t room_of_places(const List& list) {
    const size_t bytes = (list.leaf_count + list.lookups) * sizeof(Values<T>) + list.leaf_count * sizeof(Indices<T>);
    return round_up(divide_up(static_cast<int64_t>(bytes), sizeof(T)), W);
  }
  // Whether a list reads tables, or computes gradients of tables.
  static bool reads_tables(const List& list) {
    bool reads = list.lookups > 0;
    for (int i = 0; i < list.result_count; ++i) reads |= list.results[i].table >= 0;
    return reads;
  }
  T* slot(int16_t n) const {
    if (kept_ && n == list_.results[1].from) return kept_;
    return slots_ + n * kSlot;
  }
  const Terms& terms_of(const Step& step) const {
    const Table& table = program_.tables[step.table];
    return step.op == Op::lookup ? table.numbers : table.tangent;
  }

  static T as_lane(Int<T> x) { return bit_cast<T>(x); }

  static Values<T> read(const Problem& p, const LeafOfList& leaf, int64_t n, int64_t head, Range rows, Range keys,
                        const PairTiles<T>& tiles, T* to) {
    const auto everywhere = [&](T x) {
      for (int i = 0; i < W; ++i) to[i] = x;
      return Values<T>{to, 0, 0};
    };
    const auto of_rows = [&](auto number, const T* in_place = nullptr) {
      // Indices and Lookup::step() also read the number after the tile.
      if (in_place && rows.first + kRowTile < p.program->queries) return Values<T>{in_place + rows.first, 0, -1};
      for (int64_t i = 0; i < kRowTile; ++i) to[i] = i < rows.size() ? number(rows.first + i) : T{};
      return Values<T>{to, 0, -1};
    };
    // An operation reads W copies of a number as one vector. The index of a table is read as a single number.
    const auto of_keys = [&](auto number, const T* in_place = nullptr) {
      if (leaf.only_index) {
        if (in_place && keys.first + kKeyTile + W < p.program->keys) return Values<T>{in_place + keys.first, 1, 0};
        for (int64_t j = 0; j < kKeyTile + W; ++j) to[j] = j < keys.size() ? number(keys.first + j) : T{};
        return Values<T>{to, 1, 0};
      }
      for (int64_t j = 0; j < keys.size(); ++j) {
        const T x = number(keys.first + j);
        for (int i = 0; i < W; ++i) to[j * W + i] = x;
      }
      return Values<T>{to, W, 0};
    };
    const auto of_distances = [&](auto number, const T* in_place) {
      const int64_t first = rows.first - keys.first - (kKeyTile - 1) + p.program->keys - 1;
      const int64_t last = p.program->queries + p.program->keys - 1;
      // Indices::of() reads whole vectors, and the number after them.
      if (in_place && first >= 0 && first + 2 * kRowTile + W <= last)
        return Values<T>{in_place + first + kKeyTile - 1, -1, -1};
      fill_zero(to, 2 * kRowTile);
      for (int64_t i = larger(0, -first); i < smaller(2 * kRowTile, last - first); ++i) to[i] = number(first + i);
      return Values<T>{to + kKeyTile - 1, -1, -1};
    };
    const auto tile = [](const T* data) { return Values<T>{data, kRowTile, -1}; };
    const int kind = kind_of(leaf.leaf);
    const Terms t = 0 <= kind && kind < kTermKinds ? p.program->terms[kind] : Terms{};
    const int64_t column = n * t.entry + head * t.head + leaf.column * t.col;
    const auto term = [&](int64_t row) { return static_cast<const T*>(t.data)[column + row * t.row]; };
    const auto number = [&](int64_t row) { return as_lane(static_cast<const int32_t*>(t.data)[column + row * t.row]); };
    // Kernels read numbers in place if these numbers lie side by side and are as wide as T. Otherwise they read a copy.
    const T* const terms = t.row == 1 ? static_cast<const T*>(t.data) + column : nullptr;
    const T* const numbers = sizeof(T) == sizeof(int32_t) ? terms : nullptr;
    switch (leaf.leaf) {
      case Leaf::number:
        return everywhere(static_cast<T>(leaf.number));
      case Leaf::whole_number:
        return everywhere(as_lane(static_cast<Int<T>>(leaf.whole)));
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
        return of_rows(term, terms);
      case Leaf::key_term:
      case Leaf::key_tangent:
        return of_keys(term);
      case Leaf::distance_term:
      case Leaf::distance_tangent:
        return of_distances(term, terms);
      case Leaf::row_number:
        return of_rows(number, numbers);
      case Leaf::key_number:
        return of_keys(number, numbers);
      case Leaf::distance_number:
        return of_distances(number, numbers);
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
    Op op = step.op;
    Values<T> x = at(step.from[0]), y = at(step.from[1]), z = at(step.from[2]);
    if (!to) to = slot(step.to);
    if (op == Op::lookup || op == Op::lookup_tangent) {
      const Values<T> same = lookups_[step.lookup];
      if (!same.data) return look_up(step, terms_of(step), count, to);
      op = Op::fma;
      x = y;
      y = z;
      z = {same.data + first_ * same.step, same.step, same.lanes};
    }
    const auto each = [&, lanes = lanes_](auto operands, auto f) __attribute__((always_inline)) {
      constexpr int kOperands = decltype(operands)::value;
      const int64_t next_x = x.lanes & W, next_y = y.lanes & W, next_z = z.lanes & W;  // to the next vector
      const auto in_strip = [&](auto second_is_same) __attribute__((always_inline)) {
        const V same = load<T>(y.data);
        for (int64_t j = 0; j < count; ++j) {
          const T *a = x.data + j * x.step, *b = y.data + j * y.step, *c = z.data + j * z.step;
          T* result = to + j * kRowTile;
#pragma GCC unroll 4
          for (const T* const end = result + lanes; result != end; result += W, a += next_x, b += next_y, c += next_z) {
            const V second = kOperands < 2 ? V{} : second_is_same() ? same : load<T>(b);
            V of_vector;
            f(of_vector, load<T>(a), second, kOperands < 3 ? V{} : load<T>(c));
            store<T>(result, of_vector);
          }
        }
      };
      // Often the second operand is a constant, such as the scale. It stays in a register.
      if (kOperands > 1 && y.step == 0 && y.lanes == 0) return in_strip(std::true_type());
      in_strip(std::false_type());
    };
    switch (op) {
// The lambda is always inlined, because GCC compiles lambdas in templates for the oldest processor.
#define ATTN_OPERATION(op, name, signatures, value, ...)                                                         \
  case Op::op:                                                                                                   \
    return each(std::integral_constant<int, operand_count(signatures)>(),                                        \
                [](V& to, [[maybe_unused]] const V& a, [[maybe_unused]] const V& b, [[maybe_unused]] const V& c) \
                    __attribute__((always_inline)) { to = as_number<T>(value); });
#include "core/operations.inl"
      case Op::leaf:
      case Op::lookup:
      case Op::lookup_tangent:
        break;
    }
    __builtin_unreachable();
  }

  // `tiles`: the tables of the tile's rows that are kept transposed, or null.
  template <class Data, class Number>
  Lookup<T, Number> lookup(int number, const TermsOf<Data>& terms, int16_t index, Number* tiles) const {
    const Table& table = program_.tables[number];
    Number* data = static_cast<Number*>(terms.data);
    Lookup<T, Number> found = {data, 0, 0, static_cast<UInt<T>>(table.size), at(index), nullptr, first_, false};
    if (tiles && table.transposed_at >= 0) {
      found.table = tiles + table.transposed_at;
      found.is_transposed = true;
    } else {
      if (table.of == TableOf::queries) found.row = terms.row;
      if (table.of == TableOf::keys) found.key = terms.row;
      found.table += entry_ * terms.entry + head_ * terms.head + rows_.first * found.row + first_key_ * found.key;
    }
    if (index < 0 && may_index(list_.leaves[-1 - index].leaf)) found.indices = &indices_[-1 - index];
    return found;
  }

  void look_up(const Step& step, const Terms& terms, int64_t count, T* to) const {
    const Values<T> y = at(step.from[1]), z = at(step.from[2]);
    const auto put = [&](int64_t j, int64_t i, Vec<T> found) __attribute__((always_inline)) {
      const auto of = [&](const Values<T>& v)
                          __attribute__((always_inline)) { return load<T>(v.data + j * v.step + (i & v.lanes)); };
      store<T>(to + j * kRowTile + i, of(y) * of(z) + found);
    };
    const Lookup<T> at = lookup(step.table, terms, step.from[0], step.op == Op::lookup ? tables_ : nullptr);
    if (at.is_transposed) {
      for (int64_t j = 0; j < count; ++j) {
        const UInt<T> index = at.index_at(j, 0);
        const bool inside = index < at.size;
        if (!inside) report(rows_.first, first_key_ + first_ + j, static_cast<Int<T>>(index), at.size);
        for (int64_t i = 0; i < lanes_; i += W) put(j, i, inside ? load<T>(at.table + index * kRowTile + i) : Vec<T>{});
      }
      return;
    }
    const T* const table = at.table + first_ * at.key;
    const Indices<T>* const leaf = at.size >= UInt<T>{W} ? at.indices : nullptr;
    const int64_t last = rows_.size() - 1;
    // Lanes without a row read the last row's numbers.
    const auto row = [&](int64_t i) { return table + smaller(i, last) * at.row; };
    for (int64_t i = 0; i < lanes_; i += W)
      for (int64_t j = 0; j < count; j += W) {
        const int64_t keys = smaller(W, count - j);
        if (leaf && at.row != 0 && (leaf->of_distances || leaf->of_keys)) {
          // Each row has its own table. A single vector of this table may hold the numbers of W keys. If the indices
          // of neighbouring keys differ by 1, or all by -1, the numbers already lie in this vector in order.
          const int step = keys == W && i + W <= rows_.size() ? at.step(j, i) : 0;
          if (step != 0) {
            const auto least = [&](int64_t lane) {
              return smaller(at.index_at(j, lane), at.index_at(j + W - 1, lane));
            };
            const T* const from = row(i) + least(i);
            const int64_t to_next = row(i + 1) + least(i + 1) - from;
            Vec<T> columns[W];
            for (int k = 0; k < W; ++k) columns[k] = load<T>(from + k * to_next);
            transpose<T>(columns);
            for (int k = 0; k < W; ++k) put(j + k, i, columns[step > 0 ? k : W - 1 - k]);
            continue;
          }
          const int64_t place = leaf->place(first_ + j + (leaf->of_distances ? W - 1 : 0), i);
          const Vec<UInt<T>> base = at.first_of(place, leaf->of_keys);
          if (base[0] != Lookup<T>::kScattered) {
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
  // If the numbers that the tile looks up lie at fixed distances in memory, describes them as an operand. They do if
  // the indices of neighbours differ by 1 and the numbers of neighbouring rows lie side by side. If all pairs have the
  // same index, reads one number for the tile, or one number for each row (key) if each row (key) has a table of its
  // own.
  void look_up_once(const Step& step, const Terms& terms, int64_t keys, T* to) {
    Values<T>& same = lookups_[step.lookup];
    same = {nullptr, 0, 0};
    if (!terms.data) {  // the direction has no part for this table, so all its numbers are 0
      store<T>(to, Vec<T>{});
      same.data = to;
    }
    if (step.from[0] >= 0 || same.data) return;
    const Lookup<T> at = lookup(step.table, terms, step.from[0], step.op == Op::lookup ? tables_ : nullptr);
    if (!at.indices) return;
    const UInt<T> index = at.index_at(0, 0);
    const int64_t rows = rows_.size();
    const bool are_same = at.indices->are_same, of_distances = at.indices->of_distances;
    const int64_t by = at.indices->step;
    if (index >= at.size) return;
    if (at.is_transposed) {
      const bool inside = at.index_at(keys - 1, 0) < at.size;
      if ((are_same || by != 0) && inside) same = {at.table + index * kRowTile, by * kRowTile, -1};
    } else if (by == 1 && at.row == 0 && !at.indices->of_keys) {
      const UInt<T> first = at.index_at(of_distances ? keys - 1 : 0, 0);
      const UInt<T> last = index + static_cast<UInt<T>>(lanes_ - 1);
      if (first < at.size && last < at.size) same = {at.table + index, at.key - (of_distances ? 1 : 0), -1};
    } else if (!are_same) {
      return;
    } else if (at.key != 0) {
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

  const PairProgram& program_;
  const List& list_;
  int64_t entry_, head_;
  Values<T>*leaves_, *lookups_;
  Indices<T>* indices_;  // of leaves
  T* slots_;
  Range rows_;
  int64_t first_key_;
  int64_t lanes_;
  const T* tables_;  // RowTile::tables
  T* grad_tables_;
  int64_t first_ = 0;
  T* kept_ = nullptr;
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

}  // namespace attn::ATTN_ISA
