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
// (output, logsumexp, ...) is a function of x; its share of a derivative is contained in the above, so that it counts as
// a constant here. sdpa has no derivative of its own: where one is wanted it calls _sdpa_forward.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/library.h>

#include <mutex>

#include "compat.h"
#include "formulas.h"

namespace attn {
namespace {

using at::Tensor;
using torch::autograd::SavedVariable;
using torch::autograd::set_history;
using torch::autograd::variable_list;

std::optional<Tensor> if_defined(const Tensor& t) { return t.defined() ? std::optional(t) : std::nullopt; }
Tensor or_undefined(const std::optional<Tensor>& t) { return t.value_or(Tensor()); }

struct Options {
  double dropout_p;
  bool is_causal;
  std::optional<double> scale;
  bool enable_gqa;
};
#define ATTN_OPTIONS_OF(o) o.dropout_p, o.is_causal, o.scale, o.enable_gqa

// A point or a direction in the space of inputs; undefined tensors are absent (zero).
struct Inputs {
  Tensor query, key, value, attn_mask;

  std::array<Tensor, 4> all() const { return {query, key, value, attn_mask}; }
  bool any() const { return query.defined() || key.defined() || value.defined() || attn_mask.defined(); }
};

struct Saved {
  Tensor output, logsumexp, rng_state, residual;
};

#define ATTN_INPUTS_OF(x) x.query, x.key, x.value, if_defined(x.attn_mask)
#define ATTN_SAVED_OF(s) s.output, s.logsumexp, s.rng_state, s.residual
#define ATTN_TANGENTS_OF(t) if_defined(t.query), if_defined(t.key), if_defined(t.value), if_defined(t.attn_mask)
#define ATTN_THESE_INPUTS {query, key, value, or_undefined(attn_mask)}
#define ATTN_THESE_TANGENTS \
  {or_undefined(tangent_query), or_undefined(tangent_key), or_undefined(tangent_value), or_undefined(tangent_mask)}
#define ATTN_THESE_OPTIONS {dropout_p, is_causal, scale, enable_gqa}

Tensors4 backward(const Tensor& u, const Inputs& x, const Saved& s, const Options& o, Wanted wanted) {
  return backward_op().call(u, ATTN_INPUTS_OF(x), ATTN_SAVED_OF(s), ATTN_OPTIONS_OF(o), wanted);
}

Tensors3 tangent(const Inputs& x, const Saved& s, const Inputs& t, const Options& o) {
  return tangent_op().call(ATTN_INPUTS_OF(x), ATTN_SAVED_OF(s), ATTN_TANGENTS_OF(t), ATTN_OPTIONS_OF(o));
}

Tensors4 second(const Tensor& u, const Inputs& x, const Saved& s, const Inputs& t, const Tensors3& moved,
                const Options& o, Wanted wanted) {
  return second_op().call(u, ATTN_INPUTS_OF(x), ATTN_SAVED_OF(s), ATTN_TANGENTS_OF(t), std::get<0>(moved),
                          std::get<1>(moved), std::get<2>(moved), ATTN_OPTIONS_OF(o), wanted);
}

bool any(Wanted wanted) { return wanted[0] || wanted[1] || wanted[2] || wanted[3]; }

variable_list list(const Tensors4& t) { return {std::get<0>(t), std::get<1>(t), std::get<2>(t), std::get<3>(t)}; }

// ---------------------------------------------------------------------------------------------------------------
// Forward mode: a dual tensor is a primal and a tangent.

bool is_dual(const Tensor& t) { return t.defined() && t._fw_grad(/*level=*/0).defined(); }
bool is_dual(const Inputs& x) { return is_dual(x.query) || is_dual(x.key) || is_dual(x.value) || is_dual(x.attn_mask); }

Tensor tangent_of(const Tensor& t) { return t.defined() ? t._fw_grad(0) : Tensor(); }
Inputs tangent_of(const Inputs& x) {
  return {tangent_of(x.query), tangent_of(x.key), tangent_of(x.value), tangent_of(x.attn_mask)};
}
Tensor primal_of(const Tensor& t) { return is_dual(t) ? t._fw_primal(0) : t; }
Inputs primal_of(const Inputs& x) {
  return {primal_of(x.query), primal_of(x.key), primal_of(x.value), primal_of(x.attn_mask)};
}
Saved primal_of(const Saved& s) {
  return {primal_of(s.output), primal_of(s.logsumexp), s.rng_state, primal_of(s.residual)};
}

// ---------------------------------------------------------------------------------------------------------------
// Reverse mode: the nodes of the graph.

struct SavedInputs {
  SavedVariable query, key, value, attn_mask;

