"""Counts the calls of `attn` by existing models, for each way that leads to it."""

from __future__ import annotations

import collections
from collections.abc import Callable

import torch

from torch_attn import replace

__all__ = ["calls", "count", "counter"]

_calls: collections.Counter[str] = collections.Counter()  # in this process


def count(way: str) -> None:
    """Counts a call, unless a graph is being traced."""
    if not torch.compiler.is_compiling():
        _calls[way] += 1


def counter(way: str) -> Callable[[], None]:
    """Returns a function that counts a call, also while tracing; it is no part of the graph.

    Making it imports ``torch._dynamo``, which takes seconds.
    """

    def count() -> None:
        _calls[way] += 1

    counts: Callable[[], None] = torch.compiler.assume_constant_result(count)  # type: ignore[no-untyped-call]
    return counts


def calls() -> dict[str, int]:
    """Returns how often models have called `attn` in this process, for each way to it.

    If a number grows while a model runs, the model uses `attn`. A compiled model
    (:func:`torch.compile`, :func:`torch.export.export`) counts each of its layers when it is
    compiled, and not when it runs; it does not count layers of MultiheadAttention. Calls of
    :func:`torch_attn.sdpa` itself are not counted.

    Returns:
        "built-in": calls of ``F.scaled_dot_product_attention`` while :func:`replace_sdpa` was on;
        "transformers" and "diffusers": calls of models of these libraries, by
        :mod:`torch_attn.integrations`; "MultiheadAttention": calls of
        :class:`torch_attn.nn.MultiheadAttention`, which :func:`convert` makes from torch's modules.

    Example:
        >>> before = torch_attn.calls()["MultiheadAttention"]
        >>> layer = torch_attn.nn.MultiheadAttention(8, 2)
        >>> x = torch.randn(5, 1, 8)
        >>> output, _ = layer(x, x, x, need_weights=False)
        >>> torch_attn.calls()["MultiheadAttention"] - before
        1
    """
    ways = ("transformers", "diffusers", "MultiheadAttention")
    return {"built-in": replace.answered(), **{way: _calls[way] for way in ways}}
