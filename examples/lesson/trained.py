"""Chapter: the root of d_k inside a small transformer that is trained with each of three scales."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import matplotlib as mpl
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from examples import plots
from examples.demo.report import check

from .page import Numbers, Picture, Section, theme
from .recall import (
    AGREEMENT_AFTER,
    CHANCE,
    CONFIG,
    HEAD_DIM,
    LEARNING_RATE,
    PAIRS,
    SEEDS,
    SYMBOLS,
    WATCHED_EVERY,
    Rows,
    Run,
    train,
)
from .scaling import FULL, NONE, ROOT, SCALES
from .sources import ON_THE_ROOT
from .threads import one_thread
from .wording import listed, number, percent, times

# The colours of plots.scaling, so that a scale has one colour in both chapters.
COLORS = dict(zip(SCALES, plots.PALETTE[:3], strict=True))


def _steps(quick: bool) -> int:
    return 20 if quick else 300


def _seeds(quick: bool) -> tuple[int, ...]:
    return SEEDS[:1] if quick else SEEDS


def STEPS(quick: bool) -> int:  # noqa: N802
    return len(SCALES) * len(_seeds(quick)) * (_steps(quick) // WATCHED_EVERY)


def chapter(quick: bool, advance: Callable[[], None]) -> Section:
    steps = _steps(quick)
    with one_thread():
        runs = [train(scale, seed, steps, advance) for seed in _seeds(quick) for scale in SCALES]
    for seed in () if quick else SEEDS:
        at = {run.scale: run.learned_at or math.inf for run in runs if run.seed == seed}
        check(
            at[ROOT] < min(at[NONE], at[FULL]),
            f"recall, seed {seed}: learned first with {ROOT}, at step {at[ROOT]}",
        )
    if not quick:
        agreed = {scale: _mean(runs, scale, lambda run: run.agreement) for scale in SCALES}
        check(
            bool((agreed[NONE] < torch.minimum(agreed[ROOT], agreed[FULL])).all()),
            "recall: without a scale the gradients of two batches agree least",
        )
    section = Section(
        "trained",
        "The root of dₖ in training",
        f"After {ON_THE_ROOT}: what they say of gradients, inside a transformer that learns.",
    )
    _task(section, runs, steps)
    _losses(section, runs, steps)
    _first_step(section, runs)
    _gradients(section, runs)
    return section


def _task(section: Section, runs: list[Run], steps: int) -> None:
    seeds = len({run.seed for run in runs})
    section.text(f"""
        The chapter before drew its queries and keys. Here they are *learned*: a transformer of
        {CONFIG.layers} layers (attention and a two-layer network, each with LayerNorm before it),
        width {CONFIG.width}, is trained with the scale {ROOT}, with {NONE} and with {FULL}. It has
        one head of dₖ = {HEAD_DIM}, for the larger dₖ, the larger the effect. The weights that make
        queries and keys begin such that both have variance 1, as in the chapter before.

        The task is *associative recall*. A text is {PAIRS} pairs of a key and a value, such as "a
        is 7, b is 2, c is 7, …", and {PAIRS} questions, such as "b?", to be answered by 2. There
        are {SYMBOLS} keys and {SYMBOLS} values, drawn anew for every text, so that nothing can be
        learned by heart: only attention can look the answer up. Who guesses pays log {SYMBOLS} =
        {CHANCE:.2f} nats an answer. Each run takes {steps} steps of AdamW (learning rate
        {LEARNING_RATE:g}, {CONFIG.batch} texts a step), from {seeds}
        seed{"s" if seeds > 1 else ""}; the same seed begins with the same weights and reads the
        same texts, whatever the scale.
    """)


def _learned(runs: list[Run], scale: str, steps: int) -> str:
    at = [run.learned_at for run in runs if run.scale == scale]
    if all(step is None for step in at):
        return f"not within {steps} steps"
    return "after " + listed([f"{step} steps" if step else f"more than {steps}" for step in at])


def _losses(section: Section, runs: list[Run], steps: int) -> None:
    section.heading("Who learns, and when")
    lines = "\n".join(
        f"        - **{scale}**: {_learned(runs, scale, steps)}; in the end "
        + listed([percent(run.accuracy) for run in runs if run.scale == scale])
        + " of the answers are right."
        for scale in SCALES
    )
    section.text(f"""
        The first ten steps whose mean loss is below half of what guessing costs begin

