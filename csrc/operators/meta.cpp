// Shapes without data: Meta, FakeTensor, dynamic shapes. The same kernels are registered for tensors that are not
// dense, so that validate() refuses such a tensor with an error that names the argument. Without these kernels the
// dispatcher would refuse the tensor with an error that names no argument.
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
