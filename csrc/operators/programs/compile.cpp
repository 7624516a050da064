#include "operators/programs/compile.h"

#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <map>
#include <mutex>
#include <string_view>
#include <tuple>
#include <unordered_map>

#include "operators/programs/derivatives.h"

namespace attn {
namespace {

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

std::shared_ptr<const Compiled> compiled_from(const char* op_name, const char* name, const std::string& text,
                                              bool rewrites) {
  auto compiled = std::make_shared<Compiled>();
  Graph g(rewrites);
  const int result = read_text(op_name, name, text, g, *compiled);
  const int values = g.size();
  // Makes a list in which product * scale takes the place of the score. If `kept` is given, the kernel has stored value
  // number `kept` in place of the product, and the leaf `product` stands for this value.
  const auto take = [&](OwnList& list, std::vector<Result> results, int kept = kNone) {
    std::unordered_map<int, int> built = {
        {g.leaf('f', {Leaf::score}), g.add(Op::mul, g.leaf('f', {Leaf::product}), g.leaf('f', {Leaf::scale}))}};
    if (kept != kNone) built[kept] = g.leaf('f', {Leaf::product});
    for (Result& r : results) {
      r.value = g.rebuilt(r.value, built);
      if (r.index != kNone) r.index = g.rebuilt(r.index, built);
    }
    list = schedule(g, results, compiled->is_wide);
  };
  take(compiled->list, {{result}});
  if (g[result].type == 'b') return compiled;  // of a mask_mod

  const int score = g.leaf('f', {Leaf::score}), grad = g.leaf('f', {Leaf::grad});
  const std::vector<int> adjoints = gradients_of_values(g, result, grad);
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
  const auto moved = [&](int n) { return zero_if_none(g, tangent_of_value(g, n, tangents)); };
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
  compiled->applied = g.applied();
  return compiled;
}

// Tests compare lists with and without rewrites.
std::atomic<bool> rewrites_lists{true};

}  // namespace

std::shared_ptr<const Compiled> compile(const char* op_name, const char* name, const std::string& text) {
  static std::mutex mutex;
  using Key = std::tuple<std::string, std::string, bool>;
  static std::map<Key, std::shared_ptr<const Compiled>, std::less<>> cache;
  constexpr size_t kMost = 256;
  const std::tuple<std::string_view, std::string_view, bool> key(name, text, rewrites_lists.load());
  std::lock_guard<std::mutex> lock(mutex);
  if (const auto found = cache.find(key); found != cache.end()) return found->second;
  auto compiled =
      compiled_from(op_name, name, text, std::get<2>(key));  // before the cache changes, because it may throw
  if (cache.size() == kMost) cache.clear();
  return cache[Key(key)] = std::move(compiled);
}

TORCH_LIBRARY_IMPL(attn, CompositeExplicitAutograd, m) {
  m.impl("_rewrite_programs", [](bool rewrites) { rewrites_lists = rewrites; });
  m.impl("_rewrites_of", [](const std::string& score_mod) {
    std::vector<const char*> names(std::begin(kFusions), std::end(kFusions));
    for (const Rewrite& rewrite : kRewrites) names.push_back(rewrite.name);
    if (!score_mod.empty())
      names = compiled_from("attn::_rewrites_of", "score_mod", score_mod, /*rewrites=*/true)->applied;
    return std::vector<std::string>(names.begin(), names.end());
  });
}

}  // namespace attn
