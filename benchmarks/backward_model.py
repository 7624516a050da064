"""How fast Hopper's backward should be: `python benchmarks/backward_model.py`. No GPU is needed.

A multiprocessor is simulated for a while (csrc/cuda/wgmma/grad_query.cuh, grad_key.cuh): its two
consumers give products to tensor cores, wait for them, and share the schedulers and the units of
exponentials. The cycles of a tile follow, but not fewer than the formula of hopper_model.py gives.
Tasks are dealt to multiprocessors as the kernels do it. What is assumed stands in `Card` of
hopper_model.py and in `SYNC`. Copies are taken to arrive in time.

A row is a case of gpu.py. Beside it stands what cuDNN took on an H200 (benchmarks/results) and the
part of its speed that gpu.py asks for.
"""

from __future__ import annotations

import functools
import heapq
import json
from collections.abc import Callable, Iterator
from typing import NamedTuple

import decode_model
from gpu import BACKWARD_OF_CUDNN, OF_PLAIN
from hopper_model import (
    BEFORE,
    COMPARED,
    NOT_CAUSAL,
    RESULTS,
    THEIRS,
    Call,
    Card,
    lists_at_once,
    lists_side_by_side,
    overlap,
    theirs,
)  # fmt: skip

CARD = Card()
SYNC = 40.0  # cycles of a barrier, or of the end of products; assumed
CONSUMERS, ROWS = 2, 64  # of each: rows or keys that it owns


class Pass(NamedTuple):
    """An instance of GradQueryWgmma or GradKeyWgmma. In one pass there is one of the latter alone.

    What a warp of a consumer issues for a tile, in turn: to start products, to turn scores into
    weights, to turn those into dS. And a warp of the producer. Limits of tests/test_cuda_sass.py.
    """

    dim: int
    others: int  # keys or rows of a tile
    of_query: bool
    start: int
    weigh: int
    slopes: int
    copy: int
    exponentials_of_score: int = 1  # see hopper_model.Shape
    pass_on: int = 0  # in one pass: to pass on a share of dQ, behind the start of its products

    @property
    def dots(self) -> float:
        """Cycles of tensor cores for own other^T: both factors are read from shared memory."""
        return self.dim / 16 * max(self.others / 2, (2048 + 32 * self.others) / 128)

    @property
    def sum(self) -> float:
        return self.others / 16 * self.dim / 2

    @property
    def share(self) -> float:
        """The same for a consumer's columns of dQ, if there is one pass: both factors, too."""
        columns = self.dim / CONSUMERS
        cycles = CONSUMERS * ROWS / 16 * max(columns / 2, (2048 + 32 * columns) / 128)
        return cycles if self.pass_on else 0.0

    @property
    def tensor(self) -> float:
        """Cycles of a tile, of both consumers."""
        return CONSUMERS * (2 * self.dots + (1 if self.of_query else 2) * self.sum + self.share)

    @property
    def exponentials(self) -> float:
        """Cycles of a consumer: the multiprocessor computes 16 a cycle."""
        return self.exponentials_of_score * ROWS * self.others / 16


