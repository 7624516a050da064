"""What attention computes, and why it divides by the root of d_k, as one page of pictures.

    python -m examples.lesson [--quick] [--out DIR]

Writes DIR/lesson.html, which needs nothing else, and its pictures into DIR/lesson/. Every number on
the page comes from this run of torch_attn. What the page says is checked on the way; the exit
status is 1 if something does not hold.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

import torch_attn
from examples.demo.report import DemoError, console, progress

from . import (
    cost,
    extras,
    four_tokens,
    heads,
    lookup,
    minilm,
    page,
    root,
    sources,
    trained,
    variants,
    words,
)
from .threads import threads

# In the order of the page.
CHAPTERS = [words, four_tokens, heads, cost, minilm, variants, lookup, root, trained, extras]

TITLE = "What attention computes, and why it divides by √dₖ"
LEAD = """
    Scaled dot-product attention is one line of mathematics. Here every part of it is computed,
    drawn and measured, in examples small enough to check by hand, and then in real models.
"""
SAMPLE = """

    **This is a sample,** made with `--quick`: measurements are short and trainings end early, so
    that their figures need not show what the text says of them. Make the whole page without it.
"""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.lesson", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--quick", action="store_true", help="all chapters, small: seconds")
    parser.add_argument(
        "--out", type=Path, default=Path("out"), metavar="DIR", help="folder of the page"
    )
    options = parser.parse_args()

    start = time.perf_counter()
    sections = []
    try:
        with progress() as bar:
            steps = sum(chapter.STEPS(options.quick) for chapter in CHAPTERS)
            task = bar.add_task("The lesson", total=steps + 1)
            for chapter in CHAPTERS:
                name = chapter.__name__.rpartition(".")[2].replace("_", " ")
                bar.update(task, description=f"The lesson: {name}")
                sections.append(chapter.chapter(options.quick, lambda: bar.advance(task)))
            sections.append(sources.section())
            bar.update(task, description="The lesson: the page")
            path = page.write(
                sections, options.out, TITLE, LEAD + SAMPLE * options.quick, _footer()
            )
            bar.advance(task)
    except DemoError as error:
        console.print(f"\n[bold red]The lesson failed.[/] This does not hold: {error}")
        return 1
    console.print(f"\n[bold green]All checks hold[/] ({time.perf_counter() - start:.0f} s).")
    console.print(f"  {path}", soft_wrap=True)
    return 0


def _footer() -> str:
    return f"""
        Made by `python -m examples.lesson` with torch_attn {torch_attn.__version__}, PyTorch
        {torch.__version__}, instruction set `{torch.ops.attn._cpu_capability()}`,
        {threads()}. Nothing on this page was loaded from anywhere. That run computed every
        number on it, except for those quoted from the [sources](#sources).
    """


if __name__ == "__main__":
    sys.exit(main())