  void save(const Inputs& x) {
    query = SavedVariable(x.query, /*is_output=*/false);
    key = SavedVariable(x.key, false);
    value = SavedVariable(x.value, false);
    attn_mask = SavedVariable(x.attn_mask, false);
  }
  Inputs unpack() const { return {query.unpack(), key.unpack(), value.unpack(), attn_mask.unpack()}; }
  void release() {
    for (SavedVariable* v : {&query, &key, &value, &attn_mask}) v->reset_data();
  }
};

// What the nodes of all operators keep: the point, the forward's results there, the options.
//
// Several threads may run backward through one node at once, and the first one that has done so may release what the
// node keeps. So apply() and release_variables() hold the node's mutex, in every node, as in the nodes that torch
// generates ("Thread safety on Autograd Node" in torch/csrc/autograd/function.h).
struct AttentionNode : torch::autograd::Node {
  SavedInputs point;
  SavedVariable output, logsumexp, rng_state, residual;
  Options options;

  void save(const Inputs& x, const Saved& s, const Options& o, bool output_is_mine) {
    point.save(x);
    output = SavedVariable(s.output, output_is_mine);
    logsumexp = SavedVariable(s.logsumexp, false);
    rng_state = SavedVariable(s.rng_state, false);
    residual = SavedVariable(s.residual, false);
    options = o;
  }
  Saved saved() { return {output.unpack(pointer_to(this)), logsumexp.unpack(), rng_state.unpack(), residual.unpack()}; }
  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    release();
  }
  virtual void release() {  // with the mutex held
    point.release();
    for (SavedVariable* v : {&output, &logsumexp, &rng_state, &residual}) v->reset_data();
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
    return list(backward(grads[0], point.unpack(), saved(), options, wanted(0)));
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
    const Inputs t{grads[0], grads[1], grads[2], grads[3]};
    variable_list result(5);
    if (!t.any()) return result;
    const Inputs x = point.unpack();
    const Saved s = saved();
    const Tensors3 moved = tangent(x, s, t, options);
    if (task_should_compute_output(0)) result[0] = std::get<0>(moved);
    if (const Wanted w = wanted(1); any(w)) {
      const variable_list h = list(second(grad_output.unpack(), x, s, t, moved, options, w));
      std::copy(h.begin(), h.end(), result.begin() + 1);
    }
    return result;
  }
};

// Edges: the point, then the direction.
struct SdpaTangentBackward : AttentionNode {
  SavedInputs direction;
  SavedVariable tangent_output, tangent_logsumexp, tangent_residual;

  std::string name() const override { return "SdpaTangentBackward"; }
  void release() override {
    AttentionNode::release();
    direction.release();
    tangent_output.reset_data();
    tangent_logsumexp.reset_data();
    tangent_residual.reset_data();
  }

  variable_list apply(variable_list&& grads) override {
    std::lock_guard<std::mutex> lock(mutex_);
    variable_list result(8);
    if (!grads[0].defined()) return result;
    const Inputs x = point.unpack();
    const Saved s = saved();
    if (const Wanted w = wanted(0); any(w)) {
      const Tensors3 moved{tangent_output.unpack(pointer_to(this)), tangent_logsumexp.unpack(),
                           tangent_residual.unpack()};
      const variable_list h = list(second(grads[0], x, s, direction.unpack(), moved, options, w));
      std::copy(h.begin(), h.end(), result.begin());
    }
    if (const Wanted w = wanted(4); any(w)) {
      const variable_list g = list(backward(grads[0], x, s, options, w));
      std::copy(g.begin(), g.end(), result.begin() + 4);
    }
    return result;
  }
};

// Edges: grad_output, the point, the direction.
struct SdpaSecondBackward : torch::autograd::Node {
  SavedVariable grad_output;
  SavedInputs point, direction;
  Options options;
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
    const auto aliases = [&](const Inputs& i) {
      return Inputs{alias(i.query), alias(i.key), alias(i.value), alias(i.attn_mask)};
    };
    std::unique_lock<std::mutex> lock(mutex_);
    const Tensor u = alias(grad_output.unpack());
    const Inputs x = aliases(point.unpack()), t = aliases(direction.unpack());
    lock.unlock();  // The engine, which is called below, runs other nodes, which wait for mutexes of their own.
    const variable_list h =
        list(second_formula(u, ATTN_INPUTS_OF(x), ATTN_TANGENTS_OF(t), ATTN_OPTIONS_OF(options), outputs));
    variable_list from, with, to;
    for (size_t i = 0; i < 4; ++i)
      if (grads[i].defined() && h[i].defined() && h[i].requires_grad()) {
        from.push_back(h[i]);
        with.push_back(grads[i]);
      }
    std::vector<size_t> edges;
    const auto add = [&](size_t edge, const Tensor& input) {
      if (!input.defined() || !task_should_compute_output(edge)) return;
      to.push_back(input);
      edges.push_back(edge);
    };
    add(0, u);
    for (size_t i = 0; i < 4; ++i) add(1 + i, x.all()[i]), add(5 + i, t.all()[i]);
    variable_list result(9);
    if (from.empty() || to.empty()) return result;
    const variable_list g = torch::autograd::grad(from, to, with, /*retain_graph=*/true, create_graph,
                                                  /*allow_unused=*/true);
    for (size_t i = 0; i < g.size(); ++i) result[edges[i]] = g[i];
    return result;
  }
};

