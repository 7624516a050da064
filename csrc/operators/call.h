// A call of attention: the one list of its arguments. From it follows what the schemas of all operators are
// (schema.cpp), whether the built-in could have the call, and what autograd, vmap and autocast do with each argument.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <string_view>
#include <tuple>

#include "operators/operator.h"

namespace attn {

// What an argument is. A tensor broadcasts to the dimensions that are named here.
enum class Kind {
  rows,       // [*batch, its own heads, L or S, numbers]: may have a derivative, and autocast casts it
  mask,       // [*batch, heads, L, S]: likewise, if it is floating
  heads,      // [*batch, heads]: may have a derivative
  entries,    // [*batch]: integers
  sequences,  // where packed sequences begin, and how long they are
  number,     // no tensor
};

// Which operators take an argument, beside those that take all: sdpa, which has those of the built-in, and sdpa_stats,
// which has those that make scores.
enum Takers { kNeither = 0, kSdpa = 1, kStats = 2, kBoth = kSdpa | kStats };

struct About {
  const char* name;
  const char* name_in_varlen;  // what varlen_attention calls it
  Kind kind;
  int takers;
  bool is_tensor;

  constexpr bool may_have_derivative() const { return kind == Kind::rows || kind == Kind::mask || kind == Kind::heads; }
};
template <class Struct, class T>
struct Argument : About {
  T Struct::* member;

  constexpr Argument(const char* name, T Struct::* member, Kind kind, int takers, const char* in_varlen = nullptr)
      : About{name, in_varlen ? in_varlen : name, kind, takers,
              std::is_same_v<T, at::Tensor> || std::is_same_v<T, std::optional<at::Tensor>>},
        member(member) {}
};

// Sequences of different lengths may be packed, one behind the other: query [*batch, heads, T_q, E], key [*batch,
// key_heads, T_k, E], value likewise, attn_mask [*batch, heads or 1, T_q, max_k]. Sequence n has the queries from
// cu_seq_q[n] to cu_seq_q[n + 1] and the keys from cu_seq_k[n] to cu_seq_k[n + 1], which no other sequence sees. Then
// query_offset and key_lengths have a number for each sequence; without an offset its last query is at its last key.
struct Call {
  at::Tensor query;                     // [*batch, heads, L, E]
  at::Tensor key;                       // [*batch, key_heads, S, E]
  at::Tensor value;                     // [*batch, value_heads, S, Ev]
  std::optional<at::Tensor> attn_mask;  // broadcasts to [*batch, heads, L, S]: boolean, or floating
  double dropout_p = 0;
  bool is_causal = false;
  std::optional<double> scale;
  bool enable_gqa = false;
  double softcap = 0;                             // 0: none
  std::array<int64_t, 2> window_size = {-1, -1};  // keys to the left and right of the query's position; -1: all
  std::optional<at::Tensor> query_offset;         // integers that broadcast to [*batch]: the position of query 0
  std::optional<at::Tensor> key_lengths;          // likewise: keys from there on are hidden
  std::optional<at::Tensor> cu_seq_q, cu_seq_k;   // integers [N + 1], from 0, not decreasing; absent: nothing is packed
  c10::SymInt max_q = 0, max_k = 0;               // no sequence has more queries, or keys
  // Integers [N, most pages] in place of cu_seq_k: key and value are pools [pages, heads, page_size, E or Ev], and row
  // r of sequence n is row r % page_size of page block_table[n][r / page_size]. key_lengths are needed.
  std::optional<at::Tensor> block_table;
  std::optional<at::Tensor> alibi_slopes;  // broadcast to [*batch, heads]
  std::optional<at::Tensor> sinks;         // likewise

  // In the order of `attention`.
  static constexpr std::tuple kArguments{
      Argument("query", &Call::query, Kind::rows, kBoth),
      Argument("key", &Call::key, Kind::rows, kBoth),
      Argument("value", &Call::value, Kind::rows, kSdpa),
      Argument("attn_mask", &Call::attn_mask, Kind::mask, kBoth),
      Argument("dropout_p", &Call::dropout_p, Kind::number, kSdpa),
      Argument("is_causal", &Call::is_causal, Kind::number, kBoth),
      Argument("scale", &Call::scale, Kind::number, kBoth),
      Argument("enable_gqa", &Call::enable_gqa, Kind::number, kBoth),
      Argument("softcap", &Call::softcap, Kind::number, kStats),
      Argument("window_size", &Call::window_size, Kind::number, kStats),
      Argument("query_offset", &Call::query_offset, Kind::entries, kStats),
      Argument("key_lengths", &Call::key_lengths, Kind::entries, kStats, "seqused_k"),
      Argument("cu_seq_q", &Call::cu_seq_q, Kind::sequences, kNeither),
      Argument("cu_seq_k", &Call::cu_seq_k, Kind::sequences, kNeither),
      Argument("max_q", &Call::max_q, Kind::sequences, kNeither),
      Argument("max_k", &Call::max_k, Kind::sequences, kNeither),
      Argument("block_table", &Call::block_table, Kind::sequences, kNeither),
      Argument("alibi_slopes", &Call::alibi_slopes, Kind::heads, kStats),
      Argument("sinks", &Call::sinks, Kind::heads, kStats),
  };

