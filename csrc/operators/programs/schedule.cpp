#include "operators/programs/schedule.h"

#include <algorithm>
#include <utility>

namespace attn {
namespace {

bool looks_up(Op op) { return op == Op::lookup || op == Op::lookup_tangent; }

// Each of the first three functions is a pass, and makes an array with an element for every value of the graph. A pass
// reads the arrays of the passes before it.
class Scheduler {
 public:
  Scheduler(Graph& g, const std::vector<Result>& results)
      : g_(g), one_(g.number(1)), nothing_(g.number(-0.0)), results_(results) {
    for (int n = 0; n < g.size(); ++n) {
      Graph::Value v = g[n];
      if (looks_up(v.op)) v.from = {v.from[0], one_, nothing_};
      if (v.op == Op::tanh) v.from = {v.from[0], one_, one_};
      values_.push_back(v);
    }
    readers_.resize(g.size());
    source_.resize(g.size());
  }

  // Counts how many operations and results read each value. The count of a value that no result depends on is 0.
  void count_readers() {
    std::ranges::fill(readers_, 0);
    for (const auto& [n, _, index] : results_) {
      ++readers_[n];
      if (index != kNone) ++readers_[index];
    }
    for (int n = g_.size() - 1; n >= 0; --n)
      if (readers_[n] > 0)
        for (const int operand : values_[n].from)
          if (operand != kNone) ++readers_[operand];
  }

  // Puts fused operations in place of some of `values_`. Afterwards some values have no readers: count them again.
  void fuse() {
    for (int n = 0; n < g_.size(); ++n)
      if (readers_[n] > 0) {
        fuse_lookup(n);
        fuse_product(n);
        fuse_tanh(n);
      }
  }

  // Finds where steps read each value (Step::from): a leaf or a slot. A slot is free again after the last reader of its
  // value, except the slots of uniform values.
  void assign_slots() {
    for (int n = 0; n < g_.size(); ++n)
      if (readers_[n] > 0 && values_[n].op == Op::leaf) {
        source_[n] = static_cast<int16_t>(-1 - static_cast<int>(list_.own_leaves.size()));
        list_.own_leaves.push_back(values_[n].leaf);
      }
    for (int n = 0; n < g_.size(); ++n)
      if (is_step(n) && g_.is_uniform(n)) source_[n] = static_cast<int16_t>(list_.slots++);
    list_.uniform_slots = list_.slots;
    std::vector<int> readers_left = readers_;
    std::vector<int16_t> free;
    for (int n = 0; n < g_.size(); ++n) {
      if (!is_step(n) || g_.is_uniform(n)) continue;
      for (const int operand : values_[n].from) {
        if (operand == kNone || --readers_left[operand] > 0) continue;
        if (is_step(operand) && !g_.is_uniform(operand)) free.push_back(source_[operand]);
      }
      if (free.empty()) free.push_back(static_cast<int16_t>(list_.slots++));
      source_[n] = free.back();
      free.pop_back();
    }
  }

  OwnList list(bool is_wide) {
    add_steps(/*uniform=*/true);
    add_steps(/*uniform=*/false);
    for (const auto& [n, of, index] : results_) {
      list_.own_results.push_back({source_[n], of});
      if (index == kNone) continue;
      list_.own_results.back().table = static_cast<int8_t>(of.column);
      list_.own_results.back().index = source_[index];
    }
    for (size_t i = 0; i < list_.own_leaves.size(); ++i)
      list_.own_leaves[i].only_index = is_only_index(-1 - static_cast<int>(i));
    list_.steps = list_.own_steps.data();
    list_.step_count = static_cast<int>(list_.own_steps.size());
    list_.leaves = list_.own_leaves.data();
    list_.leaf_count = static_cast<int>(list_.own_leaves.size());
    list_.results = list_.own_results.data();
    list_.result_count = static_cast<int>(list_.own_results.size());
    list_.reads_pairs = has_leaf(Leaf::pair_term) || has_leaf(Leaf::pair_tangent);
    list_.reads_product = has_leaf(Leaf::product);
    list_.is_wide = is_wide;
    return std::move(list_);
  }