template <class... T>
bool requires_grad(const T&... t) {
  return torch::autograd::compute_requires_grad(t...);
}

// ---------------------------------------------------------------------------------------------------------------
// The kernels under the Autograd key.

Tensor sdpa_autograd(c10::DispatchKeySet keys, ATTN_INPUTS_ARGS, ATTN_OPTIONS_ARGS) {
  const Inputs x ATTN_THESE_INPUTS;
  if (requires_grad(query, key, value, x.attn_mask) || is_dual(x))
    return std::get<0>(forward_op().call(ATTN_INPUTS, ATTN_OPTIONS, std::nullopt));
  at::AutoDispatchBelowADInplaceOrView guard;
  return sdpa_op().redispatch(keys & c10::after_autograd_keyset, ATTN_INPUTS, ATTN_OPTIONS);
}

Tensors4 forward_autograd(c10::DispatchKeySet keys, ATTN_INPUTS_ARGS, ATTN_OPTIONS_ARGS,
                          const std::optional<Tensor>& rng_state) {
  const Inputs x ATTN_THESE_INPUTS;
  const Options options ATTN_THESE_OPTIONS;
  Tensors4 result;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    result = forward_op().redispatch(keys & c10::after_autograd_keyset, ATTN_INPUTS, ATTN_OPTIONS, rng_state);
  }
  Tensor& output = std::get<0>(result);
  const auto saved = [&] { return Saved{output, std::get<1>(result), std::get<2>(result), std::get<3>(result)}; };
  Tensor tangent_output;
  if (is_dual(x)) tangent_output = std::get<0>(tangent(primal_of(x), saved(), tangent_of(x), options));
  if (requires_grad(query, key, value, x.attn_mask)) {
    auto node = make_node<SdpaBackward>();
    node->set_next_edges(torch::autograd::collect_next_edges(query, key, value, x.attn_mask));
    set_history(output, node);
    node->save(x, saved(), options, /*output_is_mine=*/true);
  }
  if (tangent_output.defined()) output._set_fw_grad(tangent_output, /*level=*/0, /*is_inplace_op=*/false);
  return result;
}

Tensors4 backward_autograd(c10::DispatchKeySet keys, const Tensor& grad_output, ATTN_INPUTS_ARGS, ATTN_SAVED_ARGS,
                           ATTN_OPTIONS_ARGS, Wanted grad_input_mask) {
  const Inputs x ATTN_THESE_INPUTS;
  const Saved s{ATTN_SAVED};
  const Options options ATTN_THESE_OPTIONS;
  Tensors4 result;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    result = backward_op().redispatch(keys & c10::after_autograd_keyset, grad_output, ATTN_INPUTS, ATTN_SAVED,
                                      ATTN_OPTIONS, grad_input_mask);
  }
  std::array<Tensor*, 4> outputs = {&std::get<0>(result), &std::get<1>(result), &std::get<2>(result),
                                    &std::get<3>(result)};
  variable_list tangents(4);
  const auto add = [&](const Tensors4& more) {
    for (size_t i = 0; const Tensor& t : list(more)) {
      if (t.defined()) tangents[i] = tangents[i].defined() ? tangents[i] + t : t;
      ++i;
    }
  };
  if (is_dual(grad_output))
    add(backward(tangent_of(grad_output), primal_of(x), primal_of(s), options, grad_input_mask));
  if (is_dual(x)) {
    const Inputs point = primal_of(x), direction = tangent_of(x);
    const Tensors3 moved = tangent(point, primal_of(s), direction, options);
    add(second(primal_of(grad_output), point, primal_of(s), direction, moved, options, grad_input_mask));
  }
  if (requires_grad(grad_output, query, key, value, x.attn_mask)) {
    auto node = make_node<SdpaDoubleBackward>();
    node->set_next_edges(torch::autograd::collect_next_edges(grad_output, query, key, value, x.attn_mask));
    node->save(x, s, options, /*output_is_mine=*/false);
    node->grad_output = SavedVariable(grad_output, false);
    for (Tensor* t : outputs) set_history(*t, node);
  }
  for (size_t i = 0; i < 4; ++i)
    if (tangents[i].defined()) outputs[i]->_set_fw_grad(tangents[i], 0, false);
  return result;
}

