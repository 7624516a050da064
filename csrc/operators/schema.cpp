// Every operator of the library: the table of contents.
#include <torch/library.h>

#define SCALE "float? scale=None, bool enable_gqa=False"
#define MORE ", float softcap=0.0, int[2] window_size=[-1, -1], Tensor? query_offset=None, Tensor? key_lengths=None"
#define PACKED \
  ", Tensor? cu_seq_q=None, Tensor? cu_seq_k=None, SymInt max_q=0, SymInt max_k=0, Tensor? block_table=None"
#define OF_HEADS "Tensor? alibi_slopes=None, Tensor? sinks=None"
#define CALL                                                                                                    \
  "Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, float dropout_p=0.0, bool is_causal=False, " \
  "*, " SCALE

// Of the private operators, which take all inputs in a row.
#define INPUTS "Tensor query, Tensor key, Tensor value, Tensor? attn_mask, Tensor? alibi_slopes, Tensor? sinks"
#define DENSE_OPTIONS "float dropout_p, bool is_causal, *, " SCALE MORE
#define OPTIONS DENSE_OPTIONS PACKED
#define SAVED "Tensor output, Tensor logsumexp, Tensor rng_state, Tensor residual"
#define GRADS "Tensor grad_output, Tensor? grad_logsumexp"
#define TANGENTS                                                                              \
  "Tensor? tangent_query, Tensor? tangent_key, Tensor? tangent_value, Tensor? tangent_mask, " \
  "Tensor? tangent_slopes, Tensor? tangent_sinks"
#define GRADIENTS "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"

