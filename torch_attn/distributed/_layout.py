"""Which process has which part of a sequence, and the arguments of a call over some keys."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Call", "Layout", "Part", "Piece", "arguments"]


@functools.cache
def arguments(operator: str, of_tensors: bool) -> dict[str, Any]:
    """Returns arguments of an operator as name -> default, without the choice of results.

    If `of_tensors` is True, these are the arguments that take tensors, else all other arguments.
    """
    schema = getattr(torch.ops.attn, operator).default._schema
    are_tensors = {a.name: ("Tensor" in str(a.type), a.default_value) for a in schema.arguments}
    are_tensors.pop("with_rows", None)
    return {n: default for n, (is_one, default) in are_tensors.items() if is_one == of_tensors}


Piece = tuple[int, int]  # (first, last): rows first to last - 1 of the whole sequence


@dataclass(frozen=True)
class Layout:
    """The pieces of queries and of keys on each process, in the order of that process's tensors."""

    rank: int
    queries: list[list[Piece]]
    keys: list[list[Piece]]

    @property
    def world(self) -> int:
        return len(self.keys)

    @property
    def lengths(self) -> tuple[int, int]:
        """The number of all queries, and of all keys."""
        L, S = (max(p[1] for pieces in own for p in pieces) for own in (self.queries, self.keys))
        return L, S

    @staticmethod
    def in_order(lengths: list[int]) -> list[list[Piece]]:
        """Returns one piece for each process. `lengths` are the lengths of the pieces."""
        return [[piece] for piece in itertools.pairwise([0, *itertools.accumulate(lengths)])]

    @staticmethod
    def chunks(length: int, world: int) -> list[list[Piece]]:
        """Returns the pieces that :func:`torch.chunk` makes; the last pieces may be empty."""
        size = -(-length // world)
        return [[(min(r * size, length), min((r + 1) * size, length))] for r in range(world)]

    @staticmethod
    def head_and_tail(length: int, world: int) -> list[list[Piece]]:
        """Pairs the first with the last piece, the second with the last but one, and so on.

        This balances the work of a causal call.
        """
        pieces = [piece for (piece,) in Layout.chunks(length, 2 * world)]
        return [[pieces[r], pieces[-1 - r]] for r in range(world)]

    @staticmethod
    def places(pieces: list[Piece]) -> list[slice]:
        """Returns, for each piece of a process, its rows in the process's tensors."""
        ends = itertools.accumulate((last - first for first, last in pieces), initial=0)
        return [slice(*place) for place in itertools.pairwise(ends)]

    @staticmethod
    def length(pieces: list[Piece]) -> int:
        return sum(last - first for first, last in pieces)


@dataclass(frozen=True)
class Part:
    """A part of a call: some rows of this process's queries, and some keys of a block."""

    rows: slice  # of this process's tensors
    keys: slice  # of the block's tensors
    columns: slice  # of the mask, which has all keys
    options: dict[str, Any]


@dataclass(frozen=True)
class Call:
    """What all parts of a call share. Only packed sequences have `cu_seq_q` and `cu_seq_k`."""

    layout: Layout
    group: dist.ProcessGroup
    options: dict[str, Any]  # of the operators; those that depend on the part are left out
    query_offset: Tensor
    key_lengths: Tensor | None
    cu_seq_q: Tensor | None = None
    cu_seq_k: Tensor | None = None
    whole_queries: bool = False  # each process has all queries, and its own keys

    def options_of(self, rows: Piece, keys: Piece) -> dict[str, Any]:
        """Returns the options of a call over only these rows and keys, both numbered from 0."""
        q, k = self.cu_seq_q, self.cu_seq_k
        (a, _), (c, m) = _entries(q, rows), _entries(k, keys)
        offset, window = self._nearer
        options = {**self.options, "query_offset": offset + (a - c), "window_size": window}
        if self.key_lengths is not None:
            options["key_lengths"] = (self.key_lengths - c).clamp(min=0).clamp(max=m)
        if q is not None and k is not None:
            options |= {"cu_seq_q": q.clamp(*rows) - rows[0], "cu_seq_k": k.clamp(*keys) - keys[0]}
        return options

    @functools.cached_property
    def _nearer(self) -> tuple[Tensor, list[int]]:
        """Reduces huge offsets and windows so that adding a position to an offset cannot overflow.

        If an offset and a window are both huge, both are reduced by the same number. If only the
        offset is huge, a query sees all keys or no key, and a smaller offset does not change this.
        """
        far, more = 2**60, sum(self.layout.lengths)
        window = self.options["window_size"]
        left, right = (far if n >= 2 * far else 3 * far for n in window)
        offset = self.query_offset.long()
        offset = offset - more * (offset >= left) + more * (offset <= -right)
        return offset, [n - more * (n >= 2 * far) for n in window]

    @functools.cached_property
    def _numbers(self) -> set[tuple[int, ...]]:
        """A tuple for each entry of the batch.

        The tuple has the first query, the end of the queries, the first key, the end of the keys,
        the offset and the number of keys in use.
        """
        L, S = self.layout.lengths
        used = torch.tensor(S) if self.key_lengths is None else self.key_lengths
        q = torch.tensor([0, L]) if self.cu_seq_q is None else self.cu_seq_q
        k = torch.tensor([0, S]) if self.cu_seq_k is None else self.cu_seq_k
        given = (t.cpu() for cu in (q, k) for t in (cu[:-1], cu[1:]))
        entries: Any = torch.broadcast_tensors(*given, self.query_offset.cpu(), used.cpu())  # type: ignore[no-untyped-call]
        return set(zip(*(t.flatten().tolist() for t in entries), strict=True))

    def sees(self, rows: Piece, keys: Piece) -> bool:
        """Whether some query of `rows` may see some key of `keys`."""
        left, right = self.options["window_size"]
        right = 0 if self.options["is_causal"] and right != 0 else right
        for q, end_q, k, end_k, offset, used in self._numbers:
            a, b = max(q, rows[0]), min(end_q, rows[1])
            c, d = max(k, keys[0]), min(end_k, keys[1], k + used)
            move = offset - q + k  # from a query's row to the key at its position
            is_before = right < 0 or c <= b - 1 + move + right
            if a < b and c < d and is_before and (left < 0 or d > a + move - left):
                return True
        return False

    def needed(self, process: int, block: int) -> bool:
        """Whether some query of a process may see some key of a block."""
        return any(
            self.sees(rows, keys)
            for rows in self.layout.queries[process]
            for keys in self.layout.keys[block]
        )

    def parts(self, block: int) -> Iterator[Part]:
        """Yields the parts in which this process's queries may see a key of a block."""
        queries, blocks = self.layout.queries[self.layout.rank], self.layout.keys[block]
        for rows, place in zip(queries, Layout.places(queries), strict=True):
            for keys, there in zip(blocks, Layout.places(blocks), strict=True):
                if self.sees(rows, keys):
                    yield Part(place, there, slice(*keys), self.options_of(rows, keys))


def _entries(cu_seq: Tensor | None, piece: Piece) -> tuple[Any, Any]:
    """Returns which rows of each batch entry are in a piece: a first row and a number of rows.

    Rows are counted from the entry's own first row.
    """
    if cu_seq is None:
        return piece[0], piece[1] - piece[0]
    there = cu_seq.clamp(*piece)
    return there[:-1] - cu_seq[:-1], there.diff()
