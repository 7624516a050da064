#include "operators/program.h"

#include <c10/util/Exception.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <charconv>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <sstream>
#include <unordered_map>
#include <vector>

#include "operators/program_schedule.h"

namespace attn {
namespace {

constexpr int kMostOperations = 64, kMostColumns = 16, kMostLines = 512;

// ---------------------------------------------------------------------------------------------------------------
// Derivatives

// The table of operations writes derivatives and compositions as expressions.
namespace expressions {

struct Expression {
  Graph* graph = nullptr;  // null: a constant, or no value
  int n = kNone;
  double constant = std::numeric_limits<double>::quiet_NaN();

  Expression() = default;  // no value
  Expression(double x) : constant(x) {}
  Expression(Graph& g, int value) : graph(&g), n(value) {}
  // The place in the graph, where a constant becomes a leaf of `type`.
  int in(Graph& g, char type) const {
    if (graph || std::isnan(constant)) return n;
    return type == 'f' ? g.number(constant) : g.whole(static_cast<int64_t>(constant));
  }
};

// At least one operand is no constant.
Expression apply(Op op, const char* signature, const Expression& a, const Expression& b, const Expression& c) {
  Graph& g = *(a.graph ? a.graph : b.graph ? b.graph : c.graph);
  const int count = operand_count(signature);
  return {g, g.add(op, a.in(g, signature[0]), count > 1 ? b.in(g, signature[1]) : kNone,
                   count > 2 ? c.in(g, signature[2]) : kNone, signature[count + 1])};
}
#define ATTN_OPERATION(op, name, signatures, ...)                                                           \
  [[maybe_unused]] Expression op(const Expression& a, const Expression& b = {}, const Expression& c = {}) { \
    return apply(Op::op, signatures, a, b, c);                                                              \
  }
#include "core/operations.inl"
Expression where_whole(const Expression& a, const Expression& b, const Expression& c) {
  return apply(Op::where, "bii>i", a, b, c);
}
Expression operator+(const Expression& a, const Expression& b) { return add(a, b); }
Expression operator-(const Expression& a, const Expression& b) { return sub(a, b); }
Expression operator-(const Expression& a) { return neg(a); }
Expression operator*(const Expression& a, const Expression& b) { return mul(a, b); }
Expression operator/(const Expression& a, const Expression& b) { return div(a, b); }
Expression operator<(const Expression& a, const Expression& b) { return lt(a, b); }
Expression operator<=(const Expression& a, const Expression& b) { return le(a, b); }
Expression operator==(const Expression& a, const Expression& b) { return eq(a, b); }
Expression operator&(const Expression& a, const Expression& b) { return apply(Op::bit_and, "bb>b", a, b, {}); }
Expression operator|(const Expression& a, const Expression& b) { return apply(Op::bit_or, "bb>b", a, b, {}); }

}  // namespace expressions
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
int zero_if_none(Graph& g, int n) { return n == kNone ? g.number(0) : n; }

// Whether a derivative passes through the operand. Only numbers have derivatives.
bool is_differentiable(const Graph& g, int operand) { return operand != kNone && g[operand].type == 'f'; }

// Returns the gradient of every value n, adjoints[n], given the gradient of `result`.
std::vector<int> reverse(Graph& g, int result, int grad) {
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

// Returns the derivative of value n along a direction, or kNone if the derivative is 0. The caller puts the derivatives
// of the leaves into `tangents`. This function inserts every derivative that it finds.
int tangent(Graph& g, int n, std::unordered_map<int, int>& tangents) {
  if (const auto found = tangents.find(n); found != tangents.end()) return found->second;
  const Graph::Value v = g[n];
  int total = kNone;
  if (v.op == Op::lookup) {
    total = g.lookup(Op::lookup_tangent, v.from[0], v.leaf.column);
  } else if (v.op == Op::where) {
    const int x = is_differentiable(g, v.from[1]) ? tangent(g, v.from[1], tangents) : kNone;
    const int y = is_differentiable(g, v.from[2]) ? tangent(g, v.from[2], tangents) : kNone;
    if (x != kNone || y != kNone) total = g.add(Op::where, v.from[0], zero_if_none(g, x), zero_if_none(g, y));
  } else if (!g.is_leaf(n)) {
    for (int i = 0; i < 3; ++i) {
      if (!is_differentiable(g, v.from[i])) continue;
      const int t = tangent(g, v.from[i], tangents);
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

// ---------------------------------------------------------------------------------------------------------------
// Strings

struct Operation {
  const char *name, *signatures;
  Op op = Op::leaf;  // a composition
};
constexpr Operation kOperations[] = {
#define ATTN_OPERATION(op, name, signatures, ...) {name, signatures, Op::op},
#define ATTN_COMPOSITION(name, signature, expression) {name, signature},
#include "core/operations.inl"
};

class Reader {
 public:
  Reader(const char* op, const char* name, const std::string& text) : op_(op), name_(name), stream_(text) {}

  // Returns the value that the string returns.
  int read(Graph& g, char type, Compiled& compiled) {
    next_line();
    compiled.is_wide = line_ == "attn.program 1 wide";
    check(compiled.is_wide || line_ == "attn.program 1", "it must be \"attn.program 1\" or \"attn.program 1 wide\"");
    std::vector<int> values;
    while (true) {
      next_line();
      check(++lines_ <= kMostLines, "a program has at most ", kMostLines, " lines");
      std::istringstream words(line_);
      std::string first, kind, name;
      words >> first;
      if (first == "return") {
        words >> name;
        const int result = operand(values, name);
        end(words);
        std::string more;
        check(!(stream_ >> more), "nothing may follow");
        check(g[result].type == type, "it must return ", spelled(type));
        return result;
      }
      check(first == c10::str("%", values.size()), "a line must begin with %", values.size(), " or return");
      check(static_cast<bool>(words >> kind >> name) && kind.size() == 1, "a type and an operation are missing");
      values.push_back(value(g, kind[0], name, words, values, compiled));
      end(words);
    }
  }

 private:
  template <class... T>
  void check(bool is, const T&... what) const {
    TORCH_CHECK(is, op_, ": line ", number_, " of ", name_, " is \"", line_, "\"; ", what...);
  }
  static const char* spelled(char type) {
    return type == 'f' ? "a number" : type == 'i' ? "a whole number" : "a boolean";
  }
  void next_line() {
    ++number_;
    if (!std::getline(stream_, line_)) {
      line_ = "";
      check(false, "the program ends without \"return\"");
    }
  }
  void end(std::istringstream& words) const {
    std::string more;
    check(!(words >> more), "nothing may follow the operands");
  }
  int operand(const std::vector<int>& values, const std::string& word) const {
    size_t n = 0;
    const bool is = word.size() > 1 && word[0] == '%' &&
                    std::from_chars(word.data() + 1, word.data() + word.size(), n).ptr == word.data() + word.size();
    check(is && n < values.size(), "an operand must be an earlier value, %0 to %", values.size() - 1);
    return values[n];
  }
  int64_t integer(std::istringstream& words, int64_t least, int64_t most) const {
    std::string word;
    words >> word;
    int64_t n = 0;
    const auto [last, error] = std::from_chars(word.data(), word.data() + word.size(), n);
    check(error == std::errc() && last == word.data() + word.size() && !word.empty() && least <= n && n <= most,
          "a whole number between ", least, " and ", most, " must follow");
    return n;
  }

  int value(Graph& g, char type, const std::string& name, std::istringstream& words, const std::vector<int>& values,
            Compiled& compiled) {
    const int64_t most = compiled.is_wide ? std::numeric_limits<int64_t>::max() : std::numeric_limits<int32_t>::max();
    if (name == "score") {
      check(type == 'f' && std::strcmp(name_, "score_mod") == 0, "the score is a number, and only score_mod has one");
      return g.leaf('f', {Leaf::score});
    }
    if (name == "const") {
      if (type == 'i') return g.whole(integer(words, -most - 1, most));
      if (type == 'b') return g.boolean(integer(words, 0, 1));
      std::string word;
      words >> word;
      char* last = nullptr;
      const double x = std::strtod(word.c_str(), &last);
      check(!word.empty() && *last == 0, "a number must follow");
      return g.number(x);
    }
    if (name == "query" || name == "key_index") {
      check(type == 'i', "it is a whole number");
      return g.leaf('i', {name == "query" ? Leaf::query : Leaf::key});
    }
    if (name == "pair") {
      check(type == 'f' && std::strcmp(name_, "score_mod") == 0, "it is a number, and only score_mod has one");
      return g.leaf('f', {Leaf::pair_term});
    }
    constexpr const char* kAxes[] = {"row", "key", "distance"};
    for (int axis = 0; axis < 3; ++axis) {
      if (name != kAxes[axis]) continue;
      const int column = static_cast<int>(integer(words, 0, kMostColumns - 1));
      const int first = static_cast<int>(type == 'f' ? Leaf::row_term : Leaf::row_number);
      const auto leaf = static_cast<Leaf>(first + axis);
      int& count = compiled.columns[static_cast<int>(leaf) - static_cast<int>(Leaf::row_term)];
      count = std::max(count, column + 1);
      if (type == 'f') return g.leaf('f', {leaf, column});
      const int whole = g.leaf('i', {leaf, column});
      check(type == 'i' || type == 'b', "a type must be f, i or b");
      return type == 'i' ? whole : g.add(Op::ne_whole, whole, g.whole(0), kNone, 'b');
    }
    check(++operations_ <= kMostOperations, "a program has at most ", kMostOperations, " operations");
    constexpr const char* kTables[] = {"table", "row_table", "key_table"};
    if (const auto found = std::ranges::find(kTables, name); found != std::end(kTables)) {
      const auto table = static_cast<int>(integer(words, 0, kMostTables - 1));
      const auto of = static_cast<TableOf>(found - kTables);
      std::string word;
      words >> word;
      const int index = operand(values, word);
      check(type == 'f' && g[index].type == 'i', "its operand is a whole number, and it is a number");
      check(compiled.tables[table].value_or(of) == of, "table ", table, " was read as another kind");
      compiled.tables[table] = of;
      return g.lookup(Op::lookup, index, table);
    }
    std::array<int, 3> from = {kNone, kNone, kNone};
    std::string types, word;
    while (types.size() < 3 && words >> word) {
      from[types.size()] = operand(values, word);
      types += g[from[types.size()]].type;
    }
    const std::string signature = types + '>' + type;
    for (const Operation& o : kOperations) {
      const bool fits = c10::str(' ', o.signatures, ' ').find(' ' + signature + ' ') != std::string::npos;
      if (fits && name == o.name && o.op != Op::leaf) return g.add(o.op, from[0], from[1], from[2], type);
    }
    const Expression a(g, from[0]), b(g, from[1]), c(g, from[2]);
#define ATTN_COMPOSITION(composed, of, expression) \
  if (name == composed && signature == of) return (expression).in(g, type);
#include "core/operations.inl"
    check(false, "there is no operation ", name, " of type ", type, " whose operands have the types (", types, ")");
    return kNone;
  }

  const char *op_, *name_;
  std::istringstream stream_;
  std::string line_;
  int number_ = 0, lines_ = 0, operations_ = 0;
};

struct OwnCompiled : Compiled {
  std::vector<std::unique_ptr<OwnList>> own;
  std::vector<std::string> applied;
};

// Looks for a value such that every result depends on the score only through this value. No result then needs the score
// itself. The value must cost more than a product. Returns kNone if there is no such value.
int kept_value(const Graph& g, int values, const std::vector<Result>& results) {
  for (int n = 0; n < values; ++n) {
    const Op op = g[n].op;
    const bool is_dear = Op::exp <= op && op <= Op::tanh;
    const auto is_enough = [&](const Result& r) { return !g.reads(r.value, Leaf::score, n); };
    if (is_dear && g.reads(n, Leaf::score) && std::ranges::all_of(results, is_enough)) return n;
  }
  return kNone;
}

std::shared_ptr<const OwnCompiled> read(const char* op, const char* name, const std::string& text, bool rewrites) {
  auto compiled = std::make_shared<OwnCompiled>();
  Graph g(rewrites);
  const bool is_score = std::strcmp(name, "score_mod") == 0;
  const int result = Reader(op, name, text).read(g, is_score ? 'f' : 'b', *compiled);
  const int values = g.size();
  // Makes a list in which product * scale takes the place of the score. If `kept` is given, the kernel has stored value
  // number `kept` in place of the product, and the leaf `product` stands for this value.
  const auto take = [&](List& view, std::vector<Result> results, int kept = kNone) {
    std::unordered_map<int, int> built = {
        {g.leaf('f', {Leaf::score}), g.add(Op::mul, g.leaf('f', {Leaf::product}), g.leaf('f', {Leaf::scale}))}};
    if (kept != kNone) built[kept] = g.leaf('f', {Leaf::product});
    for (Result& r : results) {
      r.value = g.rebuilt(r.value, built);
      if (r.index != kNone) r.index = g.rebuilt(r.index, built);
    }
    compiled->own.push_back(std::make_unique<OwnList>(schedule(g, results, compiled->is_wide)));
    view = compiled->own.back()->view();
  };
  take(compiled->list, {{result}});
  if (!is_score) return compiled;

  const int score = g.leaf('f', {Leaf::score}), grad = g.leaf('f', {Leaf::grad});
  const std::vector<int> adjoints = reverse(g, result, grad);
  const auto adjoint = [&](int n) {
    return zero_if_none(g, n < static_cast<int>(adjoints.size()) ? adjoints[n] : kNone);
  };
  std::vector<Result> gradients = {{adjoint(score), {Leaf::score}}};
  std::unordered_map<int, int> tangents = {{score, g.leaf('f', {Leaf::tangent})},
                                           {grad, g.leaf('f', {Leaf::tangent_grad})}};
  for (int n = 0; n < values; ++n) {
    const LeafOfList leaf = g[n].leaf;
    if (g[n].op == Op::lookup) gradients.push_back({adjoint(n), g[n].leaf, g[n].from[0]});
    if (!g.is_leaf(n)) continue;
    if (leaf.leaf == Leaf::pair_term) {
      gradients.push_back({adjoint(n), leaf});
      tangents[n] = g.leaf('f', {Leaf::pair_tangent});
    } else if (Leaf::row_term <= leaf.leaf && leaf.leaf <= Leaf::distance_term) {
      gradients.push_back({adjoint(n), leaf});
      constexpr int kToTangent = static_cast<int>(Leaf::row_tangent) - static_cast<int>(Leaf::row_term);
      tangents[n] = g.leaf('f', {static_cast<Leaf>(static_cast<int>(leaf.leaf) + kToTangent), leaf.column});
    }
  }
  const auto moved = [&](int n) { return zero_if_none(g, tangent(g, n, tangents)); };
  const std::vector<Result> along = {{moved(result)}};
  std::vector<Result> gradients_along = gradients;
  for (Result& r : gradients_along) r.value = moved(r.value);
  std::vector<Result> all = gradients;
  all.insert(all.end(), along.begin(), along.end());
  all.insert(all.end(), gradients_along.begin(), gradients_along.end());
  const int kept = kept_value(g, values, all);
  if (kept != kNone) take(compiled->keeping, {{result}, {kept}});
  take(compiled->gradient, gradients, kept);
  take(compiled->tangent, along, kept);
  take(compiled->tangent_gradient, gradients_along, kept);
  compiled->applied.assign(g.applied().begin(), g.applied().end());
  return compiled;
}

// Tests compare lists with and without rewrites.
std::atomic<bool> rewrites_lists{true};

}  // namespace

std::shared_ptr<const Compiled> compile(const char* op, const char* name, const std::string& text) {
  static std::mutex mutex;
  static std::map<std::tuple<std::string, std::string, bool>, std::shared_ptr<const Compiled>> cache;
  constexpr size_t kMost = 256;
  const std::tuple key(std::string(name), text, rewrites_lists.load());
  std::lock_guard<std::mutex> lock(mutex);
  if (const auto found = cache.find(key); found != cache.end()) return found->second;
  auto compiled = read(op, name, text, std::get<2>(key));  // before the cache changes, because it may throw
  if (cache.size() == kMost) cache.clear();
  return cache[key] = std::move(compiled);
}

TORCH_LIBRARY_IMPL(attn, CompositeExplicitAutograd, m) {
  m.impl("_rewrite_programs", [](bool rewrites) { rewrites_lists = rewrites; });
  m.impl("_rewrites_of", [](const std::string& score_mod) {
    if (!score_mod.empty()) return read("attn::_rewrites_of", "score_mod", score_mod, /*rewrites=*/true)->applied;
    std::vector<std::string> names(std::begin(kFusions), std::end(kFusions));
    for (const Rewrite& rewrite : kRewrites) names.push_back(rewrite.name);
    return names;
  });
  m.impl("_operations_of_programs", [] {
    std::vector<std::string> rows;
    for (const Operation& o : kOperations)
      if (*o.name) rows.push_back(c10::str(o.name, ' ', o.signatures));
    return rows;
  });
}

}  // namespace attn
