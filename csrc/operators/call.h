// A call of attention: the only list of its arguments, with the name and the kind of each. It decides the schemas of
// all operators (schema.cpp), whether the built-in could take a call, and what autograd, vmap and autocast do with each
// argument.
//
// The path of a call without gradients: attend_autograd (autograd.cpp) -> attend_on (run.h) -> compute_forward
// (run.cpp), whose ValidatedCall checks the call (validate.h) -> ProblemBuilder (problem.cpp), which turns the call
// into a Problem (core/params.h) -> device.cpp of cpu/ or cuda/, which cuts it into tasks -> the kernel that
// cpu/kernels/kernels.inl or cuda/launch.cu chooses. scores() (cpu/tiles/scores.inl) has the scores of the CPU, or
// FewRows::scores() in decoding. A call that needs gradients goes from attend_autograd through
// _sdpa_forward to compute_forward. The backward takes the same path through _sdpa_backward and compute_backward, with
// the call and the results that autograd has kept. varlen_attention (varlen.cpp) swaps heads and tokens, and calls
// attention. In inference mode the dispatcher skips autograd.
//
// Here are the paths of four arguments. First, validate() checks `scale`, and ProblemBuilder makes it Problem::scale
// (describe_scores). ScoreFunction (core/score.h) multiplies products by the scale. There are three exceptions. With a
// soft cap, the argument of tanh contains the scale (SoftCap::exponent in core/score.h). A score_mod reads the scale as
// a leaf. If a tile keeps unscaled products (leaves_products), the exponents of the softmax contain the scale. `sinks`
// has a derivative, so it is among Inputs and in OfInputs. check_per_head() checks `sinks`, and
// ProblemBuilder::of_heads() makes it Problem::sinks. compute_backward() calls gradients() (run.cpp), which returns the
// gradient of the sinks. check_pages() checks a `block_table`, and ProblemBuilder makes it Problem::paging, which
// key_row_offset() (core/geometry.h) reads. ValidatedCall::refuse_derivatives() refuses derivatives of a call with a
// `block_table`.
//
// The fourth, `score_mod`, is a function in Python, which flex_attention traces and writes as a string
// (torch_attn/_programs/). validate() compiles the string (programs/): read_text() makes a graph of it, derivatives.h
// adds the graph's derivatives, and schedule() turns both into lists of steps. ProblemBuilder::program describes the
// lists, and the tensors that they read, in a PairProgram (core/program.h), to which Problem::program points. When a
// kernel visits a tile of scores, Evaluation (cpu/tiles/program.inl) runs a list over the tile: scores()
// (cpu/tiles/scores.inl) gets the scores, and differentiate_program() (cpu/kernels/backward.inl) their gradients.
// Tables and terms are tensors that PyTorch has computed, so its autograd takes their gradients on to the tensors that
// the function captured.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <array>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>

#include "core/program.h"
#include "operators/operator.h"

