#include "operators/program_schedule.h"

#include <algorithm>
#include <utility>

namespace attn {
namespace {

bool looks_up(Op op) { return op == Op::lookup || op == Op::lookup_tangent; }

class Scheduler {
 public:
  Scheduler(Graph& g, const std::vector<Result>& results)
      : g_(g), one_(g.number(1)), nothing_(g.number(-0.0)), product_(g.leaf('f', {Leaf::product})), uses_(g.size()) {
    for (int n = 0; n < g.size(); ++n) {
      Graph::Value v = g[n];
      if (looks_up(v.op)) v.from = {v.from[0], one_, nothing_};
      if (v.op == Op::tanh) v.from = {v.from[0], one_, one_};
      values_.push_back(v);
    }
    for (const auto& [n, _, index] : results) {
      ++uses_[n];
      if (index != kNone) ++uses_[index];
    }
    for (int n = g.size() - 1; n >= 0; --n)
      if (uses_[n] > 0)
        for (const int operand : values_[n].from)
          if (operand != kNone) ++uses_[operand];
  }

  void fuse() {
    for (int n = 0; n < g_.size(); ++n)
      if (uses_[n] > 0) {
        fuse_lookup(n);
        fuse_product(n);
        fuse_tanh(n);
      }
  }

  OwnList list() {
    place_.resize(g_.size());
    for (int n = 0; n < g_.size(); ++n)
      if (uses_[n] > 0 && values_[n].op == Op::leaf) {
        place_[n] = static_cast<int16_t>(-1 - static_cast<int>(list_.leaves.size()));
        list_.leaves.push_back(values_[n].leaf);
      }
    add_steps(/*uniform=*/true);
    add_steps(/*uniform=*/false);
    return std::move(list_);
  }

  int16_t place(int n) const { return place_[n]; }

 private:
  // Whether value n is an operation that is not fused yet, and that one other operation reads.
  bool only_use_of(int n, Op op) const { return g_[n].op == op && values_[n].op == op && uses_[n] == 1; }

  void fuse_lookup(int n) {
    Graph::Value& v = values_[n];
    for (const int i : {0, 1}) {
      if (v.op != Op::add) return;
      const int found = v.from[i], other = v.from[1 - i];
      if ((!only_use_of(found, Op::lookup) && !only_use_of(found, Op::lookup_tangent)) || found == other) continue;
      g_.note(kFuseLookup);
      v = values_[found];  // a lookup, to which the other operand is added
      v.from[2] = other;
      uses_[found] = 0;
      --uses_[nothing_];
      if (!only_use_of(other, Op::mul)) continue;
      v.from = {v.from[0], g_[other].from[0], g_[other].from[1]};
      uses_[other] = 0;
      --uses_[one_];
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
      uses_[product] = 0;
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
      uses_[x] = 0;
      --uses_[one_];
    } else if (v.op == Op::mul && only_use_of(v.from[0], Op::tanh) && g_.is_moderate(v.from[1])) {
      g_.note(kFuseTanh);
      const int inner = v.from[0];
      v = {Op::tanh, 'f', {values_[inner].from[0], values_[inner].from[1], v.from[1]}};
      uses_[inner] = 0;
      --uses_[one_];
    }
  }

  // Whether products may do step number n (List::in_product). `before` is the product, or the step before.
  bool fits_product(int n, int before) {
    Graph::Value& v = values_[n];
    const bool is_lookup = v.op == Op::lookup, multiplies = is_lookup || v.op == Op::fma || v.op == Op::fms;
    if (v.op == Op::add && v.from[1] == before) std::swap(v.from[0], v.from[1]);
    if (is_lookup && v.from[2] == before) std::swap(v.from[1], v.from[2]);
    const int x = is_lookup ? 1 : 0;
    if (uses_[before] != 1 || v.from[x] != before || (multiplies && !g_.is_uniform(v.from[x + 1]))) return false;
    return multiplies || v.op == Op::add || v.op == Op::sub;
  }

  void add_steps(bool uniform) {
    int before = g_.rewrites() ? product_ : kNone;
    std::vector<int16_t> free;
    for (int n = 0; n < g_.size(); ++n) {
      const Graph::Value& v = values_[n];
      if (uses_[n] == 0 || v.op == Op::leaf || g_.is_uniform(n) != uniform) continue;
      if (!uniform && before != kNone) {
        const bool fits = list_.in_product < kMostInProduct && fits_product(n, before);
        ++uses_[before];  // so that its slot is never free: see Evaluation::slot()
        before = fits ? n : kNone;
        list_.in_product += fits;
        if (fits) g_.note(kInProduct);
      }
      Step step{v.op, 0, {}};
      if (looks_up(v.op)) {
        step.table = static_cast<int8_t>(v.leaf.column);
        step.lookup = static_cast<int8_t>(list_.lookups++);
      }
      for (int i = 0; i < 3; ++i) {
        const int operand = v.from[i];
        if (operand == kNone) continue;
        step.from[i] = place_[operand];
        if (--uses_[operand] == 0 && place_[operand] >= list_.uniform_slots && !uniform)
          free.push_back(place_[operand]);
      }
      if (uniform || free.empty()) free.push_back(static_cast<int16_t>(list_.slots++));
      step.to = place_[n] = free.back();
      free.pop_back();
      list_.steps.push_back(step);
    }
    if (uniform) list_.uniform_slots = list_.slots;
  }

  Graph& g_;
  const int one_, nothing_, product_;  // leaves: 1, -0 and the product
  std::vector<Graph::Value> values_;   // with fused operations in place of some
  std::vector<int> uses_;              // how many operations and results read a value
  std::vector<int16_t> place_;
  OwnList list_;
};

}  // namespace

List OwnList::view() const {
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
          in_product,
          is_wide};
}

OwnList schedule(Graph& g, const std::vector<Result>& results, bool is_wide) {
  Scheduler scheduler(g, results);
  if (g.rewrites()) scheduler.fuse();
  OwnList list = scheduler.list();
  list.is_wide = is_wide;
  for (const auto& [n, of, index] : results) {
    list.results.push_back({scheduler.place(n), of});
    if (index == kNone) continue;
    list.results.back().table = static_cast<int8_t>(of.column);
    list.results.back().index = scheduler.place(index);
  }
  for (size_t i = 0; i < list.leaves.size(); ++i) {
    const auto is_leaf = [&](int16_t from) { return from == -1 - static_cast<int16_t>(i); };
    const auto reads_otherwise = [&](const Step& step) {
      return (is_leaf(step.from[0]) && !looks_up(step.op)) || is_leaf(step.from[1]) || is_leaf(step.from[2]);
    };
    list.leaves[i].only_index =
        std::ranges::none_of(list.steps, reads_otherwise) &&
        std::ranges::none_of(list.results, [&](const ResultOfList& r) { return is_leaf(r.from); });
  }
  return list;
}

}  // namespace attn
