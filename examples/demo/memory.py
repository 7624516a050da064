"""How much memory a training run takes: a process of its own runs some steps and is measured.

    python -m examples.demo.memory attn 0.1 256 8

prints by how many bytes the peak of its resident memory (VmHWM of Linux) grew over what it was
with everything imported and the model made. That counts every allocation, whoever made it: tensors,
the scratch of kernels, libraries. Activations of the whole model are part of it, attention or not.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from .gpt import Config, Training

ROOT = Path(__file__).parents[2]
STEPS = 2


def peak_resident_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no line VmHWM")


def growth(attention: str, config: Config) -> int:
    """Bytes that training took, measured in a new process."""
    command = [sys.executable, "-m", "examples.demo.memory", attention]
    command += [str(config.attention_dropout), str(config.context), str(config.batch)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return int(done.stdout)


def main(attention: str, dropout: str, context: str, batch: str) -> None:
    sizes = {"context": int(context), "batch": int(batch)}
    config = replace(Config(), attention_dropout=float(dropout), **sizes)
    training = Training(attention, config)
    before = peak_resident_bytes()
    for _ in range(STEPS):
        training.step()
    print(peak_resident_bytes() - before)


if __name__ == "__main__":
    main(*sys.argv[1:])
