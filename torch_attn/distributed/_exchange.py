"""How blocks of a sequence come from the processes that have them to those that need them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_attn.distributed._layout import Call

__all__ = ["Ring", "exchanged"]


def _start(
    group: dist.ProcessGroup, sent: dict[int, list[Tensor]], received: dict[int, list[Tensor]]
) -> list[dist.Work]:
    """Starts to send tensors to processes, and to receive those of others."""
    both = (dist.isend, sent), (dist.irecv, received)
    ops = [
        dist.P2POp(f, t, dist.get_global_rank(group, who), group)
        for f, of_processes in both
        for who, tensors in of_processes.items()
        for t in tensors
        if t.numel()
    ]
    return dist.batch_isend_irecv(ops) if ops else []


def _wait(works: list[dist.Work], group: dist.ProcessGroup, what: str) -> None:
    try:
        for work in works:
            work.wait()
    except RuntimeError as error:
        raise RuntimeError(
            f"torch_attn.distributed: process {group.rank()} of {group.size()} waited for {what}: "
            f"{error}"
        ) from error


# Gradients on their way: received, and sent, which have to live as long.
Returning = tuple[list[dist.Work], list[Tensor], list[Tensor], str]


class Ring:
    """Blocks of keys and values go round, and their gradients come back.

    In step s every process sends its own block to the one that is s places ahead, and receives that
    of the one s places behind, while it computes with the block of step s - 1. So two blocks are on
    a process beside its own, nothing is handed on, and a block goes only to whom it is of use: of a
    causal call to half of the processes, of a window to the neighbours that it reaches.
    """

    def __init__(self, call: Call, own: list[Tensor]) -> None:
        self.call, self.own = call, [t.contiguous() for t in own]
        self.returning: Returning = [], [], [], ""

    def _ask(self, step: int) -> tuple[list[dist.Work], list[Tensor], str]:
        layout = self.call.layout
        to, source = (layout.rank + step) % layout.world, (layout.rank - step) % layout.world
        received = []
        if self.call.needed(layout.rank, source):
            count = layout.length(layout.keys[source])
            received = [t.new_empty(*t.shape[:-2], count, t.shape[-1]) for t in self.own]
        sent = self.own if self.call.needed(to, layout.rank) else []
        what = f"the keys of process {source}, in step {step} of {layout.world - 1}"
        return _start(self.call.group, {to: sent}, {source: received}), received, what

    def __iter__(self) -> Iterator[tuple[int, list[Tensor]]]:
        """In each step the number of a block and its tensors, none if it is not needed here."""
        layout = self.call.layout
        coming: tuple[list[dist.Work], list[Tensor], str] = [], self.own, ""
        steps = 1 if self.call.whole_queries else layout.world
        for step in range(steps):
            works, block, what = coming
            _wait(works, self.call.group, what)
            if step + 1 < steps:
                coming = self._ask(step + 1)
            source = (layout.rank - step) % layout.world
            yield source, block if self.call.needed(layout.rank, source) else []

    def bring_back(self, gradients: list[Tensor], source: int, own: list[Tensor]) -> None:
        """Sends the gradients of block `source`, and adds those of its own that came a step ago.

        All call it in every step but the first, and then :meth:`finish`.
        """
        layout = self.call.layout
        other = (2 * layout.rank - source) % layout.world
        needed = self.call.needed(other, layout.rank)
        received = [t.new_empty(t.shape) for t in own] if needed else []
        sent = [g.contiguous() for g in gradients]
        works = _start(self.call.group, {source: sent}, {other: received})
        self.finish(own)
        self.returning = works, received, sent, f"gradients of its keys from process {other}"

    def finish(self, own: list[Tensor]) -> None:
        works, received, _, what = self.returning
        _wait(works, self.call.group, what)
        for gradient, more in zip(own, received, strict=False):
            gradient += more


class _Exchange(torch.autograd.Function):
    """``parts[r]`` to process r, for that of its parts that is for this one; so the way back."""

    @staticmethod
    def forward(group: dist.ProcessGroup, shapes: list[Any], *parts: Tensor) -> tuple[Tensor, ...]:
        rank, processes = group.rank(), range(group.size())
        received = [parts[0].new_empty(shape) for shape in shapes]
        received[rank] = parts[rank].clone()
        sent = {r: [parts[r].contiguous()] for r in processes if r != rank}
        works = _start(group, sent, {r: [received[r]] for r in processes if r != rank})
        _wait(works, group, "parts of the others")
        return tuple(received)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.group, ctx.shapes, *parts = inputs
        ctx.back = [part.shape for part in parts]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return None, None, *exchanged(ctx.group, ctx.back, gradients)

    @staticmethod
    def jvp(ctx: Any, _: None, __: None, *tangents: Tensor) -> tuple[Tensor, ...]:
        return exchanged(ctx.group, ctx.shapes, tangents)


def exchanged(group: dist.ProcessGroup, shapes: list[Any], parts: Any) -> tuple[Tensor, ...]:
    """What each process has for this one, of these shapes, for the parts that are for each."""
    received: tuple[Tensor, ...] = _Exchange.apply(group, shapes, *parts)  # type: ignore[no-untyped-call]
    return received
