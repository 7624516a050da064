// What the unit tests share.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

// Passes if `call` throws a c10::Error with this piece in its message.
inline void expect_error(const std::string& piece, const auto& call) {
  try {
    call();
    ADD_FAILURE() << "no error; expected one that says: " << piece;
  } catch (const c10::Error& error) {
    const std::string message = error.what_without_backtrace();
    EXPECT_NE(message.find(piece), std::string::npos) << "the error says: " << message << "\nexpected: " << piece;
  }
}

inline void expect_same_bits(const at::Tensor& a, const at::Tensor& b) { EXPECT_TRUE(at::equal(a, b)); }
inline void expect_same_bits(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) expect_same_bits(a[i], b[i]);
}

// For float64, after sums of a few hundred numbers of order 1.
inline void expect_close(const at::Tensor& a, const at::Tensor& b) {
  ASSERT_EQ(a.sizes(), b.sizes());
  EXPECT_LT((a - b).abs().max().item<double>(), 1e-12);
}

inline c10::IValue absent(const auto& member) { return member ? c10::IValue("given") : c10::IValue(); }

// Every argument of the operator but the first ones has a member of its name and default; a new one fails here.
inline void expect_defaults(const char* op, size_t first, const std::map<std::string, c10::IValue>& members) {
  const auto& arguments = c10::Dispatcher::singleton().findSchemaOrThrow(op, "").schema().arguments();
  ASSERT_EQ(arguments.size(), first + members.size()) << op;
  for (size_t i = first; i < arguments.size(); ++i)
    EXPECT_EQ(*arguments[i].default_value(), members.at(arguments[i].name())) << op << ": " << arguments[i].name();
}
