"""What decoding is predicted to take on an H200, before a GPU has run it; beside what was measured.

`python benchmarks/decode_model.py` prints the table. The forward of few rows
(csrc/cuda/mma/decode.cuh) reads keys and values once, and that binds: a call takes as long as the
multiprocessor that reads most keys, at its share of the memory's rate, and what its start, its
first reads, the sum over warps and the merge of splits take beside. These last are assumed.
"""

from __future__ import annotations

import math
from typing import NamedTuple


class Card(NamedTuple):
    multiprocessors: int = 132
    clock: float = 1.755e9
    bytes_a_second: float = 4.6e12  # cuDNN's, from 1 x 16k to 1 x 64k keys
    latency: float = 0.9e-6  # of a read when memory is busy; assumed
    launch: float = 3e-6  # of a kernel; assumed
    start: float = 2e-6  # of a block: its task, its query, its sums; assumed
    clear: float = 1.5e-6  # counters, before the kernel; assumed
    round: float = 0.3e-6  # of loads, in the merge of splits; assumed
    issued: float = 0.9  # of the instructions that schedulers could issue; assumed


class Call(NamedTuple):
    """One query for each sequence of a batch."""

    batch: int
    heads: int
    key_heads: int
    keys: int
    dim: int
    bits: int = 16  # of a number of a key

    @property
    def name(self) -> str:
        sizes = f"{self.batch} x {self.keys // 1024}k D{self.dim}"
        return f"decode {self.heads}:{self.key_heads} {sizes}" + (", 8 bits" * (self.bits == 8))

    @property
    def tasks(self) -> int:
        return self.batch * self.key_heads

    def splits(self, card: Card = Card()) -> int:  # noqa: B008, never changed
        rows = self.heads // self.key_heads
        return splits_of(self.tasks, rows, self.keys, card.multiprocessors, self.bits)

    @property
    def bytes_of_key(self) -> int:
        """With its value, and with the scales of both."""
        return 2 * self.dim * self.bits // 8 + (8 if self.bits == 8 else 0)


# What a warp issues for 16 keys, by the bits of a number and head_dim: limits of
# tests/test_cuda_sass.py, of int8 for 8 bits.
INSTRUCTIONS = {
    (16, 64): 304,
    (16, 128): 372,
    (16, 256): 500,
    (8, 64): 428,
    (8, 128): 736,
    (8, 256): 1140,
}
TILE = 64  # keys: splits are of whole ones
RING = 64 << 10  # bytes of a block's four warps
BLOCKS = {64: 3, 128: 3, 256: 2}  # that a multiprocessor has room for, by head_dim


def of_split(keys: int, splits: int) -> int:
    """The keys of each split but the last, which may have fewer."""
    return math.ceil(keys / splits / TILE) * TILE if splits > 1 else keys


def splits_of(tasks: int, rows: int, keys: int, multiprocessors: int, bits: int = 16) -> int:
    """As decode_splits() in csrc/cuda/launch.cu; tests/test_cuda_stand_in.py compares them."""
    times = 16 // bits

    def time(splits: int) -> int:
        blocks = math.ceil(tasks * splits / multiprocessors)
        merge = 64 + 20 * math.ceil(rows / 4) * (3 + math.ceil(splits / 8))
        return blocks * (of_split(keys, splits) + 128 * times) + (splits > 1) * merge * times

    if keys < 8 * TILE:
        return 1
    best = min(range(1, keys // (4 * TILE) + 1), key=time)
    return math.ceil(keys / of_split(keys, best))


def under_way(call: Call) -> int:
    """Bytes that a multiprocessor reads at the same time: of each ring all but the oldest tile."""
    keys = 32 if (call.bits, call.dim) == (8, 64) else 16  # of a warp's tile
    of_tile = keys * call.dim * call.bits // 8  # keys, or their values
    stages = RING // 4 // (2 * keys * max(128, call.dim * call.bits // 8))
    return BLOCKS[call.dim] * 4 * (2 * stages - 1) * of_tile


def rate(call: Call, card: Card) -> float:
    """The bytes of keys and values that a multiprocessor can take in a second."""
    instructions = INSTRUCTIONS[call.bits, call.dim]
    return min(
        card.bytes_a_second / card.multiprocessors,
        under_way(call) / card.latency,
        card.issued * 4 * card.clock / instructions * 16 * call.bytes_of_key,  # four schedulers
    )


def seconds(call: Call, card: Card = Card()) -> float:  # noqa: B008, never changed
    splits, rows = call.splits(card), call.heads // call.key_heads
    blocks = math.ceil(call.tasks * splits / card.multiprocessors)
    merge = card.clear + card.round * math.ceil(rows / 4) * (3 + math.ceil(splits / 8))
    reading = blocks * of_split(call.keys, splits) * call.bytes_of_key / rate(call, card)
    return card.launch + card.start + (splits > 1) * merge + card.latency + reading


# What cuDNN took on an H200, in seconds: benchmarks/results/2026-11-27-nvidia-h200-gpu.json.
CUDNN = {
    Call(64, 32, 8, 4096, 128): 239.6e-6,
    Call(1, 32, 8, 16384, 128): 26.7e-6,
    Call(1, 32, 8, 65536, 128): 69.8e-6,
    Call(16, 32, 32, 4096, 128): 239.1e-6,
    Call(64, 32, 4, 4096, 64): 65.0e-6,
}


def main() -> None:
    print("| call | splits | predicted, us | cuDNN, us | ratio | 8 bits, us | ratio |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for call, theirs in CUDNN.items():
        ours, eight = seconds(call), seconds(call._replace(bits=8))
        row = f"{call.splits()} | {ours * 1e6:.1f} | {theirs * 1e6:.1f} | {theirs / ours:.2f}"
        print(f"| {call.name} | {row} | {eight * 1e6:.1f} | {ours / eight:.2f} |")


if __name__ == "__main__":
    main()
