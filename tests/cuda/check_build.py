"""Of a build with CUDA, what can be checked without a GPU: `make check-cuda` runs it.

The library loads, its kernels are registered for CUDA and for gradients of CUDA tensors, and fake
CUDA tensors take a forward and a backward to the right shapes.
"""

from __future__ import annotations

import torch
from torch._subclasses import FakeTensorMode

import torch_attn
from torch_attn._library import built_with

OPERATORS = sorted(
    name.removesuffix(".default")
    for name in torch._C._dispatch_get_all_op_names()
    if name.startswith("attn::")
)


def has_kernel(operator: str, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator, key)


def main() -> None:
    assert torch.version.cuda, "this torch is a build without CUDA"
    assert built_with()["cuda"], "the library was built without CUDA"
    kernels = [name for name in OPERATORS if has_kernel(name, "CPU")]
    assert {
  "attn::sdpa", "attn::_sdpa_forward", "attn::_sdpa_backward"} <= set(kernels), kernels
    missing = [name for name in kernels if not has_kernel(name, "CUDA")]
    assert not missing, f"no kernel for CUDA: {missing}"
    for operator in ("attn::sdpa", "attn::_sdpa_forward", "attn::_sdpa_backward"):
        assert has_kernel(operator, "AutogradCUDA"), operator

    with FakeTensorMode(allow_non_fake_inputs=False):
        query, key, value = (
            torch.empty(2, 3, length, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for length, dim in ((5, 64), (7, 64), (7, 32))
        )
        output = torch_attn.sdpa(query, key, value)
        gradients = torch.autograd.grad(output.sum(), (query, key, value))
    assert output.device.type == "cuda"
    assert output.shape == (2, 3, 5, 32)
    assert [g.shape for g in gradients] == [t.shape for t in (query, key, value)]
    assert all(g.device.type == "cuda" for g in gradients)

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none: kernels not run"
    print(f"torch {torch.__version__}, {len(kernels)} operators with CUDA kernels; GPU: {gpu}")


if __name__ == "__main__":
    main()
