// Bounds of a list's integers in a tile. Thanks to these bounds, a mask_mod need not be evaluated at every pair in most
// tiles.
#pragma once

#include "core/program.h"
#include "core/score.h"

namespace attn::ATTN_ISA {

// All integers from `least` to `most`. A boolean is -1 if it is true, else 0.
struct Between {
  int64_t least, most;
  bool is_one() const { return least == most; }
};
constexpr int64_t kMostWhole = ~(uint64_t{1} << 63);
constexpr Between kAnything = {-kMostWhole - 1, kMostWhole}, kEither = {-1, 0};

inline Between bounds(const PairProgram& program, const LeafOfList& leaf, int64_t n, int64_t head, Range rows,
                      Range keys) {
  const auto of_column = [&](Range range) {
    const Terms& t = program.terms[kind_of(leaf.leaf)];
    const int32_t* const data = static_cast<const int32_t*>(t.data) + n * t.entry + head * t.head + leaf.column * t.col;
    int32_t least = data[range.first * t.row], most = least;
    for (int64_t i = range.first; i < range.last; ++i) {
      least = smaller(least, data[i * t.row]);
      most = larger(most, data[i * t.row]);
    }
    return Between{least, most};
  };
  switch (leaf.leaf) {
    case Leaf::whole_number:
      return {leaf.whole, leaf.whole};
    case Leaf::query:
      return {rows.first, rows.last - 1};
    case Leaf::key:
      return {keys.first, keys.last - 1};
    case Leaf::row_number:
      return of_column(rows);
    case Leaf::key_number:
      return of_column(keys);
    case Leaf::distance_number:
      return of_column({rows.first - keys.last + program.keys, rows.last - keys.first + program.keys - 1});
    default:
      return kAnything;
  }
}

inline Between bounds(Op op, Between a, Between b, Between c, bool is_wide) {
  constexpr Between anything = kAnything, either = kEither;
  const auto boolean = [](bool always, bool never) {
    return always ? Between{-1, -1} : never ? Between{0, 0} : kEither;
  };
  // Results beyond 32 bits, or beyond 64 if the list is wide, may have wrapped around.
  const auto whole = [=](bool wraps, int64_t least, int64_t most) {
    const int64_t end = is_wide ? kMostWhole : (int64_t{1} << 31) - 1;
    return !wraps && least >= -end - 1 && most <= end ? Between{least, most} : kAnything;
  };
  const auto sum = [=](Between x, Between y) {
    int64_t least = 0, most = 0;
    const bool wraps = __builtin_add_overflow(x.least, y.least, &least) | __builtin_add_overflow(x.most, y.most, &most);
    return whole(wraps, least, most);
  };
  const auto difference = [=](Between x, Between y) {
    int64_t least = 0, most = 0;
    const bool wraps = __builtin_sub_overflow(x.least, y.most, &least) | __builtin_sub_overflow(x.most, y.least, &most);
    return whole(wraps, least, most);
  };
  const auto smaller_of = [](Between x, Between y) {
    return Between{smaller(x.least, y.least), smaller(x.most, y.most)};
  };
  const auto larger_of = [](Between x, Between y) { return Between{larger(x.least, y.least), larger(x.most, y.most)}; };
  const bool are_equal = a.is_one() && b.is_one() && a.least == b.least, differ = a.most < b.least || b.most < a.least;
  const bool are_booleans = smaller(a.least, b.least) >= -1 && larger(a.most, b.most) <= 0;
  switch (op) {
#define ATTN_OPERATION(op, name, signatures, value, bounds, ...) \
  case Op::op:                                                   \
    return bounds;
#include "core/operations.inl"
    case Op::leaf:
    case Op::lookup:
    case Op::lookup_tangent:
      return anything;
  }
  __builtin_unreachable();
}

// Returns the bounds of the list's first result over all pairs of a tile. `room` has an element for each leaf and each
// slot.
inline Between bounds(const PairProgram& program, const List& list, int64_t n, int64_t head, Range rows, Range keys,
                      Between* room) {
  for (int i = 0; i < list.leaf_count; ++i) room[i] = bounds(program, list.leaves[i], n, head, rows, keys);
  Between* const slots = room + list.leaf_count;
  slots[0] = kAnything;  // stands for operands that an operation lacks
  const auto at = [&](int16_t from) { return from < 0 ? room[-1 - from] : slots[from]; };
  for (int i = 0; i < list.step_count; ++i) {
    const Step& step = list.steps[i];
    slots[step.to] = bounds(step.op, at(step.from[0]), at(step.from[1]), at(step.from[2]), list.is_wide);
  }
  return at(list.results[0].from);
}

}  // namespace attn::ATTN_ISA
