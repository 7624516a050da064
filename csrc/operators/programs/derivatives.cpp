#include "operators/programs/derivatives.h"

#include "operators/programs/expressions.h"

namespace attn {
namespace {

using expressions::Expression;

// Returns the partial derivative of value v with respect to its operand number i, or kNone if the derivative is always
// 0.
int partial(Graph& g, int v, int i) {
  const auto [first, second, third] = g[v].from;
  const Expression n(g, v), a(g, first), b(g, second), c(g, third), none;
  switch (g[v].op) {
#define ATTN_CHOSEN(x, y, z, ...) i == 0 ? Expression(x) : i == 1 ? Expression(y) : Expression(z)
#define ATTN_OPERATION(op, name, signatures, value, bounds, ...) \
  case Op::op:                                                   \
    return (ATTN_CHOSEN(__VA_ARGS__ __VA_OPT__(, ) none, none, none)).in(g, 'f');
#include "core/operations.inl"
#undef ATTN_CHOSEN
    default:
      return kNone;
  }
}

// x + y, where kNone stands for 0. The sign of a zero does not matter in a derivative.
int sum(Graph& g, int x, int y) {
  if (x == kNone || (y != kNone && g.is_number(x, 0))) return y;
  if (y == kNone || g.is_number(y, 0)) return x;
  return g.add(Op::add, x, y);
}

// Whether a derivative passes through the operand. Only numbers have derivatives.
bool is_differentiable(const Graph& g, int operand) { return operand != kNone && g[operand].type == 'f'; }

}  // namespace

int zero_if_none(Graph& g, int n) { return n == kNone ? g.number(0) : n; }

std::vector<int> gradients_of_values(Graph& g, int result, int grad) {
  std::vector<int> adjoints(g.size(), kNone);
  adjoints[result] = grad;
  for (int n = result; n >= 0; --n) {
    if (adjoints[n] == kNone || g.is_leaf(n) || g[n].op == Op::lookup) continue;
    const Graph::Value v = g[n];
    for (int i = 0; i < 3; ++i) {
      const int operand = v.from[i];
      if (!is_differentiable(g, operand)) continue;
      int share = kNone;
      if (v.op == Op::where) {
        const int x = i == 1 ? adjoints[n] : g.number(0), y = i == 1 ? g.number(0) : adjoints[n];
        share = g.add(Op::where, v.from[0], x, y);
      } else if (const int p = partial(g, n, i); p != kNone) {
        share = g.add(Op::times, adjoints[n], p);
      }
      adjoints[operand] = sum(g, adjoints[operand], share);
    }
  }
  return adjoints;
}

int tangent_of_value(Graph& g, int n, std::unordered_map<int, int>& tangents) {
  if (const auto found = tangents.find(n); found != tangents.end()) return found->second;
  const Graph::Value v = g[n];
  int total = kNone;
  if (v.op == Op::lookup) {
    total = g.lookup(Op::lookup_tangent, v.from[0], v.leaf.column);
  } else if (v.op == Op::where) {
    const int x = is_differentiable(g, v.from[1]) ? tangent_of_value(g, v.from[1], tangents) : kNone;
    const int y = is_differentiable(g, v.from[2]) ? tangent_of_value(g, v.from[2], tangents) : kNone;
    if (x != kNone || y != kNone) total = g.add(Op::where, v.from[0], zero_if_none(g, x), zero_if_none(g, y));
  } else if (!g.is_leaf(n)) {
    for (int i = 0; i < 3; ++i) {
      if (!is_differentiable(g, v.from[i])) continue;
      const int t = tangent_of_value(g, v.from[i], tangents);
      const int p = t == kNone ? kNone : partial(g, n, i);
      if (p == kNone) continue;
      // If the first operand of `times` is 0, the product is 0, whatever the second operand is. If only y has a tangent
      // t, the derivative of `x times y` is `x times t`, so x, which is p here, stays the first operand. In all other
      // products the tangent comes first.
      const bool hides = v.op == Op::times && i == 1;
      total = sum(g, total, hides ? g.add(Op::times, p, t) : g.add(Op::times, t, p));
    }
  }
  return tangents[n] = total;
}

}  // namespace attn