TORCH_LIBRARY(attn, m) {
  const std::vector<at::Tag> plain = {at::Tag::pt2_compliant_tag};
  const std::vector<at::Tag> random = {at::Tag::pt2_compliant_tag, at::Tag::nondeterministic_seeded};

  // What users call. sdpa has exactly the schema of the built-in; attention has more options (functional.py), and
  // returns with the output the logsumexp and the largest score of every row, [*, H, L], float32 (float64 for float64).
  m.def("sdpa(" CALL ") -> Tensor", random);
  // With cu_seq_q, sequences of different lengths lie one behind the other (Packing in ops.h), as varlen_attention
  // takes them: [T, heads, E], with the arguments of torch.nn.attention.varlen.varlen_attn, and more.
  m.def("attention(" CALL MORE PACKED ", " OF_HEADS ") -> (Tensor output, Tensor logsumexp, Tensor max_score)", random);
  m.def(
      "varlen_attention(Tensor query, Tensor key, Tensor value, Tensor cu_seq_q, Tensor? cu_seq_k, SymInt max_q, "
      "SymInt max_k, *, float? scale=None, int[2] window_size=[-1, -1], bool enable_gqa=False, "
      "Tensor? seqused_k=None, Tensor? block_table=None, float softcap=0.0, Tensor? alibi_slopes=None, "
      "Tensor? sinks=None, Tensor? query_offset=None, float dropout_p=0.0, Tensor? attn_mask=None) -> "
      "(Tensor output, Tensor logsumexp, Tensor max_score)",
      random);
  m.def("sdpa_with_weights(" CALL MORE ", " OF_HEADS ") -> (Tensor output, Tensor weights, Tensor scores)", random);

  // For every row x of scores, scaled and masked, over its keys j: largest_score = max_j x_j, logsumexp = log sum_j
  // exp(x_j) and, with weights p_j = exp(x_j - logsumexp), entropy = -sum_j p_j log p_j, all [*, H, L]. Of every key
  // and head of the query received_weight, the sum over the rows of p_j, [*, H, S]. float32 (float64 for float64), in
  // O(L + S) memory (statistics.h). Without derivatives: their place is taken by an error.
  m.def("sdpa_stats(Tensor query, Tensor key, Tensor? attn_mask=None, bool is_causal=False, *, " SCALE MORE
        ", " OF_HEADS ") -> (Tensor largest_score, Tensor entropy, Tensor logsumexp, Tensor received_weight)",
        plain);

  // With x = (query, key, value, attn_mask, alibi_slopes, sinks), O(x) the output and the rows' logsumexp, and J its
  // Jacobian, four operators give every derivative.
  //
  // O(x), if with_rows also of the logsumexp, and what derivatives need:
  // logsumexp   of every row of scores, [*, H, L, 2], float32 (float64 for float64): a pair, whose meaning is each
  //             device's own (params.h)
  // rng_state   of dropout, int64 (seed, offset, period), see params.h; empty without dropout; drawn if not given
  // residual    exact output - rounded output, float32, where derivatives of half types need it (validate.h); else it
  //             is empty. With sums_scores, which autograd asks for where slopes or sinks want a derivative, the exact
  //             output is that of weights which are not rounded either (params.h)
  m.def("_sdpa_forward(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, " OF_HEADS
        ", float dropout_p=0.0, bool is_causal=False, *, " SCALE MORE PACKED
        ", Tensor? rng_state=None, bool with_rows=False, bool sums_scores=False) -> (" SAVED
        ", Tensor row_logsumexp, Tensor max_score)",
        random);
  // J'u for u = (grad_output, grad_logsumexp). Gradients not asked for in grad_input_mask are undefined.
  m.def("_sdpa_backward(" GRADS ", " INPUTS ", " SAVED ", " OPTIONS ", bool[6] grad_input_mask) -> " GRADIENTS, plain);
  // J t for a direction t, with the derivative of logsumexp along it (a sum of two, [*, H, L, 2]) and the
  // residual of J t.
  m.def("_sdpa_tangent(" INPUTS ", " SAVED ", " TANGENTS ", " OPTIONS
        ") -> (Tensor tangent_output, Tensor tangent_logsumexp, Tensor tangent_residual)",
        plain);
  // H(u; x; t) = grad_x <u, J(x) t>, given the results of _sdpa_tangent. Double backward is (J t, H), forward over
  // reverse J'du + H, reverse over forward (J'u, H): the Hessian is symmetric, so the same H serves all three.
  m.def("_sdpa_second(" GRADS ", " INPUTS ", " SAVED ", " TANGENTS
        ", Tensor tangent_output, Tensor tangent_logsumexp, Tensor tangent_residual, " OPTIONS
        ", bool[6] grad_input_mask) -> " GRADIENTS,
        plain);

  // What merges calls over some of the keys each: of the forward's pair logsumexp the value, float64 [*, H, L], and the
  // way back. The other arguments, those of the call, say what the pair means.
#define OF_PAIR "Tensor query, Tensor? attn_mask, Tensor? alibi_slopes, *, float? scale, float softcap"
  m.def("_logsumexp_of_pair(Tensor pair, " OF_PAIR ") -> Tensor", plain);
  m.def("_pair_of_logsumexp(Tensor logsumexp, Tensor reference, " OF_PAIR ") -> Tensor", plain);

  // sdpa_with_weights for those who do not read scores: weights, or their mean over the heads, [*, L, S].
  m.def("_sdpa_and_weights(" CALL MORE ", " OF_HEADS ", bool mean=False) -> (Tensor output, Tensor weights)", random);
  // The kernel of both, for the devices that have one, without dropout. What is not wanted is empty. The output has no
  // derivatives: where they are wanted, sdpa computes it, and the value counts by its shape alone.
  m.def("_sdpa_weights(" INPUTS ", " DENSE_OPTIONS
        ", bool mean, bool with_scores, bool with_output) -> (Tensor weights, Tensor scores, Tensor output)",
        plain);

  // Which instruction set the CPU kernels run with; see cpu/capability.h.
  m.def("_cpu_capability() -> str");
  m.def("_cpu_capabilities() -> str[]");
  m.def("_set_cpu_capability(str name) -> ()");

  // What answers sdpa and attention while they are parts of calls over several processes (over_processes.h); Python
  // implements it, and returns the output alone.
  m.def("_attend_over_processes(" CALL MORE PACKED ", " OF_HEADS
        ") -> (Tensor output, Tensor logsumexp, Tensor max_score)");
  // They are while the sum of all changes is positive: it is returned. Other operators are refused then.
  m.def("_over_processes(int change) -> int");

  // Results have bits that depend on nothing else (attn::invariant()) while the sum of all changes is positive: it is
  // returned.
  m.def("_invariant(int change) -> int");

  // Switches aten::scaled_dot_product_attention to sdpa while the sum of all changes is positive, and returns that sum.
  m.def("_replace_sdpa(int change) -> int");
  // Whether it does so for tensors of a device.
  m.def("_has_kernels(Device device) -> bool");
  // How many calls of it sdpa has answered, and how many it has left to the built-in while switched on.
  m.def("_replaced_calls() -> (int, int)");
}
