// Derivatives, in the form of torch's own generated code: a Node per operator under the Autograd key.
//
// In this table x are the inputs, O(x) is the output and the rows' logsumexp, J is the Jacobian of O, and H(u; x; t) =
// grad_x <u, J(x) t>:
//
//   operator         computes   gradient, given the gradient w of the result        derivative along a direction dx, dt
//   _sdpa_forward    O          x: J'w         = _sdpa_backward                      J dx       = _sdpa_tangent
//   _sdpa_backward   J'u        u: J w         = _sdpa_tangent                       J'du + H(u; x; dx)
//                               x: H(u; x; w)  = _sdpa_second
//   _sdpa_tangent    J t        t: J'w         = _sdpa_backward                      formula
//                               x: H(w; x; t)  = _sdpa_second
//   _sdpa_second     H          formula                                              formula
//
// A "formula" is composed of ATen operators (formulas.h) and takes O(L S) memory. Operators take some of the forward's
// results (output, logsumexp, ...), which depend on x. The derivatives above already contain this dependence, so the
// results count as constants here. sdpa, attention and flex_attention have no derivative of their own. If a derivative
// is needed, they call _sdpa_forward.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/library.h>

#include <algorithm>
#include <mutex>

#include "operators/autograd.h"
#include "operators/compat.h"
#include "operators/formulas.h"
#include "operators/switches.h"

namespace attn {
namespace {

using at::Tensor;
using torch::autograd::SavedVariable;
using torch::autograd::set_history;
using torch::autograd::variable_list;

bool any(const Wanted& wanted) { return std::ranges::count(wanted, true) > 0; }

// Whether autograd records the call, given all its differentiable arguments. An argument that is a struct stands for
// its fields.
template <class... T>
bool requires_grad(const T&... arguments) {
  return std::apply([](const auto&... t) { return torch::autograd::compute_requires_grad(t...); },
                    all_inputs_of(arguments...));
}

// The edges of the node that records the call, in the order of the arguments.
template <class... T>
auto next_edges(const T&... arguments) {
  return std::apply([](const auto&... t) { return torch::autograd::collect_next_edges(t...); },
                    all_inputs_of(arguments...));
}

// ---------------------------------------------------------------------------------------------------------------
// Forward mode: a dual tensor is a primal and a tangent.

bool is_dual(const Tensor& t) { return t.defined() && t._fw_grad(/*level=*/0).defined(); }
bool is_dual(const std::optional<Tensor>& t) { return t && is_dual(*t); }
template <Struct T>
bool is_dual(const T& tensors) {
  return any_of([](const auto& t) { return is_dual(t); }, inputs_of(tensors));
}

std::optional<Tensor> tangent_of(const std::optional<Tensor>& t) {
  return is_dual(t) ? std::optional(t->_fw_grad(0)) : std::nullopt;
}
Direction tangent_of(const Call& x) {
  Direction t;
  for_each_input([](size_t, auto& tangent, const auto& primal) { tangent = tangent_of(primal); }, t, x);
  return t;
}
// Returns the derivative of the rows' logsumexp. _sdpa_tangent returns two numbers per row, and the derivative is their
// sum.
Tensor tangent_of_rows(const TangentResults& tangent) { return tangent.logsumexp.sum(-1); }
// Both numbers of a row have the same gradient, the gradient of their sum, so this function reads only the gradient of
// the first number.
GradResults grads_of_tangent(const variable_list& grads, const TangentResults& tangent) {
  GradResults u{grads[0], std::nullopt};
  if (grads[1].defined()) u.logsumexp = grads[1].select(-1, 0).contiguous();
  if (!u.output.defined()) u.output = at::zeros_like(tangent.output);
  return u;
}

Tensor primal_of(const Tensor& t) { return is_dual(t) ? t._fw_primal(0) : t; }
template <Struct T>
T primal_of(const T& tensors) {
  return map_inputs(tensors, [](const Tensor& t) { return primal_of(t); });
}

// ---------------------------------------------------------------------------------------------------------------
// Reverse mode: the nodes of the graph.

// The tensors of an argument that a node keeps for the backward.
template <class T>
class Kept {
 public:
  // The first `outputs` tensors are the node's own results, for which set_history() has been called.
  void save(const T& argument, size_t outputs = 0) {
    for_each_tensor([&](size_t i, const auto& t) { variables_.emplace_back(t, i < outputs); }, tensors_of(argument));
  }
  // `node`: pointer_to() of the node that keeps the tensors. An absent tensor stays absent. If the caller has changed a
  // tensor in place since the forward, torch throws. This function adds the name of the argument to torch's error,
  // because torch does not know this name. It also adds how the caller can avoid the error.
  void unpack(T& argument, const decltype(pointer_to(nullptr))& node) const {
    const auto unpack = [&](size_t i, auto& field) {
      try {
        Tensor t = variables_[i].unpack(node);
        if (t.defined()) field = std::move(t);
      } catch (c10::Error& error) {
        if (error.msg().find("modified by an inplace operation") != std::string::npos)
          error.add_context(c10::str("attn: backward reads ", name_of(argument, i),
                                     " again, which was changed in place since the call; pass a copy of it, made by "
                                     "clone(), or change a copy"));
        throw;
      }
    };
    for_each_tensor(unpack, tensors_of(argument));
  }
  void release() {
    for (SavedVariable& v : variables_) v.reset_data();
  }

