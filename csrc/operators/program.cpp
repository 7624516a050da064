#include "operators/program.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <mutex>
#include <memory>
#include <sstream>
#include <tuple>
#include <unordered_map>
#include <vector>

namespace attn {
namespace {

constexpr int kMostOperations = 64, kMostColumns = 16, kMostLines = 512;
constexpr int kNone = -1;

// A value of a list under construction. Equal values are stored once.
struct Value {
  Op op = Op::leaf;
  char type = 'f';
  std::array<int, 3> from = {kNone, kNone, kNone};
  LeafOfList leaf = {Leaf::number};
  bool is_uniform = false;  // the same for all pairs

  auto key() const {
    uint64_t bits;
    std::memcpy(&bits, &leaf.number, sizeof bits);
    return std::tuple(op, type, from, leaf.leaf, leaf.column, bits);
  }
};

class Graph {
 public:
  int leaf(char type, LeafOfList leaf) { return put({.type = type, .leaf = leaf}); }
  int number(double x) { return leaf('f', {Leaf::number, 0, x}); }
  int whole(double x) { return leaf('i', {Leaf::whole_number, 0, x}); }
  int lookup(Op op, int index, int table) { return put({op, 'f', {index, kNone, kNone}, {Leaf::number, table}}); }
  int boolean(bool x) { return leaf('b', {Leaf::whole_number, 0, x ? -1.0 : 0.0}); }

