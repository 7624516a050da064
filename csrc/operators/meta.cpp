// Shapes without data: Meta, FakeTensor, dynamic shapes. And tensors that are not dense, which the argument checker
// refuses: it names the argument, which the dispatcher's own error, of an operator without a kernel, would not.
#include "operators/run.h"

namespace attn {
namespace {

constexpr Device kMeta{};

}  // namespace

TORCH_LIBRARY_IMPL(attn, Meta, m) { register_kernels<kMeta>(m); }
TORCH_LIBRARY_IMPL(attn, SparseCPU, m) { register_kernels<kMeta>(m); }
TORCH_LIBRARY_IMPL(attn, SparseCUDA, m) { register_kernels<kMeta>(m); }
TORCH_LIBRARY_IMPL(attn, SparseCsrCPU, m) { register_kernels<kMeta>(m); }
TORCH_LIBRARY_IMPL(attn, SparseCsrCUDA, m) { register_kernels<kMeta>(m); }
TORCH_LIBRARY_IMPL(attn, QuantizedCPU, m) { register_kernels<kMeta>(m); }
TORCH_LIBRARY_IMPL(attn, QuantizedCUDA, m) { register_kernels<kMeta>(m); }
TORCH_LIBRARY_IMPL(attn, MkldnnCPU, m) { register_kernels<kMeta>(m); }
TORCH_LIBRARY_IMPL(attn, NestedTensorCPU, m) { register_kernels<kMeta>(m); }
TORCH_LIBRARY_IMPL(attn, NestedTensorCUDA, m) { register_kernels<kMeta>(m); }

}  // namespace attn
