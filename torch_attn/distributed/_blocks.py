"""How a sequence lies on the processes of a group, and how they exchange their blocks of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Blocks", "Exchange"]


@dataclass(frozen=True)
class Blocks:
    """Process r has the queries from ``queries[r]`` to ``queries[r + 1]``, and likewise the keys.

    Positions are those of the whole sequence. `needed` says of a process and of a block of keys
    whether one of the queries may see one of the keys: no other block is sent to it.
    """

    rank: int
    queries: list[int]
    keys: list[int]
    needed: Callable[[int, int], bool]

    @property
    def world(self) -> int:
        return len(self.keys) - 1

    @staticmethod
    def starts(length: int, world: int) -> list[int]:
        """Where the blocks begin that :func:`torch.chunk` makes; the last ones may be empty."""
        size = -(-length // world)
        return [min(r * size, length) for r in range(world + 1)]

    @staticmethod
    def gathered(L: int, S: int, device: torch.device, group: dist.ProcessGroup) -> list[list[int]]:
        """The same of blocks of any lengths, which the processes tell each other."""
        own = torch.tensor([L, S], device=device)
        all_of_them = [torch.empty_like(own) for _ in range(group.size())]
        dist.all_gather(all_of_them, own, group=group)
        ends = torch.stack([torch.zeros_like(own), *all_of_them]).cumsum(0)
        queries, keys = ends.T.tolist()
        return [queries, keys]


# Gradients on their way: received, and sent, which have to live as long.
Returning = tuple[list[dist.Work], list[Tensor], list[Tensor]]


class Exchange:
    """Blocks of keys and values go round, and their gradients come back.

    In step s every process sends its own block to the one that is s places ahead, and receives that
    of the one s places behind, while it computes with the block of step s - 1. So two blocks are on
    a process beside its own, nothing is handed on, and a block goes only to whom it is of use: of a
    causal call to half of the processes, of a window to the neighbours that it reaches.
    """

    def __init__(self, blocks: Blocks, own: list[Tensor], group: dist.ProcessGroup) -> None:
        self.blocks, self.group = blocks, group
        self.own = [t.contiguous() for t in own]
        self.returning: Returning | None = None

    def _start(
        self, there: int, sent: list[Tensor], back: int, received: list[Tensor], tag: int
    ) -> list[dist.Work]:
        both = (dist.isend, there, sent), (dist.irecv, back, received)
        ops = [
            dist.P2POp(f, t, dist.get_global_rank(self.group, who), self.group, tag)
            for f, who, tensors in both
            for t in tensors
            if t.numel()
        ]
        return dist.batch_isend_irecv(ops) if ops else []

    def _ask(self, step: int) -> tuple[list[dist.Work], list[Tensor]]:
        b, world = self.blocks, self.blocks.world
        to, source = (b.rank + step) % world, (b.rank - step) % world
        sent = self.own if b.needed(to, b.rank) else []
        received = []
        if b.needed(b.rank, source):
            count = b.keys[source + 1] - b.keys[source]
            received = [t.new_empty(*t.shape[:-2], count, t.shape[-1]) for t in self.own]
        return self._start(to, sent, source, received, 0), received

    def __iter__(self) -> Iterator[tuple[int, list[Tensor]]]:
        """In each step the number of a block and its tensors, none if it is not needed here."""
        b = self.blocks
        coming: tuple[list[dist.Work], list[Tensor]] = [], self.own
        for step in range(b.world):
            works, block = coming
            self._wait(works, f"step {step} of {b.world - 1}")
            if step + 1 < b.world:
                coming = self._ask(step + 1)
            source = (b.rank - step) % b.world
            yield source, block if b.needed(b.rank, source) else []

    def bring_back(self, gradients: list[Tensor], source: int, own: list[Tensor]) -> None:
        """Sends the gradients of block `source`, and adds those of its own that came a step ago.

        All call it in every step but the first, and then :meth:`finish`.
        """
        b = self.blocks
        other = (2 * b.rank - source) % b.world
        received = [torch.empty_like(t) for t in own] if b.needed(other, b.rank) else []
        sent = [g.contiguous() for g in gradients]
        before = self.returning
        self.returning = self._start(source, sent, other, received, 1), received, sent
        self._add(before, own)

    def finish(self, own: list[Tensor]) -> None:
        self._add(self.returning, own)

    def _add(self, returning: Returning | None, own: list[Tensor]) -> None:
        if returning is None:
            return
        works, received, _ = returning
        self._wait(works, "the gradients of its block")
        for gradient, more in zip(own, received, strict=False):
            gradient += more

    def _wait(self, works: list[dist.Work], what: str) -> None:
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise RuntimeError(
                f"torch_attn.distributed: process {self.blocks.rank} of {self.blocks.world} waited "
                f"for {what}: {error}"
            ) from error
