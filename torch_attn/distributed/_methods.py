"""How the processes communicate, and how much each method sends."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

from torch_attn.distributed._layout import Call

__all__ = ["choose", "heads_fit", "is_traced", "method", "sent"]

METHODS = ("gather", "ring", "all_to_all")
_forced: str | None = None


@contextlib.contextmanager
def method(name: str) -> Iterator[None]:
    """Chooses how attention over several processes communicates, for all threads of this process.

    The default is the method that sends the fewest bytes, as :func:`sent` computes them. All
    processes must choose the same method. A backward through a DTensor uses the method that is set
    when the backward runs.

    Args:
        name: "ring": processes send each other blocks of keys and values while they compute; first
            derivatives only. "gather": every process gets all keys and values. "all_to_all": every
            process gets all rows of some of the heads. The numbers of heads must be multiples of
            the number of processes.

    Raises:
        ValueError: another name. A call that cannot use the method raises RuntimeError.

    Example:
        >>> with torch_attn.distributed.method("gather"):
        ...     pass
    """
    global _forced
    if name not in METHODS:
        allowed = '"gather", "ring" or "all_to_all"'
        raise ValueError(f"torch_attn.distributed.method: name is {name!r}; it must be {allowed}")
    before, _forced = _forced, name
    try:
        yield
    finally:
        _forced = before


def is_traced(tensor: Any) -> bool:
    """Whether a tensor belongs to a compiled call. Before torch 2.13, only the type shows this."""
    return type(tensor).__name__ in ("FakeTensor", "FunctionalTensor")


def heads_fit(world: int, query: Any, key: Any, value: Any) -> bool:
    """Whether the heads of query, key and value can be divided equally among the processes."""
    return all(t.ndim > 2 and t.shape[-3] % world == 0 for t in (query, key, value))


def sent(
    call: Call, query: Any, key: Any, value: Any, *, with_ring: bool = True
) -> dict[str, float]:
    """Returns for each possible method how many bytes a process sends in a forward, on average.

    P is the number of processes, b the bytes of all keys and values, a the bytes of all queries and
    outputs. A ring sends ``b / P^2`` for each ordered pair of processes where the first needs keys
    of the second. A gather sends ``b (P - 1) / P``; half types are sent as float32. An all_to_all
    sends ``(a + b) (P - 1) / P^2``. A gather is included only if b <= a / P: all keys and values
    are then no larger than the queries and outputs of one process.
    """
    layout, (L, S) = call.layout, call.layout.lengths
    world = layout.world
    batch = max(math.prod(t.shape[:-3]) for t in (query, key, value)) * query.dtype.itemsize
    heads, of_key, of_value = (math.prod(t.shape[-3:-2]) for t in (query, key, value))
    E, Ev = key.shape[-1], value.shape[-1]
    rows, keys = batch * L * heads * (E + Ev), batch * S * (of_key * E + of_value * Ev)
    ways = {}
    if keys * world <= rows:
        ways["gather"] = keys * (world - 1) / world * max(1, 4 / query.dtype.itemsize)
    if with_ring:
        pairs = ((r, b) for r in range(world) for b in range(world) if r != b)
        ways["ring"] = keys * sum(call.needed(r, b) for r, b in pairs) / world**2
    if heads_fit(world, query, key, value):
        ways["all_to_all"] = (rows + keys) * (world - 1) / world**2
    return ways


def choose(call: Call, query: Any, key: Any, value: Any, why_no_ring: str | None = None) -> str:
    """Returns the forced method, or the method that sends the fewest bytes for these shapes."""
    world = call.layout.world
    error = "torch_attn.distributed: "
    if _forced == "all_to_all" and not heads_fit(world, query, key, value):
        shapes = ", ".join(str(list(t.shape)) for t in (query, key, value))
        raise RuntimeError(
            f"{error}all_to_all over {world} processes needs numbers of heads that are multiples "
            f"of {world}, but query, key and value are {shapes}; take another method"
        )
    if _forced == "ring" and why_no_ring:
        raise RuntimeError(f"{error}{why_no_ring}, which a ring lacks; take another method")
    if _forced or (call.whole_queries and not why_no_ring):
        return _forced or "ring"
    if world == 1:
        return "all_to_all" if heads_fit(world, query, key, value) else "gather"
    ways = sent(call, query, key, value, with_ring=not why_no_ring)
    if not ways:
        raise RuntimeError(
            f"{error}{why_no_ring}, which a ring lacks, and the numbers of heads are no "
            f"multiples of {world}, for all_to_all; a gather of all keys is to be asked for: "
            'with torch_attn.distributed.method("gather")'
        )
    return min(ways, key=lambda way: ways[way])
