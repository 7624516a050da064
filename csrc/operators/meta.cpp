// Shapes without data: Meta, FakeTensor, dynamic shapes. Also takes tensors that are not dense, because the argument
// checker then refuses them and names the argument. Without a kernel the dispatcher would refuse them, and its error
// names no argument.
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
