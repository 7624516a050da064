"""What the tests of the switch call, and how they see who answered."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

# A name that is there before the switch is turned on.
from torch.nn.functional import scaled_dot_product_attention as builtin
from torch.profiler import ProfilerActivity, profile

from helpers import largest, make_inputs, ulp


def is_off() -> bool:
    return bool(torch.ops.attn._replace_sdpa(0) == 0)


def inputs(L: int = 5, S: int = 7, E: int = 16, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """[2, 3, L or S, E]; the same in every call."""
    torch.manual_seed(0)
    return make_inputs(L, S, E, **options)[:3]


def tokens() -> Tensor:
    """[2, 5, 8]; the same in every call."""
    torch.manual_seed(0)
    return torch.randn(2, 5, 8)


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return builtin(query, key, value)


def gradients(attention: Callable[..., Tensor]) -> list[Any]:
    """The gradients of a loss by query, key and value."""
    leaves = [t.requires_grad_() for t in inputs()]
    attention(*leaves).square().sum().backward()
    return [t.grad for t in leaves]


def assert_close(actual: Any, expected: Any) -> None:
    """Compares half types to one unit in the last place of the largest value."""
    if isinstance(expected, Tensor):
        half = expected.dtype in (torch.bfloat16, torch.float16)
        atol = ulp(largest(expected), expected.dtype) if half else None
        torch.testing.assert_close(actual, expected, atol=atol, rtol=0 if half else None)
        return
    for pair in zip(actual, expected, strict=True):
        assert_close(*pair)


def operators(function: Callable[..., Any], *args: Any, **options: Any) -> dict[str, int]:
    """How often each operator ran, in this thread."""
    with profile(activities=[ProfilerActivity.CPU]) as timeline:
        function(*args, **options)
    return {event.key: event.count for event in timeline.key_averages()}


def runs_attn(function: Callable[..., Any], *args: Any) -> bool:
    return any(name.startswith("attn::") for name in operators(function, *args))


@pytest.fixture
def compile_anew() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Module(nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)


# Made in the first call: before the switch is turned on.
@functools.cache
def exported() -> torch.export.ExportedProgram:
    return torch.export.export(Module(), inputs())