 private:
  // Whether value n is an operation that is not fused yet, and that one other operation reads.
  bool only_use_of(int n, Op op) const { return g_[n].op == op && values_[n].op == op && readers_[n] == 1; }

  void fuse_lookup(int n) {
    Graph::Value& v = values_[n];
    for (const int i : {0, 1}) {
      if (v.op != Op::add) return;
      const int found = v.from[i], other = v.from[1 - i];
      if ((!only_use_of(found, Op::lookup) && !only_use_of(found, Op::lookup_tangent)) || found == other) continue;
      g_.note(kFuseLookup);
      v = values_[found];  // a lookup, to which the other operand is added
      v.from[2] = other;
      if (!only_use_of(other, Op::mul)) continue;
      v.from = {v.from[0], g_[other].from[0], g_[other].from[1]};
    }
  }

  void fuse_product(int n) {
    Graph::Value& v = values_[n];
    if ((v.op != Op::add && v.op != Op::sub) || g_.is_uniform(n)) return;
    for (const int i : {0, 1}) {
      const int product = v.from[i], other = v.from[1 - i];
      if (!only_use_of(product, Op::mul) || product == other) continue;
      g_.note(kFuseProduct);
      const Op op = v.op == Op::add ? Op::fma : i == 0 ? Op::fms : Op::fnma;
      v = {op, 'f', {g_[product].from[0], g_[product].from[1], other}};
      return;
    }
  }

  void fuse_tanh(int n) {
    Graph::Value& v = values_[n];
    if (v.op == Op::tanh) {
      const int x = v.from[0];
      if (!only_use_of(x, Op::mul) || !g_.has_factor(x)) return;
      g_.note(kFuseTanh);
      v.from = {g_[x].from[0], g_[x].from[1], one_};
    } else if (v.op == Op::mul && only_use_of(v.from[0], Op::tanh) && g_.is_moderate(v.from[1])) {
      g_.note(kFuseTanh);
      const int inner = v.from[0];
      v = {Op::tanh, 'f', {values_[inner].from[0], values_[inner].from[1], v.from[1]}};
    }
  }

  bool is_step(int n) const { return readers_[n] > 0 && values_[n].op != Op::leaf; }

  void add_steps(bool uniform) {
    for (int n = 0; n < g_.size(); ++n) {
      if (!is_step(n) || g_.is_uniform(n) != uniform) continue;
      const Graph::Value& v = values_[n];
      Step& step = list_.own_steps.emplace_back(Step{v.op, source_[n]});
      for (int i = 0; i < 3; ++i)
        if (v.from[i] != kNone) step.from[i] = source_[v.from[i]];
      if (!looks_up(v.op)) continue;
      step.table = static_cast<int8_t>(v.leaf.column);
      step.lookup = static_cast<int8_t>(list_.lookups++);
    }
  }

  bool has_leaf(Leaf kind) const {
    return std::ranges::any_of(list_.own_leaves, [&](const LeafOfList& leaf) { return leaf.leaf == kind; });
  }

  // Whether steps read the leaf at `source` only as the index of a table.
  bool is_only_index(int source) const {
    const auto reads_otherwise = [&](const Step& step) {
      return (step.from[0] == source && !looks_up(step.op)) || step.from[1] == source || step.from[2] == source;
    };
    const auto is_result = [&](const ResultOfList& result) { return result.from == source; };
    return std::ranges::none_of(list_.own_steps, reads_otherwise) && std::ranges::none_of(list_.own_results, is_result);
  }

  Graph& g_;
  const int one_, nothing_;  // leaves: 1 and -0
  const std::vector<Result>& results_;
  std::vector<Graph::Value> values_;  // of the graph, with fused operations in place of some
  std::vector<int> readers_;
  std::vector<int16_t> source_;
  OwnList list_;
};

}  // namespace

OwnList schedule(Graph& g, const std::vector<Result>& results, bool is_wide) {
  Scheduler scheduler(g, results);
  scheduler.count_readers();
  if (g.rewrites()) {
    scheduler.fuse();
    scheduler.count_readers();
  }
  scheduler.assign_slots();
  return scheduler.list(is_wide);
}

}  // namespace attn
