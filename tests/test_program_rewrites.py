"""Rewrites of functions of the pair: each holds for constants of every kind, on both sides.

A row with a single key has that key's score as its logsumexp. So the logsumexp reads a score_mod at
chosen scores, and has the same derivatives as the score_mod.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_attn
from helpers import INF, NAN

SCORES = [0.0, -0.0, 1.0, -1.0, 0.3, -0.3, 7.0, -50.0, 1e-5, -1e-5, 90.0, INF, -INF, NAN]
CONSTANTS = [0.37, -2.5, 0.0, -0.0, 1.0, -1.0, 1e-9, -1e9, 1e15, -1e-15, INF, -INF, NAN]
FEW = [-2.5, 1.0, -1.0, 0.0, INF]
DTYPES = torch.float32, torch.float64
OTHERS = torch.tensor([-0.0, 0.0, *torch.linspace(-2, 2, len(SCORES) - 2)], dtype=torch.float64)
TABLE = torch.tensor([0.7, 2.0], dtype=torch.float64)
tanh, floor_divide = torch.tanh, functools.partial(torch.div, rounding_mode="floor")


def clamps(x: Any, u: float, v: float) -> Any:
    return x.clamp(-0.9, u) + x.clamp(min=v) * x.clamp(max=u)


# Functions of the score x, two constants, a number y of the row, and a number t of a table.
Function = Callable[[Any, Any, Any, Any, Any], Any]
FUNCTIONS: dict[str, Function] = {
    "x + u": lambda x, u, v, y, t: (x + u) + (v + x),
    "x - u": lambda x, u, v, y, t: (x - u) - (v - x),
    "x * u": lambda x, u, v, y, t: (x * u) * (v * x),
    "x / u": lambda x, u, v, y, t: x / u + v / (x + 3),
    "1 / (y + u)": lambda x, u, v, y, t: v / (y + u),
    "1 / (y - u)": lambda x, u, v, y, t: v / (y - u),
    "x * u * v": lambda x, u, v, y, t: x * u * v,
    "u * (x / v)": lambda x, u, v, y, t: u * (x / v),
    "x * u / v": lambda x, u, v, y, t: x * u / v,
    "-(x * u)": lambda x, u, v, y, t: v * -(x * u),
    "-(-x)": lambda x, u, v, y, t: torch.neg(-x) + u * -x * v,
    "products": lambda x, u, v, y, t: (x * u) * (v * y) * x,
    "x * u + y": lambda x, u, v, y, t: x * u + y * v,
    "x * u - y": lambda x, u, v, y, t: x * u - y,
    "y - x * u": lambda x, u, v, y, t: y - x * u + tanh(y),
    "x * u + t": lambda x, u, v, y, t: x * u + t * v,
    "t + y * u": lambda x, u, v, y, t: tanh(t + y * u) + x * v,
    "tanh(x) * u": lambda x, u, v, y, t: tanh(x) * u + v,
    "u * tanh(x * v)": lambda x, u, v, y, t: u * tanh(x * v),
    "u * tanh(x / v)": lambda x, u, v, y, t: u * tanh(x / v) + y,
    "-tanh(x * u)": lambda x, u, v, y, t: -(v * tanh(u * x)) - x,
    "tanh(t) * u": lambda x, u, v, y, t: x + tanh(t * v) * u,
    "where": lambda x, u, v, y, t: torch.where(x < u, x * v, x * v) + torch.where(y < 0, u, x),
    "exp": lambda x, u, v, y, t: torch.exp(tanh(x) * u) * v,
    "squares": lambda x, u, v, y, t: (x * u).square() - (x * v) ** 2,
    "minimum": lambda x, u, v, y, t: torch.minimum(x * v, torch.full_like(x, u)).abs(),
    # Not at the bounds, where torch 2.14 has another derivative than 2.13, which is ours.
    "clamp": lambda x, u, v, y, t: clamps(x + 0.05, u, v),
    "relu": lambda x, u, v, y, t: torch.relu(x * u) + v,
    # PyTorch's // itself has no derivative.
    "x // u": lambda x, u, v, y, t: floor_divide(x, u) + floor_divide(v, y),
    "x % u": lambda x, u, v, y, t: x % u + v % y,
}


# Strings made by hand, because Python leaves out operations that change nothing. They read row 0,
# because a product of query and key may be 0 where it should be -0.
STRINGS = {
    (name, is_left): "attn.program 1\n%0 f row 0\n%1 f const {u}\n%2 f "
    + f"{name} {'%1 %0' if is_left else '%0 %1'}\n"
    + "%3 f const {v}\n%4 f div %3 %2\nreturn %4"
    for name in ("add", "sub", "mul", "div")
    for is_left in (False, True)
}


def derivatives(
    function: Callable[[Tensor], Tensor], order: int, dtype: torch.dtype
) -> list[Tensor]:
    """The function at SCORES and, where it is small, its derivatives."""
    x = torch.tensor(SCORES, dtype=dtype, requires_grad=True)
    found = [function(x)]
    # The kernel's rounding errors grow with the largest score.
    is_small = (found[0].abs() < 100) & x.isfinite()
    for _ in range(order):
        if not found[-1].requires_grad:  # of a function that does not depend on the score
            found.append(torch.zeros_like(x))
            continue
        found += torch.autograd.grad(found[-1].sum(), x, create_graph=True, materialize_grads=True)
    return [found[0], *(t[is_small] for t in found[1:])]


def program_of(function: Function, u: float, v: float, dtype: torch.dtype) -> dict[str, Any]:
    """The arguments of the operator."""
    y, t = OTHERS.to(dtype), TABLE.to(dtype)
    mod = lambda s, b, h, i, j: function(s, u, v, y[i], t[i * j % 2]) + 0 * j  # noqa: E731
    shape = (1, 1, len(SCORES), 1)
    return torch_attn.score_program(mod, shape=shape, dtype=dtype).arguments()


def read(program: dict[str, Any], dtype: torch.dtype) -> list[Tensor]:
    def at(x: Tensor) -> Tensor:
        one, query = torch.ones(1, 1, 1, 1, dtype=dtype), x[None, None, :, None]
        call: dict[str, Any] = {"scale": 1.0, **program}
        if "f row 0" in program["score_mod"] and "row_terms" not in program:  # of STRINGS
            query, call["row_terms"] = torch.zeros_like(query), query
        return torch.ops.attn.flex_attention(query, one, one, **call)[1][0, 0]  # type: ignore[no-any-return]

    return derivatives(at, 2, dtype)


def check(
    program: dict[str, Any], plain: Callable[[Tensor], Tensor], dtype: torch.dtype, what: Any
) -> None:
    """As the list without rewrites, to the second derivative, and as PyTorch's own operations."""
    found = read(program, dtype)
    torch.ops.attn._rewrite_programs(False)
    try:
        listed = read(program, dtype)
    finally:
        torch.ops.attn._rewrite_programs(True)
    torchs = derivatives(plain, 1, dtype)
    rtol, atol = (1e-4, 1e-5) if dtype == torch.float32 else (1e-7, 1e-7)
    for name, expected in (("list", listed), ("torch", torchs)):
        for order, (x, y) in enumerate(zip(found, expected, strict=False)):
            if order > 0:  # PyTorch's is NaN where it multiplies 0 by infinity
                x, y = (t.where(x.isfinite() & y.isfinite(), 0) for t in (x, y))
            message = lambda text, c=(what, name, order): f"{c}: {text}"  # noqa: E731
            torch.testing.assert_close(x, y, equal_nan=True, msg=message, rtol=rtol, atol=atol)


