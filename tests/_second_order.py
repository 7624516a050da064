"""Every way to ask for second derivatives, and the bound they are held to."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

import torch_attn
from _accuracy import Neighbour, hold, means_something
from helpers import (
    SEED,
    Inputs,
    assert_same_bits,
    builtin_sdpa,
    kept,
    largest,
    to_dtype,
)
from torch_attn import reference

Sdpa = Callable[..., Tensor]
F64 = torch.float64


def directions(inputs: Inputs) -> Inputs:
    return Inputs(
        *(None if t is None or t.dtype == torch.bool else torch.randn_like(t) for t in inputs)
    )


def named(prefix: str, inputs: Inputs, tensors: Any) -> dict[str, Tensor]:
    """The tensors by the names of those inputs that are not None."""
    names = [name for name, t in inputs._asdict().items() if t is not None]
    return {f"{prefix}{name}": t.detach() for name, t in zip(names, tensors, strict=True)}


def present(inputs: Inputs) -> list[Tensor]:
    return [t for t in inputs if t is not None]


def double_backward(
    sdpa: Sdpa, x: Inputs, u: Tensor, t: Inputs, **options: Any
) -> dict[str, Tensor]:
    """J t and H(u; x; t) = grad_x <u, J t>, as the gradients of J'u in direction t.

    Only where t has a tensor does x require a gradient.
    """
    x = Inputs(
        *(a if d is None else a.detach().requires_grad_() for a, d in zip(x, t, strict=True))
    )
    u = u.detach().requires_grad_()
    wanted = [a for a, d in zip(x, t, strict=True) if d is not None]
    torch.manual_seed(SEED)
    gradients = torch.autograd.grad(sdpa(*x, **options), wanted, u, create_graph=True)
    tangent, *second = torch.autograd.grad(
        gradients, [u, *wanted], present(t), materialize_grads=True
    )
    return {"tangent": tangent.detach(), **named("second_", t, second)}


def duals(x: Inputs, t: Inputs) -> tuple[Inputs, list[Tensor]]:
    """x with tangent t, and the leaves: those tensors that have a tangent."""
    leaves = Inputs(
        *(a if d is None else a.detach().requires_grad_() for a, d in zip(x, t, strict=True))
    )
    return Inputs(
        *(a if d is None else forward_ad.make_dual(a, d) for a, d in zip(leaves, t, strict=True))
    ), [a for a, d in zip(leaves, t, strict=True) if d is not None]


def over_forward(sdpa: Sdpa, x: Inputs, u: Tensor, t: Inputs, **options: Any) -> dict[str, Tensor]:
    """The same, reverse over forward."""
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


def math_sdpa(*args: Any, **options: Any) -> Tensor:
    """The built-in by its backend that has second derivatives."""
    with sdpa_kernel(SDPBackend.MATH):
        return builtin_sdpa(*args, **options)


def builtin_errors(x: Inputs, u: Tensor, t: Inputs, **options: Any) -> dict[str, float]:
    """The largest errors of the built-in's math backend.

    The largest over twelve neighbours: of few numbers it is a matter of luck.
    """
    if u.dtype == F64:
        # The reference is no better than the built-in here. Rounding errors grow with eps: take
        # the errors in float32, scaled, and as much again for the reference's own.
        x, t = (Inputs(*(to_dtype(a, torch.float32) for a in tensors)) for tensors in (x, t))
        errors = builtin_errors(x, u.float(), t, **options)
        scale = 2 * torch.finfo(F64).eps / torch.finfo(torch.float32).eps
        return {name: scale * error for name, error in errors.items()}
    generator = torch.Generator(u.device).manual_seed(SEED)
    largest_errors: dict[str, float] = {}
    for change in [False] * 8 + [True] * 4:
        exact = exact_results(x, u, t, **options)
        builtin = double_backward(math_sdpa, x, u, t, **options)
        errors = {name: largest(builtin[name] - exact[name]) for name in exact}
        means_something(errors, exact)
        largest_errors = {n: max(e, largest_errors.get(n, 0)) for n, e in errors.items()}
        other = Neighbour(x, bool(options.get("is_causal")), generator, change=change)
        x, t, u = other.inputs(x), other.inputs(t), other.output(u)
        if "dropout_mask" in options:
            options["dropout_mask"] = other.scores(options["dropout_mask"])
    return largest_errors


def exact_results(x: Inputs, u: Tensor, t: Inputs, **options: Any) -> dict[str, Tensor]:
    x, t = (Inputs(*(to_dtype(a, F64) for a in tensors)) for tensors in (x, t))
    return double_backward(reference.sdpa, x, u.double(), t, **options)


def make_grad_output(x: Inputs, **options: Any) -> Tensor:
    return torch.randn_like(torch_attn.sdpa(*x, **options))


class Problem(NamedTuple):
    """A point, a gradient of the output, a direction; what is exact there, and how exact."""

    x: Inputs
    u: Tensor
    t: Inputs
    options: dict[str, Any]
    exact: dict[str, Tensor]
    errors: dict[str, float]


Make = Callable[..., tuple[Inputs, dict[str, Any]]]


def problem(make: Make, *arguments: Any) -> Problem:
    return problem_on(torch.get_default_device(), make, *arguments)


@functools.cache  # the same for every instruction set
def problem_on(_: torch.device, make: Make, *arguments: Any) -> Problem:
    torch.manual_seed(0)
    x, options = make(*arguments)
    u, t = make_grad_output(x, **options), directions(x)
    told = dict(options)
    if p := options.get("dropout_p"):
        del told["dropout_p"]
        told = {**options, "dropout_mask": kept(x, p, **told)}
    return Problem(
        x, u, t, options, exact_results(x, u, t, **told), builtin_errors(x, u, t, **told)
    )


def check_second(given: Problem) -> dict[str, Tensor]:
    """The suite's bound held to J t and H; all ways there give the same bits."""
    x, u, t, options, exact, errors = given
    actual = double_backward(torch_attn.sdpa, x, u, t, **options)
    assert actual.keys() == exact.keys()
    for name in exact:
        source = x.query if name == "tangent" else getattr(x, name.removeprefix("second_"))
        assert actual[name].dtype == source.dtype, name
        hold(name, actual[name], exact[name], errors[name], source.dtype)
    assert_same_bits(over_forward(torch_attn.sdpa, x, u, t, **options), actual)
    assert_same_bits(over_reverse(torch_attn.sdpa, x, u, t, **options), actual)
    return actual