Tensors3 tangent_autograd(c10::DispatchKeySet keys, ATTN_INPUTS_ARGS, ATTN_SAVED_ARGS, ATTN_TANGENTS_ARGS,
                          ATTN_OPTIONS_ARGS) {
  const Inputs x ATTN_THESE_INPUTS;
  const Inputs t ATTN_THESE_TANGENTS;
  if (is_dual(x) || is_dual(t)) return tangent_formula(ATTN_INPUTS, ATTN_TANGENTS, ATTN_OPTIONS);
  Tensors3 result;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    result = tangent_op().redispatch(keys & c10::after_autograd_keyset, ATTN_INPUTS, ATTN_SAVED, ATTN_TANGENTS,
                                     ATTN_OPTIONS);
  }
  if (requires_grad(query, key, value, x.attn_mask, t.query, t.key, t.value, t.attn_mask)) {
    auto node = make_node<SdpaTangentBackward>();
    node->set_next_edges(
        torch::autograd::collect_next_edges(query, key, value, x.attn_mask, t.query, t.key, t.value, t.attn_mask));
    node->save(x, {ATTN_SAVED}, ATTN_THESE_OPTIONS, /*output_is_mine=*/false);
    node->direction.save(t);
    set_history(std::get<0>(result), node);
    node->tangent_output = SavedVariable(std::get<0>(result), /*is_output=*/true);
    node->tangent_logsumexp = SavedVariable(std::get<1>(result), false);
    node->tangent_residual = SavedVariable(std::get<2>(result), false);
  }
  return result;
}

Tensors4 second_autograd(c10::DispatchKeySet keys, const Tensor& grad_output, ATTN_INPUTS_ARGS, ATTN_SAVED_ARGS,
                         ATTN_TANGENTS_ARGS, ATTN_MOVED_ARGS, ATTN_OPTIONS_ARGS, Wanted grad_input_mask) {
  const Inputs x ATTN_THESE_INPUTS;
  const Inputs t ATTN_THESE_TANGENTS;
  if (is_dual(grad_output) || is_dual(x) || is_dual(t))
    return second_formula(grad_output, ATTN_INPUTS, ATTN_TANGENTS, ATTN_OPTIONS, grad_input_mask);
  Tensors4 result;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    result = second_op().redispatch(keys & c10::after_autograd_keyset, grad_output, ATTN_INPUTS, ATTN_SAVED,
                                    ATTN_TANGENTS, ATTN_MOVED, ATTN_OPTIONS, grad_input_mask);
  }
  if (requires_grad(grad_output, query, key, value, x.attn_mask, t.query, t.key, t.value, t.attn_mask)) {
    auto node = make_node<SdpaSecondBackward>();
    node->set_next_edges(torch::autograd::collect_next_edges(grad_output, query, key, value, x.attn_mask, t.query,
                                                             t.key, t.value, t.attn_mask));
    node->grad_output = SavedVariable(grad_output, false);
    node->point.save(x);
    node->direction.save(t);
    node->options = ATTN_THESE_OPTIONS;
    node->outputs = grad_input_mask;
    for (Tensor* g : {&std::get<0>(result), &std::get<1>(result), &std::get<2>(result), &std::get<3>(result)})
      set_history(*g, node);
  }
  return result;
}

}  // namespace

TORCH_LIBRARY_IMPL(attn, Autograd, m) {
  m.impl("sdpa", sdpa_autograd);
  m.impl("_sdpa_forward", forward_autograd);
  m.impl("_sdpa_backward", backward_autograd);
  m.impl("_sdpa_tangent", tangent_autograd);
  m.impl("_sdpa_second", second_autograd);
}

}  // namespace attn