PASSES = {
    64: (Pass(64, 128, True, 72, 248, 186, 112), Pass(64, 96, False, 70, 232, 184, 300)),
    128: (Pass(128, 96, True, 99, 194, 145, 140), Pass(128, 64, False, 96, 162, 130, 376)),
}
# With an option, by its form in gpu.py: (form of a limit, passes).
OPTIONS = {
    "alibi": {
        64: (Pass(64, 128, True, 74, 396, 191, 112), Pass(64, 96, False, 72, 374, 182, 304)),
        128: (Pass(128, 96, True, 103, 308, 148, 140), Pass(128, 64, False, 96, 264, 130, 384)),
    },
    "learned alibi": {
        64: (Pass(64, 128, True, 74, 396, 324, 112), Pass(64, 96, False, 72, 374, 182, 304)),
        128: (Pass(128, 96, True, 103, 308, 244, 140), Pass(128, 64, False, 96, 264, 130, 384)),
    },
    "softcap": {
        64: (Pass(64, 128, True, 74, 800, 191, 112, 3), Pass(64, 96, False, 72, 624, 182, 304, 3)),
        128: (Pass(128, 96, True, 103, 560, 148, 140, 3),
              Pass(128, 64, False, 96, 450, 130, 384, 3)),
    },
    # Masks, by Case.mask in common.py. Every tile shows some keys, and not all.
    "bool": {
        64: (Pass(64, 128, True, 159, 264, 322, 135), Pass(64, 64, False, 68, 285, 134, 358)),
        128: (Pass(128, 64, True, 159, 147, 193, 148), Pass(128, 64, False, 92, 328, 136, 514)),
    },
    "dropout": {
        64: (Pass(64, 96, True, 900, 270, 276, 100), Pass(64, 96, False, 850, 412, 234, 304)),
        128: (Pass(128, 96, True, 975, 198, 276, 140), Pass(128, 64, False, 632, 282, 168, 384)),
    },
}  # fmt: skip


# The part of cuDNN's speed that one pass should reach at 8192 keys, by head_dim.
ONE_PASS_OF_CUDNN = {64: 0.80, 128: 0.90}
# All three gradients in one pass (csrc/cuda/wgmma/one_pass.cuh), plain and with the option.
ONE_PASS = {
    "": {
        64: (Pass(64, 64, False, 56, 160, 178, 369, 1, 32),),
        128: (Pass(128, 64, False, 83, 160, 164, 680, 1, 49),),
    },
    "alibi": {
        64: (Pass(64, 64, False, 58, 256, 182, 372, 1, 32),),
        128: (Pass(128, 64, False, 83, 258, 168, 682, 1, 49),),
    },
    "softcap": {
        64: (Pass(64, 64, False, 58, 424, 182, 372, 3, 32),),
        128: (Pass(128, 64, False, 83, 440, 168, 682, 3, 49),),
    },
}


