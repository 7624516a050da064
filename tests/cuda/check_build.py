"""Of a build with CUDA, what can be checked without a GPU: `make check-cuda` runs it.

The library loads, its kernels are registered for CUDA and for gradients of CUDA tensors, and every
operator gives results of the right shapes on fake CUDA tensors and, with autograd, meta tensors.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor
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


def make_inputs() -> list[Tensor]:
    shapes = [(2, 3, 5, 64), (2, 3, 7, 64), (2, 3, 7, 32), (1, 1, 5, 7)]
    return [torch.empty(shape, dtype=torch.bfloat16) for shape in shapes]


def assert_like(results: Sequence[Tensor], expected: Sequence[Tensor], device: str) -> None:
    assert [r.shape for r in results] == [e.shape for e in expected]
    assert [r.dtype for r in results] == [e.dtype for e in expected]
    assert all(r.device.type == device for r in results)


def check_shapes(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor, device: str) -> None:
    """Of all derivatives, of and along all inputs."""
    ops, x = torch.ops.attn, (query, key, value, attn_mask)
    plain = {"scale": None, "enable_gqa": False}
    of_all = {**plain, "grad_input_mask": [True] * 4}
    output = query.new_empty(2, 3, 5, 32)
    assert_like([torch_attn.sdpa(*x)], [output], device)
    saved = ops._sdpa_forward(*x)
    assert_like(saved[:1], [output], device)
    assert_like(ops._sdpa_backward(output, *x, *saved, 0.0, False, **of_all), x, device)
    tangents = ops._sdpa_tangent(*x, *saved, *x, 0.0, False, **plain)
    assert_like(tangents[:1], [output], device)
    second = ops._sdpa_second(output, *x, *saved, *x, *tangents, 0.0, False, **of_all)
    assert_like(second, x, device)


def main() -> None:
    assert torch.version.cuda, "this torch is a build without CUDA"
    assert built_with()["cuda"], "the library was built without CUDA"
    kernels = [name for name in OPERATORS if has_kernel(name, "CPU")]
    assert {"attn::sdpa", "attn::_sdpa_forward", "attn::_sdpa_backward"} <= set(kernels), kernels
    missing = [name for name in kernels if not has_kernel(name, "CUDA")]
    assert not missing, f"no kernel for CUDA: {missing}"
    for operator in kernels:
        table = torch._C._dispatch_dump_table(operator)
        assert re.search(r"^AutogradCUDA: .*csrc/autograd\.cpp.*$", table, re.MULTILINE), table

    # Not by autograd, which asks the driver for a context of the device.
    with FakeTensorMode(allow_non_fake_inputs=False), torch.device("cuda"):
        check_shapes(*make_inputs(), "cuda")
    x = [t.to("meta").requires_grad_() for t in make_inputs()]
    gradients = torch.autograd.grad(torch_attn.sdpa(*x).sum(), x)
    assert_like(gradients, x, "meta")

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none: kernels not run"
    print(f"torch {torch.__version__}, {len(kernels)} operators with CUDA kernels; GPU: {gpu}")


if __name__ == "__main__":
    main()
