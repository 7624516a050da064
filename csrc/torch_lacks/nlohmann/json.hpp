// Stands in for JSON for Modern C++. torch's ATen/functorch/Interpreter.h, which vmap.cpp needs, includes it for two
// inline functions that (de)serialize interpreters, but torch's wheels do not ship it. Those functions are never called
// here, so declarations are enough.
#pragma once

#include <string>

namespace nlohmann {

class json {
 public:
  json();
  template <class T>
  explicit json(const T&);
  static json parse(const std::string&);
  std::string dump() const;
  template <class T>
  T get() const;
};

}  // namespace nlohmann
