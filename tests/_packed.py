"""What the tests of packed sequences, and of keys in pages, share."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from helpers import NAN


def cu_seq(lengths: list[int]) -> Tensor:
    """Where sequences of these lengths begin, and where the last one ends."""
    return F.pad(torch.tensor(lengths, dtype=torch.int64).cumsum(0), (1, 0))


def in_pages(tensors: dict[str, Tensor], keys: list[int], page: int) -> dict[str, Any]:
    """Arguments of varlen_attn: shuffled pages of what has a row for each key, and their table.

    Rows of no sequence are NaN, or large where a number has 8 bits.
    """
    owned = [-(-length // page) for length in keys]
    free = torch.randperm(sum(owned) + 3).tolist()
    table = torch.full((len(keys), max(owned) + 1), -1, dtype=torch.int32)
    pools, parts = {}, {}
    for name, rows in tensors.items():
        spoilt = NAN if rows.itemsize > 1 else 99
        pools[name] = rows.new_full((len(free), page, *rows.shape[1:]), spoilt)
        parts[name] = [own.split(page) for own in rows.split(keys)]
    for n, count in enumerate(owned):
        for i in range(count):
            number = free.pop()
            table[n, i] = number
            for name, pool in pools.items():
                part = parts[name][n][i]
                pool[number, : len(part)] = part
    used = torch.tensor(keys, dtype=torch.int32)
    return {**pools, "cu_seq_k": None, "seqused_k": used, "block_table": table}
