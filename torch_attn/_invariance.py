"""The switch for results whose bits depend only on a query and the keys that it sees."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

__all__ = ["invariant"]


@contextlib.contextmanager
def invariant() -> Iterator[None]:
    """Gives the same bits for a sequence as a whole, in chunks, and token by token.

    On a CPU, the bits of a row never depend on the other entries of a batch, nor on how sequences
    are packed, nor on threads. On a GPU this holds only while the switch is on, because otherwise
    the number of entries decides whether their keys are split into parts. In a ``with`` block, or
    in a function that this decorates, the bits also do not depend on how many queries a call has,
    nor on whether gradients are recorded. So a model that was trained on whole sequences computes,
    from the same keys, the same numbers while it generates. The switch holds for the whole process,
    all threads included; blocks may be nested. ``ATTN_INVARIANT=1`` in the environment turns it on
    from the start.

    Decoding becomes slower, because it takes the kernel of long calls and does not share the keys
    of one sequence among threads; docs/performance.md has the figures. This does not change other
    layers of a model: a matrix product of PyTorch has other bits for another number of rows.

    Raises:
        RuntimeError: in a function that :func:`torch.compile` compiles with ``fullgraph=True``,
            because the graph has to break there. Enter it around the call.

    Do not decorate a generator function or a coroutine, because its body runs after the decorated
    call has returned. Enter the switch inside, around code that does not yield or await.

    Example:
        >>> query, key, value = torch.randn(3, 1, 8, 100, 64)
        >>> with torch_attn.invariant():
        ...     whole = torch_attn.sdpa(query, key, value, is_causal=True)
        ...     last = torch_attn.sdpa(query[:, :, 99:], key, value)
        >>> torch.equal(whole[:, :, 99:], last)
        True
    """
    if torch.compiler.is_dynamo_compiling():
        raise RuntimeError(
            "torch_attn: invariant cannot be part of a compiled function; enter it around the call"
        )
    torch.ops.attn._invariant(+1)
    try:
        yield
    finally:
        torch.ops.attn._invariant(-1)
