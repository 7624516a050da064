"""A program that test_old_processors.py runs on processors that qemu imitates, in some seconds.

Output, gradients, second derivatives and tangents of every dtype, with a mask, grouped heads,
causality and dropout, against the textbook in float64: the error is at most twice the error of the
textbook in the same precision, and some rounding. The argument is the instruction set that must be
in use.
"""

from __future__ import annotations

import sys
import warnings

sys.modules["numpy"] = None  # type: ignore[assignment]  # NumPy's build needs a newer processor.
warnings.simplefilter("ignore")

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

import torch_attn  # noqa: E402
from torch_attn import reference  # noqa: E402

SIZES = {"L": 70, "S": 67, "E": 20, "Ev": 12}
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def make(dtype: torch.dtype) -> list[Tensor]:
    L, S, E, Ev = SIZES.values()
    shapes = [(2, 4, L, E), (2, 2, S, E), (2, 1, S, Ev), (1, 4, L, S)]
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]


def derivatives(sdpa, inputs: list[Tensor], directions: list[Tensor]) -> list[Tensor]:  # type: ignore[no-untyped-def]
    """Output, its gradients, gradients of their products with the directions, and the tangent."""
    output = sdpa(*inputs, is_causal=True, enable_gqa=True)
    loss = (output * directions[-1]).sum()
    gradients = torch.autograd.grad(loss, inputs, create_graph=True)
    products = sum((g * t).sum() for g, t in zip(gradients, directions, strict=False))
    second = torch.autograd.grad(products, inputs)
    _, tangent = torch.func.jvp(
        lambda *x: sdpa(*x, is_causal=True, enable_gqa=True), tuple(inputs), tuple(directions[:4])
    )
    return [output, *gradients, *second, tangent]


def largest(tensor: Tensor) -> float:
    return tensor.abs().max().item()


def main() -> None:
    assert torch.ops.attn._cpu_capability() == sys.argv[1], torch.ops.attn._cpu_capability()
    for dtype in DTYPES:
        torch.manual_seed(0)
        inputs = make(dtype)
        directions = [torch.randn_like(t) for t in inputs]
        directions.append(torch.randn(2, 4, SIZES["L"], SIZES["Ev"], dtype=dtype))
        exact_inputs = [t.detach().double().requires_grad_() for t in inputs]
        exact = derivatives(reference.sdpa, exact_inputs, [t.double() for t in directions])
        textbook = derivatives(reference.sdpa, inputs, directions)
        actual = derivatives(torch_attn.sdpa, inputs, directions)
        for ours, others, expected in zip(actual, textbook, exact, strict=True):
            rounding = 32 * torch.finfo(dtype).eps * largest(expected)
            bound = 2 * largest(others.double() - expected) + rounding
            error = largest(ours.double() - expected)
            assert error <= bound, (dtype, error, bound)
        torch_attn.sdpa(*inputs, dropout_p=0.5, enable_gqa=True).sum().backward()
        assert all(t.grad is not None and t.grad.isfinite().all() for t in inputs)
    print("all right")


if __name__ == "__main__":
    main()
