"""Sends blocks of a sequence from the processes that have them to the processes that need them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_attn.distributed._layout import Call, Layout

__all__ = ["Ring", "exchanged", "told", "waiting"]


@contextlib.contextmanager
def waiting(group: dist.ProcessGroup, what: str) -> Iterator[None]:
    """Makes the group's errors say which process waited, and for what."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"torch_attn.distributed: process {group.rank()} of {group.size()} waited for {what}: "
            f"{error}"
        ) from error


def told(L: int, S: int, device: torch.device, group: dist.ProcessGroup) -> Any:
    """Returns the pieces of queries and of keys. The processes tell each other their lengths."""
    own = torch.tensor([L, S], device=device)
    lengths = [torch.empty_like(own) for _ in range(group.size())]
    with waiting(group, "all to tell their lengths"):
        dist.all_gather(lengths, own, group=group)
    return (Layout.in_order(of_all) for of_all in torch.stack(lengths).T.tolist())


class _Messages:
    """Tensors that are being sent and received. Keeps them alive during the transfer."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        sent: dict[int, list[Tensor]],
        received: dict[int, list[Tensor]],
        what: str,
    ) -> None:
        self.group, self.sent, self.received = group, sent, received
        self.whom, ops = [], []
        for f, verb, tensors in ((dist.isend, "take", sent), (dist.irecv, "send", received)):
            for who, t in ((to, t) for to in tensors for t in tensors[to] if t.numel()):
                ops.append(dist.P2POp(f, t, dist.get_global_rank(group, who), group))
                self.whom.append(f"process {who} to {verb} {what}")
        self.all_of_them = " or ".join(dict.fromkeys(self.whom))
        with waiting(group, self.all_of_them):
            self.works = dist.batch_isend_irecv(ops) if ops else []

    def wait(self) -> None:
        for n, work in enumerate(self.works):  # a work for each operation, or one for all
            is_each = len(self.works) == len(self.whom)
            with waiting(self.group, self.whom[n] if is_each else self.all_of_them):
                work.wait()


class Ring:
    """Sends blocks of keys and values around a ring, and sends the blocks' gradients back.

    In step s every process sends its own block to the process s places ahead, and receives the
    block of the process s places behind, while it computes with the block of step s - 1. So a
    process holds at most two blocks beside its own, and never forwards a block. A block goes only
    to processes that need it. If the blocks are in order, a causal call sends it to half of the
    processes on average. A call with a window sends it to the neighbours that the window reaches.
    """

    def __init__(self, call: Call, own: list[Tensor]) -> None:
        self.call, self.own = call, [t.contiguous() for t in own]
        self.returning: _Messages | None = None

    def _needed(self, process: int, block: int, tensors: list[Any]) -> list[Any]:
        return tensors if self.call.needed(process, block) else []

    def __iter__(self) -> Iterator[tuple[int, list[Tensor]]]:
        """Yields a block's number and the list of the block's tensors in each step.

        The list is empty if this process does not need the block.
        """
        layout, rank = self.call.layout, self.call.layout.rank
        steps = 1 if self.call.whole_queries else layout.world
        block = self._needed(rank, rank, self.own)
        for step in range(1, steps + 1):
            to, source = (rank + step) % layout.world, (rank - step) % layout.world
            messages, coming = None, []
            if step < steps:
                count = layout.length(layout.keys[source])
                shapes = [(*t.shape[:-2], count, t.shape[-1]) for t in self.own]
                coming = [self.own[0].new_empty(s) for s in self._needed(rank, source, shapes)]
                sent = self._needed(to, rank, self.own)
                what = f"keys in step {step} of {steps - 1}"
                messages = _Messages(self.call.group, {to: sent}, {source: coming}, what)
            yield (source + 1) % layout.world, block
            if messages is not None:
                messages.wait()
            block = coming

    def bring_back(self, gradients: list[Tensor], source: int, own: list[Tensor]) -> None:
        """Sends the gradients of block `source`. Adds the gradients of the previous step to `own`.

        All processes must call this method in every step but the first, and then :meth:`finish`.
        """
        layout, rank = self.call.layout, self.call.layout.rank
        other = (2 * rank - source) % layout.world
        coming = [own[0].new_empty(s) for s in self._needed(other, rank, [t.shape for t in own])]
        sent = [g.contiguous() for g in gradients]
        step = (rank - source) % layout.world
        what = f"gradients of keys in step {step} of {layout.world - 1}"
        messages = _Messages(self.call.group, {source: sent}, {other: coming}, what)
        self.finish(own)
        self.returning = messages

    def finish(self, own: list[Tensor]) -> None:
        if self.returning is not None:
            self.returning.wait()
            for received in self.returning.received.values():
                for gradient, more in zip(own, received, strict=False):
                    gradient += more


class _Exchange(torch.autograd.Function):
    """Sends ``parts[r]`` to process r and receives a part from it. Backward does the reverse."""

    @staticmethod
    def forward(group: dist.ProcessGroup, shapes: list[Any], *parts: Tensor) -> tuple[Tensor, ...]:
        rank, others = group.rank(), [r for r in range(group.size()) if r != group.rank()]
        received = [parts[0].new_empty(shape) for shape in shapes]
        received[rank] = parts[rank].clone()
        sent = {r: [parts[r].contiguous()] for r in others}
        coming = {r: [received[r]] for r in others}
        _Messages(group, sent, coming, "parts of the sequence").wait()
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
    """Sends ``parts[r]`` to process r. Returns the parts that each process sends here."""
    received: tuple[Tensor, ...] = _Exchange.apply(group, shapes, *parts)  # type: ignore[no-untyped-call]
    return received
