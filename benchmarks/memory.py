"""Derivatives as calls to measure, and the memory that one call of them takes."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import torch_attn  # noqa: F401  (registers the operators)

BACKWARD, DROPOUT = "forward and backward", "forward and backward, dropout 0.1"
DOUBLE, JVP = "double backward", "jvp"


def derivative_runner(kind: str, ours: bool, length: int) -> Callable[[], Any]:
    """Runs a derivative of 1 x 2 heads x length, D = 64, float32.

    The built-in has the second derivative and the forward mode on its math backend alone.
    """
    torch.manual_seed(0)
    tensors = [torch.randn(1, 2, length, 64) for _ in range(3)]
    tangents = [torch.randn_like(t) for t in tensors]
    dropout = 0.1 if kind == DROPOUT else 0.0

    builtin = torch.nn.functional.scaled_dot_product_attention

    def attention(*inputs: torch.Tensor) -> torch.Tensor:
        if ours:
            return torch.ops.attn.sdpa(*inputs, dropout_p=dropout)
        if kind in (BACKWARD, DROPOUT):
            return builtin(*inputs, dropout_p=dropout)
        with sdpa_kernel(SDPBackend.MATH):
            return builtin(*inputs)

    if kind == JVP:
        return lambda: torch.func.jvp(attention, tuple(tensors), tuple(tangents))

    inputs = [t.requires_grad_() for t in tensors]

    def backward() -> Any:
        return torch.autograd.grad(attention(*inputs), inputs, tangents[0])

    def double_backward() -> Any:
        first = torch.autograd.grad(attention(*inputs).square().sum(), inputs, create_graph=True)
        product = sum((g * t).sum() for g, t in zip(first, tangents, strict=True))
        return torch.autograd.grad(product, inputs)

    return double_backward if kind == DOUBLE else backward


def peak_memory() -> float:
    """MiB this process held at most. (getrusage's ru_maxrss would begin with the parent's.)"""
    lines = Path("/proc/self/status").read_text().splitlines()
    (kib,) = [line.split()[1] for line in lines if line.startswith("VmHWM")]
    return int(kib) / 1024


def measure_memory(kind: str, ours: bool, length: int) -> float:
    """MiB by which one call raises the peak of a fresh process above a call of 64 tokens."""
    derivative_runner(kind, ours, 64)()
    run = derivative_runner(kind, ours, length)
    before = peak_memory()
    run()
    return peak_memory() - before


def memory_of(calls: list[tuple[str, bool, int]]) -> list[float]:
    """measure_memory() of each, in forks of a process that loaded everything and ran nothing."""
    command = [sys.executable, __file__, json.dumps(calls)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return [float(line) for line in done.stdout.splitlines()]


def main() -> None:
    context = multiprocessing.get_context("fork")
    for call in json.loads(sys.argv[1]):
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(target=lambda c=call, s=sender: s.send(measure_memory(*c)))
        child.start()
        sender.close()  # so that nothing is waited for if the child ends without an answer
        print(receiver.recv())
        child.join()


if __name__ == "__main__":
    main()
