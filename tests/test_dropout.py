"""Dropout: seeds, rate, independence, the same mask in backward and on every instruction set."""

from __future__ import annotations

import itertools
import math
import zlib
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_attn
from _accuracy import check
from helpers import (
    CPU_CAPABILITIES,
    DTYPES,
    SEED,
    Inputs,
    assert_same_bits,
    kept,
    kernels_set_to,
    make_grad_output,
    make_inputs,
    results,
    rng_state,
)

pytestmark = pytest.mark.usefixtures("kernels")


def flat_inputs(B: int, H: int, L: int, S: int) -> Inputs:
    """Scores of 0: every weight is 1 / S."""
    return Inputs(torch.zeros(B, H, L, 1), torch.zeros(B, H, S, 1), torch.zeros(B, H, S, 1))


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({"L": 33, "S": 70}, {}),
    "one key": ({"L": 33, "S": 1}, {}),
    "one query": ({"L": 1, "S": 150}, {}),
    "2-D": ({"L": 20, "S": 30, "batch": (), "heads": 1}, {}),
    "5-D": ({"L": 20, "S": 30, "batch": (2, 2)}, {}),
    "causal": ({"L": 70, "S": 33}, {"is_causal": True}),
    "mask": ({"L": 33, "S": 70, "mask": (2, 1, 33, 70)}, {}),
    "broadcast mask": ({"L": 33, "S": 70, "mask": (1, 70)}, {"is_causal": True}),
    "bool mask": ({"L": 33, "S": 70, "mask": (33, 70), "kind": "bool"}, {}),
    "grouped heads": ({"L": 33, "S": 70, "heads": (6, 3, 2)}, {"enable_gqa": True}),
    "many keys": ({"L": 3, "S": 1300, "batch": (), "heads": 1}, {}),
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_accuracy(case: str, dtype: torch.dtype) -> None:
    """Output and gradients given the mask that was drawn: backward has drawn the same."""
    sizes, options = CASES[case]
    inputs = make_inputs(**sizes, dtype=dtype)
    mask = kept(inputs, 0.3, **options)
    check(inputs, gradients=True, dropout_mask=mask, dropout_p=0.3, **options)


def test_seed() -> None:
    inputs = make_inputs(33, 70, mask=(1, 70))
    grad_output = make_grad_output(inputs)

    def draw() -> dict[str, Tensor]:
        return results(torch_attn.sdpa, inputs, grad_output, dropout_p=0.5)

    torch.manual_seed(SEED)
    first, second = draw(), draw()
    torch.manual_seed(SEED)
    assert_same_bits(draw(), first)
    assert_same_bits(draw(), second)
    for name in first:
        assert not torch.equal(first[name], second[name]), name
    torch.manual_seed(SEED + 1)
    assert not torch.equal(draw()["output"], first["output"])


def test_backward_draws_nothing() -> None:
    inputs = make_inputs(33, 70).require_grad()
    output = torch_attn.sdpa(*inputs, dropout_p=0.5)
    state = rng_state(output.device)
    output.sum().backward()
    assert torch.equal(rng_state(output.device), state)


@pytest.mark.parametrize("dtype", DTYPES)
def test_p_0(dtype: torch.dtype) -> None:
    """p = 0 is no dropout at all; it draws nothing."""
    inputs = make_inputs(33, 70, dtype=dtype)
    grad_output = make_grad_output(inputs)
    state = rng_state(grad_output.device)
    actual = results(torch_attn.sdpa, inputs, grad_output, dropout_p=0.0)
    assert torch.equal(rng_state(grad_output.device), state)
    assert_same_bits(actual, results(torch_attn.sdpa, inputs, grad_output))


@pytest.mark.parametrize("dtype", DTYPES)
def test_p_1(dtype: torch.dtype) -> None:
    """p = 1 gives zeros, and zero gradients."""
    inputs = make_inputs(33, 70, mask=(1, 70), dtype=dtype)
    everything = results(torch_attn.sdpa, inputs, make_grad_output(inputs), dropout_p=1.0)
    for name, tensor in everything.items():
        assert torch.equal(tensor, torch.zeros_like(tensor)), name


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9, 0.99])
def test_rate(p: float) -> None:
    """The number kept is binomial: in all, of every query and of every key."""
    mask = kept(flat_inputs(2, 3, 128, 256), p)

    def deviations(counts: Tensor, n: int) -> float:
        return ((counts - n * (1 - p)) / math.sqrt(n * p * (1 - p))).abs().max().item()

    assert deviations(mask.sum(), mask.numel()) < 4
    if p in (0.1, 0.5, 0.9):  # of 768 rows and 1536 columns
        assert deviations(mask.sum(-1), 256) < 6
        assert deviations(mask.sum(-2), 128) < 6


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_rows_are_independent(p: float) -> None:
    """No two rows, of any query, head, batch or call, correlate, at any shift along the keys."""
    B, H, L, S = 2, 3, 64, 512
    inputs = flat_inputs(B, H, L, S)
    rows = torch.cat([kept(inputs, p).flatten(0, 2), kept(inputs, p, None).flatten(0, 2)])
    rows = (rows.double() - (1 - p)) / math.sqrt(p * (1 - p))
    correlations = rows @ rows.T / math.sqrt(S)  # normal with variance 1 off the diagonal
    assert correlations.fill_diagonal_(0).abs().max() < 6.5
    spectrum = torch.fft.rfft(rows)
    for row in (0, 1, L, B * H * L):
        shifted = torch.fft.irfft(spectrum * spectrum[row].conj(), n=S) / math.sqrt(S)
        shifted[row, 0] = 0
        assert shifted.abs().max() < 7, row


def test_columns_are_independent() -> None:
    mask = kept(flat_inputs(1, 1, 512, 300), 0.5)[0, 0].double() * 2 - 1
    correlations = mask.T @ mask / math.sqrt(512)
    assert correlations.fill_diagonal_(0).abs().max() < 6


@pytest.mark.parametrize("case", CASES)
def test_mask_does_not_depend_on_what_is_computed(case: str, kernels: str) -> None:
    """One mask for every instruction set, dtype and size of the heads: the tiles have no say."""
    sizes, options = CASES[case]
    expected = None
    others = {"default"} if kernels in CPU_CAPABILITIES else set()
    for dtype, E, name in itertools.product(DTYPES, (1, 40), {kernels, *others}):
        inputs = make_inputs(**{**sizes, "E": E, "mask": None}, dtype=dtype)
        inputs = inputs._replace(query=inputs.query * 0)
        with kernels_set_to(name):
            mask = kept(inputs, 0.3, **options)
        expected = mask if expected is None else expected
        assert torch.equal(mask, expected), (dtype, E, name)


def test_a_seed_drops_what_it_always_dropped() -> None:
    """docs/promises.md; any release, processor, or number of threads."""
    mask = kept(make_inputs(5, 130, 16), 0.3, seed=2026)
    assert (mask.sum().item(), zlib.crc32(mask.cpu().numpy().tobytes())) == (2744, 977888296)
