"""What the tests of other libraries' models share: counting calls, and float64 throughout."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import torch_attn

VOCABULARY = 40
LONGEST = 9  # tokens of a text


class Calls(TorchDispatchMode):
    """Counts calls of operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count[func.name()] += 1
        return func(*args, **(kwargs or {}))

    @property
    def forward(self) -> int:
        # With autograd below the mode `sdpa` and `attention`, which it calls for a window or a soft
        # cap, have become the operator behind them; else they are themselves.
        names = ("attn::sdpa", "attn::attention", "attn::_sdpa_forward")
        return sum(self.count[name] for name in names)

    @property
    def builtin(self) -> int:
        return sum(
            n
            for name, n in self.count.items()
            if "scaled_dot_product" in name and "backward" not in name
        )


class InFloat64(TorchFunctionMode):
    """Takes float32 for float64 wherever a program names it.

    Models round to float32 on their way whatever their dtype is, such as eager attention in its
    softmax. Without that two implementations agree to float64's resolution, or they differ.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        def wider(x: Any) -> Any:
            return torch.float64 if x is torch.float32 else x

        if func is Tensor.float:
            func = Tensor.double
        return func(*map(wider, args), **{name: wider(x) for name, x in (kwargs or {}).items()})


@contextlib.contextmanager
def float64() -> Iterator[None]:
    """Models that are made here are of float64, and round to nothing less."""
    torch.set_default_dtype(torch.float64)
    try:
        with InFloat64():
            yield
    finally:
        torch.set_default_dtype(torch.float32)


def assert_close_in_float64(actual: Tensor, expected: Tensor) -> None:
    """Allows ten thousand units of its resolution at the largest value, after a model's layers.

    What is computed in float32, or with a wrong mask or scale, is off by 1e5 times as much.
    """
    assert actual.dtype == expected.dtype == torch.float64
    largest = expected.abs().max().item()
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e4 * 2.2e-16 * largest)


def padded_texts(side: str) -> tuple[dict[str, Tensor], Tensor]:
    """Three texts, padded on this side or on "none", and which of their tokens are real."""
    real = torch.arange(LONGEST) < torch.tensor([[LONGEST], [6], [1]])
    if side == "left":
        real = real.flip(1)
    elif side == "none":
        real = torch.ones_like(real)
    tokens = torch.randint(4, VOCABULARY, real.shape)
    return {"input_ids": tokens, "attention_mask": real.long()}, real


class Step(NamedTuple):
    """A forward and a backward pass."""

    output: Tensor
    rows: Tensor  # of the output, those that count
    gradients: Tensor  # of all parameters
    operators: Calls
    calls: int  # of attn, as the library counts them


def step(library: str, model: nn.Module, inputs: dict[str, Any], rows: Any = ...) -> Step:
    """Runs a model whose first output has these rows that count: by default all of them."""
    model.zero_grad()
    before = torch_attn.calls()[library]
    with Calls() as operators:
        output = model(**inputs)[0]
        counts = output[rows]
        direction = torch.linspace(-1, 1, counts.numel()).sin().view(counts.shape)
        counts.mul(direction).sum().backward()
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    calls = torch_attn.calls()[library] - before
    return Step(output.detach(), counts.detach(), torch.cat(gradients), operators, calls)


def error_of_register(library: str, files: dict[str, str], folder: Path) -> str:
    """The error, and its name, where these files come before the installed packages."""
    for name, source in files.items():
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_text(source)
    code = f"""
import sys
from torch_attn.integrations.{library} import register
sys.path.insert(0, {str(folder)!r})
try:
    register()
except Exception as error:
    print(f"{{type(error).__name__}}: {{error}} ({{error.name}})")
    assert ("does not import" in str(error)) == (error.__cause__ is not None)
"""
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    return result.stdout.decode().strip()