namespace attn {

struct Call;

// What an argument is. The comments below give the dimensions that a tensor of each kind broadcasts to.
enum class Kind {
  rows,        // [*batch, its own heads, L or S, numbers]
  value_rows,  // likewise, but no score depends on them
  mask,        // [*batch, heads, L, S]: boolean, or floating
  heads,       // [*batch, heads]
  terms,       // of a program: [*batch, heads, L or S or L + S - 1, columns]
  entries,     // [*batch]: integers
  numbers,     // of a program: integers, with the dimensions of terms
  scales,      // [*batch, its own heads, S]; of pages [pages, heads, page_size]
  starts,      // of packed sequences
  pages,       // of packed sequences
  longest,     // of packed sequences
  number,      // no tensor: a scale, a flag, a window
  dropout,     // a number that no score depends on
  program,     // of a program: strings, and a size
  results,     // which results the caller wants
};

// What operators ask about an argument.
constexpr unsigned kTensor = 1;             // or a list of tensors
constexpr unsigned kInput = 1 << 1;         // a tensor that may have a derivative
constexpr unsigned kCast = 1 << 2;          // autocast casts it
constexpr unsigned kOfScores = 1 << 3;      // scores depend on it, and so do statistics, which take no 8 bits
constexpr unsigned kOfProgram = 1 << 4;     // of functions of the pair
constexpr unsigned kOfPacking = 1 << 5;     // of packed sequences
constexpr unsigned kOf8Bits = 1 << 6;       // of keys and values of 8 bits
constexpr unsigned kOfResults = 1 << 7;     // chooses results, and changes none
constexpr unsigned kOfBuiltin = 1 << 8;     // the built-in has it
constexpr unsigned kOfVarlenAttn = 1 << 9;  // torch.nn.attention.varlen.varlen_attn has it
constexpr unsigned kNotInVarlen = 1 << 10;  // varlen_attention lacks it
constexpr unsigned kScoreTerm = 1 << 11;    // cap and ALiBi: a score_mod can say it (About::in_score_mod)
constexpr unsigned kList = 1 << 12;         // the only list, and the last of all tensors

constexpr unsigned flags_of(Kind kind) {
  switch (kind) {
    case Kind::rows:
      return kTensor | kInput | kCast | kOfScores | kOfVarlenAttn;
    case Kind::value_rows:
      return kTensor | kInput | kCast | kOfVarlenAttn;
    case Kind::mask:
      return kTensor | kInput | kCast | kOfScores;
    case Kind::heads:
      return kTensor | kInput | kOfScores;
    case Kind::terms:
      return kTensor | kInput | kOfProgram;
    case Kind::entries:
      return kTensor | kOfScores;
    case Kind::numbers:
      return kTensor | kOfProgram;
    case Kind::scales:
      return kTensor | kOf8Bits;
    case Kind::starts:
      return kTensor | kOfPacking | kOfVarlenAttn;
    case Kind::pages:
      return kTensor | kOfPacking;
    case Kind::longest:
      return kOfPacking | kOfVarlenAttn;
    case Kind::number:
      return kOfScores;
    case Kind::program:
      return kOfProgram;
    case Kind::results:
      return kOfResults;
    case Kind::dropout:
      break;
  }
  return 0;
}

struct About {
  const char* name;
  Kind kind;
  unsigned more = 0;                  // flags that not every argument of the kind has
  const char* name_in_varlen = name;  // what varlen_attention calls it
  // If the argument is a term of the score: how a score_mod says the same. Beside a score_mod such an argument is an
  // error (check_beside_program), because the score_mod alone computes the score.
  const char* in_score_mod = nullptr;

  constexpr unsigned flags() const { return flags_of(kind) | more | (in_score_mod ? kScoreTerm : 0); }
  constexpr bool has(unsigned flag) const { return (flags() & flag) != 0; }
};

// The values that a floating-point argument may have.
struct Allowed {
  bool (*holds)(double number);
  const char* text;  // as an error says it
};
constexpr Allowed kNumber = {[](double x) { return x == x; }, "a number"};
constexpr Allowed kProbability = {[](double x) { return 0 <= x && x <= 1; }, "a probability between 0 and 1"};
constexpr Allowed kCap = {[](double x) { return 0 <= x && x <= std::numeric_limits<double>::max(); },
                          "a finite number, 0 for none or above"};

template <class T>
constexpr bool kIsFloating = std::is_same_v<T, double> || std::is_same_v<T, std::optional<double>>;
template <class T>
struct Argument : About {
  T Call::* member;
  Allowed allowed;

