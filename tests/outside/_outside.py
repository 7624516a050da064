"""What the outside checks share: the switch, its planted faults, and the file of results.

The checks run programs of other projects on torch_attn.flex_attention. They run by hand; README.md
says how. Nothing of the other projects is kept here.
"""

from __future__ import annotations

import argparse
import collections
import functools
import pathlib
import platform
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import flex_attention as of_torch

import torch_attn
from torch_attn._replacement import flex as switch

RESULTS = pathlib.Path(__file__).parent / "results"
_PACKAGE = str(pathlib.Path(torch_attn.__file__).parent)
_GIT = ["git", "-C", _PACKAGE, "describe", "--always", "--dirty"]
COMMIT = subprocess.run(_GIT, capture_output=True, text=True, check=False).stdout.strip()


def counted(function: Callable[..., Any], *arguments: Any) -> tuple[Any, int, int]:
    """What a function returns, and the calls that torch_attn answered meanwhile and passed on."""
    before = switch.FLEX.counts()
    result = function(*arguments)
    calls, passed_on = switch.FLEX.counts()
    return result, calls - before[0], passed_on - before[1]


def arguments_of(text: str, path: str | None = None) -> argparse.ArgumentParser:
    """The arguments of a check with this docstring, which may take a path."""
    parser = argparse.ArgumentParser(description=text.split("\n")[0])
    if path is not None:
        parser.add_argument("path", type=pathlib.Path, help=path)
    parser.add_argument("--plant", choices=["output", "scores"])
    return parser


def begin(fault: str | None = None) -> None:
    """Prepares the process, with the fault to plant."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(2)
    plant(fault)


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

    torch_attn.flex_attention = switch.flex_attention = of_wrong_sign


def versions(**others: str) -> list[str]:
    """Lines that say what ran: Python, torch, torch_attn and what `others` names."""
    lines = [
        f"date          {time.strftime('%Y-%m-%d')}",
        f"python        {platform.python_version()}, {platform.machine()}",
        f"torch         {torch.__version__}, {torch.get_num_threads()} threads",
        f"torch_attn    {torch_attn.__version__} {COMMIT}".rstrip(),
    ]
    return lines + [f"{name:<13} {text}" for name, text in others.items()]


def report(name: str, fault: str | None, start: float, rows: list[str], **others: str) -> None:
    """Writes the rows, which begin with their outcomes, with the sum of each outcome."""
    sums = collections.Counter(passed=0, failed=0)
    sums.update(row.split()[0] for row in rows)
    lines = versions(**others, fault=fault or "none")
    lines += [f"seconds       {time.time() - start:.0f}", ""]
    lines += [", ".join(f"{number} {outcome}" for outcome, number in sums.items()), "", *rows]
    write("_".join(filter(None, (name, fault))), lines)


def write(name: str, lines: list[str]) -> None:
    """Prints the lines and writes them to results/<name>.txt."""
    text = "\n".join(lines) + "\n"
    sys.stdout.write(text)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.txt").write_text(text)
