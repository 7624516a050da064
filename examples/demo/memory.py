"""What a training step takes: a process of its own runs some steps and is measured.

    python -m examples.demo.memory attn 0.1 256 8

prints by how many bytes the peak of its resident memory (VmHWM of Linux) grew over what it was
with everything imported and the model made, and how many seconds the fastest step but the first
took. The memory counts every allocation, whoever made it: tensors, the scratch of kernels,
libraries. Activations of the whole model are part of it, attention or not.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from .gpt import Config, Training
from .report import seconds

ROOT = Path(__file__).parents[2]
STEPS = 3


def peak_resident_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no line VmHWM")


class Cost(NamedTuple):
    """Of a training: bytes that its memory grew by, and seconds of a step."""

    memory: int
    time: float


def cost(attention: str, config: Config) -> Cost:
    """What training takes, measured in a new process."""
    command = [sys.executable, "-m", "examples.demo.memory", attention]
    command += [str(config.attention_dropout), str(config.context), str(config.batch)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    memory, time = done.stdout.split()
    return Cost(int(memory), float(time))


def main(attention: str, dropout: str, context: str, batch: str) -> None:
    sizes = {"context": int(context), "batch": int(batch)}
    config = replace(Config(), attention_dropout=float(dropout), **sizes)
    training = Training(attention, config)
    before = peak_resident_bytes()
    training.step()
    time = min(seconds(training.step) for _ in range(STEPS - 1))
    print(peak_resident_bytes() - before, time)


if __name__ == "__main__":
    main(*sys.argv[1:])
