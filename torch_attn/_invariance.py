"""The switch that makes the bits of a row depend only on its query and the keys that it sees."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

__all__ = ["invariant"]


@contextlib.contextmanager
def invariant() -> Iterator[None]:
    """Gives the same bits whether a sequence is computed as a whole, in chunks or token by token.

    The switch is on in a ``with`` block, or in a function that it decorates. While it is on, the
    bits of a row do not depend on how many queries a call has, or on whether autograd records the
    call. So a model that was trained on whole sequences computes the same numbers from the same
    keys while it generates.

    On a CPU, the bits of a row never depend on the other entries of a batch, on how sequences are
    packed, or on the number of threads. On a GPU this holds only while the switch is on, because
    otherwise the number of entries decides whether the kernel splits the keys into parts.

    The switch holds for the whole process, all threads included. Blocks may be nested.
    ``ATTN_INVARIANT=1`` in the environment turns the switch on from the start.

    Decoding becomes slower, because it uses the kernel for calls with many queries and does not
    split the keys of a sequence among threads. docs/performance.md has the figures. The switch does
    not change other layers of a model: a matrix product of PyTorch still has different bits for a
    different number of rows.

    Raises:
        RuntimeError: the switch is entered in a function that :func:`torch.compile` compiles with
            ``fullgraph=True``. The graph would have to break there. Enter the switch around the
            call of that function.

    Do not decorate a generator function or a coroutine, because its body runs after the decorated
    call has returned. Enter the switch inside its body, around code that does not yield or await.

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
