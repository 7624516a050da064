"""How fast Hopper's forward should be: `python benchmarks/hopper_model.py`. No GPU is needed.

A tile of keys takes a multiprocessor the cycles of its tensor cores and of its exponentials, each
times a number of `overlap()`: with 1 and 1 nothing would overlap. The two numbers are those with
which this formula gives what FlashAttention-3, a kernel of the same structure, reaches on an H100.
Tasks are dealt to multiprocessors as the kernel does it. What else is assumed stands in `Card`.

A row is a case of gpu.py. Beside it stands what cuDNN took on an H200 (benchmarks/results) and the
part of its speed that gpu.py asks for, and, once a GPU has run these kernels, what they took. If
that differs by more than 15%, mend this file. Calls with a cap or with ALiBi stand beside the same
call without.
"""

from __future__ import annotations

import heapq
import json
import math
from pathlib import Path
from typing import NamedTuple

from gpu import OF_CUDNN, OF_PLAIN, OURS

RESULTS = Path(__file__).parent / "results"
BEFORE = "2026-11-27-nvidia-h200-gpu.json"  # the last file without these kernels
MEASURED = max(RESULTS.glob("*-gpu.json"))


class Card(NamedTuple):
    """An H200 or an H100 SXM."""

    multiprocessors: int = 132
    clock: float = 1.755e9  # Hz
    bytes_a_cycle: float = 28.0  # from L2 to a multiprocessor; assumed
    latency: float = 1200.0  # cycles until the rows of a task are there; assumed
    end: float = 500.0  # cycles to write a task's output; assumed
    launch: float = 4e-6  # seconds of a call beside its tasks; assumed
    # FLOP/s of a matrix product on the H200, which power limits; measured.
    matmul: float = 712e12


class Shape(NamedTuple):
    """The tiles of an instance of ForwardWgmma."""

    dim: int
    consumers: int  # warpgroups, of 64 rows each
    keys: int
    # What a warp issues for a tile, of a consumer and of the producer: the limits of
    # tests/test_cuda_sass.py.
    instructions: int = 0
    copying: int = 0
    # One for the weight. A cap takes another one and a reciprocal, which the same units compute.
    exponentials_of_score: int = 1

    @property
    def rows(self) -> int:
        return 64 * self.consumers

    @property
    def tensor(self) -> float:
        """Cycles of tensor cores for a tile.

        m64nNk16 takes N / 2 of them. With both factors in shared memory, as for scores, it takes as
        long as it reads 2 KB and 32 N bytes, if that is longer.
        """
        scores = self.dim / 16 * max(self.keys / 2, (2048 + 32 * self.keys) / 128)
        output = self.keys / 16 * self.dim / 2
        return self.consumers * (scores + output)

    @property
    def exponentials(self) -> float:
        """Cycles for a tile: a multiprocessor computes 16 a cycle."""
        return self.exponentials_of_score * self.rows * self.keys / 16

    @property
    def issued(self) -> int:
        """Cycles of a scheduler for a tile: it has a warp of each warpgroup."""
        return self.consumers * self.instructions + self.copying


SHAPES = {
    64: Shape(64, 3, 128, 436, 120),
    128: Shape(128, 2, 128, 488, 168),
    256: Shape(256, 2, 80, 496, 196),
}
# With an option, by its form in gpu.py.
OPTIONS = {
    "alibi": {
        64: Shape(64, 3, 128, 544, 120),
        128: Shape(128, 2, 128, 604, 168),
        256: Shape(256, 2, 80, 592, 196),
    },
    "softcap": {
        64: Shape(64, 3, 128, 816, 120, 3),
        128: Shape(128, 2, 128, 852, 168, 3),
        256: Shape(256, 2, 80, 744, 196, 3),
    },
    # Masks, by Case.mask in common.py. Every tile shows some keys, and not all.
    "bool": {64: Shape(64, 2, 128, 772, 134), 128: Shape(128, 2, 128, 952, 188)},
    "grad": {64: Shape(64, 2, 128, 788, 134), 128: Shape(128, 2, 128, 900, 188)},
    "dropout": {64: Shape(64, 2, 128, 1500, 120), 128: Shape(128, 2, 128, 1550, 168)},
}
NOT_CAUSAL = ("bool", "grad", "dropout")
# Whose speed has to be reached, and the calls of them in the file of results.
THEIRS = {"bool": "CUDNN", "dropout": "FLASH"}
COMPARED = (("bool", 64), ("bool", 128), ("dropout", 64))


