"""The operator's main job on real input, in four parts.

    python -m examples.demo [--quick] [--out DIR]

1. A trained sentence model with its own attention and with attn: equal embeddings, speed, calls.
2. A small GPT learns from real text with the built-in and with attn: equal loss curves, time,
   memory.
3. The errors of both against the textbook formula in float64.
4. Attention among four tokens, in one picture.

What has to hold is checked; the exit status is 1 if something does not.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

import torch_attn

from . import embeddings, four_tokens, parity, training
from .report import DemoError, console


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--quick", action="store_true", help="all parts, small: seconds")
    parser.add_argument(
        "--out", type=Path, default=Path("out"), metavar="DIR", help="folder of the pictures"
    )
    options = parser.parse_args()

    start = time.perf_counter()
    console.print(
        f"torch_attn {torch_attn.__version__} with torch {torch.__version__}, "
        f"instruction set {torch.ops.attn._cpu_capability()}, {torch.get_num_threads()} threads"
    )
    try:
        embeddings.run(options.quick)
        pictures = training.run(options.out, options.quick)
        parity.run()
        pictures += four_tokens.run(options.out)
    except DemoError as error:
        console.print(f"\n[bold red]The demo failed.[/] This does not hold: {error}")
        return 1
    console.print(
        f"\n[bold green]All checks hold[/] ({time.perf_counter() - start:.0f} s). Pictures:"
    )
    for picture in pictures:
        console.print(f"  {picture}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
