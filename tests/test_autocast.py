"""Autocast: what the built-in casts is cast, float64 is left alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import torch_attn
from helpers import DTYPES, Inputs, make_grad_output, make_inputs, results, to_dtype

LOW = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtype_is_the_builtins(device: str, dtype: torch.dtype, low: torch.dtype) -> None:
    query, key, value, _ = make_inputs(5, 7, dtype=dtype)
    with torch.autocast(device, low):
        actual = torch_attn.sdpa(query, key, value)
        builtin = F.scaled_dot_product_attention(query, key, value)
    assert actual.dtype == builtin.dtype == (dtype if dtype == torch.float64 else low)


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_same_bits_as_cast_by_hand(device: str, kind: str, low: torch.dtype) -> None:
    inputs = make_inputs(33, 70, mask=(33, 70), kind=kind)
    with torch.autocast(device, low):
        actual = torch_attn.sdpa(*inputs, is_causal=True)
    by_hand = torch_attn.sdpa(*(to_dtype(t, low) for t in inputs), is_causal=True)
    assert torch.equal(actual, by_hand)


@pytest.mark.parametrize("low", LOW)
def test_gradients_have_the_dtype_of_the_inputs(device: str, low: torch.dtype) -> None:
    inputs = make_inputs(33, 70, mask=(1, 70))
    grad_output = make_grad_output(inputs).to(low)
    with torch.autocast(device, low):
        actual = results(torch_attn.sdpa, inputs, grad_output)
    by_hand = results(torch_attn.sdpa, Inputs(*(to_dtype(t, low) for t in inputs)), grad_output)
    for name in ("grad_query", "grad_key", "grad_value", "grad_attn_mask"):
        assert torch.equal(actual[name], by_hand[name].float()), name


def test_mixed_dtypes_become_one(device: str) -> None:
    query, key, value, _ = make_inputs(5, 7)
    with torch.autocast(device, torch.bfloat16):
        output = torch_attn.sdpa(query, key.bfloat16(), value.half())
    assert output.dtype == torch.bfloat16


def test_disabled(device: str) -> None:
    inputs = make_inputs(5, 7)
    with torch.autocast(device, enabled=False):
        output = torch_attn.sdpa(*inputs)
    assert torch.equal(output, torch_attn.sdpa(*inputs))


@pytest.mark.parametrize("mask", [None, "bool", "float"])
def test_float64_is_left_alone(device: str, mask: str | None) -> None:
    inputs = make_inputs(5, 7, mask=mask and (5, 7), kind=mask or "bool", dtype=torch.float64)
    with torch.autocast(device, torch.bfloat16):
        output = torch_attn.sdpa(*inputs)
    assert torch.equal(output, torch_attn.sdpa(*inputs))


def test_weights_too(device: str) -> None:
    inputs = make_inputs(5, 7, mask=(5, 7))
    with torch.autocast(device, torch.bfloat16):
        output, weights, scores = torch_attn.sdpa_with_weights(*inputs)
        assert torch.equal(output, torch_attn.sdpa(*inputs))
    assert output.dtype == torch.bfloat16
    assert weights.shape == scores.shape == (2, 3, 5, 7)
