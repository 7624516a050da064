// Operations of a graph as expressions of C++: the table of operations (core/operations.inl) writes derivatives and
// compositions as `1 / b` or `where(a < b, 1, 0)`.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "operators/programs/graph.h"

namespace attn::expressions {

struct Expression {
  Graph* graph = nullptr;  // null: a constant, or no value
  int n = kNone;
  double constant = std::numeric_limits<double>::quiet_NaN();

  Expression() = default;  // no value
  Expression(double x) : constant(x) {}
  Expression(Graph& g, int value) : graph(&g), n(value) {}
  // The value's number in the graph, where a constant becomes a leaf of `type`.
  int in(Graph& g, char type) const {
    if (graph || std::isnan(constant)) return n;
    return type == 'f' ? g.number(constant) : g.whole(static_cast<int64_t>(constant));
  }
};

// At least one operand is no constant.
inline Expression apply(Op op, const char* signature, const Expression& a, const Expression& b, const Expression& c) {
  Graph& g = *(a.graph ? a.graph : b.graph ? b.graph : c.graph);
  const int count = operand_count(signature);
  return {g, g.add(op, a.in(g, signature[0]), count > 1 ? b.in(g, signature[1]) : kNone,
                   count > 2 ? c.in(g, signature[2]) : kNone, signature[count + 1])};
}
#define ATTN_OPERATION(op, name, signatures, ...)                                                 \
  inline Expression op(const Expression& a, const Expression& b = {}, const Expression& c = {}) { \
    return apply(Op::op, signatures, a, b, c);                                                    \
  }
#include "core/operations.inl"
inline Expression where_whole(const Expression& a, const Expression& b, const Expression& c) {
  return apply(Op::where, "bii>i", a, b, c);
}
inline Expression operator+(const Expression& a, const Expression& b) { return add(a, b); }
inline Expression operator-(const Expression& a, const Expression& b) { return sub(a, b); }
inline Expression operator-(const Expression& a) { return neg(a); }
inline Expression operator*(const Expression& a, const Expression& b) { return mul(a, b); }
inline Expression operator/(const Expression& a, const Expression& b) { return div(a, b); }
inline Expression operator<(const Expression& a, const Expression& b) { return lt(a, b); }
inline Expression operator<=(const Expression& a, const Expression& b) { return le(a, b); }
inline Expression operator==(const Expression& a, const Expression& b) { return eq(a, b); }
inline Expression operator&(const Expression& a, const Expression& b) { return apply(Op::bit_and, "bb>b", a, b, {}); }
inline Expression operator|(const Expression& a, const Expression& b) { return apply(Op::bit_or, "bb>b", a, b, {}); }

}  // namespace attn::expressions
