"""Part 2: a small GPT learns real English, once with the built-in and once with attn."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import median

import torch

from . import memory
from .gpt import ATTENTION, Config, Training
from .plots import BLUE, ORANGE, VERMILION, figure, save
from .report import check, console, heading, progress, seconds, table
from .text import PROSE

TOLERANCE = 1e-2  # between the loss curves, in nats a character
LEAST = 1e-7


def draw(losses: dict[str, list[float]], path: Path) -> Path:
    picture = figure(10, 4.2)
    left, right = picture.subplots(1, 2)
    steps = range(1, len(losses["attn"]) + 1)
    left.plot(steps, losses["built-in"], color=ORANGE, linewidth=5, alpha=0.6, label="built-in")
    left.plot(steps, losses["attn"], color=BLUE, linewidth=1.3, label="attn")
    left.set(title="Loss of the same training", xlabel="step", ylabel="nats a character")
    left.legend()

    differences = [abs(a - b) for a, b in zip(*losses.values(), strict=True)]
    right.plot(steps, differences, ".", color=BLUE)
    right.axhline(TOLERANCE, color=VERMILION, linestyle="--")
    inside = right.get_yaxis_transform()
    right.text(0.02, 0.8 * TOLERANCE, "allowed", color=VERMILION, va="top", transform=inside)
    right.set(
        title="Difference of the two losses",
        xlabel="step",
        ylabel="nats a character",
        xlim=left.get_xlim(),
    )
    # Logarithmic, and below the least difference that two such numbers can have linear, down to
    # losses that are equal.
    right.set_yscale("symlog", linthresh=LEAST)
    right.set_ylim(-0.2 * LEAST, 3 * TOLERANCE)
    right.set_yticks([0, *(10.0**e for e in range(-7, 0) if 10.0**e <= TOLERANCE)])
    return save(picture, path)


def run(out: Path, quick: bool) -> list[Path]:
    config = Config(context=64) if quick else Config()
    steps = 10 if quick else 200
    heading(
        "2  Learning from real text",
        f"A GPT of {config.layers} layers, {config.heads} heads of "
        f"{config.width // config.heads} and {config.context} characters of context reads the "
        f"manual of Python ({len(PROSE):,} characters), twice from the same seed.",
    )
    runs = {name: Training(name, config) for name in ATTENTION}
    losses: dict[str, list[float]] = {name: [] for name in runs}
    times: dict[str, list[float]] = {name: [] for name in runs}

    def step(name: str) -> None:
        losses[name].append(runs[name].step())

    with progress() as bar:
        task = bar.add_task("  training", total=steps)
        for i in range(steps):
            # Step by step in turns, so that both meet the same machine.
            for name in list(runs)[:: 1 if i % 2 else -1]:
                times[name].append(seconds(lambda name=name: step(name)))
            bar.update(task, advance=1, description=f"  training, loss {losses['attn'][-1]:.3f}")

    cases = {"memory": config}
    if not quick:
        cases["memory with dropout"] = replace(config, attention_dropout=0.1)
    measured = [(name, case) for case in cases.values() for name in runs]
    with progress() as bar:
        grown = [
            f"{memory.growth(name, case) / 2**20:.0f} MiB"
            for name, case in bar.track(measured, description="  measuring memory")
        ]

    results = table(
        "attention",
        "first loss",
        "last loss",
        "time a step",
        *cases,
        caption=f"{steps} steps in turns, median time. Memory: the growth of the resident peak of "
        "a process of its own that trains; with dropout: of a tenth of the attention's weights.",
    )
    for i, name in enumerate(runs):
        results.add_row(
            name,
            f"{losses[name][0]:.4f}",
            f"{losses[name][-1]:.4f}",
            f"{1e3 * median(times[name]):.1f} ms",
            *grown[i :: len(runs)],
        )
    console.print(results)

    apart = max(abs(a - b) for a, b in zip(*losses.values(), strict=True))
    check(apart < TOLERANCE, f"the losses differ by at most {apart:.1e} (below {TOLERANCE:.0e})")
    few = max(1, steps // 10)
    start, end = (
        torch.tensor(losses["attn"])[part].mean() for part in (slice(few), slice(-few, None))
    )
    check(bool(end < start), f"it learns: from {start:.2f} to {end:.2f} nats a character")
    return [draw(losses, out / "loss.png")]
