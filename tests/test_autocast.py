"""Autocast: what the built-in casts is cast, float64 is left alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

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


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("call", ["sdpa", "sdpa_with_logsumexp", "sdpa_with_weights"])
def test_slopes_and_sinks_are_left_alone(device: str, call: str, low: torch.dtype) -> None:
    """They stay in float32, with their gradients, as where all but them is cast by hand."""
    inputs = make_inputs(33, 70, mask=(33, 70))
    slopes, sinks = torch.rand(3) / 3, torch.randn(3)
    function = getattr(torch_attn, call)

    def found(inputs: Inputs) -> list[Tensor]:
        leaves = [t.clone().requires_grad_() for t in (slopes, sinks)]
        options = {"softcap": 2.0, "window_size": (40, 5), "query_offset": 30}
        results = function(*inputs, alibi_slopes=leaves[0], sinks=leaves[1], **options)
        results = [results] if isinstance(results, Tensor) else list(results)
        loss = sum(r.float().nan_to_num(neginf=0).sum() for r in results if r.requires_grad)
        return [*results, *torch.autograd.grad(loss, leaves)]

    with torch.autocast(device, low):
        actual = found(inputs)
    by_hand = found(Inputs(*(to_dtype(t, low) for t in inputs)))
    assert all(map(torch.equal, actual, by_hand))
    assert actual[0].dtype == low
    assert actual[-1].dtype == actual[-2].dtype == torch.float32
    rounded = function(
        *(to_dtype(t, low) for t in inputs), alibi_slopes=slopes.to(low), sinks=sinks.to(low)
    )
    assert not torch.equal(actual[0], rounded if call == "sdpa" else rounded[0])


def test_statistics_leave_sinks_alone(device: str) -> None:
    query, key, *_ = make_inputs(33, 70)
    options = {"sinks": torch.randn(3), "alibi_slopes": torch.rand(3)}
    with torch.autocast(device, torch.bfloat16):
        actual = torch_attn.sdpa_stats(query, key, **options)
    by_hand = torch_attn.sdpa_stats(query.bfloat16(), key.bfloat16(), **options)
    assert all(map(torch.equal, actual, by_hand))
