// Operators that take and return structs.
//
// PyTorch's dispatcher knows only flat lists of arguments: Tensor query, Tensor key, Tensor value, Tensor? attn_mask
// and so on. Our functions take structs of such arguments (call.h, ops.h). The class Operator converts between the two,
// so no list is written by hand. A struct lists its fields once, in the order of the schema. An operator has a name and
// the type of a function, which takes and returns structs or single values:
//
//   struct Saved {
//     at::Tensor output, logsumexp;
//     static auto fields(auto& s) { return std::tie(s.output, s.logsumexp); }
//   };
//   using BackwardOp = Operator<"attn::_sdpa_backward", Gradients(Saved, Call)>;
//
// BackwardOp::call(saved, call) calls the operator. BackwardOp::kernel<f> turns a function f(saved, call) into one that
// the dispatcher expects, f(output, logsumexp, query, key, ...). If f returns a struct, the dispatcher gets a tuple. An
// operator may take only some fields of a struct, or take them in another order. In the type of such an operator, a
// view takes the place of the struct. A view is a type whose Data is the struct and whose fields() lists the fields.
// The operator's functions still take the whole struct:
//
//   struct KeyAlone {
//     using Data = Call;
//     static auto fields(auto& c) { return std::tie(c.key); }
//   };
//
// A field may be a list: OptionalTensors in an argument, and std::vector<at::Tensor> in a result. The tensors in a
// result's list are defined.
//
// When the library is loaded, the dispatcher compares all these types with the schema.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace attn {

template <class T>
concept Struct = requires(T& t) { t.fields(t); };

// A tuple of references to the fields. A value that is no struct counts as one field.
auto fields_of(auto& value) { return std::tie(value); }
auto fields_of(Struct auto& s) { return s.fields(s); }

// Calls f(i, element, ...) with element number i of each tuple of references, for every i.
void for_each_of(auto&& f, auto first, auto... others) {
  [&]<size_t... i>(std::index_sequence<i...>) {
    const auto call = [&]<size_t n>(std::integral_constant<size_t, n>) {
      f(n, std::get<n>(first), std::get<n>(others)...);
    };
    (call(std::integral_constant<size_t, i>()), ...);
  }(std::make_index_sequence<std::tuple_size_v<decltype(first)>>());
}

// A field as the dispatcher passes it, and back. The dispatcher would overlook tensors in a std::vector, so it gets a
// list of its own. The list ends with one more element, None, because AOTInductor passes no empty list of tensors.
using OptionalTensors = std::vector<std::optional<at::Tensor>>;
using PassedTensors = c10::List<std::optional<at::Tensor>>;
const auto& to_passed(const auto& field) { return field; }
inline PassedTensors to_passed(const OptionalTensors& list) {
  static const PassedTensors none({std::nullopt});
  if (list.empty()) return none;
  PassedTensors passed{at::ArrayRef(list)};
  passed.push_back(std::nullopt);
  return passed;
}
const auto& from_passed(const auto& field) { return field; }
inline OptionalTensors from_passed(const PassedTensors& list) {
  const bool has_end = !list.empty() && !list.get(list.size() - 1);  // calls of users may lack it
  return {list.begin(), list.end() - has_end};
}

// A type that lists which fields of the struct T::Data an operator takes.
template <class T>
concept View = requires { typename T::Data; };
template <class T>
struct DataOf {
  using type = T;
};
template <View T>
struct DataOf<T> {
  using type = typename T::Data;
};

// A string as an argument of a template.
template <size_t length>
struct Name {
  char text[length];
  constexpr Name(const char (&literal)[length]) { std::copy_n(literal, length, text); }
};

// The fields of an argument of an operator.
template <class Argument>
auto fields_as(auto& value) {
  if constexpr (View<Argument>)
    return Argument::fields(value);
  else
    return fields_of(value);
}
template <class Argument>
using Fields = decltype(fields_as<Argument>(std::declval<const typename DataOf<Argument>::type&>()));

template <class Result, class... Arguments>
auto flat_arguments(Result (*)(Arguments...)) -> decltype(std::tuple_cat(std::declval<Fields<Arguments>>()...));

// `Arguments` are the types that our functions take, and `Flat` are the types of the flat list.
template <Name name_, class Function, class Flat = decltype(flat_arguments(std::declval<Function*>()))>
class Operator;
template <Name name_, class Result, class... Arguments, class... Flat>
class Operator<name_, Result(Arguments...), std::tuple<const Flat&...>> {
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
    constexpr size_t counts[] = {std::tuple_size_v<Fields<Arguments>>...};
    return std::accumulate(counts, counts + n, size_t{0});
  }

  template <class Argument, size_t first, size_t... i>
  static auto gather(const auto& flat, std::index_sequence<i...>) {
    typename DataOf<Argument>::type argument;
    fields_as<Argument>(argument) = std::forward_as_tuple(from_passed(std::get<first + i>(flat))...);
    return argument;
  }

  template <auto f, size_t... n>
  static auto call_with(std::index_sequence<n...>, const auto& flat, auto... before) {
    return to_flat(f(before..., gather<Arguments, first_field(n)>(
                                    flat, std::make_index_sequence<std::tuple_size_v<Fields<Arguments>>>())...));
  }

  // The dispatcher passes plain values by value, tensors and optional tensors by reference.
  template <class Field>
  using AsPassed = std::remove_cvref_t<decltype(to_passed(std::declval<const Field&>()))>;
  template <class Field>
  using Passed = std::conditional_t<std::is_trivially_copyable_v<AsPassed<Field>> || std::is_same_v<Field, c10::SymInt>,
                                    AsPassed<Field>, const AsPassed<Field>&>;
  using FlatResult = decltype(to_flat(std::declval<Result>()));

 public:
  static constexpr const char* name = name_.text;

  // Library::impl takes these functions as kernels. kernel_with_keys takes a function f(keys, arguments...), which
  // calls redispatch().
  template <auto f>
  static FlatResult kernel(Passed<Flat>... fields) {
    return call_with<f>(std::index_sequence_for<Arguments...>(), std::tie(fields...));
  }
  template <auto f>
  static FlatResult kernel_with_keys(c10::DispatchKeySet keys, Passed<Flat>... fields) {
    return call_with<f>(std::index_sequence_for<Arguments...>(), std::tie(fields...), keys);
  }

  static Result call(const typename DataOf<Arguments>::type&... arguments) {
    const auto call = [](auto&... fields) { return handle().call(to_passed(fields)...); };
    return from_flat(std::apply(call, flat(arguments...)));
  }
  static Result redispatch(c10::DispatchKeySet keys, const typename DataOf<Arguments>::type&... arguments) {
    const auto call = [&](auto&... fields) { return handle().redispatch(keys, to_passed(fields)...); };
    return from_flat(std::apply(call, flat(arguments...)));
  }
  static auto flat(const typename DataOf<Arguments>::type&... arguments) {
    return std::tuple_cat(fields_as<Arguments>(arguments)...);
  }

  // Looks the operator up in the first call, because the operator may not be registered yet when this code is loaded.
  static const auto& handle() {
    static const auto found =
        c10::Dispatcher::singleton().findSchemaOrThrow(name, "").template typed<FlatResult(Passed<Flat>...)>();
    return found;
  }
};

}  // namespace attn
