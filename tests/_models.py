"""What the tests of other libraries' models share: counting calls, and float64 throughout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


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


def assert_close_in_float64(actual: Tensor, expected: Tensor) -> None:
    """Allows ten thousand units of its resolution at the largest value, after a model's layers.

    What is computed in float32, or with a wrong mask or scale, is off by 1e5 times as much.
    """
    assert actual.dtype == expected.dtype == torch.float64
    largest = expected.abs().max().item()
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e4 * 2.2e-16 * largest)
