"""What the outside checks share: the switch, its planted faults, and the file of results.

The checks run programs of other projects on torch_attn.flex_attention. They run by hand; README.md
says how. Nothing of the other projects is kept here.
"""

from __future__ import annotations

import contextlib
import functools
import pathlib
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.attention import flex_attention as of_torch

import torch_attn

RESULTS = pathlib.Path(__file__).parent / "results"
_GIT = [
    "git",
    "-C",
    str(pathlib.Path(torch_attn.__file__).parent),
    "describe",
    "--always",
    "--dirty",
]
COMMIT = subprocess.run(_GIT, capture_output=True, text=True, check=False).stdout.strip()
HAS_SWITCH = hasattr(torch_attn, "replacing_flex")


class Counts:
    """The calls that torch_attn answered, and those that it passed on to PyTorch."""

    def __init__(self) -> None:
        self.calls = 0
        self.passed_on = 0


COUNTS = Counts()  # of all the blocks of replacing() so far


@contextlib.contextmanager
def replacing() -> Iterator[None]:
    """Turns the switch on. Without one in torch_attn, swaps PyTorch's code by hand."""
    if not HAS_SWITCH:
        with _swapped():
            yield
        return
    with torch_attn.replacing_flex() as handle:
        before = handle.calls, handle.passed_on
        try:
            yield
        finally:
            COUNTS.calls += handle.calls - before[0]
            COUNTS.passed_on += handle.passed_on - before[1]


@contextlib.contextmanager
def _swapped() -> Iterator[None]:
    function = of_torch.flex_attention
    code = function.__code__
    if code is _stand_in.__code__:
        yield
        return
    function.__code__ = _stand_in.__code__
    try:
        yield
    finally:
        function.__code__ = code


def _stand_in(
    query,
    key,
    value,
    score_mod=None,
    block_mask=None,
    scale=None,
    enable_gqa=False,
    return_lse=False,
    kernel_options=None,
    *,
    return_aux=None,
):
    import sys

    answer = sys.modules["_outside"]._answer
    options = (score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options)
    return answer(query, key, value, *options, return_aux=return_aux)


_own = of_torch.flex_attention.__code__


def _answer(*arguments: Any, **more: Any) -> Any:
    try:
        result = torch_attn.flex_attention(*arguments, **more)
    except (RuntimeError, TypeError, ValueError):
        COUNTS.passed_on += 1
        function = of_torch.flex_attention
        function.__code__, code = _own, function.__code__
        try:
            return function(*arguments, **more)
        finally:
            function.__code__ = code
    COUNTS.calls += 1
    return result


def allow_derivatives_in_torch() -> None:
    """Lets PyTorch's own function compute derivatives on a CPU; uncompiled, they are right."""
    of_torch._validate_device = lambda query, key, value: None


class _Negated(torch.autograd.Function):
    """The identity, whose gradient has the wrong sign."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return -gradient


def plant(fault: str | None) -> None:
    """Spoils torch_attn: "output" negates its output, "scores" the gradients of query and key."""
    if fault is None:
        return
    real: Callable[..., Any] = torch_attn.flex_attention

    @functools.wraps(real)  # the switch asks for the signature
    def of_wrong_sign(query: Any, key: Any, value: Any, *arguments: Any, **options: Any) -> Any:
        if fault == "scores":
            query, key = _Negated.apply(query), _Negated.apply(key)
            return real(query, key, value, *arguments, **options)
        result = real(query, key, value, *arguments, **options)
        return -result if isinstance(result, torch.Tensor) else (-result[0], *result[1:])

    torch_attn.flex_attention = of_wrong_sign
    if HAS_SWITCH:
        sys.modules["torch_attn._replacement.flex"].flex_attention = of_wrong_sign


def versions(**others: str) -> list[str]:
    """Lines that say what ran: Python, torch, torch_attn, the switch and what `others` names."""
    switch = "torch_attn.replacing_flex" if HAS_SWITCH else "a stand-in that swaps the code by hand"
    lines = [
        f"date          {time.strftime('%Y-%m-%d')}",
        f"python        {platform.python_version()}, {platform.machine()}",
        f"torch         {torch.__version__}, {torch.get_num_threads()} threads",
        f"torch_attn    {torch_attn.__version__} {COMMIT}".rstrip(),
        f"switch        {switch}",
    ]
    return lines + [f"{name:<13} {text}" for name, text in others.items()]


def write(name: str, lines: list[str]) -> None:
    """Prints the lines and writes them to results/<name>.txt."""
    text = "\n".join(lines) + "\n"
    sys.stdout.write(text)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.txt").write_text(text)
