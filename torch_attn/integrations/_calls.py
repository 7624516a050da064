"""How often models have called `attn`, by the library that they come from."""

from __future__ import annotations

import collections

import torch

__all__ = ["calls", "count"]

calls: collections.Counter[str] = collections.Counter()  # in this process


# Called while a graph is traced, and no part of it.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def count(library: str) -> None:
    """One call more by a model of the library."""
    calls[library] += 1
