// Shapes without data: Meta, FakeTensor, dynamic shapes.
#include "operators/run.h"

namespace attn {
namespace {

constexpr Device kMeta{};

}  // namespace

TORCH_LIBRARY_IMPL(attn, Meta, m) { register_kernels<kMeta>(m); }

}  // namespace attn