def test_every_rewrite_is_applied() -> None:
    """A rewrite that nothing here reaches fails, and a name that is gone."""
    applied = set()
    for u, v in itertools.product(CONSTANTS, FEW):
        texts = [program_of(f, u, v, torch.float64)["score_mod"] for f in FUNCTIONS.values()]
        for text in (*texts, *(x.format(u=u, v=v) for x in STRINGS.values())):
            applied.update(torch.ops.attn._rewrites_of(text))
    assert applied == set(torch.ops.attn._rewrites_of(""))


@pytest.mark.usefixtures("cpu_capability")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_rewritten_functions_compute_the_same(name: str) -> None:
    function = FUNCTIONS[name]
    for dtype, u, v in itertools.product(DTYPES, CONSTANTS, FEW):
        more = {"y": OTHERS.to(dtype), "t": TABLE[0].to(dtype)}
        plain = functools.partial(lambda x, u, v, y, t: function(x, u, v, y, t), u=u, v=v, **more)
        check(program_of(function, u, v, dtype), plain, dtype, (dtype, u, v))


@pytest.mark.usefixtures("cpu_capability")
@pytest.mark.parametrize(("name", "is_left"), STRINGS)
def test_rewritten_strings_compute_the_same(name: str, is_left: bool) -> None:
    operation = getattr(torch, name)
    for dtype, u, v in itertools.product(DTYPES, CONSTANTS, FEW):

        def plain(x: Tensor, u: float = u, v: float = v) -> Tensor:
            c = torch.tensor(u, dtype=x.dtype)
            return v / (operation(c, x) if is_left else operation(x, c))  # type: ignore[no-any-return]

        text = STRINGS[name, is_left].format(u=u, v=v)
        check({"score_mod": text}, plain, dtype, (dtype, u, v))


@pytest.mark.usefixtures("cpu_capability")
def test_the_sign_of_a_tanh_in_bfloat16() -> None:
    """On the kernels of half types, too, in output and gradients."""
    x = [torch.randn(1, 2, 70, 16).bfloat16() for _ in range(3)]
    found, expected = [], []
    for cap in (20.0, -20.0, -0.7):
        score = lambda s, b, h, i, j, c=cap: c * tanh(s / c) - c * tanh(s)  # noqa: E731
        q, k, v = (t.clone().requires_grad_() for t in x)
        output = torch_attn.flex_attention(q, k, v, score)
        found += [output, *torch.autograd.grad(output.float().sin().sum(), (q, k, v))]
        q, k, v = (t.float().requires_grad_() for t in x)
        output = torch.softmax(score(q @ k.mT / 4, 0, 0, 0, 0), -1) @ v
        expected += [output, *torch.autograd.grad(output.sin().sum(), (q, k, v))]
    for ours, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(
            ours.float(), exact, rtol=0.03, atol=0.03 * float(exact.detach().abs().max())
        )
