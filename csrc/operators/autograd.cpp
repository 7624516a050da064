// Derivatives, written as torch's own generated code writes them: a Node per operator under the Autograd key.
//
// With x = (query, key, value, attn_mask), O(x) the output, J its Jacobian and H(u; x; t) = grad_x <u, J(x) t>:
//
//   operator         computes   gradient, given the gradient w of the result        derivative along a direction dx, dt
//   _sdpa_forward    O          x: J'w         = _sdpa_backward                      J dx       = _sdpa_tangent
//   _sdpa_backward   J'u        u: J w         = _sdpa_tangent                       J'du + H(u; x; dx)
//                               x: H(u; x; w)  = _sdpa_second
//   _sdpa_tangent    J t        t: J'w         = _sdpa_backward                      formula
//                               x: H(w; x; t)  = _sdpa_second
//   _sdpa_second     H          formula                                              formula
//
// "formula": composed of ATen operators (formulas.h), O(L S) memory. What the operators take from the forward's results
// (output, logsumexp, ...) is a function of x; its share of a derivative is contained in the above, so that it counts
// as a constant here. sdpa has no derivative of its own: where one is wanted it calls _sdpa_forward.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/library.h>

#include <mutex>

#include "operators/compat.h"
#include "operators/formulas.h"

namespace attn {
namespace {

using at::Tensor;
using torch::autograd::SavedVariable;
using torch::autograd::set_history;
using torch::autograd::variable_list;

variable_list list(const Gradients& g) { return {g.query, g.key, g.value, g.attn_mask}; }

bool any(Wanted wanted) { return wanted[0] || wanted[1] || wanted[2] || wanted[3]; }

// Whether autograd records the call, given all its differentiable arguments. A struct stands for its fields.
template <class... T>
bool requires_grad(const T&... arguments) {
  return std::apply([](const auto&... t) { return torch::autograd::compute_requires_grad(t...); },
                    all_fields(arguments...));
}

// The edges of the node that records the call, in the order of the arguments.
template <class... T>
auto next_edges(const T&... arguments) {
  return std::apply([](const auto&... t) { return torch::autograd::collect_next_edges(t...); },
                    all_fields(arguments...));
}

// ---------------------------------------------------------------------------------------------------------------
// Forward mode: a dual tensor is a primal and a tangent.

bool is_dual(const Tensor& t) { return t.defined() && t._fw_grad(/*level=*/0).defined(); }
bool is_dual(const std::optional<Tensor>& t) { return t && is_dual(*t); }
template <Struct T>
bool is_dual(const T& tensors) {
  return std::apply([](const auto&... t) { return (is_dual(t) || ...); }, T::fields(tensors));
}

std::optional<Tensor> tangent_of(const std::optional<Tensor>& t) {
  return is_dual(t) ? std::optional(t->_fw_grad(0)) : std::nullopt;
}
Direction tangent_of(const Inputs& x) {
  return {tangent_of(x.query), tangent_of(x.key), tangent_of(x.value), tangent_of(x.attn_mask)};
}

Tensor primal_of(const Tensor& t) { return is_dual(t) ? t._fw_primal(0) : t; }
template <Struct T>
T primal_of(const T& tensors) {
  return map_tensors(tensors, [](const Tensor& t) { return primal_of(t); });
}

// ---------------------------------------------------------------------------------------------------------------
// Reverse mode: the nodes of the graph.

// A struct of tensors, as a node keeps it for the backward.
template <Struct T>
class Kept {
 public:
  // first_is_output: the first field is a result of the node itself.
  void save(const T& tensors, bool first_is_output) {
    const auto save = [&](const auto& first, const auto&... others) {
      variables_ = {SavedVariable(first, first_is_output), SavedVariable(others, false)...};
    };
    std::apply(save, T::fields(tensors));
  }
  // Takes pointer_to(node), where the first field may be a result of that node. An absent tensor stays absent.
  T unpack(decltype(pointer_to(nullptr)) node = nullptr) const {
    T tensors;
    size_t i = 0;
    const auto unpack_next = [&](auto& field) {
      Tensor t = variables_[i].unpack(i == 0 ? node : nullptr);
      if (t.defined()) field = std::move(t);
      ++i;
    };
    std::apply([&](auto&... field) { (unpack_next(field), ...); }, T::fields(tensors));
    return tensors;
  }
  void release() {
    for (SavedVariable& v : variables_) v.reset_data();
  }

