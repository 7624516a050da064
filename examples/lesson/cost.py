"""Chapter: what attention costs. Time and memory of one forward and backward over the length.

    python -m examples.lesson.cost attn 0.1 512 1024

runs the steps of one operator in a process of its own and prints for each length by how many bytes
the peak of its resident memory (VmHWM of Linux) grew, whoever allocated them: tensors, the scratch
of kernels, libraries.
"""

from __future__ import annotations

import ctypes
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

import torch_attn
from examples.demo.memory import ROOT
from examples.demo.report import seconds

HEADS, HEAD_DIM, DROPOUT = 2, 64, 0.1


def naive(query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0) -> Tensor:
    """The formula as the documents write it: every step makes a matrix [heads, L, S]."""
    scores = query @ key.mT / math.sqrt(key.size(-1))
    weights = torch.softmax(scores, dim=-1)
    return F.dropout(weights, dropout_p) @ value


OPERATORS: dict[str, Callable[..., Tensor]] = {
    "naive": naive,
    "built-in": F.scaled_dot_product_attention,
    "attn": torch_attn.sdpa,
}


def make(length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value [1, 2, length, 64] that want gradients; the same on every call."""
    generator = torch.Generator().manual_seed(length)
    shape = (3, 1, HEADS, length, HEAD_DIM)
    query, key, value = torch.randn(shape, generator=generator).unbind()
    return query.requires_grad_(), key.requires_grad_(), value.requires_grad_()


def step(name: str, inputs: Sequence[Tensor], dropout_p: float = 0.0) -> None:
    """One forward and backward, as in training."""
    output = OPERATORS[name](*inputs, dropout_p=dropout_p)
    torch.autograd.grad(output, inputs, output.detach())


# --- what is kept, exactly ------------------------------------------------------------------------


def kept_elements(name: str, length: int, dropout_p: float = 0.0) -> int:
    """How many elements the forward keeps for the backward, inputs and output included.

    Each storage once, however many views of it are kept.
    """
    storages: dict[int, int] = {}
    kept: list[Tensor] = []  # alive, so that no address is used twice

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes() // tensor.element_size()
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        OPERATORS[name](*make(length), dropout_p=dropout_p)
    return sum(storages.values())


# --- time -----------------------------------------------------------------------------------------


def times(length: int, dropout_p: float = 0.0, budget: float = 0.8) -> dict[str, float]:
    """Operator -> seconds of a step: the median of rounds in which each has its turn.

    Rounds go on for about `budget` seconds, but there are at least 3 and at most 30.
    """
    inputs = make(length)
    for name in OPERATORS:
        step(name, inputs, dropout_p)  # memory, threads and caches are as in the middle of training
    measured: dict[str, list[float]] = {name: [] for name in OPERATORS}
    spent, rounds = 0.0, 0
    while rounds < 3 or (spent < budget and rounds < 30):
        # Who goes first changes, so that none always finds the machine warm.
        for name in list(OPERATORS)[:: 1 if rounds % 2 else -1]:
            taken = seconds(lambda name=name: step(name, inputs, dropout_p))
            measured[name].append(taken)
            spent += taken
        rounds += 1
    return {name: median(values) for name, values in measured.items()}


def exponent(lengths: Sequence[int], values: Sequence[float]) -> float:
    """The power of the length with which the values grow: the slope of a line through both logs."""
    x = torch.tensor(lengths, dtype=torch.float64).log2()
    y = torch.tensor(values, dtype=torch.float64).log2()
    x, y = x - x.mean(), y - y.mean()
    return ((x * y).sum() / x.square().sum()).item()


# --- memory ---------------------------------------------------------------------------------------


def memory(name: str, dropout_p: float, lengths: Sequence[int]) -> list[int]:
    """Bytes that a step takes at each length, beside its inputs, measured in a new process."""
    command = [sys.executable, "-m", "examples.lesson.cost", name, str(dropout_p)]
    command += map(str, lengths)
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return [int(line) for line in done.stdout.split()]


def resident_bytes(field: str) -> int:
    """VmRSS: resident now. VmHWM: at most, since the process began or clear_refs was written."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no line {field}")


def main(name: str, dropout_p: str, *lengths: str) -> None:
    step(name, make(64), float(dropout_p))  # threads and libraries are there
    for length in map(int, lengths):
        inputs = make(length)
        # What was freed goes back to the system, and the peak starts anew.
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        before = resident_bytes("VmRSS")
        step(name, inputs, float(dropout_p))
        print(resident_bytes("VmHWM") - before)
        del inputs


if __name__ == "__main__":
    main(*sys.argv[1:])
