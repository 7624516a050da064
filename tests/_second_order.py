"""Every way to ask for second derivatives, and the bound they are held to."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

import torch_attn
from _accuracy import Problem, hold_results
from helpers import (
    SEED,
    Inputs,
    Sdpa,
    assert_same_bits,
    double_backward,
    kept,
    leaves_along,
    make_grad_output,
    named,
)


def directions(inputs: Inputs) -> Inputs:
    return Inputs(
        *(None if t is None or t.dtype == torch.bool else torch.randn_like(t) for t in inputs)
    )


def duals(x: Inputs, t: Inputs) -> tuple[Inputs, list[Tensor]]:
    """x with tangent t, and the leaves: those tensors that have a tangent."""
    x, leaves = leaves_along(x, t)
    pairs = zip(x, t, strict=True)
    return Inputs(*(a if d is None else forward_ad.make_dual(a, d) for a, d in pairs)), leaves


def over_forward(sdpa: Sdpa, x: Inputs, u: Tensor, t: Inputs, **options: Any) -> dict[str, Tensor]:
    """The results of double_backward, reverse over forward."""
    torch.manual_seed(SEED)
    with forward_ad.dual_level():
        dual, leaves = duals(x, t)
        tangent = forward_ad.unpack_dual(sdpa(*dual, **options)).tangent
        second = torch.autograd.grad(tangent, leaves, u, materialize_grads=True)
    return {"tangent": tangent.detach(), **named("second_", t, second)}


def over_reverse(sdpa: Sdpa, x: Inputs, u: Tensor, t: Inputs, **options: Any) -> dict[str, Tensor]:
    """The same, forward over reverse."""
    torch.manual_seed(SEED)
    with forward_ad.dual_level():
        dual, _ = duals(x, t)
        output = sdpa(*dual, **options)
        wanted = [a for a, d in zip(dual, t, strict=True) if d is not None]
        gradients = torch.autograd.grad(output, wanted, u)
        second = [forward_ad.unpack_dual(g).tangent for g in gradients]
        tangent = forward_ad.unpack_dual(output).tangent
    return {"tangent": tangent.detach(), **named("second_", t, second)}


def check_second(x: Inputs, options: dict[str, Any]) -> dict[str, Tensor]:
    """The suite's bound held to J t and H; all ways there give the same bits."""
    u, t = make_grad_output(x, **options), directions(x)
    rest = {name: option for name, option in options.items() if name != "dropout_p"}
    mask = kept(x, options["dropout_p"], **rest) if "dropout_p" in options else None
    problem = Problem(x, options, u, t, mask)
    actual = double_backward(torch_attn.sdpa, x, u, t, **options)
    assert actual.keys() == problem.exact.keys()
    hold_results(problem, actual)
    assert_same_bits(over_forward(torch_attn.sdpa, x, u, t, **options), actual)
    assert_same_bits(over_reverse(torch_attn.sdpa, x, u, t, **options), actual)
    return actual