 private:
  std::array<SavedVariable, kFields<T>> variables_;
};

// What the nodes of all operators keep: the point, the forward's results there, the options.
//
// Several threads may run backward through one node at once, and the first one that has done so may release what the
// node keeps. So apply() and release_variables() hold the node's mutex, in every node, as in the nodes that torch
// generates ("Thread safety on Autograd Node" in torch/csrc/autograd/function.h).
struct AttentionNode : torch::autograd::Node {
  Kept<Inputs> point;
  Kept<Saved> saved;
  PlainOptions options;

  void save(const Inputs& x, const Saved& s, const PlainOptions& o, bool output_is_mine) {
    point.save(x, false);
    saved.save(s, output_is_mine);
    options = o;
  }
  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    release();
  }
  virtual void release() {  // with the mutex held
    point.release();
    saved.release();
  }

  // Which of the four inputs whose edges start at `first` want a gradient.
  Wanted wanted(size_t first) const {
    Wanted w;
    for (size_t i = 0; i < 4; ++i) w[i] = task_should_compute_output(first + i);
    return w;
  }
};

// Edges in the order query, key, value, attn_mask.
struct SdpaBackward : AttentionNode {
  std::string name() const override { return "SdpaBackward"; }

  variable_list apply(variable_list&& grads) override {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!grads[0].defined()) return variable_list(4);
    return list(BackwardOp::call(grads[0], point.unpack(), saved.unpack(pointer_to(this)), options, wanted(0)));
  }
};

// Edges: grad_output, then the point.
struct SdpaDoubleBackward : AttentionNode {
  SavedVariable grad_output;

  std::string name() const override { return "SdpaDoubleBackward"; }
  void release() override {
    AttentionNode::release();
    grad_output.reset_data();
  }

  variable_list apply(variable_list&& grads) override {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto if_defined = [](const Tensor& t) { return t.defined() ? std::optional(t) : std::nullopt; };
    const Direction t{if_defined(grads[0]), if_defined(grads[1]), if_defined(grads[2]), if_defined(grads[3])};
    variable_list result(5);
    if (!t.query && !t.key && !t.value && !t.attn_mask) return result;
    const Inputs x = point.unpack();
    const Saved s = saved.unpack(pointer_to(this));
    const TangentResults tangent = TangentOp::call(x, s, t, options);
    if (task_should_compute_output(0)) result[0] = tangent.output;
    if (const Wanted w = wanted(1); any(w)) {
      const variable_list h = list(SecondOp::call(grad_output.unpack(), x, s, t, tangent, options, w));
      std::copy(h.begin(), h.end(), result.begin() + 1);
    }
    return result;
  }
};

// Edges: the point, then the direction.
struct SdpaTangentBackward : AttentionNode {
  Kept<Direction> direction;
  Kept<TangentResults> tangent;

  std::string name() const override { return "SdpaTangentBackward"; }
  void release() override {
    AttentionNode::release();
    direction.release();
    tangent.release();
  }

  variable_list apply(variable_list&& grads) override {
    std::lock_guard<std::mutex> lock(mutex_);
    variable_list result(8);
    if (!grads[0].defined()) return result;
    const Inputs x = point.unpack();
    const Saved s = saved.unpack(pointer_to(this));
    if (const Wanted w = wanted(0); any(w)) {
      const TangentResults r = tangent.unpack(pointer_to(this));
      const variable_list h = list(SecondOp::call(grads[0], x, s, direction.unpack(), r, options, w));
      std::copy(h.begin(), h.end(), result.begin());
    }
    if (const Wanted w = wanted(4); any(w)) {
      const variable_list g = list(BackwardOp::call(grads[0], x, s, options, w));
      std::copy(g.begin(), g.end(), result.begin() + 4);
    }
    return result;
  }
};

// Edges: grad_output, the point, the direction.
struct SdpaSecondBackward : torch::autograd::Node {
  SavedVariable grad_output;
  Kept<Inputs> point;
  Kept<Direction> direction;
  PlainOptions options;
  Wanted outputs;