 private:
  static std::string name_of([[maybe_unused]] const T& argument, size_t i) {
    if constexpr (std::is_same_v<T, Call>) {
      const About& about = Tensors::about(i);
      const bool is_of_program = about.has(kOfProgram) || about.kind == Kind::mask;
      if (argument.has_program() && is_of_program) return "a tensor that score_mod or mask_mod captures";
      const bool one_name = about.name == std::string_view(about.name_in_varlen);
      return Tensors::name(i) + (one_name ? "" : c10::str(" (", about.name_in_varlen, ")"));
    } else if constexpr (requires { T::kNames; }) {
      return T::kNames[i];
    } else {
      return "a tensor";
    }
  }

  c10::SmallVector<SavedVariable, std::tuple_size_v<decltype(tensors_of(std::declval<T&>()))>> variables_;
};

// A node that keeps arguments of types T for the backward. One argument is the call. The node has the edges of all
// arguments, in the order of T: the call's edges are the last, and a direction's are the first. Results of the forward
// have no edges, because they count as constants (see above).
//
// Several threads may run backward through one node at once, and the first to finish may release the tensors that the
// node keeps. Therefore apply() and release_variables() of every node hold the node's mutex, as in the nodes that torch
// generates ("Thread safety on Autograd Node" in torch/csrc/autograd/function.h).
template <Name name_, class... T>
struct AttentionNode : torch::autograd::Node {
  std::tuple<Kept<T>...> kept;
  Call without_tensors;  // but with as many tables, which are undefined

  std::string name() const override { return name_.text; }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {
    TORCH_CHECK_NOT_IMPLEMENTED(false,
                                "attn::sdpa does not support compiled autograd: call backward() outside of "
                                "torch._dynamo.compiled_autograd, or leave torch._dynamo.config.compiled_autograd "
                                "False; torch.compile differentiates what it compiles without it");
  }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    std::apply([](auto&... k) { (k.release(), ...); }, kept);
  }

  template <class A>
  void save(const A& argument, size_t outputs = 0) {
    std::get<Kept<A>>(kept).save(argument, outputs);
  }
  void save(const Call& call) {
    std::get<Kept<Call>>(kept).save(call);
    const Call nothing;
    without_tensors = call;
    tensors_of(without_tensors) = tensors_of(nothing);
    without_tensors.tables.resize(call.tables.size());
  }
  template <class A>
  A unpack() {
    A argument;
    if constexpr (std::is_same_v<A, Call>) argument = without_tensors;
    if constexpr (std::is_same_v<A, Direction>) argument.tables.resize(without_tensors.tables.size());
    std::get<Kept<A>>(kept).unpack(argument, pointer_to(this));
    return argument;
  }

