"""Part 2: a small GPT learns real English, once with the built-in and once with attn."""

from __future__ import annotations

import textwrap
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from examples import plots

from . import memory
from .gpt import ATTENTION, Config, Training, write
from .plots import COLORS, figure, save
from .report import check, console, heading, progress, seconds, table
from .text import PROSE

TOLERANCE = 1e-2  # between the loss curves, in nats a character
CHARACTERS = 2048  # a step, for every context that cost is measured at
DROPOUT = 0.1  # of the attention's weights: what the built-in has no fused kernel for on a CPU


class Cost(NamedTuple):
    """The cost of a training: bytes that memory grew by, and the median seconds of a step."""

    memory: int
    time: float


def draw(
    losses: dict[str, list[float]],
    costs: dict[str, dict[int, Cost]],
    texts: dict[str, str],
    path: Path,
) -> Path:
    picture = figure(12, 9)
    axes = picture.subplots(2, 2)
    lengths = list(costs["attn"])
    panels: list[tuple[Any, str, str, float]] = [
        (axes[0, 0], "memory", "Memory of training, with dropout", 2**20),
        (axes[0, 1], "time", "Time of a training step, with dropout", 1e-3),
    ]
    for ax, field, title, unit in panels:
        measured = {
            name: [getattr(of[length], field) / unit for length in lengths]
            for name, of in costs.items()
        }
        xlabel = f"characters of context ({CHARACTERS} in a step)"
        ylabel = "MiB" if field == "memory" else "ms"
        plots.scaling(lengths, measured, xlabel=xlabel, ylabel=ylabel, title=title, ax=ax)

    loss, written = axes[1]
    steps = range(1, len(losses["attn"]) + 1)
    for (name, values), color, width in zip(losses.items(), COLORS, (6, 1.5), strict=False):
        loss.plot(steps, values, color=color, linewidth=width, label=name)
    loss.set(title="Loss: the two are one line", xlabel="step", ylabel="nats a character")
    loss.legend()
    apart = difference(losses)
    note = f"they differ by at most {apart:.0e}"
    loss.text(0.98, 0.6, note, ha="right", transform=loss.transAxes)

    written.axis("off")
    written.set_title("What the model with attn writes")
    lines = []
    for (when, text), rows in zip(texts.items(), (3, 9), strict=True):
        lines += [f"{when}:", *textwrap.wrap(" ".join(text.split()), 58)[:rows], ""]
    written.text(
        0, 1, "\n".join(lines), va="top", family="monospace", fontsize=10, linespacing=1.4,
        transform=written.transAxes, parse_math=False,
    )  # fmt: skip
    return save(picture, path)


def difference(losses: dict[str, list[float]]) -> float:
    """The largest of one step."""
    return max(abs(a - b) for a, b in zip(*losses.values(), strict=True))


def costs_at(context: int, rounds: int) -> dict[str, Cost]:
    """What training takes with each attention: memory in processes of their own, time in turns."""
    config = replace(
        Config(), context=context, batch=CHARACTERS // context, attention_dropout=DROPOUT
    )
    runs = {name: Training(name, config) for name in ATTENTION}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for i in range(-1, rounds):
        for name in list(runs)[:: 1 if i % 2 else -1]:
            time = seconds(runs[name].step)
            if i >= 0:  # not what the first step allocates
                times[name].append(time)
    return {name: Cost(memory.growth(name, config), median(times[name])) for name in runs}


def run(out: Path, quick: bool) -> list[Path]:
    config = Config(context=64) if quick else Config()
    steps = 10 if quick else 160
    heading(
        "2  Learning from real text",
        f"A GPT of {config.layers} layers, {config.heads} heads of "
        f"{config.width // config.heads} and {config.context} characters of context reads the "
        f"manual of Python ({len(PROSE):,} characters), twice from the same seed.",
    )
    runs = {name: Training(name, config) for name in ATTENTION}
    texts = {"before it learns": write(runs["attn"].model, "The ", 200)}
    runs["attn"].model.train()
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

    lengths = [64, 128] if quick else [256, 512, 1024, 2048]
    costs: dict[str, dict[int, Cost]] = {name: {} for name in runs}
    with progress() as bar:
        for length in bar.track(lengths, description="  measuring memory and time"):
            for name, cost in costs_at(length, 1 if quick else 3).items():
                costs[name][length] = cost

    results = table(
        "attention",
        "first loss",
        "last loss",
        "time a step",
        caption=f"{steps} steps in turns, median time",
    )
    for name in runs:
        results.add_row(
            name,
            f"{losses[name][0]:.4f}",
            f"{losses[name][-1]:.4f}",
            f"{1e3 * median(times[name]):.1f} ms",
        )
    console.print(results)
    by_length = table(
        "context",
        *(f"{name}, {what}" for what in ("MiB", "ms") for name in runs),
        caption=f"with dropout of {DROPOUT} of the attention's weights, {CHARACTERS} characters a "
        "step. Memory: growth of the resident peak of a process of its own; time: as above",
    )
    for length in lengths:
        both = [costs[name][length] for name in runs]
        by_length.add_row(
            str(length),
            *(f"{of.memory / 2**20:.0f}" for of in both),
            *(f"{1e3 * of.time:.0f}" for of in both),
        )
    console.print(by_length)
    texts[f"after {steps} steps"] = write(runs["attn"].model, "The ", 480)
    for when, text in texts.items():
        console.print(f"  It writes, {when}: ", end="")
        console.print(repr(text[:100]), style="dim", markup=False)

    apart = difference(losses)
    check(apart < TOLERANCE, f"the losses differ by at most {apart:.1e} (below {TOLERANCE:.0e})")
    few = max(1, steps // 10)
    start, end = (
        torch.tensor(losses["attn"])[part].mean() for part in (slice(few), slice(-few, None))
    )
    check(bool(end < start), f"it learns: from {start:.2f} to {end:.2f} nats a character")
    return [draw(losses, costs, texts, out / "loss.png")]