  static auto fields(auto& call);   // all
  static auto tensors(auto& call);  // that are tensors
  static auto inputs(auto& call);   // that may have derivatives

  bool is_packed() const { return cu_seq_q.has_value(); }
};

// The arguments for which `takes` is true.
template <bool (*takes)(const About&)>
struct Arguments {
  using Data = Call;
  static constexpr size_t kAll = std::tuple_size_v<decltype(Call::kArguments)>;
  static constexpr std::array<About, kAll> kAbout =
      std::apply([](const auto&... a) { return std::array<About, kAll>{a...}; }, Call::kArguments);
  static constexpr size_t kCount = std::ranges::count_if(kAbout, takes);
  static constexpr std::array<size_t, kCount> kPlaces = [] {
    std::array<size_t, kCount> places{};
    size_t n = 0;
    for (size_t i = 0; i < kAll; ++i)
      if (takes(kAbout[i])) places[n++] = i;
    return places;
  }();

  static constexpr const About& about(size_t i) { return kAbout[kPlaces[i]]; }
  static auto fields(auto& call) {
    return [&]<size_t... i>(std::index_sequence<i...>) {
      return std::tie(call.*std::get<kPlaces[i]>(Call::kArguments).member...);
    }(std::make_index_sequence<kCount>());
  }
};
constexpr bool is_any(const About&) { return true; }
constexpr bool is_tensor(const About& a) { return a.is_tensor; }
constexpr bool may_have_derivative(const About& a) { return a.may_have_derivative(); }
constexpr bool is_of_builtin(const About& a) { return a.takers & kSdpa; }
constexpr bool is_beyond_builtin(const About& a) { return !is_of_builtin(a); }
constexpr bool is_of_scores(const About& a) { return a.takers & kStats; }
constexpr bool is_dense(const About& a) { return a.kind != Kind::sequences; }

using All = Arguments<is_any>;
using Tensors = Arguments<is_tensor>;
using Inputs = Arguments<may_have_derivative>;
using Builtin = Arguments<is_of_builtin>;
using BeyondBuiltin = Arguments<is_beyond_builtin>;
using Scores = Arguments<is_of_scores>;
using Dense = Arguments<is_dense>;  // of operators that take no packed sequences

// Of varlen_attention, which packs always. They begin as those of torch.nn.attention.varlen.varlen_attn.
constexpr bool is_first_of_varlen(const About& a) {
  return a.kind == Kind::rows || (a.kind == Kind::sequences && a.name != std::string_view("block_table"));
}
constexpr bool is_rest_of_varlen(const About& a) {
  return !is_first_of_varlen(a) && a.name != std::string_view("is_causal");  // which a window says
}
using FirstOfVarlen = Arguments<is_first_of_varlen>;
using RestOfVarlen = Arguments<is_rest_of_varlen>;
struct Varlen {
  using Data = Call;
  static auto fields(auto& call) { return std::tuple_cat(FirstOfVarlen::fields(call), RestOfVarlen::fields(call)); }
};

auto Call::fields(auto& call) { return All::fields(call); }
auto Call::tensors(auto& call) { return Tensors::fields(call); }
auto Call::inputs(auto& call) { return Inputs::fields(call); }

// What sdpa_stats takes, as a call: the value is never read, but its heads count, which are those of the key.
inline Call with_key_as_value(Call scores) {
  scores.value = scores.key;
  return scores;
}

// Something of every input.
template <class T>
struct OfInputs {
  T query, key, value, attn_mask, alibi_slopes, sinks;

  static auto fields(auto& x) { return std::tie(x.query, x.key, x.value, x.attn_mask, x.alibi_slopes, x.sinks); }
};
// A direction in the space of inputs: each tensor has the shape of its input, and is absent where it is zero.
using Direction = OfInputs<std::optional<at::Tensor>>;
// Each has the shape of its input, and is undefined where it is not wanted.
using Gradients = OfInputs<at::Tensor>;
using Wanted = std::array<bool, Inputs::kCount>;  // in the same order
static_assert(kInputs<Direction> == Inputs::kCount, "OfInputs has the arguments that may have derivatives");

// Whether the built-in could have the call: all other arguments are as they are by default.
inline bool is_builtin(const Call& call) {
  const Call by_default;
  bool all = true;
  const auto compare = [&]<class T>(size_t, const T& given, const T& usual) {
    if constexpr (std::is_same_v<T, std::optional<at::Tensor>>)
      all = all && given.has_value() == usual.has_value();
    else
      all = all && given == usual;
  };
  for_each_of(compare, BeyondBuiltin::fields(call), BeyondBuiltin::fields(by_default));
  return all;
}

}  // namespace attn
