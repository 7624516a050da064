"""Counts how often existing models call `attn`, separately for each way of calling."""

from __future__ import annotations

import collections
from collections.abc import Callable

import torch

from torch_attn._when_imported import when_imported

__all__ = ["calls", "calls_of", "calls_of_built_in", "count", "counter", "jagged_calls"]

_calls: collections.Counter[str] = collections.Counter()  # in this process
# Of the built-in with jagged tensors, which the dispatcher does not count, because they intercept
# calls before it: those that attn has answered, and those left to PyTorch.
jagged_calls = {True: 0, False: 0}


def count(way: str) -> None:
    """Counts a call, unless a graph is being traced."""
    if not torch.compiler.is_compiling():
        _calls[way] += 1


def counter(way: str) -> Callable[[], None]:
    """Returns a function that counts a call, also while a graph is traced.

    The graph does not contain the count.
    """

    def count() -> None:
        _calls[way] += 1

    # Not now, because importing torch._dynamo takes seconds.
    when_imported("torch._dynamo", lambda: torch.compiler.assume_constant_result(count))  # type: ignore[no-untyped-call]
    return count


def calls_of(way: str) -> int:
    return _calls[way]


def calls_of_built_in() -> tuple[int, int]:
    """The calls of the built-in that attn has answered in this process, and those left to it."""
    if torch.compiler.is_dynamo_compiling():
        raise RuntimeError(
            "torch_attn: calls and passed_on cannot be read in a compiled function, where they "
            "would stay what they are now; read them around it"
        )
    calls, passed_on = torch.ops.attn._replaced_calls()
    return calls + jagged_calls[True], passed_on + jagged_calls[False]


def calls() -> dict[str, int]:
    """Returns how often models have called `attn` in this process, for each way of calling.

    If a number grows while a model runs, the model uses `attn`. The layers of a compiled model
    (:func:`torch.compile`, :func:`torch.export.export`) are counted when the model is compiled, and
    not when it runs. In a compiled model, layers of MultiheadAttention are not counted. Direct
    calls of :func:`torch_attn.sdpa` are not counted.

    Returns:
        "built-in": the calls of ``F.scaled_dot_product_attention`` that `attn` answered while
        :func:`replace_sdpa` was on; "FlexAttention": the calls of PyTorch's FlexAttention that
        `attn` answered while :func:`replace_flex` was on; "transformers" and "diffusers": calls by
        models of these libraries, through :mod:`torch_attn.integrations`; "MultiheadAttention":
        calls of :class:`torch_attn.nn.MultiheadAttention`, which :func:`convert` makes from torch's
        modules.

    Example:
        >>> before = torch_attn.calls()["MultiheadAttention"]
        >>> layer = torch_attn.nn.MultiheadAttention(8, 2)
        >>> x = torch.randn(5, 1, 8)
        >>> output, _ = layer(x, x, x, need_weights=False)
        >>> torch_attn.calls()["MultiheadAttention"] - before
        1
    """
    ways = ("FlexAttention", "transformers", "diffusers", "MultiheadAttention")
    return {"built-in": calls_of_built_in()[0], **{way: _calls[way] for way in ways}}
