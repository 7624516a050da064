"""Counts how often existing models call `attn`, separately for each way of calling."""

from __future__ import annotations

import collections
from collections.abc import Callable

import torch

from torch_attn import replace
from torch_attn._when_imported import when_imported

__all__ = ["calls", "calls_of", "count", "counter"]

_calls: collections.Counter[str] = collections.Counter()  # in this process


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
    return {"built-in": replace.answered(), **{way: _calls[way] for way in ways}}
