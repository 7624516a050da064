"""Shapes without data: Meta and fake tensors give the sizes, strides and dtypes of the kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

import torch_attn
from _cases import CASES, Case
from helpers import LAYOUTS, Inputs, make_inputs, of_inputs


def description(tensor: Tensor | None) -> Any:
    return tensor if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype)


def forward_and_backward(inputs: Inputs, **options: Any) -> list[Tensor | None]:
    """All that the operators return, those that only autograd calls included."""
    plain = torch.ops.attn.sdpa(*inputs, **options)
    detailed = torch.ops.attn.sdpa_with_weights(*inputs, **options)
    saved = torch.ops.attn._sdpa_forward(*inputs, **options)
    mask = inputs.attn_mask
    gradients = torch.ops.attn._sdpa_backward(
        *[torch.empty_like(saved[0]), None, *saved[:4], *inputs],
        **options,
        grad_input_mask=of_inputs(
            *[True, True, True, mask is not None and mask.is_floating_point()], rest=False
        ),
    )
    return [plain, *detailed, *saved, *gradients[:-1], *gradients[-1]]


def assert_agree(inputs: Inputs, **options: Any) -> None:
    expected = [description(t) for t in forward_and_backward(inputs, **options)]
    on_meta = inputs.map(
        lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
    )
    assert [description(t) for t in forward_and_backward(on_meta, **options)] == expected
    with FakeTensorMode() as mode:
        fake = forward_and_backward(inputs.map(mode.from_tensor), **options)
    assert [description(t) for t in fake] == expected
    assert all(t is None or t.device == inputs.query.device for t in fake)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("case", CASES[::7], ids=str)
def test_cases(case: Case) -> None:
    assert_agree(case.inputs(), **case.options)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("tensor", ["all", *Inputs._fields])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, tensor: str) -> None:
    inputs = make_inputs(5, 7, 4, 6, mask=(2, 3, 5, 7))
    if tensor == "all":
        assert_agree(inputs.map(LAYOUTS[layout]))
    else:
        assert_agree(inputs._replace(**{tensor: LAYOUTS[layout](getattr(inputs, tensor))}))


@pytest.mark.usefixtures("device")
def test_expanded() -> None:
    inputs = make_inputs(1, 7, 4, 6, batch=(1,), heads=1, mask=(1, 1, 1, 7))
    assert_agree(inputs.map(lambda t: t.expand(2, 3, -1, -1)))


@pytest.mark.usefixtures("device")
def test_dropout() -> None:
    assert_agree(make_inputs(5, 7), dropout_p=0.5)


def test_autograd_on_meta() -> None:
    inputs = make_inputs(5, 7, mask=(1, 7)).map(lambda t: t.to("meta")).require_grad()
    torch_attn.sdpa(*inputs, dropout_p=0.5, is_causal=True).sum().backward()
    assert all(leaf.grad.shape == leaf.shape and leaf.grad.is_meta for leaf in inputs)
