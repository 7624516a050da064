"""How often models have called `attn`, by the library that they come from."""

from __future__ import annotations

import collections

import torch

__all__ = ["calls", "count"]

_calls: collections.Counter[str] = collections.Counter()


# Called while a graph is traced, and no part of it.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def count(library: str) -> None:
    """One call more by a model of the library."""
    _calls[library] += 1


def calls(library: str) -> int:
    """How many there were in this process."""
    return _calls[library]