  template <class... Rule>
  constexpr Argument(About about, T Call::* member, Rule... allowed)
      : About(about), member(member), allowed(allowed...) {
    static_assert(sizeof...(Rule) == kIsFloating<T>, "floating-point arguments say which values are allowed");
  }
};

// Sequences of different lengths may be packed, one after the other: query [*batch, heads, T_q, E], key [*batch,
// key_heads, T_k, E], value likewise, attn_mask [*batch, heads or 1, T_q, max_k]. Sequence n has the queries from
// cu_seq_q[n] up to cu_seq_q[n + 1] and the keys from cu_seq_k[n] up to cu_seq_k[n + 1], which no other sequence sees.
// In a packed call query_offset and key_lengths have one number per sequence. Without query_offset, the last query of a
// sequence has the position of its last key. Error messages use the names and layouts of varlen_attention.
struct Call {
  at::Tensor query{};                     // [*batch, heads, L, E]
  at::Tensor key{};                       // [*batch, key_heads, S, E]
  at::Tensor value{};                     // [*batch, value_heads, S, Ev]
  std::optional<at::Tensor> attn_mask{};  // broadcasts to [*batch, heads, L, S]: boolean, or floating
  double dropout_p = 0;
  bool is_causal = false;
  std::optional<double> scale{};
  bool enable_gqa = false;
  double softcap = 0;                             // 0: none
  std::array<int64_t, 2> window_size = {-1, -1};  // keys to the left and right of the query's position; -1: all
  std::optional<at::Tensor> query_offset{};       // integers that broadcast to [*batch]: the position of query 0
  std::optional<at::Tensor> key_lengths{};        // likewise: keys from this number on are hidden
  // Integers [N + 1] that begin with 0 and never decrease. Without cu_seq_q the call is not packed.
  std::optional<at::Tensor> cu_seq_q{}, cu_seq_k{};
  c10::SymInt max_q = 0, max_k = 0;  // bounds of the sequences' lengths
  // Integers [N, most pages]. Key and value are then pools [pages, heads, page_size, E or Ev], and row r of sequence n
  // is row r % page_size of page block_table[n][r / page_size]. Such a call needs key_lengths, and may lack cu_seq_k.
  std::optional<at::Tensor> block_table{};
  // Both broadcast to [*batch, heads]. core/score.h defines their effect on scores and softmax.
  std::optional<at::Tensor> alibi_slopes{}, sinks{};
  // Functions of a pair of a query and a key (programs/text.h). The tensors that these functions read have the compute
  // dtype or int32 and broadcast to [*batch, heads, n, columns] with n = L, S or L + S - 1. Pair (i, j) has distance
  // i - j + S - 1.
  std::optional<std::string> score_mod{}, mask_mod{};
  // If there is a score_mod, attn_mask is not a mask, but holds the number that score_mod reads for each pair.
  std::optional<at::Tensor> row_terms{}, key_terms{}, distance_terms{};
  std::optional<at::Tensor> row_numbers{}, key_numbers{}, distance_numbers{};
  // uint8 [*batch, heads, blocks of queries, blocks of keys]. 0: no pair of the block is visible; 1: mask_mod decides
  // for each pair; 2: all pairs are visible.
  std::optional<at::Tensor> blocks{};
  std::array<int64_t, 2> block_size = {0, 0};  // queries and keys of a block
  // float32 scales of keys and values of 8 bits (is_8_bit). A scale broadcasts to the dimensions of its key or value
  // except the last one. The call attends to key * key_scale[..., None] and value * value_scale[..., None]. It has no
  // derivatives.
  std::optional<at::Tensor> key_scale{}, value_scale{};
  // Up to kMostTables tables [*batch, heads, L or S or 1, numbers], which functions of the pair read at an index that
  // they compute.
  OptionalTensors tables{};
  bool with_rows = true;  // whether the rows' logsumexp and largest score are wanted; else they are empty, [0]

  // The arguments in the order of `attention`. The built-in has the first eight.
  static constexpr std::tuple kArguments{
      Argument({"query", Kind::rows, kOfBuiltin}, &Call::query),
      Argument({"key", Kind::rows, kOfBuiltin}, &Call::key),
      Argument({"value", Kind::value_rows, kOfBuiltin}, &Call::value),
      Argument({"attn_mask", Kind::mask, kOfBuiltin}, &Call::attn_mask),
      Argument({"dropout_p", Kind::dropout, kOfBuiltin}, &Call::dropout_p, kProbability),
      // window_size says the same
      Argument({"is_causal", Kind::number, kOfBuiltin | kNotInVarlen}, &Call::is_causal),
      Argument({"scale", Kind::number, kOfBuiltin}, &Call::scale, kNumber),
      Argument({"enable_gqa", Kind::number, kOfBuiltin}, &Call::enable_gqa),
      Argument({.name = "softcap", .kind = Kind::number, .in_score_mod = "softcap * torch.tanh(score / softcap)"},
               &Call::softcap, kCap),
      Argument({"window_size", Kind::number}, &Call::window_size),
      Argument({"query_offset", Kind::entries}, &Call::query_offset),
      Argument({.name = "key_lengths", .kind = Kind::entries, .name_in_varlen = "seqused_k"}, &Call::key_lengths),
      Argument({"cu_seq_q", Kind::starts}, &Call::cu_seq_q),
      Argument({"cu_seq_k", Kind::starts}, &Call::cu_seq_k),
      Argument({"max_q", Kind::longest}, &Call::max_q),
      Argument({"max_k", Kind::longest}, &Call::max_k),
      Argument({"block_table", Kind::pages}, &Call::block_table),
      Argument(
          {.name = "alibi_slopes", .kind = Kind::heads, .in_score_mod = "score - slopes[h] * (q_idx - kv_idx).abs()"},
          &Call::alibi_slopes),
      Argument({"sinks", Kind::heads}, &Call::sinks),
      Argument({"score_mod", Kind::program}, &Call::score_mod),
      Argument({"mask_mod", Kind::program}, &Call::mask_mod),
      Argument({"row_terms", Kind::terms}, &Call::row_terms),
      Argument({"key_terms", Kind::terms}, &Call::key_terms),
      Argument({"distance_terms", Kind::terms}, &Call::distance_terms),
      Argument({"row_numbers", Kind::numbers}, &Call::row_numbers),
      Argument({"key_numbers", Kind::numbers}, &Call::key_numbers),
      Argument({"distance_numbers", Kind::numbers}, &Call::distance_numbers),
      Argument({"blocks", Kind::numbers}, &Call::blocks),
      Argument({"block_size", Kind::program}, &Call::block_size),
      Argument({"key_scale", Kind::scales}, &Call::key_scale),
      Argument({"value_scale", Kind::scales}, &Call::value_scale),
      Argument({"tables", Kind::terms, kList}, &Call::tables),
      Argument({"with_rows", Kind::results}, &Call::with_rows),
  };
  static auto fields(auto& call);

