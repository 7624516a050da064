#include "operators/programs/graph.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace attn {
namespace {

using Value = Graph::Value;

bool is_product(const Value& v) { return v.op == Op::mul || v.op == Op::times; }
bool is_zero(const Graph& g, int n, bool negative) {
  return g.is_number(n, 0) && std::signbit(g.number_of(n)) == negative;
}
// A product's operand number i if the other one is `x`, else kNone.
int beside(const Graph& g, const Value& v, double x) {
  if (!is_product(v)) return kNone;
  return g.is_number(v.from[1], x) ? v.from[0] : g.is_number(v.from[0], x) ? v.from[1] : kNone;
}
// The value of an operation on two constants.
int of_constants(Graph& g, const Value& v, double x) {
  const int found = g.number(x);
  return g.is_number(v.from[0]) && g.is_number(v.from[1]) && g.is_moderate(found) ? found : kNone;
}

constexpr Rewrite kAll[] = {
    {"x + -0 = x",
     [](Graph& g, const Value& v) {
       if (v.op != Op::add) return kNone;
       return is_zero(g, v.from[1], true) ? v.from[0] : is_zero(g, v.from[0], true) ? v.from[1] : kNone;
     }},
    {"x - 0 = x",
     [](Graph& g, const Value& v) { return v.op == Op::sub && is_zero(g, v.from[1], false) ? v.from[0] : kNone; }},
    {"x * 1 = x", [](Graph& g, const Value& v) { return beside(g, v, 1); }},
    {"x * -1 = -x",
     [](Graph& g, const Value& v) {
       const int x = beside(g, v, -1);
       return x == kNone ? kNone : g.add(Op::neg, x);
     }},
    // `times`, which derivatives use, is 0 if its first operand is.
    {"0 times x = 0",
     [](Graph& g, const Value& v) { return v.op == Op::times && beside(g, v, 0) != kNone ? g.number(0) : kNone; }},
    {"u * v = a constant",
     [](Graph& g, const Value& v) {
       return is_product(v) ? of_constants(g, v, g.number_of(v.from[0]) * g.number_of(v.from[1])) : kNone;
     }},
    {"u * x = x * u",
     [](Graph& g, const Value& v) {
       const bool applies = is_product(v) && g.is_moderate(v.from[0]) && !g.is_uniform(v.from[1]);
       return applies ? g.add(Op::mul, v.from[1], v.from[0]) : kNone;
     }},
    {"(x * u) * v = x * (u * v)",
     [](Graph& g, const Value& v) {
       const auto [a, b, _] = v.from;
       if (!is_product(v) || !g.has_factor(a) || !g.is_moderate(b)) return kNone;
       const int factor = g.add(Op::mul, g[a].from[1], b);
       return g.is_moderate(factor) ? g.add(Op::mul, g[a].from[0], factor) : kNone;
     }},
    {"x times u = x * u",
     [](Graph& g, const Value& v) {
       const bool applies = v.op == Op::times && g.is_moderate(v.from[1]) && !g.is_uniform(v.from[0]);
       return applies ? g.add(Op::mul, v.from[0], v.from[1]) : kNone;
     }},
    {"(x * u) * y = (x * y) * u",
     [](Graph& g, const Value& v) {
       const auto [a, b, _] = v.from;
       if (!is_product(v) || g.is_uniform(a) || g.is_uniform(b)) return kNone;
       const auto product = [&](int x, int y, int factor) { return g.add(Op::mul, g.add(v.op, x, y), factor); };
       if (g.has_factor(a)) return product(g[a].from[0], b, g[a].from[1]);
       return g.has_factor(b) ? product(a, g[b].from[0], g[b].from[1]) : kNone;
     }},
    {"x / 1 = x",
     [](Graph& g, const Value& v) { return v.op == Op::div && g.is_number(v.from[1], 1) ? v.from[0] : kNone; }},
    {"u / v = a constant",
     [](Graph& g, const Value& v) {
       return v.op == Op::div ? of_constants(g, v, g.number_of(v.from[0]) / g.number_of(v.from[1])) : kNone;
     }},
    {"(x * u) / v = x * (u / v)",
     [](Graph& g, const Value& v) {
       const auto [a, b, _] = v.from;
       if (v.op != Op::div || !g.has_factor(a) || !g.is_moderate(b)) return kNone;
       const int factor = g.add(Op::div, g[a].from[1], b);
       return g.is_moderate(factor) ? g.add(Op::mul, g[a].from[0], factor) : kNone;
     }},
    {"-(-x) = x",
     [](Graph& g, const Value& v) {
       return v.op == Op::neg && g[v.from[0]].op == Op::neg ? g[v.from[0]].from[0] : kNone;
     }},
    {"-u = a constant",
     [](Graph& g, const Value& v) {
       return v.op == Op::neg && g.is_number(v.from[0]) ? g.number(-g.number_of(v.from[0])) : kNone;
     }},
    {"-(x * u) = x * -u",
     [](Graph& g, const Value& v) {
       if (v.op != Op::neg || !g.has_factor(v.from[0])) return kNone;
       const Value product = g[v.from[0]];
       return g.add(Op::mul, product.from[0], g.add(Op::neg, product.from[1]));
     }},
    {"where(c, x, x) = x",
     [](Graph&, const Value& v) { return v.op == Op::where && v.from[1] == v.from[2] ? v.from[1] : kNone; }},
};

}  // namespace

