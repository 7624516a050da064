// A function of the pair as a graph of values, each computed from earlier ones. The graph simplifies itself while it is
// built.
#pragma once

#include <array>
#include <limits>
#include <map>
#include <span>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "core/program.h"

namespace attn {

constexpr int kNone = -1;  // no value

class Graph {
 public:
  // Equal values are stored once.
  struct Value {
    Op op = Op::leaf;
    char type = 'f';
    std::array<int, 3> from = {kNone, kNone, kNone};
    LeafOfList leaf = {Leaf::number};
    bool is_uniform = false;  // the same for all pairs
    // log2 |value| of a uniform number, where the scale counts as 1. NaN if it is not known or not finite.
    double magnitude = std::numeric_limits<double>::quiet_NaN();
  };

  explicit Graph(bool rewrites) : rewrites_(rewrites) {}

  int leaf(char type, LeafOfList leaf) { return put({.type = type, .leaf = leaf}); }
  int number(double x) { return leaf('f', {Leaf::number, 0, x}); }
  int whole(int64_t x) { return leaf('i', {Leaf::whole_number, 0, 0, x}); }
  int boolean(bool x) { return leaf('b', {Leaf::whole_number, 0, 0, x ? -1 : 0}); }
  int lookup(Op op, int index, int table) { return put({op, 'f', {index, kNone, kNone}, {Leaf::number, table}}); }
  // Adds an operation whose result has `type`, or returns a value that equals it (kRewrites).
  int add(Op op, int a, int b = kNone, int c = kNone, char type = 'f');
  // Adds an operation as it is.
  int put(const Value& value);

  const Value& operator[](int n) const { return values_[n]; }
  int size() const { return static_cast<int>(values_.size()); }
  bool rewrites() const { return rewrites_; }
  bool is_leaf(int n) const { return values_[n].op == Op::leaf; }
  bool is_number(int n) const { return is_leaf(n) && values_[n].leaf.leaf == Leaf::number; }
  bool is_number(int n, double x) const { return is_number(n) && number_of(n) == x; }
  double number_of(int n) const { return values_[n].leaf.number; }
  // Whether value n is the same for all pairs.
  bool is_uniform(int n) const { return values_[n].is_uniform; }
  // Whether value n is uniform, finite, not 0, and so near to 1 that a product with it leaves the range of float32 only
  // if the other factor nearly does.
  bool is_moderate(int n) const {
    constexpr double kMost = 24;
    return -kMost <= values_[n].magnitude && values_[n].magnitude <= kMost;
  }
  // Whether value n is a product of a factor that differs between pairs and a second factor that is moderate.
  bool has_factor(int n) const { return values_[n].op == Op::mul && !is_uniform(n) && is_moderate(values_[n].from[1]); }
  // Whether value n depends on the leaf by a path that does not pass through value `cut`.
  bool reads(int n, Leaf leaf, int cut = kNone) const;
  // Builds value n again, with replacements for some of the values that n depends on. `built` maps each replaced value
  // to its replacement, and gets an entry for every value that this function builds.
  int rebuilt(int n, std::unordered_map<int, int>& built);
  // The names of the rewrites and fusions (schedule.h) that were applied.
  const std::vector<const char*>& applied() const { return applied_; }
  void note(const char* name);

 private:
  double magnitude_of(const Value& v) const;

  bool rewrites_;
  std::vector<Value> values_;
  std::map<std::tuple<Op, char, std::array<int, 3>, Leaf, int, uint64_t, int64_t>, int> numbers_;
  std::vector<const char*> applied_;
};

// A rule that replaces an operation by a value that equals it for every number, infinity and NaN of the other operands,
// up to rounding, and up to an intermediate result that leaves the range of float32. tests/test_program_rewrites.py
// goes over the table, with constants of every kind.
struct Rewrite {
  const char* name;  // x and y are any values, and u and v moderate ones (Graph::is_moderate)
  // Returns the value that takes the place of operation `v`, or kNone if the rule does not apply.
  int (*apply)(Graph& g, const Graph::Value& v);
};
extern const std::span<const Rewrite> kRewrites;

}  // namespace attn
