#include "operators/programs/text.h"

#include <c10/util/Exception.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstring>
#include <limits>
#include <sstream>
#include <vector>

#include "operators/programs/expressions.h"

namespace attn {
namespace {

using expressions::Expression;

constexpr int kMostOperations = 64, kMostColumns = 16, kMostLines = 512;

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
  Reader(const char* op_name, const char* name, const std::string& text, Graph& g, Reads& reads)
      : op_name_(op_name),
        name_(name),
        is_score_(std::strcmp(name, "score_mod") == 0),
        stream_(text),
        g_(g),
        reads_(reads) {}

  // Returns the value that the string returns.
  int read() {
    const char type = is_score_ ? 'f' : 'b';
    next_line();
    reads_.is_wide = line_ == "attn.program 1 wide";
    check(reads_.is_wide || line_ == "attn.program 1", "it must be \"attn.program 1\" or \"attn.program 1 wide\"");
    while (true) {
      next_line();
      check(++lines_ <= kMostLines, "a program has at most ", kMostLines, " lines");
      words_ = std::istringstream(line_);
      const std::string first = word();
      if (first == "return") {
        const int result = operand(word());
        end();
        std::string more;
        check(!(stream_ >> more), "nothing may follow");
        check(g_[result].type == type, "it must return ", spelled(type));
        return result;
      }
      check(first == c10::str("%", values_.size()), "a line must begin with %", values_.size(), " or return");
      const std::string kind = word(), name = word();
      check(!name.empty() && kind.size() == 1, "a type and an operation are missing");
      values_.push_back(value(kind[0], name));
      end();
    }
  }

 private:
  template <class... T>
  void check(bool is, const T&... what) const {
    TORCH_CHECK(is, op_name_, ": line ", number_, " of ", name_, " is \"", line_, "\"; ", what...);
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
  // The next word of the line, or "" at its end.
  std::string word() {
    std::string next;
    words_ >> next;
    return next;
  }
  void end() { check(word().empty(), "nothing may follow the operands"); }
  int operand(const std::string& value) const {
    size_t n = 0;
    const char *const first = value.data(), *const last = first + value.size();
    const bool is = value.size() > 1 && *first == '%' && std::from_chars(first + 1, last, n).ptr == last;
    check(is && n < values_.size(), "an operand must be an earlier value, %0 to %", values_.size() - 1);
    return values_[n];
  }
  int64_t integer(int64_t least, int64_t most) {
    const std::string next = word();
    int64_t n = 0;
    const char* const end_of_word = next.data() + next.size();
    const auto [last, error] = std::from_chars(next.data(), end_of_word, n);
    check(error == std::errc() && last == end_of_word && !next.empty() && least <= n && n <= most,
          "a whole number between ", least, " and ", most, " must follow");
    return n;
  }

  int value(char type, const std::string& name) {
    if (const int n = leaf(type, name); n != kNone) return n;
    check(++operations_ <= kMostOperations, "a program has at most ", kMostOperations, " operations");
    if (const int n = lookup(type, name); n != kNone) return n;
    return operation(type, name);
  }

  // Returns kNone if `name` is no leaf; so does lookup().
  int leaf(char type, const std::string& name) {
    if (name == "score") {
      check(type == 'f' && is_score_, "the score is a number, and only score_mod has one");
      return g_.leaf('f', {Leaf::score});
    }
    if (name == "const") return constant(type);
    if (name == "query" || name == "key_index") {
      check(type == 'i', "it is a whole number");
      return g_.leaf('i', {name == "query" ? Leaf::query : Leaf::key});
    }
    if (name == "pair") {
      check(type == 'f' && is_score_, "it is a number, and only score_mod has one");
      return g_.leaf('f', {Leaf::pair_term});
    }
    constexpr const char* kAxes[] = {"row", "key", "distance"};
    const auto axis = std::ranges::find(kAxes, name);
    if (axis == std::end(kAxes)) return kNone;
    const int column = static_cast<int>(integer(0, kMostColumns - 1));
    const Leaf first = type == 'f' ? Leaf::row_term : Leaf::row_number;
    const auto leaf = static_cast<Leaf>(static_cast<int>(first) + (axis - kAxes));
    int& count = reads_.columns[kind_of(leaf)];
    count = std::max(count, column + 1);
    if (type == 'f') return g_.leaf('f', {leaf, column});
    const int whole = g_.leaf('i', {leaf, column});
    check(type == 'i' || type == 'b', "a type must be f, i or b");
    return type == 'i' ? whole : g_.add(Op::ne_whole, whole, g_.whole(0), kNone, 'b');
  }

  int constant(char type) {
    const int64_t most = reads_.is_wide ? std::numeric_limits<int64_t>::max() : std::numeric_limits<int32_t>::max();
    if (type == 'i') return g_.whole(integer(-most - 1, most));
    if (type == 'b') return g_.boolean(integer(0, 1));
    const std::string number = word();
    char* last = nullptr;
    const double x = std::strtod(number.c_str(), &last);
    check(!number.empty() && *last == 0, "a number must follow");
    return g_.number(x);
  }

  int lookup(char type, const std::string& name) {
    constexpr const char* kTables[] = {"table", "row_table", "key_table"};  // in the order of TableOf
    const auto found = std::ranges::find(kTables, name);
    if (found == std::end(kTables)) return kNone;
    const auto table = static_cast<int>(integer(0, kMostTables - 1));
    const auto of = static_cast<TableOf>(found - kTables);
    const int index = operand(word());
    check(type == 'f' && g_[index].type == 'i', "its operand is a whole number, and it is a number");
    check(reads_.tables[table].value_or(of) == of, "table ", table, " was read as another kind");
    reads_.tables[table] = of;
    return g_.lookup(Op::lookup, index, table);
  }

  int operation(char type, const std::string& name) {
    std::array<int, 3> from = {kNone, kNone, kNone};
    std::string types;
    while (types.size() < 3) {
      const std::string next = word();
      if (next.empty()) break;
      const int n = from[types.size()] = operand(next);
      types += g_[n].type;
    }
    const std::string signature = types + '>' + type;
    for (const Operation& o : kOperations) {
      const bool fits = c10::str(' ', o.signatures, ' ').find(' ' + signature + ' ') != std::string::npos;
      if (fits && name == o.name && o.op != Op::leaf) return g_.add(o.op, from[0], from[1], from[2], type);
    }
    const Expression a(g_, from[0]), b(g_, from[1]), c(g_, from[2]);
#define ATTN_COMPOSITION(composed, of, expression) \
  if (name == composed && signature == of) return (expression).in(g_, type);
#include "core/operations.inl"
    check(false, "there is no operation ", name, " of type ", type, " whose operands have the types (", types, ")");
    return kNone;
  }

  const char *op_name_, *name_;
  const bool is_score_;
  std::istringstream stream_, words_;  // the string, and the line
  std::string line_;
  Graph& g_;
  Reads& reads_;
  std::vector<int> values_;  // of the lines so far
  int number_ = 0, lines_ = 0, operations_ = 0;
};

}  // namespace

int read_text(const char* op_name, const char* name, const std::string& text, Graph& g, Reads& reads) {
  return Reader(op_name, name, text, g, reads).read();
}

TORCH_LIBRARY_IMPL(attn, CompositeExplicitAutograd, m) {
  m.impl("_operations_of_programs", [] {
    std::vector<std::string> rows;
    for (const Operation& o : kOperations)
      if (*o.name) rows.push_back(c10::str(o.name, ' ', o.signatures));
    return rows;
  });
}

}  // namespace attn