  bool is_packed() const { return cu_seq_q.has_value(); }
  bool has_program() const { return score_mod || mask_mod || blocks; }
};

inline bool is_8_bit(const at::Tensor& t) {
  return t.scalar_type() == at::kChar || t.scalar_type() == at::kFloat8_e4m3fn;
}
inline bool is_8_bit(const std::optional<at::Tensor>& t) { return t && is_8_bit(*t); }

constexpr auto kAbout =
    std::apply([](const auto&... a) { return std::array{static_cast<About>(a)...}; }, Call::kArguments);

// A view of Call (operator.h): the arguments that have all flags of `with` and none of `without`.
template <unsigned with, unsigned without = 0>
struct Arguments {
  using Data = Call;
  static constexpr bool takes(const About& about) {
    return (about.flags() & with) == with && (about.flags() & without) == 0;
  }
  static constexpr size_t kCount = std::ranges::count_if(kAbout, takes);
  static constexpr auto kPlaces = [] {
    std::array<size_t, kCount> places{};
    size_t n = 0;
    for (size_t i = 0; i < kAbout.size(); ++i)
      if (takes(kAbout[i])) places[n++] = i;
    return places;
  }();

  // About argument number i, or about tensor number i. Tables are the last tensors, with numbers from kCount - 1 on.
  static constexpr const About& about(size_t i) { return kAbout[kPlaces[std::min(i, kCount - 1)]]; }
  static std::string name(size_t i) {
    const About& of = about(i);
    return of.has(kList) ? c10::str(of.name, "[", i - (kCount - 1), "]") : of.name;
  }
  static auto fields(auto& call) {
    return [&]<size_t... i>(std::index_sequence<i...>) {
      return std::tie(call.*std::get<kPlaces[i]>(Call::kArguments).member...);
    }(std::make_index_sequence<kCount>());
  }
};

using All = Arguments<0>;
using Tensors = Arguments<kTensor>;
using Inputs = Arguments<kInput>;  // which may have derivatives
using Builtin = Arguments<kOfBuiltin>;
using BeyondBuiltin = Arguments<0, kOfBuiltin | kOfResults>;
using WithoutProgram = Arguments<0, kOfProgram>;
using Unpacked = Arguments<0, kOfProgram | kOfPacking | kOfResults>;  // of operators that take no packed sequences
using Flex = Arguments<0, kOfPacking | kOf8Bits | kScoreTerm>;
using Scores = Arguments<kOfScores, kOfProgram | kOfPacking | kOfResults>;

// varlen_attention always packs. Its arguments begin with the arguments of torch.nn.attention.varlen.varlen_attn.
using FirstOfVarlen = Arguments<kOfVarlenAttn>;
using RestOfVarlen = Arguments<0, kOfProgram | kOfVarlenAttn | kNotInVarlen>;
struct Varlen {
  using Data = Call;
  static auto fields(auto& call) { return std::tuple_cat(FirstOfVarlen::fields(call), RestOfVarlen::fields(call)); }
};

auto Call::fields(auto& call) { return All::fields(call); }

// tensors_of() returns the tensors of a struct, and inputs_of() the tensors that may have derivatives. In a struct
// other than Call, both functions return all fields.
template <class Some, class T>
auto fields_among(T& s) {
  if constexpr (std::is_same_v<std::remove_const_t<T>, Call>)
    return Some::fields(s);
  else
    return fields_of(s);
}
auto tensors_of(auto& s) { return fields_among<Tensors>(s); }
auto inputs_of(auto& s) { return fields_among<Inputs>(s); }
auto all_inputs_of(const auto&... arguments) { return std::tuple_cat(inputs_of(arguments)...); }
template <class T>
constexpr size_t kInputs = std::tuple_size_v<decltype(inputs_of(std::declval<T&>()))>;

// Calls f(i, tensor, ...) with tensor number i of each tuple of references, for every i. Each tensor of a list has its
// own number. Lists at the same place first get the length of the longest of them.
void for_each_tensor(auto&& f, auto first, auto... others) {
  const auto visit = [&](size_t i, auto&... same) {
    if constexpr ((requires { same.size(); } && ...)) {
      const size_t size = std::max({same.size()...});
      const auto lengthen = [&](auto& list) {
        if constexpr (requires { list.resize(size); }) list.resize(size);
      };
      (lengthen(same), ...);
      for (size_t t = 0; t < size; ++t) f(i + t, same.at(t)...);
    } else {
      f(i, same...);
    }
  };
  for_each_of(visit, first, others...);
}
// Whether f(tensor) is true for any tensor of a tuple of references.
bool any_of(const auto& f, auto tensors) {
  bool any = false;
  for_each_tensor([&](size_t, const auto& t) { any = any || f(t); }, tensors);
  return any;
}

// Calls f(i, input, ...) with input number i of each struct, for every i. All structs have the same inputs.
void for_each_input(auto&& f, auto&... structs) { for_each_tensor(f, inputs_of(structs)...); }

// Returns the struct with every input replaced by f(input). An absent input stays absent.
template <Struct T>
T map_inputs(T s, const auto& f) {
  const auto map = [&]<class Field>(size_t, Field& field) {
    if constexpr (std::is_same_v<Field, at::Tensor>)
      field = f(field);
    else if (field)
      field = f(*field);
  };
  for_each_input(map, s);
  return s;
}

// Makes a call from the arguments of sdpa_stats, which takes no value tensor. The key takes the place of the value,
// because only the value's number of heads matters.
inline Call with_key_as_value(Call scores) {
  scores.value = scores.key;
  return scores;
}

// One T for every input.
template <class T>
struct OfInputs {
  T query, key, value, attn_mask, alibi_slopes, sinks, row_terms, key_terms, distance_terms;
  std::vector<T> tables;  // one T for each table

