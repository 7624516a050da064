#include "operators/program.h"

#include <c10/util/Exception.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <charconv>
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

// Returns the partial derivative of value n with respect to its operand number i, or kNone if the derivative is always
// 0.
int partial(Graph& g, int n, int i) {
  const Graph::Value v = g[n];
  const auto [a, b, c] = v.from;
  const auto choose = [&](int condition, int x, int y) { return g.add(Op::where, condition, x, y); };
  const auto less = [&](int x, int y) { return g.add(Op::lt, x, y, kNone, 'b'); };
  const auto number = [&](double x) { return g.number(x); };
  switch (v.op) {
    case Op::add:
      return number(1);
    case Op::sub:
      return number(i == 0 ? 1 : -1);
    case Op::mul:
    case Op::times:
      return i == 0 ? b : a;
    case Op::div:
      return i == 0 ? g.add(Op::div, number(1), b) : g.add(Op::neg, g.add(Op::div, n, b));
    case Op::neg:
      return number(-1);
    case Op::abs:
      return choose(less(number(0), a), number(1), choose(less(a, number(0)), number(-1), number(0)));
    case Op::minimum:
    case Op::maximum: {  // equal operands get half each
      const int own = i == 0 ? a : b, other = i == 0 ? b : a;
      const int wins = v.op == Op::minimum ? less(own, other) : less(other, own);
      return choose(wins, number(1), choose(g.add(Op::eq, a, b, kNone, 'b'), number(0.5), number(0)));
    }
    case Op::clamp: {
      const int below = less(a, b), above = less(c, a);
      if (i == 0) return choose(g.add(Op::bit_or, below, above, kNone, 'b'), number(0), number(1));
      if (i == 1) return choose(g.add(Op::bit_and, below, less(b, c), kNone, 'b'), number(1), number(0));
      return choose(g.add(Op::bit_or, above, less(c, b), kNone, 'b'), number(1), number(0));
    }
    case Op::sqrt:
      return g.add(Op::div, number(0.5), n);
    case Op::exp:
      return n;
    case Op::exp2:
      return g.add(Op::mul, n, number(0.69314718055994530942));
    case Op::log:
      return g.add(Op::div, number(1), a);
    case Op::log1p:
      return g.add(Op::div, number(1), g.add(Op::add, number(1), a));
    case Op::tanh:
      return g.add(Op::sub, number(1), g.add(Op::mul, n, n));
    case Op::remainder:
      return i == 0 ? number(1) : g.add(Op::neg, g.add(Op::floor_divide, a, b));
    case Op::to_float32:
    case Op::to_float16:
    case Op::to_bfloat16:
      return number(1);
    default:  // floor, floor_divide, and conversions to and from whole numbers
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
  const char* name;
  char type;
  const char* operands;
  Op op;
};
constexpr Operation kOperations[] = {
    {"add", 'f', "ff", Op::add},
    {"sub", 'f', "ff", Op::sub},
    {"mul", 'f', "ff", Op::mul},
    {"div", 'f', "ff", Op::div},
    {"neg", 'f', "f", Op::neg},
    {"abs", 'f', "f", Op::abs},
    {"minimum", 'f', "ff", Op::minimum},
    {"maximum", 'f', "ff", Op::maximum},
    {"clamp", 'f', "fff", Op::clamp},
    {"sqrt", 'f', "f", Op::sqrt},
    {"exp", 'f', "f", Op::exp},
    {"exp2", 'f', "f", Op::exp2},
    {"log", 'f', "f", Op::log},
    {"log1p", 'f', "f", Op::log1p},
    {"tanh", 'f', "f", Op::tanh},
    {"floor", 'f', "f", Op::floor},
    {"floor_divide", 'f', "ff", Op::floor_divide},
    {"remainder", 'f', "ff", Op::remainder},
    {"float32", 'f', "f", Op::to_float32},
    {"float16", 'f', "f", Op::to_float16},
    {"bfloat16", 'f', "f", Op::to_bfloat16},
    {"add", 'i', "ii", Op::add_whole},
    {"sub", 'i', "ii", Op::sub_whole},
    {"mul", 'i', "ii", Op::mul_whole},
    {"minimum", 'i', "ii", Op::minimum_whole},
    {"maximum", 'i', "ii", Op::maximum_whole},
    {"floor_divide", 'i', "ii", Op::floor_divide_whole},
    {"remainder", 'i', "ii", Op::remainder_whole},
    {"and", 'i', "ii", Op::bit_and},
    {"or", 'i', "ii", Op::bit_or},
    {"xor", 'i', "ii", Op::bit_xor},
    {"not", 'i', "i", Op::bit_not},
    {"and", 'b', "bb", Op::bit_and},
    {"or", 'b', "bb", Op::bit_or},
    {"xor", 'b', "bb", Op::bit_xor},
    {"not", 'b', "b", Op::bit_not},
    {"eq", 'b', "ff", Op::eq},
    {"ne", 'b', "ff", Op::ne},
    {"lt", 'b', "ff", Op::lt},
    {"le", 'b', "ff", Op::le},
    {"eq", 'b', "ii", Op::eq_whole},
    {"ne", 'b', "ii", Op::ne_whole},
    {"lt", 'b', "ii", Op::lt_whole},
    {"le", 'b', "ii", Op::le_whole},
    {"where", 'f', "bff", Op::where},
    {"where", 'i', "bii", Op::where},
    {"where", 'b', "bbb", Op::where},
    {"float", 'f', "i", Op::float_of},
    {"int", 'i', "f", Op::whole_of},
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
    const auto [a, b, c] = from;
    const auto is = [&](const char* other, char result, const char* of) {
      return name == other && type == result && types == of;
    };
    // These operations are composed of other operations.
    if (is("gt", 'b', "ff") || is("gt", 'b', "ii"))
      return g.add(types == "ff" ? Op::lt : Op::lt_whole, b, a, kNone, 'b');
    if (is("ge", 'b', "ff") || is("ge", 'b', "ii"))
      return g.add(types == "ff" ? Op::le : Op::le_whole, b, a, kNone, 'b');
    if (is("reciprocal", 'f', "f")) return g.add(Op::div, g.number(1), a);
    if (is("rsqrt", 'f', "f")) return g.add(Op::div, g.number(1), g.add(Op::sqrt, a));
    if (is("square", 'f', "f")) return g.add(Op::mul, a, a);
    if (is("sigmoid", 'f', "f"))
      return g.add(Op::div, g.number(1), g.add(Op::add, g.number(1), g.add(Op::exp, g.add(Op::neg, a))));
    if (is("neg", 'i', "i")) return g.add(Op::sub_whole, g.whole(0), a, kNone, 'i');
    if (is("abs", 'i', "i"))
      return g.add(Op::maximum_whole, a, g.add(Op::sub_whole, g.whole(0), a, kNone, 'i'), kNone, 'i');
    if (is("clamp", 'i', "iii"))
      return g.add(Op::minimum_whole, g.add(Op::maximum_whole, a, b, kNone, 'i'), c, kNone, 'i');
    if (is("float", 'f', "b")) return g.add(Op::where, a, g.number(1), g.number(0));
    if (is("int", 'i', "b")) return g.add(Op::where, a, g.whole(1), g.whole(0), 'i');
    if (is("bool", 'b', "f")) return g.add(Op::ne, a, g.number(0), kNone, 'b');
    if (is("bool", 'b', "i")) return g.add(Op::ne_whole, a, g.whole(0), kNone, 'b');
    for (const Operation& o : kOperations)
      if (is(o.name, o.type, o.operands)) return g.add(o.op, a, b, c, type);
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
// itself. The value must cost more than a product: tanh, exp, exp2, log or log1p. Returns kNone if there is no such
// value.
int kept_value(const Graph& g, int values, const std::vector<Result>& results) {
  for (int n = 0; n < values; ++n) {
    const Op op = g[n].op;
    const bool is_dear = op == Op::tanh || op == Op::exp || op == Op::exp2 || op == Op::log || op == Op::log1p;
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
}

}  // namespace attn
