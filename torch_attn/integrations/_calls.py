"""How often models have called `attn`, by the library that they come from."""

from __future__ import annotations

import collections

import torch

_calls: collections.Counter[str] = collections.Counter()


# Called while a graph is traced, and no part of it.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def count(library: str) -> None:
    _calls[library] += 1


def calls(library: str) -> int:
    return _calls[library]
