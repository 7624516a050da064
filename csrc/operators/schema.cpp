// Every operator of the library: the table of contents.
#include <torch/library.h>

#include <string>

#include "operators/ops.h"

namespace attn {
namespace {

// The parts of a schema that come from the arguments of a call (call.h), such as "Tensor query", "Tensor?
// attn_mask=None" or "int[2] window_size=[-1, -1]".

std::string type_of(const at::Tensor&) { return "Tensor"; }
std::string type_of(const std::optional<at::Tensor>&) { return "Tensor?"; }
std::string type_of(const OptionalTensors&) { return "Tensor?[]"; }
std::string type_of(const std::optional<double>&) { return "float?"; }
std::string type_of(const std::optional<std::string>&) { return "str?"; }
std::string type_of(double) { return "float"; }
std::string type_of(bool) { return "bool"; }
std::string type_of(const c10::SymInt&) { return "SymInt"; }
std::string type_of(const std::array<int64_t, 2>&) { return "int[2]"; }

template <class T>
std::string text_of(const std::optional<T>&) {
  return "None";
}
std::string text_of(double number) { return c10::str(number, number == 0 ? ".0" : ""); }
std::string text_of(bool is) { return is ? "True" : "False"; }
std::string text_of(const c10::SymInt& number) { return std::to_string(number.expect_int()); }
std::string text_of(const std::array<int64_t, 2>& pair) { return c10::str("[", pair[0], ", ", pair[1], "]"); }

// Writes the arguments of a schema, with the defaults of Call. Arguments are keyword-only from `first_keyword` on.
template <class Some>
std::string arguments(std::string_view first_keyword = "scale", const char* About::* name = &About::name,
                      bool with_defaults = true) {
  const Call by_default;
  std::string text;
  const auto add = [&]<class T>(size_t i, const T& value) {
    const About& about = Some::about(i);
    if (i > 0) text += ", ";
    if (about.name == first_keyword) text += "*, ";
    text += type_of(value) + " " + about.*name;
    if constexpr (!std::is_same_v<T, at::Tensor> && !std::is_same_v<T, OptionalTensors>)
      if (with_defaults) text += "=" + text_of(value);
  };
  for_each_of(add, Some::fields(by_default));
  return text;
}

// A tensor for each of the arguments that may have derivatives, and a list for the last, which is a list.
std::string of_inputs(const char* type, const char* prefix = nullptr) {
  std::string text;
  for (size_t i = 0; i < Inputs::kCount; ++i) {
    text += i > 0 ? std::string(", ") + type : type;
    if (i == Inputs::kCount - 1) text += "[]";
    if (prefix) text += std::string(" ") + prefix + Inputs::about(i).name;
  }
  return text;
}

using Tags = std::vector<at::Tag>;
const Tags kPlain = {at::Tag::pt2_compliant_tag};
const Tags kRandom = {at::Tag::pt2_compliant_tag, at::Tag::nondeterministic_seeded};
const std::string kRows = "Tensor logsumexp, Tensor max_score";

void define(torch::Library& m, const std::string& text, const Tags& tags) {
  c10::FunctionSchema schema = torch::schema(text.c_str());
  std::vector<c10::Argument> arguments = schema.arguments();
  for (c10::Argument& a : arguments)  // torch parses no default of a list of tensors
    if (a.name() == "tables")
      a = c10::Argument(a.name(), a.type(), a.N(), to_passed(OptionalTensors()), a.kwarg_only());
  schema = schema.cloneWithArguments(std::move(arguments));
  schema.setAliasAnalysis(c10::AliasAnalysisKind::FROM_SCHEMA);
  m.def(std::move(schema), tags);
}

void define_for_users(torch::Library& m) {
  // Operators for users. sdpa has exactly the schema of the built-in. attention has more options (functional.py), and
  // also returns the logsumexp and the largest score of every row, [*, H, L], float32 (float64 for float64). Without
  // with_rows these two are empty, [0].
  define(m, "sdpa(" + arguments<Builtin>() + ") -> Tensor", kRandom);
  // With cu_seq_q, sequences of different lengths are packed one after the other, in tensors [heads, T, E] (call.h).
  // varlen_attention takes tensors [T, heads, E]. It has the arguments of torch.nn.attention.varlen.varlen_attn and
  // more arguments.
  define(m, "attention(" + arguments<WithoutProgram>() + ") -> (Tensor output, " + kRows + ")", kRandom);
  define(m,
         "varlen_attention(" + arguments<FirstOfVarlen>("", &About::name_in_varlen, /*with_defaults=*/false) + ", " +
             arguments<RestOfVarlen>("attn_mask", &About::name_in_varlen) + ") -> (Tensor output, " + kRows + ")",
         kRandom);
  // Attention with a score_mod, a mask_mod or both, given as strings (programs/text.h). "table 5" in a string is
  // tables[5].
  define(m, "flex_attention(" + arguments<Flex>() + ") -> (Tensor output, " + kRows + ")", kRandom);
  // Attention that also returns its matrices of weights and scores (weights.cpp).
  define(m, "sdpa_with_weights(" + arguments<Unpacked>() + ") -> (Tensor output, Tensor weights, Tensor scores)",
         kRandom);

  // Statistics of every row of scores x_j, scaled and masked, each [*, H, L]: largest_score = max_j x_j, logsumexp =
  // log sum_j exp(x_j), and entropy = -sum_j p_j log p_j with the weights p_j = exp(x_j - logsumexp). received_weight,
  // [*, H, S], is the sum of p_j over the rows, for every head of the query and every key j. Results are float32
  // (float64 for float64). The call takes O(L + S) memory (core/statistics.h). The results have no derivatives, and
  // asking for one raises an error.
  define(m,
         "sdpa_stats(" + arguments<Scores>() +
             ") -> (Tensor largest_score, Tensor entropy, Tensor logsumexp, Tensor received_weight)",
         kPlain);
}

void define_derivatives(torch::Library& m) {
  const std::string call = arguments<All>();
  // The next four operators compute the forward and its first and second derivatives. In their comments, x stands for
  // the arguments that may have derivatives, in the order of a call. O(x) stands for the output and the rows'
  // logsumexp, and J for the Jacobian of O.
  //
  // _sdpa_forward returns O(x), with the rows' results only if with_rows, and what the derivatives need:
  // logsumexp   of every row of scores, [*, H, L, 2], float32 (float64 for float64). It is a pair of numbers, whose
  //             meaning depends on the device (core/params.h)
  // rng_state   of dropout, int64 (seed, offset, period), see core/params.h. Drawn if not given. Empty without dropout
  // residual    exact output - rounded output, float32, if derivatives of half types need it (validate.h), else empty.
  //             Autograd asks for exact_residual if slopes or sinks need a derivative. The exact output is then
  //             computed from weights that are not rounded (core/params.h)
  const std::string saved = "Tensor output, Tensor logsumexp, Tensor rng_state, Tensor residual";
  const std::string grads = "Tensor grad_output, Tensor? grad_logsumexp";
  const std::string directions = of_inputs("Tensor?", "tangent_");
  const std::string tangents = "Tensor tangent_output, Tensor tangent_logsumexp, Tensor tangent_residual";
  const std::string wanted = c10::str("bool[", std::tuple_size_v<Wanted>, "] grad_input_mask");
  define(m,
         "_sdpa_forward(" + call + ", Tensor? rng_state=None, bool exact_residual=False) -> (" + saved +
             ", Tensor row_logsumexp, Tensor max_score)",
         kRandom);
  // J'u for u = (grad_output, grad_logsumexp). A gradient is undefined, or of a table empty, [0], if grad_input_mask
  // does not ask for it.
  define(m,
         "_sdpa_backward(" + grads + ", " + saved + ", " + call + ", " + wanted + ") -> (" + of_inputs("Tensor") + ")",
         kPlain);
  // J t for a direction t. tangent_tables ends with one more element, None (operator.h). tangent_residual is the exact
  // tangent of the output minus tangent_output, which is rounded. tangent_logsumexp has two numbers per row, [*, H, L,
  // 2]. Their sum is the derivative of the row's logsumexp along t.
  define(m, "_sdpa_tangent(" + saved + ", " + directions + ", " + call + ") -> (" + tangents + ")", kPlain);
  // H(u; x; t) = grad_x <u, J(x) t>, given the results of _sdpa_tangent. Double backward is (J t, H), forward over
  // reverse is J'du + H, and reverse over forward is (J'u, H). The Hessian is symmetric, so the same H serves all
  // three.
  define(m,
         "_sdpa_second(" + grads + ", " + saved + ", " + directions + ", " + tangents + ", " + call + ", " + wanted +
             ") -> (" + of_inputs("Tensor") + ")",
         kPlain);

  // The first of these two operators converts the forward's pair to the logsumexp, float64 [*, H, L]. The second
  // converts a logsumexp back to a pair. Both serve to merge calls over different keys. The meaning of the pair depends
  // on the call.
  define(m, "_logsumexp_of_pair(Tensor pair, " + call + ") -> Tensor", kPlain);
  define(m, "_pair_of_logsumexp(Tensor logsumexp, Tensor reference, " + call + ") -> Tensor", kPlain);

  // Like sdpa_with_weights, without scores. If `mean`, the weights are averaged over the heads, [*, L, S].
  define(m, "_sdpa_and_weights(" + arguments<Unpacked>() + ", bool mean=False) -> (Tensor output, Tensor weights)",
         kRandom);
}

void define_settings(torch::Library& m) {
  // The instruction set that the CPU kernels run with; see cpu/capability.h.
  m.def("_cpu_capability() -> str");
  m.def("_cpu_capabilities() -> str[]");
  m.def("_set_cpu_capability(str name) -> ()");

  // For tests: whether functions of the pair are simplified (programs/graph.h), and the names of the rules that change
  // a score_mod. For an empty string, the names of all rules.
  m.def("_rewrite_programs(bool rewrites) -> ()");
  m.def("_rewrites_of(str score_mod) -> str[]");
  m.def("_operations_of_programs() -> str[]");

  // sdpa and attention call this operator while calls are spread over several processes (switches.h). Python implements
  // it, and returns only the output.
  define(m, "_attend_over_processes(" + arguments<WithoutProgram>() + ") -> (Tensor output, " + kRows + ")", {});
  // Changes a switch (switches.h), which keeps the sum of all its changes. Adds `change` to the sum, and returns the
  // sum. While the sum is positive, calls are spread over several processes, and operators other than sdpa and
  // attention raise an error.
  m.def("_over_processes(int change) -> int");

  // Does the same with another switch. While the sum of its changes is positive, attn::invariant() is on.
  m.def("_invariant(int change) -> int");

  // Does the same with a third switch. While the sum of its changes is positive, sdpa takes the place of
  // aten::scaled_dot_product_attention.
  m.def("_replace_sdpa(int change) -> int");
  // Whether the switch of _replace_sdpa works for tensors of a device.
  m.def("_has_kernels(Device device) -> bool");
  // How many calls sdpa has answered while the switch was on, and how many it has left to the built-in.
  m.def("_replaced_calls() -> (int, int)");
}

}  // namespace

TORCH_LIBRARY(attn, m) {
  define_for_users(m);
  define_derivatives(m);
  define_settings(m);
}

}  // namespace attn
