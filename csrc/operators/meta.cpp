// Shapes without data: Meta, FakeTensor, dynamic shapes. Also tensors that are not dense: the argument checker refuses
// them and names the argument. The dispatcher's own error, for an operator without a kernel, would not name it.
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
