"""How fast multi-head latent attention should be on Hopper: `python benchmarks/latent_model.py`.

No GPU is needed. A multiprocessor is simulated tile by tile (csrc/cuda/wgmma/latent.cuh): what the
producer has under way, what tensor cores have to do, and who waits for whom. What is assumed stands
in `Card` of hopper_model.py and in `Times`. The floor is 0.6 of a matrix product's rate or 0.85 of
the memory's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import decode_model
import hopper_model

CARD, MEMORY = hopper_model.Card(), decode_model.Card()
ROWS, KEYS = 64, 64  # of a task and of a tile
FIRST, SECOND = 256, 320  # columns of a key in each of the two rings
STAGES = 2
# What a warp issues for a tile: limits of tests/test_cuda_sass.py.
INSTRUCTIONS = {"weigh": 388, "receive": 64, "copy": 208}


class Times(NamedTuple):
    """Cycles."""

    weigh: float = 450.0  # scores to weights, from wait to wait; assumed
    give: float = 60.0  # to store weights; assumed
    sync: float = 40.0  # a barrier, or the end of products; assumed
    # m64n64k16 for scores and m64n256k16 for a half of the output.
    scores: float = 32.0
    output: float = 128.0


class Simulation:
    """The tiles of one task, when memory is busy."""

    STEP = 8.0  # cycles

    def __init__(self, tiles: int, bytes_a_cycle: float, times: Times = Times()):  # noqa: B008
        self.tiles, self.rate, self.times = tiles, bytes_a_cycle, times
        self.now = 0.0
        self.products = [0.0, 0.0]  # cycles of tensor cores that each consumer waits for
        self.given = self.taken = 0  # weights
        self.arrived, self.read = [0, 0], [0, 0]  # tiles of each ring
        self.copies: list[list[tuple[float, float]]] = [[], []]  # when bytes can come, and how many
        self.busy = 0.0  # cycles of tensor cores

    def pass_time(self, cycles: float) -> Iterator[Callable[[], bool]]:
        end = self.now + cycles
        yield lambda: self.now >= end

    def multiply(self, consumer: int, cycles: float) -> Iterator[Callable[[], bool]]:
        self.products[consumer] += cycles
        yield lambda: self.products[consumer] <= 0

    def weigh(self) -> Iterator[Callable[[], bool]]:
        t = self.times
        for tile in range(self.tiles):
            for ring, columns in enumerate((FIRST, SECOND)):
                yield lambda tile=tile, ring=ring: self.arrived[ring] > tile
                yield from self.multiply(0, columns / 16 * t.scores)
            yield from self.pass_time(t.sync + t.weigh)
            yield lambda tile=tile: self.taken >= tile
            yield from self.pass_time(t.give)
            self.given += 1
            yield from self.multiply(0, KEYS / 16 * t.output)
            yield from self.pass_time(t.sync)
            self.read[0] += 1

    def receive(self) -> Iterator[Callable[[], bool]]:
        for tile in range(self.tiles):
            yield lambda tile=tile: self.given > tile
            yield from self.pass_time(self.times.sync)
            yield from self.multiply(1, KEYS / 16 * self.times.output)
            yield from self.pass_time(self.times.sync)
            self.taken += 1
            self.read[1] += 1

    def copy(self) -> None:
        """Starts copies where a stage is free; those under way share the rate."""
        coming = []
        for ring, columns in enumerate((FIRST, SECOND)):
            copies = self.copies[ring]
            while (begun := self.arrived[ring] + len(copies)) < self.tiles:
                if begun >= self.read[ring] + STAGES:
                    break
                copies.append((self.now + CARD.latency, 2.0 * KEYS * columns))
            if copies and copies[0][0] <= self.now:
                coming.append(ring)
        for ring in coming:
            when, left = self.copies[ring].pop(0)
            left -= self.STEP * self.rate / len(coming)
            if left > 0:
                self.copies[ring].insert(0, (when, left))
            else:
                self.arrived[ring] += 1

    def cycles(self) -> float:
        consumers = [self.weigh(), self.receive()]
        waiting = [next(consumer) for consumer in consumers]
        over = [False, False]
        while not all(over):
            self.copy()
            wanted = [i for i in range(2) if self.products[i] > 0]
            self.busy += self.STEP * bool(wanted)
            for i in wanted:
                self.products[i] -= self.STEP / len(wanted)
            for i, consumer in enumerate(consumers):
                while not over[i] and waiting[i]():
                    over[i] = (following := next(consumer, None)) is None
                    waiting[i] = following or waiting[i]
            self.now += self.STEP
        return self.now


class Call(NamedTuple):
    """One query for each sequence of a batch; one head of keys."""

    batch: int
    heads: int
    keys: int

    @property
    def name(self) -> str:
        return f"latent {self.heads}:1 {self.batch} x {self.keys // 1024}k D576/512"

    @property
    def flop(self) -> float:
        return 2.0 * self.batch * self.heads * self.keys * (576 + 512)

    @property
    def bytes(self) -> float:
        return 2.0 * self.batch * self.keys * 576

    @property
    def tasks_of_entry(self) -> int:
        return math.ceil(self.heads / ROWS)

    @property
    def keys_of_split(self) -> int:
        """As plan_forward() in csrc/cuda/launch.cu."""
        tasks = self.batch * self.tasks_of_entry
        splits = min(CARD.multiprocessors // tasks, self.keys // (4 * KEYS))
        return math.ceil(self.keys / max(1, splits) / KEYS) * KEYS

    @property
    def splits(self) -> int:
        return math.ceil(self.keys / self.keys_of_split)


def seconds(call: Call) -> float:
    blocks = call.batch * call.tasks_of_entry * call.splits
    tasks = math.ceil(blocks / CARD.multiprocessors)  # of a multiprocessor, one after the other
    # Tasks of one entry read the same keys at about the same time: memory brings them once.
    of_memory = MEMORY.bytes_a_second / CARD.clock / min(blocks, CARD.multiprocessors)
    rate = min(CARD.bytes_a_cycle, of_memory * call.tasks_of_entry)
    of_task = Simulation(call.keys_of_split // KEYS, rate).cycles() + CARD.end
    reading = CARD.launch + tasks * of_task / CARD.clock
    products = call.flop / CARD.matmul
    partial = 8.0 * call.splits * call.batch * call.heads * 512  # bytes, written and read
    merge = MEMORY.launch + partial / MEMORY.bytes_a_second if call.splits > 1 else 0.0
    return max(reading, products) + merge


CALLS = (Call(32, 128, 16384), Call(64, 16, 4096), Call(1, 128, 65536), Call(1, 128, 16384))


def of_floor(call: Call) -> float:
    """The speed, where 1 is the floor."""
    time = seconds(call)
    of_products = call.flop / time / CARD.matmul / 0.6
    return max(of_products, call.bytes / time / MEMORY.bytes_a_second / 0.85)


def main() -> None:
    print("| call | splits | predicted, us | TFLOP/s | GB/s | of the floor |")
    print("| --- | --- | --- | --- | --- | --- |")
    for call in CALLS:
        time = seconds(call)
        rates = f"{call.flop / time / 1e12:.0f} | {call.bytes / time / 1e9:.0f}"
        row = f"{call.name} | {call.splits} | {time * 1e6:.1f} | {rates}"
        print(f"| {row} | {of_floor(call):.2f} |")


if __name__ == "__main__":
    main()
