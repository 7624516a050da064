// Differences between the supported releases of torch (2.11 to 2.15).
#pragma once

#include <torch/csrc/autograd/function.h>
#include <torch/version.h>

namespace attn {

// A Node of the autograd graph is held by std::shared_ptr up to torch 2.12, and by c10::intrusive_ptr from 2.13 on.
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13
template <class N>
auto make_node() {
  return c10::make_intrusive<N>();
}
inline auto pointer_to(torch::autograd::Node* node) {
  return c10::intrusive_ptr<torch::autograd::Node>::reclaim_copy(node);
}
#else
template <class N>
auto make_node() {
  return std::shared_ptr<N>(new N(), torch::autograd::deleteNode);
}
inline auto pointer_to(torch::autograd::Node* node) { return node->shared_from_this(); }
#endif

}  // namespace attn