  variable_list no_gradients() const { return variable_list(num_outputs()); }

  size_t inputs() const { return kInputs<Call> - 1 + without_tensors.tables.size(); }
  template <class A>
  size_t first_edge() const {
    return std::is_same_v<A, Call> ? num_outputs() - inputs() : 0;
  }
  // Which inputs of A (Call or Direction) need a gradient.
  template <class A>
  Wanted wanted() const {
    Wanted w{};
    for (size_t i = 0; i < inputs(); ++i) w[i] = task_should_compute_output(first_edge<A>() + i);
    return w;
  }
  template <class A>
  void put(variable_list& result, const Gradients& of_argument, const Wanted& wanted) const {
    const auto put_if_wanted = [&, edge = first_edge<A>()](size_t i, const Tensor& grad) {
      if (wanted[i]) result[edge + i] = grad;
    };
    for_each_input(put_if_wanted, of_argument);
  }
};

// A node of an operator whose results `formula` can compute. `formula` takes arguments of types T, and then `outputs`.
// `outputs` says which results are wanted.
template <Name name_, auto formula, class Outputs, class... T>
struct FormulaNode : AttentionNode<name_, T...> {
  Outputs outputs;

  // Releases the node's mutex before it calls the engine, because the engine runs other nodes, which lock their own
  // mutexes. The node's edges decide which gradients are computed. The tensors cannot decide this, because tensors of
  // torch.func.vjp do not require gradients after torch.func.vjp has returned.
  variable_list apply(variable_list&& grads) override {
    const bool create_graph = at::GradMode::is_enabled();
    at::AutoGradMode enable(true);
    std::unique_lock<std::mutex> lock(this->mutex_);
    const std::tuple<T...> arguments{independent(this->template unpack<T>())...};
    lock.unlock();
    const auto compute = [&](const T&... argument) { return formula(argument..., outputs); };
    return differentiate(
        list(std::apply(compute, arguments)), grads, std::apply(list<T...>, arguments),
        [&](size_t edge) { return this->task_should_compute_output(edge); }, create_graph);
  }
};

// Makes a node that keeps `arguments` and has their edges.
template <class N, class... A>
auto record(const A&... arguments) {
  auto node = make_node<N>();
  node->set_next_edges(next_edges(arguments...));
  (node->save(arguments), ...);
  return node;
}

// The node of _sdpa_forward. It records the output and, if the rows' results are wanted, the rows' logsumexp.
struct SdpaBackward : AttentionNode<"SdpaBackward", Call, Saved> {
  variable_list apply(variable_list&& grads) override {
    std::lock_guard<std::mutex> lock(mutex_);
    variable_list result = no_gradients();
    if (std::ranges::none_of(grads, &Tensor::defined)) return result;
    const Saved s = unpack<Saved>();
    GradResults u{grads[0].defined() ? grads[0] : at::zeros_like(s.output), std::nullopt};
    if (grads.size() > 1 && grads[1].defined()) u.logsumexp = grads[1];
    const Wanted w = wanted<Call>();
    put<Call>(result, BackwardOp::call(u, s, unpack<Call>(), w), w);
    return result;
  }
};

// The edges of GradResults come first, here and in SdpaSecondBackward.
struct SdpaDoubleBackward : AttentionNode<"SdpaDoubleBackward", GradResults, Call, Saved> {
  variable_list apply(variable_list&& grads) override {
    std::lock_guard<std::mutex> lock(mutex_);
    Direction t;
    t.tables.resize(without_tensors.tables.size());
    const auto set_if_defined = [&](size_t i, std::optional<Tensor>& tangent) {
      if (grads[i].defined()) tangent = grads[i];
    };
    for_each_input(set_if_defined, t);
    variable_list result = no_gradients();
    if (std::ranges::none_of(grads, &Tensor::defined)) return result;
    const Call call = unpack<Call>();
    const Saved s = unpack<Saved>();
    const TangentResults tangent = TangentOp::call(s, t, call);
    constexpr size_t kOutput = 0, kLogsumexp = 1;
    if (task_should_compute_output(kOutput)) result[kOutput] = tangent.output;
    if (task_should_compute_output(kLogsumexp)) result[kLogsumexp] = tangent_of_rows(tangent);
    if (const Wanted w = wanted<Call>(); any(w))
      put<Call>(result, SecondOp::call(unpack<GradResults>(), s, t, tangent, call, w), w);
    return result;
  }
};

struct SdpaTangentBackward : AttentionNode<"SdpaTangentBackward", Direction, Call, Saved, TangentResults> {
  variable_list apply(variable_list&& grads) override {
    std::lock_guard<std::mutex> lock(mutex_);
    variable_list result = no_gradients();
    if (std::ranges::none_of(grads, &Tensor::defined)) return result;
    const Call call = unpack<Call>();
    const Saved s = unpack<Saved>();
    const TangentResults tangent = unpack<TangentResults>();
    const GradResults u = grads_of_tangent(grads, tangent);
    if (const Wanted w = wanted<Call>(); any(w))
      put<Call>(result, SecondOp::call(u, s, unpack<Direction>(), tangent, call, w), w);
    if (const Wanted w = wanted<Direction>(); any(w)) put<Direction>(result, BackwardOp::call(u, s, call, w), w);
    return result;
  }
};

using SdpaSecondBackward = FormulaNode<"SdpaSecondBackward", second_formula, Wanted, GradResults, Direction, Call>;

// Gradients through weights are seldom needed, so the forward keeps no weights. The backward computes them again by the
// formula, which is differentiable to any order.
using SdpaWeightsBackward = FormulaNode<"SdpaWeightsBackward", weights_formula, WantedWeights, Call>;

// sdpa_stats has no derivative. A call with inputs that require gradients works, so that a training step can log
// statistics. Only a backward through the results throws. A call with dual tensors (forward mode) throws at once.
constexpr const char* kNoDerivative =
    "attn::sdpa_stats: its results have no derivatives, and one was asked for; take the scores and weights of "
    "sdpa_with_weights, which have, or call sdpa_stats with query.detach() and key.detach()";

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

// sdpa, attention or flex_attention.
template <class Op>
auto attend_autograd(c10::DispatchKeySet keys, const Call& call) {
  if (is_over_processes()) return attend_over_processes<Op>(call);
  if (requires_grad(call) || is_dual(call)) return attend_by_forward<Op>(call);
  return below_autograd<Op>(keys, call);
}

ForwardResults forward_autograd(c10::DispatchKeySet keys, const Call& call, const std::optional<Tensor>& rng_state,
                                bool exact_residual) {
  // attend_by_forward() passes false, so this function checks whether slopes or sinks need a derivative.
  const auto learned = [](const auto& t) { return requires_grad(t) || is_dual(t); };
  exact_residual = exact_residual || learned(call.alibi_slopes) || learned(call.sinks);
  ForwardResults results = below_autograd<ForwardOp>(keys, call, rng_state, exact_residual);
  auto& [saved, rows] = results;
  TangentResults tangent;
  if (is_dual(call)) tangent = TangentOp::call(saved, tangent_of(call), primal_of(call));
  if (requires_grad(call)) {
    auto node = record<SdpaBackward>(call);
    set_history(call.with_rows ? variable_list{saved.output, rows.logsumexp} : variable_list{saved.output}, node);
    node->save(saved, /*outputs=*/1);
  }
  if (tangent.output.defined()) {
    saved.output._set_fw_grad(tangent.output, /*level=*/0, /*is_inplace_op=*/false);
    if (call.with_rows) rows.logsumexp._set_fw_grad(tangent_of_rows(tangent), /*level=*/0, /*is_inplace_op=*/false);
  }
  return results;
}

Gradients backward_autograd(c10::DispatchKeySet keys, const GradResults& u, const Saved& s, const Call& call,
                            Wanted wanted) {
  Gradients results = below_autograd<BackwardOp>(keys, u, s, call, wanted);
  Gradients tangents;
  const auto add = [&](const Gradients& more) {
    const auto add_field = [](size_t, Tensor& sum, const Tensor& t) {
      if (t.defined()) sum = sum.defined() ? sum + t : t;
    };
    for_each_input(add_field, tangents, more);
  };
  if (is_dual(u)) {
    const GradResults tangent{is_dual(u.output) ? *tangent_of(u.output) : at::zeros_like(primal_of(u.output)),
                              tangent_of(u.logsumexp)};
    add(BackwardOp::call(tangent, primal_of(s), primal_of(call), wanted));
  }
  if (is_dual(call)) {
    const Call point = primal_of(call);
    const Saved saved = primal_of(s);
    const Direction direction = tangent_of(call);
    const TangentResults tangent = TangentOp::call(saved, direction, point);
    add(SecondOp::call(primal_of(u), saved, direction, tangent, point, wanted));
  }
  if (requires_grad(u, call)) {
    auto node = record<SdpaDoubleBackward>(u, call);
    node->save(s);
    set_history(list(results), node);
  }
  const auto make_dual = [](size_t, Tensor& primal, const Tensor& tangent) {
    if (tangent.defined()) primal._set_fw_grad(tangent, /*level=*/0, /*is_inplace_op=*/false);
  };
  for_each_input(make_dual, results, tangents);
  return results;
}

TangentResults tangent_autograd(c10::DispatchKeySet keys, const Saved& s, const Direction& t, const Call& call) {
  if (is_dual(call) || is_dual(t)) return tangent_formula(t, call);
  TangentResults results = below_autograd<TangentOp>(keys, s, t, call);
  if (requires_grad(t, call)) {
    auto node = record<SdpaTangentBackward>(t, call);
    node->save(s);
    set_history({results.output, results.logsumexp}, node);
    node->save(results, /*outputs=*/2);
  }
  return results;
}

Gradients second_autograd(c10::DispatchKeySet keys, const GradResults& u, const Saved& s, const Direction& t,
                          const TangentResults& tangent, const Call& call, Wanted wanted) {
  if (is_dual(u) || is_dual(call) || is_dual(t)) return second_formula(u, t, call, wanted);
  Gradients results = below_autograd<SecondOp>(keys, u, s, t, tangent, call, wanted);
  if (requires_grad(u, t, call)) {
    auto node = record<SdpaSecondBackward>(u, t, call);
    node->outputs = wanted;
    set_history(list(results), node);
  }
  return results;
}

Statistics stats_autograd(c10::DispatchKeySet keys, const Call& scores) {
  TORCH_CHECK(!is_dual(scores), kNoDerivative);
  Statistics results = below_autograd<StatsOp>(keys, scores);
  if (requires_grad(scores)) {
    auto node = make_node<SdpaStatsBackward>();
    node->set_next_edges(next_edges(scores));
    set_history(list(results), node);
  }
  return results;
}

}  // namespace