  static constexpr auto kInputNames =
      std::to_array<std::string_view>({"query", "key", "value", "attn_mask", "alibi_slopes", "sinks", "row_terms",
                                       "key_terms", "distance_terms", "tables"});
  static auto fields(auto& x) {
    return std::tie(x.query, x.key, x.value, x.attn_mask, x.alibi_slopes, x.sinks, x.row_terms, x.key_terms,
                    x.distance_terms, x.tables);
  }
};
// A direction in the space of inputs: each tensor has the shape of its input, and is absent if it is zero.
using Direction = OfInputs<std::optional<at::Tensor>>;
// Each gradient has the shape of its input. If it is not wanted, it is undefined or, of a table, empty, [0].
using Gradients = OfInputs<at::Tensor>;
using Wanted = std::array<bool, Inputs::kCount - 1 + kMostTables>;  // in the order of OfInputs; has room for all tables
static_assert(
    kInputs<Direction> == Inputs::kCount &&
        [] {
          for (size_t i = 0; i < Inputs::kCount; ++i)
            if (Inputs::about(i).name != Direction::kInputNames[i]) return false;
          return true;
        }(),
    "OfInputs has the arguments of Call that may have derivatives, in their order");

// Whether an argument has its default. A tensor has its default if it is absent.
template <class T>
bool is_default(const T& given, const T& usual) {
  if constexpr (std::is_same_v<T, std::optional<at::Tensor>>)
    return !given;
  else if constexpr (std::is_same_v<T, OptionalTensors>)
    return given.empty();
  else
    return given == usual;
}

// Whether the built-in could take the call: all arguments that the built-in lacks have their defaults.
inline bool is_builtin(const Call& call) {
  const Call by_default;
  bool all = true;
  const auto compare = [&](size_t, const auto& given, const auto& usual) { all = all && is_default(given, usual); };
  for_each_of(compare, BeyondBuiltin::fields(call), BeyondBuiltin::fields(by_default));
  return all;
}

}  // namespace attn
