"""How often `attn` was called, by each way to it in models that exist."""

from __future__ import annotations

import collections
from collections.abc import Callable

import torch

from torch_attn import replace

__all__ = ["calls", "count", "counter"]

_calls: collections.Counter[str] = collections.Counter()  # in this process


def count(way: str) -> None:
    """Counts a call, if no graph is traced."""
    if not torch.compiler.is_compiling():
        _calls[way] += 1


def counter(way: str) -> Callable[[], None]:
    """A function that counts a call, also while a graph is traced, of which it is no part.

    To make it imports ``torch._dynamo``, which takes seconds.
    """

    def count() -> None:
        _calls[way] += 1

    counts: Callable[[], None] = torch.compiler.assume_constant_result(count)  # type: ignore[no-untyped-call]
    return counts


def calls() -> dict[str, int]:
    """How often models have called `attn` in this process, by each way that leads them to it.

    A number that grows while a model runs says that the model uses `attn`. A compiled model
    (:func:`torch.compile`, :func:`torch.export.export`) counts each of its layers when it is
    compiled, and not when it runs; those of MultiheadAttention it does not count. Calls of
    :func:`torch_attn.sdpa` itself are not counted.

    Returns:
        "built-in": calls of ``F.scaled_dot_product_attention`` while :func:`replace_sdpa` was on;
        "transformers" and "diffusers": calls of models of these libraries, by
        :mod:`torch_attn.integrations`; "MultiheadAttention": calls of
        :class:`torch_attn.nn.MultiheadAttention`, which :func:`convert` makes of torch's modules.

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