class Call(NamedTuple):
    batch: int
    heads: int
    length: int
    dim: int
    causal: bool

    @property
    def flop(self) -> float:
        of_all = 4.0 * self.batch * self.heads * self.length**2 * self.dim
        return of_all / 2 if self.causal else of_all

    def tiles(self, shape: Shape) -> list[int]:
        """The number of tiles of each task of a head. The longest task comes first."""
        ends = [min(self.length, first + shape.rows) if self.causal else self.length
                for first in range(0, self.length, shape.rows)]  # fmt: skip
        return [-(-end // shape.keys) for end in reversed(ends)]


# What FlashAttention-3 is reported to reach on an H100 SXM with 16,384 tokens of bfloat16,
# TFLOP/s, and its tiles.
PUBLISHED = (
    (Shape(64, 3, 192), False, 497),
    (Shape(64, 3, 128), True, 473),
    (Shape(128, 2, 176), False, 648),
    (Shape(128, 2, 128), True, 616),
)


def overlap(card: Card = Card()) -> tuple[float, float]:  # noqa: B008, never changed
    """The cycles of a tile for one of tensor cores and for one of exponentials: least squares."""
    rows = []
    for shape, causal, tflops in PUBLISHED:
        call = Call(1, 2048 // shape.dim, 16384, shape.dim, causal)
        tiles = call.tiles(shape)
        tasks = call.heads * len(tiles) / card.multiprocessors
        tasks = tasks if causal else math.ceil(tasks)  # of a multiprocessor, one after the other
        cycles = (call.flop / (tflops * 1e12) - card.launch) * card.clock / tasks
        of_tile = (cycles - card.latency - card.end) / (sum(tiles) / len(tiles) + 0.5)
        rows.append((shape.tensor / of_tile, shape.exponentials / of_tile))
    (aa, ab, bb), (a, b) = (
        [sum(x[i] * x[j] for x in rows) for i, j in ((0, 0), (0, 1), (1, 1))],
        [sum(x[i] for x in rows) for i in range(2)],
    )
    determinant = aa * bb - ab * ab
    return (a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant


def cycles_of_tile(shape: Shape, card: Card = Card()) -> float:  # noqa: B008
    of_tensor, of_exponential = overlap(card)
    # More instructions take more of the time that weights take.
    plain = SHAPES.get(shape.dim, shape)._replace(consumers=shape.consumers)
    weighing = shape.exponentials
    if shape.instructions > plain.instructions > 0:
        weighing = max(weighing, plain.exponentials * shape.issued / plain.issued)
    computed = of_tensor * shape.tensor + of_exponential * weighing
    read = 4 * shape.keys * shape.dim / card.bytes_a_cycle  # K and V of 16 bits
    return max(computed, shape.issued, read)


def seconds(call: Call, shape: Shape | None = None, at_once: int | None = None) -> float:
    """Predicts a call. at_once: see TaskOrder in csrc/core/params.h; 0: no order."""
    card, shape = Card(), shape or SHAPES[call.dim]
    of_tile, tiles = cycles_of_tile(shape, card), call.tiles(shape)
    lists = call.batch * call.heads
    if at_once is None:
        at_once = lists_at_once(call)
    costs = [
        card.latency + card.end + of_tile * (count + 0.5)  # half of a tile: to fill and to drain
        for first in range(0, lists, max(1, at_once))
        for count in tiles
        for _ in range(min(max(1, at_once), lists - first))
    ]
    if at_once == 0:
        ends = [sum(costs[first :: card.multiprocessors]) for first in range(card.multiprocessors)]
    else:
        ends = [0.0] * card.multiprocessors
        for cost in costs:
            heapq.heapreplace(ends, ends[0] + cost)
    return max(max(ends) / card.clock, call.flop / card.matmul) + card.launch


def lists_at_once(call: Call) -> int:
    """As order_of() in csrc/cuda/shared/rows.cuh."""
    return lists_side_by_side(call) if call.causal else 0


def lists_side_by_side(call: Call) -> int:
    """As the function there of this name."""
    return max(1, min((32 << 20) // (4 * call.length * call.dim), call.batch * call.heads))


class Prediction(NamedTuple):
    call: Call
    tflops: float
    cudnn: float  # measured; 0 if it has not been
    floor: float  # of cuDNN's
    ours: float = 0.0  # measured, likewise

    def __str__(self) -> str:
        c = self.call
        name = f"{'causal ' if c.causal else ''}{c.batch}x{c.heads}x{c.length} D{c.dim}"
        text = f"{name:26}{self.tflops:4.0f} TFLOP/s predicted, "
        text += f"{self.ours:.0f} measured" if self.ours else "not measured"
        if not self.cudnn:
            return f"{text}; cuDNN not measured"
        ratio = self.tflops / self.cudnn
        return f"{text}; {ratio:.2f} of cuDNN's {self.cudnn:.0f}, at least {self.floor:.2f}"


def predictions(at_once: int | None = None) -> list[Prediction]:
    rows = {
        (r["length"], r["head_dim"], r["causal"]): r["tflops"]
        for r in reversed(json.loads(MEASURED.read_text())["speed"])
        if r["pass"] == "forward" and r["dtype"] == "bf16" and r["length"] == r["keys"]
        if not r["mask"] and not r["dropout"] and not r.get("form")
    }
    calls = [
        Call(16384 // length, 2048 // dim, length, dim, causal)
        for dim in SHAPES
        for causal in (False, True)
        for length in (2048, 8192)
    ]
    found = []
    for call in calls:
        measured = rows.get((call.length, call.dim, call.causal), {})
        ours = measured.get(OURS, 0.0) if MEASURED.name != BEFORE else 0.0
        tflops = call.flop / seconds(call, at_once=at_once) / 1e12
        floor = OF_CUDNN[call.dim][call.length > 4096]
        found.append(Prediction(call, tflops, measured.get("CUDNN", 0.0), floor, ours))
    return found


def of_plain(form: str, dim: int) -> float:
    """The part of the speed of the same call without an option that is left with it."""
    call = Call(8, 2048 // dim, 2048, dim, form not in NOT_CAUSAL)
    return seconds(call) / seconds(call, OPTIONS[form][dim])


def theirs(which: str, form: str, dim: int) -> float:
    """How many seconds the other one took with a mask or dropout, in a file of results."""
    return next(
        r["ms"][THEIRS[form]] / 1e3
        for r in json.loads((RESULTS / BEFORE).read_text())["speed"]
        if (r["pass"], r["dtype"], r["head_dim"]) == (which, "bf16", dim)
        and (r["dropout"] > 0 if form == "dropout" else r["mask"] == form)
    )


def of_theirs(form: str, dim: int) -> float:
    """The part of the speed that another reached with a mask or dropout."""
    call = Call(8, 2048 // dim, 2048, dim, False)
    return theirs("forward", form, dim) / seconds(call, OPTIONS[form][dim])


if __name__ == "__main__":
    print("of tensor cores and of exponentials: {:.2f} and {:.2f} cycles".format(*overlap()))
    for prediction in predictions():
        print(prediction)
    for form, shapes in OPTIONS.items():
        for dim in shapes:
            asked = OF_PLAIN.get((form, "forward"), {}).get(dim, 0.0)
            print(f"{form} D{dim}: {of_plain(form, dim):.2f} of plain, at least {asked:.2f}")
    for form, dim in COMPARED:
        print(f"{form} D{dim}: {of_theirs(form, dim):.2f} of {THEIRS[form]}'s speed, at least 1.00")
