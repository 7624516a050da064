"""Checks of a build with CUDA what can be checked without a GPU: `make check-cuda` runs it.

The library loads, its kernels are registered for CUDA and for gradients of CUDA tensors, and every
operator gives results of the right shapes on fake CUDA tensors and, with autograd, meta tensors.
No kernel keeps in memory what should be in registers. The programs that check kernels on a GPU are
compiled, beside the library. With one architecture all of it is small enough to be carried to a
machine with a GPU.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

import torch_attn
from tests.cuda.programs import compile_programs, find
from torch_attn._library import LIBRARY, built_with

TO = Path("build") / "cuda" / "programs"
LARGEST = 64  # MiB
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
    """Checks the shapes of all derivatives, of and along all inputs."""
    ops, x = torch.ops.attn, (query, key, value, attn_mask)
    rest = len(ops._sdpa_backward.default._schema.returns) - 5
    wanted = [True] * 4 + [False] * (ops._sdpa_backward.default._schema.arguments[-1].N - 4)
    output = query.new_empty(2, 3, 5, 32)
    assert_like([torch_attn.sdpa(*x)], [output], device)
    of_rows = query.new_empty(2, 3, 5, dtype=torch.float32)
    of_keys = query.new_empty(2, 3, key.size(-2), dtype=torch.float32)
    statistics = torch_attn.sdpa_stats(query, key, attn_mask)
    assert_like(statistics, [of_rows, of_rows, of_rows, of_keys], device)
    saved = ops._sdpa_forward(*x)[:4]
    along = (*x, *[None] * rest, [None])
    assert_like(saved[:1], [output], device)
    assert_like(ops._sdpa_backward(output, None, *saved, *x, grad_input_mask=wanted)[:4], x, device)
    tangents = ops._sdpa_tangent(*saved, *along, *x)
    assert_like(tangents[:1], [output], device)
    second = ops._sdpa_second(output, None, *saved, *along, *tangents, *x, grad_input_mask=wanted)
    assert_like(second[:4], x, device)


# How many bytes of registers may be in memory, by head size, for each Extra (wgmma/tasks.cuh).
HOPPER_BYTES = {
    ("Forward", "64"): (88, 104, 56, 0),
    ("Forward", "128"): (0, 80, 48, 16),
    ("Forward", "256"): (24, 56),
    ("Grad", "64"): (0, 224, 152, 64),
    ("Grad", "128"): (48, 96, 272, 104),
}


def check_registers() -> tuple[int, int]:
    """Checks the memory of every kernel of the library; returns how many, for how many GPUs.

    Kernels of float64, with two registers for each number, may have some in memory, and those with
    tensor cores a few addresses where that lets more blocks run at a time (kBlocks). On Hopper the
    producer has few registers, and may set a task with some in memory; so may kernels with an
    option. tests/test_cuda_sass.py counts those in loops over tiles.
    """
    command = [find("cuobjdump"), "-res-usage", LIBRARY]
    usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    architectures = re.findall(r"^arch = (\w+)$", usage, re.MULTILINE)
    wanted = {"sm_90a"} if os.environ.get("TORCH_CUDA_ARCH_LIST") else {"sm_80", "sm_90a"}
    assert set(architectures) >= wanted, architectures
    kernels = re.findall(r"Function (\w+):\s+REG:\d+ STACK:(\d+) .*LOCAL:(\d+)", usage)
    for name, *numbers in kernels:
        allowed = 256 if re.search("SimtId|merge_splitsId", name) else 0
        if re.search(r"(For|Back)wardMmaI\w+Li(64|128)E", name):
            allowed = 40 if "MmaGradientE4" in name else 32
        if hopper := re.search(r"(Forward|Grad)\w*WgmmaI\w+?Li(\d+)E\w+?5ExtraE([0-3])E", name):
            allowed = HOPPER_BYTES[hopper[1], hopper[2]][int(hopper[3])]
        assert max(map(int, numbers)) <= allowed, f"{name} needs local memory: {numbers} bytes"
    return len(kernels), len(set(architectures))


def main() -> None:
    assert torch.version.cuda, "this torch is a build without CUDA"
    assert built_with()["cuda"], "the library was built without CUDA"
    kernels = [n for n in OPERATORS if has_kernel(n, "CPU")]
    assert {"attn::sdpa", "attn::_sdpa_forward", "attn::_sdpa_backward"} <= set(kernels), kernels
    missing = [name for name in kernels if not has_kernel(name, "CUDA")]
    assert not missing, f"no kernel for CUDA: {missing}"
    for operator in kernels:
        table = torch._C._dispatch_dump_table(operator)
        assert re.search(
            r"^AutogradCUDA: .*csrc/operators/autograd\.cpp.*$", table, re.MULTILINE
        ), table

    # Not by autograd, which asks the driver for a context of the device.
    with FakeTensorMode(allow_non_fake_inputs=False), torch.device("cuda"):
        check_shapes(*make_inputs(), "cuda")
    x = [t.to("meta").requires_grad_() for t in make_inputs()]
    gradients = torch.autograd.grad(torch_attn.sdpa(*x).sum(), x)
    assert_like(gradients, x, "meta")

    compiled, architectures = check_registers()
    assert compiled >= 18 * architectures, f"{compiled} kernels for {architectures} architectures"
    programs = compile_programs(TO)
    mib = sum(path.stat().st_size for path in (Path(LIBRARY), *programs)) / 2**20
    assert architectures > 1 or mib <= LARGEST, (
        f"{mib:.0f} MiB are too much to be carried to another machine"
    )
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none: kernels not run"
    print(
        f"torch {torch.__version__}: {len(kernels)} operators on CUDA, {compiled} kernels that "
        f"have their numbers in registers; {len(programs)} programs in {TO}, "
        f"with the library {mib:.0f} MiB; GPU: {gpu}"
    )


if __name__ == "__main__":
    main()
