"""The switch for bits that depend on nothing but a query and the keys that it sees."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

__all__ = ["invariant"]


@contextlib.contextmanager
def invariant() -> Iterator[None]:
    """Makes a text as a whole, in chunks, and token by token give the same bits.

    The bits of a row never depend on the other entries of a batch, nor on how sequences are packed,
    nor on threads; on a GPU only within this, as the keys of few entries are otherwise cut in parts
    by how many entries there are. In a ``with`` block of this, or in a function that it decorates,
    they do not depend either on how many queries a call has, nor on whether gradients are recorded:
    so a model that is trained on whole texts gives, of the same keys, the same numbers while it
    generates. For the whole process, threads included; nested blocks count. ``ATTN_INVARIANT=1`` in
    the environment has it on from the start.

    It costs decoding, which then takes the kernel of long calls and does not share the keys of one
    sequence among threads; docs/performance.md has the figures. Other layers of a model have to
    keep their bits themselves: a matrix product of PyTorch has others for other numbers of rows.

    Raises:
        RuntimeError: in a function that :func:`torch.compile` compiles with ``fullgraph=True``,
            whose graph has to end there; enter it around the call.

    A generator function or a coroutine runs after its call has returned, when what decorates it is
    off again: enter it inside, where nothing is yielded or awaited.

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