class Simulation:
    """Two consumers that pass over `tiles` tiles each."""

    STEP = 4.0  # cycles

    def __init__(self, of: Pass, tiles: int):
        self.of, self.tiles = of, tiles
        self.now = self.busy = 0.0
        self.products: list[list[float]] = [[], []]  # cycles left, in order
        self.ended = [0, 0]  # products of each consumer
        self.started = [0, 0]
        self.stored = [0, 0]  # tiles of dS that each has stored for the other
        # What each computes: how much is left of it, and what part of the schedulers and of the
        # units of exponentials it would take alone.
        self.work: list[tuple[float, float, float] | None] = [None, None]

    def start(self, me: int, cycles: float) -> int:
        self.products[me].append(cycles)
        self.started[me] += 1
        return self.started[me]

    def wait(self, me: int, product: int) -> Iterator[Callable[[], bool]]:
        yield lambda: self.ended[me] >= product
        end = self.now + SYNC
        yield lambda: self.now >= end

    def meet(self, me: int) -> Iterator[Callable[[], bool]]:
        """Waits until the other consumer has stored dS of this tile, too."""
        self.stored[me] += 1
        mine, end = self.stored[me], self.now + SYNC
        yield lambda: min(self.stored) >= mine and self.now >= end

    def compute(
        self, me: int, issued: float, exponentials: float = 0.0
    ) -> Iterator[Callable[[], bool]]:
        cycles = max(issued, exponentials)
        self.work[me] = (cycles, issued / cycles, exponentials / cycles)
        yield lambda: self.work[me] is None

    def own_rows(self, me: int) -> Iterator[Callable[[], bool]]:
        of, before = self.of, 0
        for tile in range(self.tiles):
            yield from self.compute(me, of.start)
            scores, slopes = self.start(me, of.dots), self.start(me, of.dots)
            before = self.start(me, of.sum) if tile else 0
            yield from self.wait(me, scores)
            yield from self.compute(me, of.weigh, of.exponentials)
            yield from self.wait(me, slopes)
            yield from self.compute(me, of.slopes)
            yield from self.wait(me, before)
        yield from self.wait(me, self.start(me, of.sum))

    def own_keys(self, me: int) -> Iterator[Callable[[], bool]]:
        of = self.of
        for _ in range(self.tiles):
            yield from self.compute(me, of.start)
            scores, slopes = self.start(me, of.dots), self.start(me, of.dots)
            yield from self.wait(me, scores)
            yield from self.compute(me, of.weigh, of.exponentials)
            yield from self.wait(me, slopes)
            self.start(me, of.sum)
            yield from self.compute(me, of.slopes)
            if of.pass_on:
                yield from self.meet(me)
                share, last = self.start(me, of.share), self.start(me, of.sum)
                yield from self.wait(me, share)
                yield from self.compute(me, of.pass_on)
                yield from self.wait(me, last)
            else:
                yield from self.wait(me, self.start(me, of.sum))

    def pass_step(self) -> None:
        multiplying = [me for me in range(CONSUMERS) if self.products[me]]
        self.busy += self.STEP * bool(multiplying)
        for me in multiplying:
            self.products[me][0] -= self.STEP / len(multiplying)
            if self.products[me][0] <= 0:
                self.products[me].pop(0)
                self.ended[me] += 1
        computing = [me for me in range(CONSUMERS) if self.work[me]]
        # The producer's share of the schedulers: each of its four warps is on another one.
        producer = self.of.copy / self.of.tensor
        loads = [sum(self.work[me][i] for me in computing) for i in (1, 2)]  # type: ignore[index]
        slower = max(1.0, loads[0] / (1 - producer), loads[1])
        for me in computing:
            left, *loads_of_me = self.work[me]  # type: ignore[misc]
            left -= self.STEP / slower
            self.work[me] = (left, *loads_of_me) if left > 0 else None  # type: ignore[assignment]
        self.now += self.STEP

    def cycles(self) -> float:
        consumers = [
            self.own_rows(me) if self.of.of_query else self.own_keys(me) for me in range(CONSUMERS)
        ]
        waiting = [next(consumer) for consumer in consumers]
        over = [False] * CONSUMERS
        while not all(over):
            self.pass_step()
            for me, consumer in enumerate(consumers):
                while not over[me] and waiting[me]():
                    over[me] = (following := next(consumer, None)) is None
                    waiting[me] = following or waiting[me]
        return self.now


@functools.cache
def cycles_of_tile(of: Pass, tiles: int = 20) -> float:
    simulated = (Simulation(of, 2 * tiles).cycles() - Simulation(of, tiles).cycles()) / tiles
    of_tensor, of_exponential = overlap()  # of FlashAttention-3's forward
    return max(simulated, of_tensor * of.tensor + of_exponential * CONSUMERS * of.exponentials)