  std::string name() const override { return "SdpaSecondBackward"; }
  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    grad_output.reset_data();
    point.release();
    direction.release();
  }

  variable_list apply(variable_list&& grads) override {
    const bool create_graph = at::GradMode::is_enabled();
    at::AutoGradMode enable(true);
    // Aliases: the gradient with respect to one of these must not run through another's history. What is asked for is
    // decided by the edges: after torch.func.vjp has returned, its tensors no longer say that they require a gradient.
    const auto alias = [](const Tensor& t) {
      if (!t.defined()) return t;
      Tensor same = t.view_as(t);
      return same.requires_grad() || !same.is_floating_point() ? same : same.requires_grad_();
    };
    std::unique_lock<std::mutex> lock(mutex_);
    const Tensor u = alias(grad_output.unpack());
    const Inputs x = map_tensors(point.unpack(), alias);
    const Direction t = map_tensors(direction.unpack(), alias);
    lock.unlock();  // The engine, which is called below, runs other nodes, which wait for mutexes of their own.
    const variable_list h = list(second_formula(u, x, t, options, outputs));
    variable_list from, with, to;
    for (size_t i = 0; i < 4; ++i)
      if (grads[i].defined() && h[i].defined() && h[i].requires_grad()) {
        from.push_back(h[i]);
        with.push_back(grads[i]);
      }
    std::vector<size_t> edges;
    const auto add = [&](size_t edge, const std::optional<Tensor>& input) {
      if (!input || !input->defined() || !task_should_compute_output(edge)) return;
      to.push_back(*input);
      edges.push_back(edge);
    };
    size_t edge = 0;
    std::apply([&](const auto&... input) { (add(edge++, input), ...); }, all_fields(u, x, t));
    variable_list result(9);
    if (from.empty() || to.empty()) return result;
    const variable_list g = torch::autograd::grad(from, to, with, /*retain_graph=*/true, create_graph,
                                                  /*allow_unused=*/true);
    for (size_t i = 0; i < g.size(); ++i) result[edges[i]] = g[i];
    return result;
  }
};

// sdpa_stats has no derivative. Its results say so when a gradient is asked of them; to read them is no error, so that
// statistics can be logged in the middle of a training step.
constexpr const char* kNoDerivative =
    "attn::sdpa_stats: its results have no derivatives, and one was asked for; take the scores and weights of "
    "sdpa_with_weights, which have, or call sdpa_stats with query.detach() and key.detach()";

// Edges: query, key, attn_mask.
struct SdpaStatsBackward : torch::autograd::Node {
  std::string name() const override { return "SdpaStatsBackward"; }

  variable_list apply(variable_list&&) override { TORCH_CHECK(false, kNoDerivative); }
};

// ---------------------------------------------------------------------------------------------------------------
// The kernels under the Autograd key.

// Calls the operator again, without autograd.
template <class Op, class... Arguments>
auto below_autograd(c10::DispatchKeySet keys, const Arguments&... arguments) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  return Op::redispatch(keys & c10::after_autograd_keyset, arguments...);
}

Tensor sdpa_autograd(c10::DispatchKeySet keys, const Inputs& x, const PlainOptions& options) {
  if (requires_grad(x) || is_dual(x)) return ForwardOp::call(x, options, std::nullopt).output;
  return below_autograd<SdpaOp>(keys, x, options);
}

Saved forward_autograd(c10::DispatchKeySet keys, const Inputs& x, const PlainOptions& options,
                       const std::optional<Tensor>& rng_state) {
  Saved results = below_autograd<ForwardOp>(keys, x, options, rng_state);
  Tensor tangent_output;
  if (is_dual(x)) tangent_output = TangentOp::call(primal_of(x), results, tangent_of(x), options).output;
  if (requires_grad(x)) {
    auto node = make_node<SdpaBackward>();
    node->set_next_edges(next_edges(x));
    set_history(results.output, node);
    node->save(x, results, options, /*output_is_mine=*/true);
  }
  if (tangent_output.defined()) results.output._set_fw_grad(tangent_output, /*level=*/0, /*is_inplace_op=*/false);
  return results;
}

