"""`torch.set_float32_matmul_precision`: "medium" allows factors of 8 bits, "high" of 16."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import torch_attn
from _accuracy import Problem
from helpers import (
    Inputs,
    assert_same_bits,
    builtin_sdpa,
    double_backward,
    largest,
    make_grad_output,
    make_inputs,
    results,
)
from torch_attn import reference

SIZES = [
    {"L": 70, "S": 91, "E": 64, "Ev": 64},
    {"L": 33, "S": 130, "E": 33, "Ev": 65},
    {"L": 5, "S": 7, "E": 8, "Ev": 3, "mask": (5, 7)},
]


@pytest.fixture(autouse=True)
def _restore_precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_medium(kernels: str, sizes: dict[str, int], layout: str) -> None:
    """Bfloat16 products where the instruction set has them, with the error of a bfloat16 call."""
    inputs = make_inputs(**sizes)
    if layout == "transposed":
        inputs = inputs.map(lambda t: t.mT.contiguous().mT)
    grad_output = make_grad_output(inputs)
    torch.set_float32_matmul_precision("medium")
    medium = results(torch_attn.sdpa, inputs, grad_output)
    torch.set_float32_matmul_precision("highest")
    highest = results(torch_attn.sdpa, inputs, grad_output)
    if kernels not in ("avx512_bf16", "amx"):
        assert_same_bits(medium, highest)
        return
    problem = Problem(inputs, {}, grad_output)

    def errors(problem: Problem) -> Iterator[tuple[str, float]]:
        for name, builtin in problem.to(torch.bfloat16).solve(builtin_sdpa).items():
            yield name, largest(builtin - problem.exact[name])

    exact, of_builtin = problem.exact, problem.over_neighbours(errors)
    for name, tensor in medium.items():
        assert tensor.dtype == torch.float32
        error = largest(tensor - exact[name])
        assert largest(highest[name] - exact[name]) < error, name
        assert error <= 2 * of_builtin[name], name


# Shorter ones go to no tiles.
LONG = [{"L": 200, "S": 210, "E": 64, "Ev": 64}, {"L": 193, "S": 330, "E": 33, "Ev": 65}]


@pytest.mark.parametrize("sizes", [*LONG, SIZES[-1]], ids=str)
def test_high(kernels: str, sizes: dict[str, int]) -> None:
    """Factors of two bfloat16 where tiles multiply them, a hundredth of the error of "medium"."""
    inputs = make_inputs(**sizes)
    grad_output = make_grad_output(inputs)
    highest = results(torch_attn.sdpa, inputs, grad_output)
    torch.set_float32_matmul_precision("high")
    high = results(torch_attn.sdpa, inputs, grad_output)
    if kernels != "amx" or sizes not in LONG:
        assert_same_bits(high, highest)
        return
    exact = results(reference.sdpa, inputs.map(torch.Tensor.double), grad_output.double())
    torch.set_float32_matmul_precision("medium")
    medium = results(torch_attn.sdpa, inputs, grad_output)
    for name, tensor in high.items():
        error = largest(tensor - exact[name])
        assert largest(highest[name] - exact[name]) < error, name
        assert 100 * error <= largest(medium[name] - exact[name]), name


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_derivatives_take_the_scores_of_the_forward(kernels: str, precision: str) -> None:
    """A row that attends to one key has a weight of 1, along a direction too, however large its
    score is and to however few bits its factors were rounded."""
    query, key, value, _ = make_inputs(65, 70, 64)
    x = Inputs(10 * query, 10 * key, value)
    u, t = (
        torch.randn(2, 3, 65, 64),
        x.map(torch.zeros_like)._replace(value=torch.randn_like(value)),
    )
    torch.set_float32_matmul_precision(precision)
    actual = double_backward(torch_attn.sdpa, x, u, t, is_causal=True)
    assert torch.equal(actual["tangent"][..., 0, :], t.value[..., 0, :])
    assert torch.equal(actual["second_query"][..., 0, :], torch.zeros(2, 3, 64))
    exact = Problem(x, {"is_causal": True}, u, t).exact
    # The tangent along the values is the output of these.
    moved = torch_attn.sdpa(*x._replace(value=t.value), is_causal=True)
    error = largest(moved - exact["tangent"])
    assert largest(actual["tangent"] - exact["tangent"]) <= 2 * error


def test_float64_is_float64(kernels: str) -> None:
    inputs = make_inputs(65, 130, 64, dtype=torch.float64)
    before = results(torch_attn.sdpa, inputs)
    torch.set_float32_matmul_precision("medium")
    assert_same_bits(results(torch_attn.sdpa, inputs), before)


@pytest.mark.regression
def test_subnormal_halves_are_numbers(cpu_capability: str) -> None:
    """torch.set_flush_denormal is about floats: every half is a float that is not subnormal."""
    value = torch.arange(1, 1025, dtype=torch.int16).view(torch.float16).view(1, 1024)
    query, key = torch.zeros(1, 8, dtype=torch.float16), torch.zeros(1, 8, dtype=torch.float16)
    assert torch.set_flush_denormal(True)
    try:
        assert torch.equal(torch_attn.sdpa(query, key, value), value)
    finally:
        torch.set_flush_denormal(False)