{lines}

        {_verdict(runs)}
    """)
    with theme():
        figure, (axes,) = _panels(1)
        for run in runs:
            _line(axes, run, range(1, steps + 1), run.losses, labelled=run.seed == SEEDS[0])
        axes.axhline(CHANCE, color=mpl.rcParams["axes.edgecolor"], linestyle="--", linewidth=1)
        axes.text(steps, CHANCE, "guessing ", ha="right", va="bottom", fontsize=8)
        axes.set(
            xlabel="step", ylabel="loss (nats an answer)", ylim=(0, 1.15 * max(runs[0].losses))
        )
        _legend(figure, axes)
    last = {run.scale: run.losses[-1] for run in runs}
    section.picture(
        "trained-loss",
        figure,
        "Loss of every step on texts never seen before. Lines of one colour: seeds.",
        "Loss over steps: "
        + "; ".join(f"{scale} ends at {loss:.2f}" for scale, loss in last.items()),
        Numbers(
            ["step", *(f"{run.scale}, seed {run.seed}" for run in runs)],
            [[i + 1, *(run.losses[i] for run in runs)] for i in range(0, steps, WATCHED_EVERY)],
        ),
    )


def _verdict(runs: list[Run]) -> str:
    if any(run.scale == ROOT and run.learned_at is None for run in runs):
        return "This run is too short for any of them."
    return (
        f"So the textbook's order holds: {ROOT} learns first. Without scaling the same network is "
        f"far behind, though nothing else differs. With {FULL} it begins late too, for its weights "
        "begin uniform, and its scores have to grow first; then it learns as well. No scale makes "
        "learning impossible: a network can grow or shrink the weights that make queries and keys. "
        "The scale decides where it begins."
    )


def _mean(runs: list[Run], scale: str, value: Callable[[Run], Tensor]) -> Tensor:
    """[layers] over the seeds."""
    return torch.stack([value(run) for run in runs if run.scale == scale]).mean(0)


def _first_step(section: Section, runs: list[Run]) -> None:
    section.heading("What arrives at the first step")
    section.text(f"""
        Below are, for each scale and layer: the standard deviation σ of the scores; entropy and
        largest weight of the rows of the questions, which see {PAIRS + 1} to {2 * PAIRS} keys; the
        length of these rows of dS (of the summed loss), median and root mean square; and the norm
        of the gradient of the {2 * CONFIG.width} × {CONFIG.width} weights that make queries and
        keys.
    """)
    rows = []
    for scale in SCALES:
        for layer in range(CONFIG.layers):
            found = [
                _mean(runs, scale, lambda run, f=f: getattr(run.rows[0], f))[layer].item()
                for f in Rows.__dataclass_fields__
            ]
            norm = _mean(runs, scale, lambda run: run.gradients[0])[layer].item()
            rows.append([scale, layer + 1, *found, norm])
    section.table(
        [
            "scale",
            "layer",
            "σ of scores",
            "entropy",
            "largest",
            "median dS",
            "r.m.s. dS",
            "gradient",
        ],
        rows,
        "Means over the seeds, at the first step.",
    )
    first = {scale: _mean(runs, scale, lambda run: run.gradients[0])[0].item() for scale in SCALES}
    rms = {
        scale: _mean(runs, scale, lambda run: run.rows[0].root_mean_square_dscores)[0].item()
        for scale in SCALES
    }
    median = {
        scale: _mean(runs, scale, lambda run: run.rows[0].median_dscores)[0].item()
        for scale in SCALES
    }
    section.text(f"""
        Expected are scores of standard deviation scale · √dₖ: {HEAD_DIM**0.5:.1f} without scaling,
        1, and {HEAD_DIM**-0.5:.2f}. In the first layer the median row of dS is
        {number(median[NONE], 2)} long without scaling and {number(median[ROOT], 2)} with {ROOT}:
        {times(median[ROOT] / median[NONE])} longer.

        But the *norm of the gradient* of the weights is **largest without scaling**,
        {times(first[NONE] / first[ROOT])} that with {ROOT}. Who looks for vanishing gradients there
        will not find them, and the chapter before says why: the root mean square of the rows hardly
        differs ({number(rms[NONE], 2)} and {number(rms[ROOT], 2)} in the first layer), since the
        few undecided rows make up for the other rows, and the factor scale · √dₖ, through
        which dS becomes dQ and dK, is {HEAD_DIM**0.5:.1f} instead of 1.
    """)


def _gradients(section: Section, runs: list[Run]) -> None:
    agreed = {scale: _mean(runs, scale, lambda run: run.agreement) for scale in SCALES}
    final = {scale: _mean(runs, scale, lambda run: run.rows[-1].deviation) for scale in SCALES}
    after = min(AGREEMENT_AFTER, len(runs[0].losses) - 1)

    def of(values: Tensor) -> str:
        return listed([number(x, 2) for x in values.tolist()])

    section.heading("Large gradients that teach nothing")
    section.text(f"""
        AdamW divides each gradient by its usual size, so that a norm, large or small, hardly
        matters. What matters is whether the gradients of different texts *agree*. After {after}
        steps, before any run has learned, the mean cosine between the gradients of two batches is,
        in the layers,

        - {of(agreed[ROOT])} with {ROOT},
        - {of(agreed[NONE])} without scaling,
        - {of(agreed[FULL])} with {FULL}.

        Without scaling, what one batch asks for is close to noise for the next: it comes from the
        rows that happen to be undecided in it. Meanwhile the scores do not shrink to a healthy
        size. Their standard deviation in the last step watched is {of(final[NONE])} without
        scaling, against {of(final[ROOT])} with {ROOT} and {of(final[FULL])} with {FULL}, and the
        median row of dS gets shorter on the way. (It gets short in the end where the task is
        solved, too: then the loss has no gradient left.)
    """)
    steps = len(runs[0].losses)
    layers = range(CONFIG.layers)
    columns = [
        f"{run.scale}, seed {run.seed}, layer {layer + 1}" for run in runs for layer in layers
    ]
    with theme():
        figure, panels = _panels(CONFIG.layers)
        for layer, axes in enumerate(panels):
            for run in runs:
                labelled = layer == 0 and run.seed == SEEDS[0]
                medians = run.gradients[:, layer].unfold(0, 10, 10).median(-1).values
                _line(axes, run, range(5, steps, 10), medians.tolist(), labelled)
            axes.set(title=f"Layer {layer + 1}", ylabel="norm of the gradient")
            _logarithmic(axes, torch.stack([run.gradients[:, layer] for run in runs]))
        panels[-1].set_xlabel("step")
        _legend(figure, panels[0])
    gradients = Picture(
        "trained-gradients",
        figure,
        "Norm of the gradient of the weights that make queries and keys: medians of ten steps.",
        "Two panels, one a layer, on a logarithmic axis: at first the norms differ by a factor of "
        f"about ten from scale to scale, {NONE} being largest.",
        Numbers(
            ["step", *columns],
            [
                [i + 1, *(x for run in runs for x in run.gradients[i].tolist())]
                for i in range(0, steps, WATCHED_EVERY)
            ],
        ),
    )
    with theme():
        figure, panels = _panels(CONFIG.layers)
        for layer, axes in enumerate(panels):
            for run in runs:
                values = [rows.median_dscores[layer].item() for rows in run.rows]
                labelled = layer == 0 and run.seed == SEEDS[0]
                _line(axes, run, [i + 1 for i in run.watched], values, labelled)
            axes.set(title=f"Layer {layer + 1}", ylabel="median row of dS")
            _logarithmic(
                axes, torch.tensor([r.median_dscores[layer] for run in runs for r in run.rows])
            )
        panels[-1].set_xlabel("step")
        _legend(figure, panels[0])
    section.pictures(
        gradients,
        Picture(
            "trained-dscores",
            figure,
            f"Median length of a row of dS, every {WATCHED_EVERY} steps; the loss is summed.",
            "Two panels, one a layer, on a logarithmic axis: without a scale the median falls from "
            "the beginning; with the other scales it rises until the task is learned.",
            Numbers(
                ["step", *columns],
                [
                    [step + 1, *(x for run in runs for x in run.rows[i].median_dscores.tolist())]
                    for i, step in enumerate(runs[0].watched)
                ],
            ),
        ),
    )


def _panels(count: int) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(4.8, 1.0 + 2.6 * count), layout="constrained")
    panels = figure.subplots(count, 1, squeeze=False, sharex=True)[:, 0].tolist()
    for axes in panels:
        axes.grid(visible=True, alpha=0.6, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, panels


def _line(
    axes: Axes, run: Run, steps: Sequence[int], values: Sequence[float], labelled: bool
) -> None:
    marker = dict(zip(SCALES, "os^", strict=True))[run.scale]
    axes.plot(
        steps,
        values,
        color=COLORS[run.scale],
        marker=marker,
        markevery=max(1, len(steps) // 8),
        markersize=4.5,
        linewidth=1.1,
        alpha=0.85,
        label=f"scale {run.scale}" if labelled else None,
    )


def _logarithmic(axes: Axes, values: Tensor) -> None:
    """A logarithmic axis, linear below the least positive number where there are zeros to show."""
    positive = values[values > 0]
    if len(positive) == values.numel():
        axes.set_yscale("log")
    elif len(positive):
        axes.set_yscale("symlog", linthresh=10.0 ** math.floor(positive.min().log10().item()))


def _legend(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