  const Value& operator[](int n) const { return values_[n]; }
  int size() const { return static_cast<int>(values_.size()); }
  bool is_number(int n, double x) const {
    return values_[n].leaf.leaf == Leaf::number && is_leaf(n) && number_of(n) == x;
  }
  bool is_leaf(int n) const { return values_[n].op == Op::leaf; }
  // Whether value n is the same for all pairs.
  bool is_uniform(int n) const { return values_[n].is_uniform; }
  // Whether value n depends on the leaf by a path that does not pass through value `cut`.
  bool reads(int n, Leaf leaf, int cut = kNone) const {
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
  // Builds value n again, with replacements for some of the values that n depends on. `built` maps each replaced value
  // to its replacement, and gets an entry for every value that this function builds.
  int rebuilt(int n, std::unordered_map<int, int>& built) {
    if (const auto found = built.find(n); found != built.end()) return found->second;
    if (is_leaf(n)) return n;
    Value v = values_[n];
    for (int& operand : v.from)
      if (operand != kNone) operand = rebuilt(operand, built);
    if (v.op == Op::lookup || v.op == Op::lookup_tangent) return built[n] = put(v);
    return built[n] = add(v.op, v.from[0], v.from[1], v.from[2], v.type);
  }

  // Adds an operation whose result has `type`. Simplifies the operation if the result then differs by at most a
  // rounding error. Moves factors that are the same for all pairs out of sums and products, so that these factors merge
  // into one.
  int add(Op op, int a, int b = kNone, int c = kNone, char type = 'f') {
    switch (op) {
      case Op::add:
        if (is_number(a, 0)) return b;
        if (is_number(b, 0)) return a;
        break;
      case Op::sub:
        if (is_number(b, 0)) return a;
        break;
      case Op::mul:
      case Op::times:
        if (is_number(a, 1)) return b;
        if (is_number(b, 1)) return a;
        if (is_number(a, -1)) return add(Op::neg, b);
        if (is_number(b, -1)) return add(Op::neg, a);
        if (op == Op::times && (is_number(a, 0) || is_number(b, 0))) return number(0);
        if (is_number(a) && is_number(b)) return number(number_of(a) * number_of(b));
        if (is_uniform(a) && is_uniform(b)) break;
        if (is_uniform(a)) return add(Op::mul, b, a);
        if (is_uniform(b)) {
          if (has_factor(a)) {
            const Value product = values_[a];
            return add(Op::mul, product.from[0], add(Op::mul, product.from[1], b));
          }
          if (op == Op::times) return add(Op::mul, a, b);
          break;
        }
        if (has_factor(a)) return with_factor(op, values_[a].from[0], b, values_[a].from[1]);
        if (has_factor(b)) return with_factor(op, a, values_[b].from[0], values_[b].from[1]);
        break;
      case Op::div:
        if (is_number(b, 1)) return a;
        if (is_number(a) && is_number(b)) return number(number_of(a) / number_of(b));
        if (has_factor(a) && is_uniform(b)) {
          const Value product = values_[a];
          return add(Op::mul, product.from[0], add(Op::div, product.from[1], b));
        }
        break;
      case Op::neg:
        if (values_[a].op == Op::neg) return values_[a].from[0];
        if (is_number(a)) return number(-number_of(a));
        if (has_factor(a)) {
          const Value product = values_[a];
          return add(Op::mul, product.from[0], add(Op::neg, product.from[1]));
        }
        break;
      case Op::where:
        if (b == c) return b;
        break;
      default:
        break;
    }
    return put({op, type, {a, b, c}});
  }

 private:
  double number_of(int n) const { return values_[n].leaf.number; }
  bool is_number(int n) const { return is_leaf(n) && values_[n].leaf.leaf == Leaf::number; }
  // Whether value n is a product of a factor that differs between pairs and a second factor that is the same for all
  // pairs.
  bool has_factor(int n) const { return values_[n].op == Op::mul && !is_uniform(n) && is_uniform(values_[n].from[1]); }
  int with_factor(Op op, int a, int b, int factor) { return add(Op::mul, add(op, a, b), factor); }

  int put(const Value& value) {
    const auto [found, is_new] = numbers_.try_emplace(value.key(), size());
    if (is_new) {
      values_.push_back(value);
      values_.back().is_uniform =
          value.op == Op::leaf ? value.leaf.leaf <= Leaf::scale : std::ranges::all_of(value.from, [&](int operand) {
            return operand == kNone || values_[operand].is_uniform;
          });
    }
    return found->second;
  }

  std::vector<Value> values_;
  std::map<decltype(Value().key()), int> numbers_;
};

// ---------------------------------------------------------------------------------------------------------------
// Derivatives

// Returns the partial derivative of value n with respect to its operand number i, or kNone if the derivative is always
// 0.
int partial(Graph& g, int n, int i) {
  const Value v = g[n];
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
      const int below = less(a, b), above = less(c, a), crossed = less(c, b);
      if (i == 0) return choose(g.add(Op::bit_or, below, above, kNone, 'b'), number(0), number(1));
      if (i == 1) return choose(crossed, number(0), choose(below, number(1), number(0)));
      return choose(g.add(Op::bit_or, above, crossed, kNone, 'b'), number(1), number(0));
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
    default:  // floor, and conversions to and from whole numbers
      return kNone;
  }
}

// x + y, where kNone stands for 0.
int sum(Graph& g, int x, int y) {
  if (x == kNone || y == kNone) return x == kNone ? y : x;
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
    const Value v = g[n];
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
  const Value v = g[n];
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
// Lists

struct OwnList {
  std::vector<Step> steps;
  std::vector<LeafOfList> leaves;
  std::vector<ResultOfList> results;
  int slots = 0, uniform_slots = 0, lookups = 0, in_product = 0;

  List view() const {
    const auto reads = [&](Leaf one, Leaf other) {
      return std::ranges::any_of(leaves, [&](const LeafOfList& l) { return l.leaf == one || l.leaf == other; });
    };
    return {steps.data(),
            static_cast<int>(steps.size()),
            leaves.data(),
            static_cast<int>(leaves.size()),
            results.data(),
            static_cast<int>(results.size()),
            slots,
            uniform_slots,
            lookups,
            reads(Leaf::pair_term, Leaf::pair_tangent),
            reads(Leaf::product, Leaf::product),
            in_product};
  }
};

struct Result {
  int value;
  LeafOfList of = {Leaf::number};
  int index = kNone;  // the value that is the index into table `of.column`
};
// Returns the operations that `results` need, in order. A slot is reused when no later operation reads its value.
OwnList list_of(Graph& g, const std::vector<Result>& results) {
  const int one = g.number(1), nothing = g.number(-0.0), product = g.leaf('f', {Leaf::product});
  std::vector<Value> values;
  for (int n = 0; n < g.size(); ++n) {
    values.push_back(g[n]);
    if (g[n].op == Op::lookup || g[n].op == Op::lookup_tangent) values.back().from = {g[n].from[0], one, nothing};
  }
  std::vector<int> uses(g.size());
  for (const auto& [n, _, index] : results) {
    ++uses[n];
    if (index != kNone) ++uses[index];
  }
  for (int n = g.size() - 1; n >= 0; --n)
    if (uses[n] > 0)
      for (const int operand : values[n].from)
        if (operand != kNone) ++uses[operand];
  // Fuses two operations into one if the second operation is the only one that reads the result of the first:
  // - lookup: a number of a table, plus a value or a product
  // - fma, fms, fnma: a product plus a value, a product minus a value, a value minus a product
  // - tanh: z * tanh(x * y), if y and z are the same for all pairs
  const auto only_use_of = [&](int n, Op op) { return g[n].op == op && values[n].op == op && uses[n] == 1; };
  for (int n = 0; n < g.size(); ++n) {
    Value& v = values[n];
    if (uses[n] == 0) continue;
    for (const int i : {0, 1}) {
      if (v.op != Op::add) break;
      const int found = v.from[i], other = v.from[1 - i];
      if ((!only_use_of(found, Op::lookup) && !only_use_of(found, Op::lookup_tangent)) || found == other) continue;
      v = values[found];  // a lookup, to which the other operand is added
      v.from[2] = other;
      uses[found] = 0;
      --uses[nothing];
      if (!only_use_of(other, Op::mul)) continue;
      v.from = {v.from[0], g[other].from[0], g[other].from[1]};
      uses[other] = 0;
      --uses[one];
    }
    for (const int i : {0, 1}) {
      if ((v.op != Op::add && v.op != Op::sub) || g.is_uniform(n)) break;
      const int product = v.from[i], other = v.from[1 - i];
      if (!only_use_of(product, Op::mul) || product == other) continue;
      const Op op = v.op == Op::add ? Op::fma : i == 0 ? Op::fms : Op::fnma;
      v = {op, 'f', {g[product].from[0], g[product].from[1], other}};
      uses[product] = 0;
      break;
    }
    if (v.op == Op::tanh) {
      const int x = v.from[0];
      const bool has_factor = only_use_of(x, Op::mul) && g.is_uniform(g[x].from[1]);
      v.from = {has_factor ? g[x].from[0] : x, has_factor ? g[x].from[1] : one, one};
      if (has_factor) uses[x] = 0;
      uses[one] += has_factor ? 1 : 2;
    } else if (v.op == Op::mul && only_use_of(v.from[0], Op::tanh) && g.is_uniform(v.from[1])) {
      const int inner = v.from[0];
      v = {Op::tanh, 'f', {values[inner].from[0], values[inner].from[1], v.from[1]}};
      uses[inner] = 0;
      --uses[one];
    }
  }
  OwnList list;
  // Whether products may do step number n (List::in_product). `before` is the product, or the step before.
  const auto fits_product = [&](int n, int before) {
    Value& v = values[n];
    const bool looks_up = v.op == Op::lookup, multiplies = looks_up || v.op == Op::fma || v.op == Op::fms;
    if (v.op == Op::add && v.from[1] == before) std::swap(v.from[0], v.from[1]);
    if (looks_up && v.from[2] == before) std::swap(v.from[1], v.from[2]);
    const int x = looks_up ? 1 : 0;
    if (uses[before] != 1 || v.from[x] != before || (multiplies && !g.is_uniform(v.from[x + 1]))) return false;
    return multiplies || v.op == Op::add || v.op == Op::sub;
  };
  int before = product;
  std::vector<int16_t> place(g.size());
  std::vector<int16_t> free;
  for (int n = 0; n < g.size(); ++n)
    if (uses[n] > 0 && values[n].op == Op::leaf) {
      place[n] = static_cast<int16_t>(-1 - static_cast<int>(list.leaves.size()));
      list.leaves.push_back(values[n].leaf);
    }
  for (const bool uniform : {true, false}) {
    for (int n = 0; n < g.size(); ++n) {
      const Value& v = values[n];
      if (uses[n] == 0 || v.op == Op::leaf || g.is_uniform(n) != uniform) continue;
      if (!uniform && before != kNone) {
        const bool fits = list.in_product < kMostInProduct && fits_product(n, before);
        ++uses[before];  // so that its slot is never free: see Evaluation::slot()
        before = fits ? n : kNone;
        list.in_product += fits;
      }
      Step step{v.op, 0, {}};
      if (v.op == Op::lookup || v.op == Op::lookup_tangent) {
        step.table = static_cast<int8_t>(v.leaf.column);
        step.lookup = static_cast<int8_t>(list.lookups++);
      }
      for (int i = 0; i < 3; ++i) {
        const int operand = v.from[i];
        if (operand == kNone) continue;
        step.from[i] = place[operand];
        if (--uses[operand] == 0 && place[operand] >= list.uniform_slots && !uniform) free.push_back(place[operand]);
      }
      if (uniform || free.empty()) free.push_back(static_cast<int16_t>(list.slots++));
      step.to = place[n] = free.back();
      free.pop_back();
      list.steps.push_back(step);
    }
    if (uniform) list.uniform_slots = list.slots;
  }
  for (const auto& [n, of, index] : results) {
    list.results.push_back({place[n], of});
    if (index == kNone) continue;
    list.results.back().table = static_cast<int8_t>(of.column);
    list.results.back().index = place[index];
  }
  for (size_t i = 0; i < list.leaves.size(); ++i) {
    const auto is_leaf = [&](int16_t from) { return from == -1 - static_cast<int16_t>(i); };
    const auto reads_otherwise = [&](const Step& step) {
      const bool looks_up = step.op == Op::lookup || step.op == Op::lookup_tangent;
      return (is_leaf(step.from[0]) && !looks_up) || is_leaf(step.from[1]) || is_leaf(step.from[2]);
    };
    list.leaves[i].only_index =
        std::ranges::none_of(list.steps, reads_otherwise) &&
        std::ranges::none_of(list.results, [&](const ResultOfList& r) { return is_leaf(r.from); });
  }
  return list;
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
    {"add", 'i', "ii", Op::add_whole},
    {"sub", 'i', "ii", Op::sub_whole},
    {"mul", 'i', "ii", Op::mul_whole},
    {"minimum", 'i', "ii", Op::minimum_whole},
    {"maximum", 'i', "ii", Op::maximum_whole},
    {"floor_divide", 'i', "ii", Op::floor_divide},
    {"remainder", 'i', "ii", Op::remainder},
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
    check(line_ == "attn.program 1", "it must be \"attn.program 1\"");
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
    constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
    if (name == "score") {
      check(type == 'f' && std::strcmp(name_, "score_mod") == 0, "the score is a number, and only score_mod has one");
      return g.leaf('f', {Leaf::score});
    }
    if (name == "const") {
      if (type == 'i') return g.whole(static_cast<double>(integer(words, -kMost - 1, kMost)));
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
      const auto of = static_cast<int8_t>(found - kTables);
      std::string word;
      words >> word;
      const int index = operand(values, word);
      check(type == 'f' && g[index].type == 'i', "its operand is a whole number, and it is a number");
      check(compiled.tables[table] < 0 || compiled.tables[table] == of, "table ", table, " was read as another kind");
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

std::shared_ptr<const Compiled> read(const char* op, const char* name, const std::string& text) {
  auto compiled = std::make_shared<OwnCompiled>();
  Graph g;
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
    compiled->own.push_back(std::make_unique<OwnList>(list_of(g, results)));
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
  return compiled;
}

}  // namespace

std::shared_ptr<const Compiled> compile(const char* op, const char* name, const std::string& text) {
  static std::mutex mutex;
  static std::map<std::pair<std::string, std::string>, std::shared_ptr<const Compiled>> cache;
  constexpr size_t kMost = 256;
  const std::pair key(std::string(name), text);
  std::lock_guard<std::mutex> lock(mutex);
  if (const auto found = cache.find(key); found != cache.end()) return found->second;
  auto compiled = read(op, name, text);  // before the cache changes, because it may throw
  if (cache.size() == kMost) cache.clear();
  return cache[key] = std::move(compiled);
}

}  // namespace attn