OutputAndWeights weights_by_kernel(const Device& device, const Call& call, const WantedWeights& wanted) {
  OutputAndWeights results;
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    results = compute_weights(device, call, wanted);
  }
  if (requires_grad(call)) {
    auto node = record<SdpaWeightsBackward>(call);
    node->outputs = wanted;
    set_history(list(results), node);
  }
  return results;
}

TORCH_LIBRARY_IMPL(attn, Autograd, m) {
  m.impl("sdpa", SdpaOp::kernel_with_keys<attend_autograd<SdpaOp>>);
  m.impl("attention", AttentionOp::kernel_with_keys<attend_autograd<AttentionOp>>);
  m.impl("flex_attention", FlexOp::kernel_with_keys<attend_autograd<FlexOp>>);
  m.impl("_sdpa_forward", ForwardOp::kernel_with_keys<forward_autograd>);
  m.impl("_sdpa_backward", BackwardOp::kernel_with_keys<backward_autograd>);
  m.impl("_sdpa_tangent", TangentOp::kernel_with_keys<tangent_autograd>);
  m.impl("_sdpa_second", SecondOp::kernel_with_keys<second_autograd>);
  m.impl("sdpa_stats", StatsOp::kernel_with_keys<stats_autograd>);
}

}  // namespace attn
