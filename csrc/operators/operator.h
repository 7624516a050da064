// Operators that take and return structs.
//
// PyTorch's dispatcher knows only flat lists of arguments: Tensor query, Tensor key, Tensor value, Tensor? attn_mask
// and so on. Our functions take structs of them (ops.h). The class Operator converts between the two, so that no list
// has to be written by hand. A struct lists its fields once, in the order of the schema. An operator is a name, and the
// type of a function of structs or single values:
//
//   struct CallOptions {
//     double dropout_p;
//     bool is_causal;
//     static auto fields(auto& o) { return std::tie(o.dropout_p, o.is_causal); }
//   };
//   using SdpaOp = Operator<"attn::sdpa", at::Tensor(Inputs, CallOptions)>;
//
// SdpaOp::call(inputs, options) calls the operator. SdpaOp::kernel<f> makes of a function f(inputs, options) what the
// dispatcher expects, f(query, ..., dropout_p, is_causal). If f returns a struct, the dispatcher gets a tuple. When the
// library is loaded, the dispatcher compares all these types with the schema.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>

namespace attn {

template <class T>
concept Struct = requires(T& t) { t.fields(t); };

// A tuple of references to the fields. A value that is no struct counts as one field.
auto fields_of(auto& value) { return std::tie(value); }
auto fields_of(Struct auto& s) { return s.fields(s); }
auto all_fields(const auto&... arguments) { return std::tuple_cat(fields_of(arguments)...); }

template <class T>
constexpr size_t kFields = std::tuple_size_v<decltype(fields_of(std::declval<T&>()))>;

// The struct with f(tensor) in place of every tensor in it. An absent tensor stays absent.
template <Struct T>
T map_tensors(T tensors, const auto& f) {
  const auto map = [&]<class Field>(Field& field) {
    if constexpr (std::is_same_v<Field, at::Tensor>)
      field = f(field);
    else if (field)
      field = f(*field);
  };
  std::apply([&](auto&... fields) { (map(fields), ...); }, fields_of(tensors));
  return tensors;
}

// Calls f(i, field, ...) with field number i of each struct, for every i: the structs have as many fields.
void for_each_field(auto&& f, auto& first, auto&... others) {
  [&]<size_t... i>(std::index_sequence<i...>) {
    const auto call = [&]<size_t n>(std::integral_constant<size_t, n>) {
      f(n, std::get<n>(fields_of(first)), std::get<n>(fields_of(others))...);
    };
    (call(std::integral_constant<size_t, i>()), ...);
  }(std::make_index_sequence<kFields<std::remove_reference_t<decltype(first)>>>());
}

// A string as an argument of a template.
template <size_t length>
struct Name {
  char text[length];
  constexpr Name(const char (&literal)[length]) { std::copy_n(literal, length, text); }
};

template <class Result, class... Arguments>
auto flat_arguments(Result (*)(Arguments...)) -> decltype(all_fields(std::declval<Arguments>()...));

// `Arguments` are the arguments as our functions take them, `Fields` the types of the flat list.
template <Name name_, class Function, class Flat = decltype(flat_arguments(std::declval<Function*>()))>
class Operator;
template <Name name_, class Result, class... Arguments, class... Fields>
class Operator<name_, Result(Arguments...), std::tuple<const Fields&...>> {
  static auto to_flat(auto result) { return result; }
  static auto to_flat(Struct auto result) {
    return std::apply([](auto&... fields) { return std::tuple(std::move(fields)...); }, fields_of(result));
  }
  static Result from_flat(Result result) { return result; }
  template <class... T>
  static Result from_flat(std::tuple<T...> flat) {
    Result result;
    fields_of(result) = std::move(flat);
    return result;
  }

  // Where the fields of argument number n begin in the flat list.
  static constexpr size_t first_field(size_t n) {
    constexpr size_t counts[] = {kFields<Arguments>...};
    return std::accumulate(counts, counts + n, size_t{0});
  }

  template <class Argument, size_t first, size_t... i>
  static Argument gather(const auto& flat, std::index_sequence<i...>) {
    Argument argument;
    fields_of(argument) = std::tie(std::get<first + i>(flat)...);
    return argument;
  }

  template <auto f, size_t... n>
  static auto call_with(std::index_sequence<n...>, const auto& flat, auto... before) {
    return to_flat(
        f(before..., gather<Arguments, first_field(n)>(flat, std::make_index_sequence<kFields<Arguments>>())...));
  }

  // The dispatcher passes plain values by value, tensors and optional tensors by reference.
  template <class Field>
  using Passed = std::conditional_t<std::is_trivially_copyable_v<Field> || std::is_same_v<Field, c10::SymInt>, Field,
                                    const Field&>;
  using FlatResult = decltype(to_flat(std::declval<Result>()));

 public:
  static constexpr const char* name = name_.text;

  // For Library::impl. kernel_with_keys is for an f(keys, arguments...) that goes on with redispatch().
  template <auto f>
  static FlatResult kernel(Passed<Fields>... fields) {
    return call_with<f>(std::index_sequence_for<Arguments...>(), std::tie(fields...));
  }
  template <auto f>
  static FlatResult kernel_with_keys(c10::DispatchKeySet keys, Passed<Fields>... fields) {
    return call_with<f>(std::index_sequence_for<Arguments...>(), std::tie(fields...), keys);
  }

  static Result call(const Arguments&... arguments) {
    return from_flat(std::apply([](auto&... fields) { return handle().call(fields...); }, all_fields(arguments...)));
  }
  static Result redispatch(c10::DispatchKeySet keys, const Arguments&... arguments) {
    return from_flat(
        std::apply([&](auto&... fields) { return handle().redispatch(keys, fields...); }, all_fields(arguments...)));
  }

  // Looked up in the first call; when this code is loaded, the operator need not be registered yet.
  static const auto& handle() {
    static const auto found =
        c10::Dispatcher::singleton().findSchemaOrThrow(name, "").template typed<FlatResult(Passed<Fields>...)>();
    return found;
  }
};

}  // namespace attn
