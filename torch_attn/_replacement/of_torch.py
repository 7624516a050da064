"""PyTorch's FlexAttention as it is without the switch."""

from __future__ import annotations

from types import FunctionType
from typing import Any

from torch.nn.attention import flex_attention as of_torch

__all__ = ["original", "theirs"]


def _copy(function: Any) -> Any:
    """Returns a function with the same code, which the switch does not change."""
    if type(function) is not FunctionType or function.__closure__:
        return function
    own = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__
    )
    own.__kwdefaults__ = function.__kwdefaults__
    return own


# PyTorch's function, and a copy of it. This module is imported before the switch is first on.
theirs: Any = of_torch.flex_attention
original = _copy(theirs)