def tiles_of_tasks(of: Pass, call: Call) -> list[int]:
    """The tiles of each task of a head. The longest task comes first."""
    own = CONSUMERS * ROWS
    seen = [min(call.length, first + own) if call.causal else call.length
            for first in range(0, call.length, own)]  # fmt: skip
    return [-(-others // of.others) for others in reversed(seen)]


def seconds_of(of: Pass, call: Call) -> float:
    of_tile, lists = cycles_of_tile(of), call.batch * call.heads
    at_once = max(1, lists_at_once(call))
    ends = [0.0] * CARD.multiprocessors
    tasks = tiles_of_tasks(of, call)
    if of.pass_on:  # from the last keys on; a block is a tile behind the one whose turn is before
        tasks.reverse()
        at_once = min(lists, lists_side_by_side(call))
        if not call.causal:
            ends = [i // at_once * of_tile for i in range(CARD.multiprocessors)]
            heapq.heapify(ends)
    for first in range(0, lists, at_once):
        for tiles in tasks:
            for _ in range(min(at_once, lists - first)):
                heapq.heapreplace(ends, ends[0] + CARD.latency + CARD.end + of_tile * tiles)
    return max(ends) / CARD.clock


def seconds(call: Call, form: str = "", one_pass: bool = False) -> float:
    """The passes, after the kernel that computes delta from the output and its gradient."""
    of_form = ONE_PASS[form] if one_pass else OPTIONS[form] if form else PASSES
    read = 2 * 2.0 * call.batch * call.heads * call.length * call.dim
    delta = decode_model.Card().launch + read / decode_model.Card().bytes_a_second
    passes = sum(seconds_of(of, call) for of in of_form[call.dim])
    # call.flop: of the two of the forward
    products = (5 if one_pass else 7) / 2 * call.flop / CARD.matmul
    # In one pass another kernel reads the sums of dQ, in float32, and writes dQ.
    rounding = decode_model.Card().launch + 1.5 * read / decode_model.Card().bytes_a_second
    return delta + CARD.launch + max(passes, products) + (rounding if one_pass else 0.0)


class Prediction(NamedTuple):
    call: Call
    ms: float
    cudnn: float  # measured, ms
    floor: float  # of its speed

    @property
    def name(self) -> str:
        c = self.call
        return f"{'causal ' if c.causal else ''}{c.batch}x{c.heads}x{c.length} D{c.dim}"

    def __str__(self) -> str:
        c, name = self.call, self.name
        rates = [2.5 * c.flop / ms / 1e9 for ms in (self.ms, self.cudnn)]
        text = f"{name:26}{rates[0]:4.0f} TFLOP/s predicted; {self.cudnn / self.ms:.2f} of cuDNN's"
        return f"{text} {rates[1]:.0f}, at least {self.floor:.2f}"


def predictions() -> list[Prediction]:
    rows = {
        (r["length"], r["head_dim"], r["causal"]): r["ms"]["CUDNN"]
        for r in json.loads((RESULTS / BEFORE).read_text())["speed"]
        if r["pass"] == "backward" and r["dtype"] == "bf16" and "CUDNN" in r["ms"]
        if not r["mask"] and not r["dropout"] and not r.get("form")
    }
    calls = [
        Call(16384 // length, 2048 // dim, length, dim, causal)
        for dim in PASSES
        for causal in (False, True)
        for length in (2048, 8192)
    ]
    return [
        Prediction(
            c,
            seconds(c) * 1e3,
            rows[c.length, c.dim, c.causal],
            BACKWARD_OF_CUDNN[c.dim] if c.length > 4096 else 0.0,
        )
        for c in calls
    ]


def gain_of_one_pass(call: Call, form: str = "") -> float:
    """How many times as fast one pass is as two."""
    return seconds(call, form) / seconds(call, form, one_pass=True)


def of_plain(form: str, dim: int) -> float:
    """The part of the speed of the same call without an option that is left with it."""
    call = Call(8, 2048 // dim, 2048, dim, form not in NOT_CAUSAL)
    return seconds(call) / seconds(call, form)


def of_theirs(form: str, dim: int) -> float:
    """The part of the speed that another reached with a mask or dropout, in a file of results."""
    return theirs("backward", form, dim) / seconds(Call(8, 2048 // dim, 2048, dim, False), form)


if __name__ == "__main__":
    for dim, passes in PASSES.items():
        for of in passes:
            busy = of.tensor / cycles_of_tile(of)
            name = "dQ" if of.of_query else "dK and dV"
            cycles = f"{cycles_of_tile(of):.0f} cycles a tile"
            print(f"{name} D{dim}: {cycles}, tensor cores busy {busy:.2f}")
    for prediction in predictions():
        print(prediction)
    for form in ONE_PASS:
        for prediction in predictions():
            gain = gain_of_one_pass(prediction.call, form)
            print(
                f"one pass, {form or 'plain'}, {prediction.name}: {gain:.2f} of two passes' speed"
            )
    for form, passes_of_form in OPTIONS.items():
        for dim in passes_of_form:
            asked = OF_PLAIN.get((form, "backward"), {}).get(dim, 0.0)
            print(f"{form} D{dim}: {of_plain(form, dim):.2f} of plain, at least {asked:.2f}")
    for form, dim in COMPARED:
        print(f"{form} D{dim}: {of_theirs(form, dim):.2f} of {THEIRS[form]}'s speed, at least 1.00")