const std::span<const Rewrite> kRewrites = kAll;

int Graph::add(Op op, int a, int b, int c, char type) {
  const Value value{op, type, {a, b, c}};
  if (!rewrites_) return put(value);
  for (const Rewrite& rewrite : kRewrites) {
    const int found = rewrite.apply(*this, value);
    if (found == kNone) continue;
    note(rewrite.name);
    return found;
  }
  return put(value);
}

void Graph::note(const char* name) {
  if (std::ranges::find(applied_, name) == applied_.end()) applied_.push_back(name);
}

int Graph::put(const Value& value) {
  uint64_t bits;
  std::memcpy(&bits, &value.leaf.number, sizeof bits);
  const auto& [leaf, column, _, whole, only_index] = value.leaf;
  const auto [found, is_new] =
      numbers_.try_emplace(std::tuple(value.op, value.type, value.from, leaf, column, bits, whole), size());
  if (is_new) {
    Value own = value;
    own.is_uniform = own.op == Op::leaf ? leaf <= Leaf::scale : std::ranges::all_of(own.from, [&](int operand) {
      return operand == kNone || values_[operand].is_uniform;
    });
    own.magnitude = magnitude_of(own);
    values_.push_back(own);
  }
  return found->second;
}

double Graph::magnitude_of(const Value& v) const {
  const auto of = [&](int i) { return values_[v.from[i]].magnitude; };
  if (v.op == Op::leaf && v.leaf.leaf == Leaf::scale) return 0;
  if (v.op == Op::leaf && v.leaf.leaf == Leaf::number && v.leaf.number != 0 && std::isfinite(v.leaf.number))
    return std::log2(std::abs(v.leaf.number));
  if (v.op == Op::neg) return of(0);
  if (v.op == Op::mul) return of(0) + of(1);
  if (v.op == Op::div) return of(0) - of(1);
  return std::numeric_limits<double>::quiet_NaN();
}

bool Graph::reads(int n, Leaf leaf, int cut) const {
  std::vector<bool> needed(n + 1);
  needed[n] = true;
  for (; n >= 0; --n) {
    const Value& v = values_[n];
    if (!needed[n] || n == cut) continue;
    if (v.op == Op::leaf && v.leaf.leaf == leaf) return true;
    for (const int operand : v.from)
      if (operand != kNone) needed[operand] = true;
  }
  return false;
}

int Graph::rebuilt(int n, std::unordered_map<int, int>& built) {
  if (const auto found = built.find(n); found != built.end()) return found->second;
  if (is_leaf(n)) return n;
  Value v = values_[n];
  for (int& operand : v.from)
    if (operand != kNone) operand = rebuilt(operand, built);
  if (v.op == Op::lookup || v.op == Op::lookup_tangent) return built[n] = put(v);
  return built[n] = add(v.op, v.from[0], v.from[1], v.from[2], v.type);
}

}  // namespace attn