Gradients backward_autograd(c10::DispatchKeySet keys, const Tensor& grad_output, const Inputs& x, const Saved& s,
                            const PlainOptions& options, Wanted wanted) {
  Gradients results = below_autograd<BackwardOp>(keys, grad_output, x, s, options, wanted);
  variable_list tangents(4);
  const auto add = [&](const Gradients& more) {
    for (size_t i = 0; const Tensor& t : list(more)) {
      if (t.defined()) tangents[i] = tangents[i].defined() ? tangents[i] + t : t;
      ++i;
    }
  };
  if (is_dual(grad_output))
    add(BackwardOp::call(*tangent_of(grad_output), primal_of(x), primal_of(s), options, wanted));
  if (is_dual(x)) {
    const Inputs point = primal_of(x);
    const Saved saved = primal_of(s);
    const Direction direction = tangent_of(x);
    const TangentResults tangent = TangentOp::call(point, saved, direction, options);
    add(SecondOp::call(primal_of(grad_output), point, saved, direction, tangent, options, wanted));
  }
  if (requires_grad(grad_output, x)) {
    auto node = make_node<SdpaDoubleBackward>();
    node->set_next_edges(next_edges(grad_output, x));
    node->save(x, s, options, /*output_is_mine=*/false);
    node->grad_output = SavedVariable(grad_output, false);
    set_history(list(results), node);
  }
  for (size_t i = 0; i < 4; ++i)
    if (tangents[i].defined()) list(results)[i]._set_fw_grad(tangents[i], 0, false);
  return results;
}

TangentResults tangent_autograd(c10::DispatchKeySet keys, const Inputs& x, const Saved& s, const Direction& t,
                                const PlainOptions& options) {
  if (is_dual(x) || is_dual(t)) return tangent_formula(x, t, options);
  TangentResults results = below_autograd<TangentOp>(keys, x, s, t, options);
  if (requires_grad(x, t)) {
    auto node = make_node<SdpaTangentBackward>();
    node->set_next_edges(next_edges(x, t));
    node->save(x, s, options, /*output_is_mine=*/false);
    node->direction.save(t, false);
    set_history(results.output, node);
    node->tangent.save(results, /*first_is_output=*/true);
  }
  return results;
}

Gradients second_autograd(c10::DispatchKeySet keys, const Tensor& grad_output, const Inputs& x, const Saved& s,
                          const Direction& t, const TangentResults& tangent, const PlainOptions& options,
                          Wanted wanted) {
  if (is_dual(grad_output) || is_dual(x) || is_dual(t)) return second_formula(grad_output, x, t, options, wanted);
  Gradients results = below_autograd<SecondOp>(keys, grad_output, x, s, t, tangent, options, wanted);
  if (requires_grad(grad_output, x, t)) {
    auto node = make_node<SdpaSecondBackward>();
    node->set_next_edges(next_edges(grad_output, x, t));
    node->grad_output = SavedVariable(grad_output, false);
    node->point.save(x, false);
    node->direction.save(t, false);
    node->options = options;
    node->outputs = wanted;
    set_history(list(results), node);
  }
  return results;
}

Statistics stats_autograd(c10::DispatchKeySet keys, const QueryAndKey& x, const ScoreOptions& options) {
  TORCH_CHECK(!is_dual(x), kNoDerivative);
  Statistics results = below_autograd<StatsOp>(keys, x, options);
  if (requires_grad(x)) {
    auto node = make_node<SdpaStatsBackward>();
    node->set_next_edges(next_edges(x));
    set_history({results.largest_score, results.entropy, results.logsumexp, results.received_weight}, node);
  }
  return results;
}

}  // namespace

TORCH_LIBRARY_IMPL(attn, Autograd, m) {
  m.impl("sdpa", SdpaOp::kernel_with_keys<sdpa_autograd>);
  m.impl("_sdpa_forward", ForwardOp::kernel_with_keys<forward_autograd>);
  m.impl("_sdpa_backward", BackwardOp::kernel_with_keys<backward_autograd>);
  m.impl("_sdpa_tangent", TangentOp::kernel_with_keys<tangent_autograd>);
  m.impl("_sdpa_second", SecondOp::kernel_with_keys<second_autograd>);
  m.impl("sdpa_stats", StatsOp::kernel_with_keys<stats_autograd>);
}

}  // namespace attn
