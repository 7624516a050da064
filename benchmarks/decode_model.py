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


class Call(NamedTuple):
    """One query for each sequence of a batch."""

    batch: int
    heads: int
    key_heads: int
    keys: int
    dim: int

    @property
    def name(self) -> str:
        return (
            f"decode {self.heads}:{self.key_heads} {self.batch} x {self.keys // 1024}k D{self.dim}"
        )

    @property
    def tasks(self) -> int:
        return self.batch * self.key_heads

    def splits(self, card: Card = Card()) -> int:  # noqa: B008, never changed
        rows = self.heads // self.key_heads
        return splits_of(self.tasks, rows, self.keys, card.multiprocessors)

    @property
    def bytes_of_key(self) -> int:
        return 4 * self.dim  # with its value, of 16 bits


TILE = 64  # keys, of a block
RING = 64 << 10  # bytes of a block's four warps
BLOCKS = {64: 3, 128: 3, 256: 2}  # that a multiprocessor has room for, by head_dim


def of_split(keys: int, splits: int) -> int:
    """The keys of each split but the last, which may have fewer."""
    return math.ceil(keys / splits / TILE) * TILE if splits > 1 else keys


def splits_of(tasks: int, rows: int, keys: int, multiprocessors: int) -> int:
    """As decode_splits() in csrc/cuda/launch.cu; tests/test_cuda_stand_in.py compares them."""

    def time(splits: int) -> int:
        blocks = math.ceil(tasks * splits / multiprocessors)
        merge = 64 + 20 * math.ceil(rows / 4) * (3 + math.ceil(splits / 8))
        return blocks * (of_split(keys, splits) + 128) + (splits > 1) * merge

    if keys < 8 * TILE:
        return 1
    best = min(range(1, keys // (4 * TILE) + 1), key=time)
    return math.ceil(keys / of_split(keys, best))


def under_way(call: Call) -> int:
    """Bytes that a multiprocessor reads at the same time: of each ring all but the oldest tile."""
    return BLOCKS[call.dim] * (RING - 4 * 2 * 16 * call.dim)


def seconds(call: Call, card: Card = Card()) -> float:  # noqa: B008, never changed
    splits, rows = call.splits(card), call.heads // call.key_heads
    blocks = math.ceil(call.tasks * splits / card.multiprocessors)
    of_memory = card.bytes_a_second / card.multiprocessors
    rate = min(of_memory, under_way(call) / card.latency)
    merge = card.clear + card.round * math.ceil(rows / 4) * (3 + math.ceil(splits / 8))
    reading = blocks * of_split(call.keys, splits) * call.bytes_of_key / rate
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
    print("| call | splits | predicted, us | cuDNN, us | ratio |\n| --- | --- | --- | --- | --- |")
    for call, theirs in CUDNN.items():
        ours, splits = seconds(call), call.splits()
        row = f"{splits} | {ours * 1e6:.1f} | {theirs * 1e6:.1f} | {theirs / ours:.2f}"
        print(f"| {call.name} | {row} |")


if __name__ == "__main__":
    main()
