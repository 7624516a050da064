"""Chapter: the root of d_k inside a small transformer that is trained with each of three scales.

The task is associative recall: "a is 7, b is 2, c is 7, ...; b?", answered by 2. Nothing but the
text itself tells which value belongs to which key, so that only attention can answer; and how well
it does is one number. The weights that make queries and keys begin such that both are standard
normal, as in the chapter before, with one head of 128.

How it was chosen: tried beforehand were this task with 16 and 32 pairs, learning rates of 0.001 and
0.003, three seeds, heads of 128 and 256, PyTorch's default initialization and SGD, as well as the
characters of a real text. With 1/√dₖ it was learned first in all of them, by little in the text;
without a scale last, but for PyTorch's initialization, where it was level with 1/dₖ. SGD learned
with 1/√dₖ alone, and not for good. With four heads of 32 the three are nearer to each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

import torch_attn
from examples.demo.gpt import Block, Config
from examples.demo.report import check

from .page import Numbers, Picture, Section, theme
from .scaling import FULL, NONE, ROOT, SCALES
from .threads import one_thread
from .wording import listed, number, percent, times

SYMBOLS = 64  # keys that there are, and values
PAIRS = 16
CONFIG = Config(context=2 * PAIRS, batch=16, layers=2, heads=1, width=128)
HEAD_DIM = CONFIG.width // CONFIG.heads
LEARNING_RATE = 1e-3
SEEDS = (0, 1)
CHANCE = math.log(SYMBOLS)
WATCHED_EVERY = 10
AGREEMENT_AFTER = 40  # steps, when nobody has learned anything yet


class Attention:
    """attn with a scale, which hands out the gradient of the scores of its last watched call."""

    def __init__(self, scale: float) -> None:
        self.scale = scale
        self.watching = False
        self.mask: Tensor | None = None
        self.query = self.key = torch.empty(0)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        self.mask = None
        if self.watching:
            # Of zeros: it changes nothing, and its gradient is that of the scores.
            shape = (*query.shape[:-1], key.size(-2))
            self.mask = torch.zeros(shape, requires_grad=True)
            self.query, self.key = query.detach(), key.detach()
        return torch_attn.sdpa(query, key, value, self.mask, scale=self.scale, **options)


class Recall(nn.Module):
    """Logits `[B, pairs, SYMBOLS]` of the values that belong to the keys that are asked for.

    A pair is one token, the sum of what stands for its key and its value; a question is a token
    that has a key alone. Tokens see those before them; there are no positions, for none is needed.
    """

    def __init__(self, scale: float) -> None:
        super().__init__()
        width = CONFIG.width
        self.attentions = [Attention(scale) for _ in range(CONFIG.layers)]
        self.key = nn.Embedding(SYMBOLS, width)
        self.value = nn.Embedding(SYMBOLS, width)
        self.blocks = nn.Sequential(*(Block(CONFIG, attention) for attention in self.attentions))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, SYMBOLS, bias=False)
        for block in self.blocks:
            # LayerNorm gives numbers of variance 1: so have the queries and keys made of them.
            nn.init.normal_(block.qkv.weight[: 2 * width], std=width**-0.5)
            nn.init.zeros_(block.qkv.bias)

    def forward(self, keys: Tensor, values: Tensor, asked: Tensor) -> Tensor:
        tokens = torch.cat([self.key(keys) + self.value(values), self.key(asked)], dim=1)
        logits: Tensor = self.head(self.norm(self.blocks(tokens)))[:, keys.size(1) :]
        return logits


def batch_of(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys, values, keys that are asked for and their values: each `[size, PAIRS]`.

    The keys of a row are distinct; values and questions may repeat.
    """
    keys = torch.rand(size, SYMBOLS, generator=generator).argsort(dim=-1)[:, :PAIRS]
    values = torch.randint(SYMBOLS, (size, PAIRS), generator=generator)
    asked = torch.randint(PAIRS, (size, PAIRS), generator=generator)
    return keys, values, keys.gather(1, asked), values.gather(1, asked)


@dataclass(frozen=True)
class Rows:
    """The rows of scores of the questions, in each layer: `[layers]`."""

    deviation: Tensor  # the standard deviation of the scores
    entropy: Tensor  # the mean, in nats
    largest: Tensor  # the mean of the largest weights
    median_dscores: Tensor  # the length of a row of dS, of the losses' sum
    root_mean_square_dscores: Tensor


@dataclass(frozen=True)
class Run:
    scale: str
    seed: int
    losses: list[float]  # of every step, in nats an answer
    gradients: Tensor  # [steps, layers] norms for the weights that make queries and keys
    watched: list[int]  # the steps at which rows were looked at
    rows: list[Rows]
    agreement: Tensor  # [layers] of gradients, after AGREEMENT_AFTER steps
    accuracy: float  # of 1,024 answers to new texts, at the end

    @property
    def learned_at(self) -> int | None:
        """The first step from which the mean loss of ten is below half of what guessing costs."""
        means = torch.tensor(self.losses).unfold(0, 10, 1).mean(-1)
        below = (means < CHANCE / 2).nonzero()
        return int(below[0]) + 1 if len(below) else None


def rows_of(attentions: list[Attention], answers: int) -> Rows:
    """What the last, watched step did; its loss was the mean over so many answers."""
    found: list[list[Tensor]] = []
    for attention in attentions:
        assert attention.mask is not None
        assert attention.mask.grad is not None
        value = attention.key  # any will do: of the results only scores and weights are looked at
        _, weights, scores = torch_attn.sdpa_with_weights(
            attention.query, attention.key, value, is_causal=True, scale=attention.scale
        )
        weights, scores, dscores = (
            t[:, :, PAIRS:] for t in (weights, scores, answers * attention.mask.grad)
        )
        lengths = dscores.norm(dim=-1)
        found.append(
            [
                scores[scores > -math.inf].std(),
                torch.special.entr(weights).sum(-1).mean(),
                weights.amax(-1).mean(),
                lengths.median(),
                lengths.square().mean().sqrt(),
            ]
        )
    return Rows(*(torch.stack(layers) for layers in zip(*found, strict=True)))


def agreement(model: Recall, generator: torch.Generator, batches: int = 8) -> Tensor:
    """[layers] mean cosine between what two batches want of the weights of queries and keys.

    1 if all agree; 0 if what each teaches is noise to the others.
    """
    gradients = []
    for _ in range(batches):
        *given, answers = batch_of(CONFIG.batch, generator)
        loss = F.cross_entropy(model(*given).flatten(0, 1), answers.flatten())
        weights = [block.qkv.weight for block in model.blocks]
        found = torch.stack(torch.autograd.grad(loss, weights))[:, : 2 * CONFIG.width]
        gradients.append(F.normalize(found.flatten(1), dim=-1))
    stacked = torch.stack(gradients, dim=1)  # [layers, batches, numbers]
    cosines = stacked @ stacked.mT
    return (cosines.sum((-2, -1)) - batches) / (batches * (batches - 1))


def train(scale: str, seed: int, steps: int, advance: Callable[[], None] = lambda: None) -> Run:
    """The same seed begins with the same weights and reads the same texts, whatever the scale."""
    torch.manual_seed(seed)
    model = Recall(SCALES[scale](HEAD_DIM))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    generator = torch.Generator().manual_seed(seed)
    losses: list[float] = []
    gradients = torch.empty(steps, CONFIG.layers)
    watched: list[int] = []
    rows: list[Rows] = []
    agreed = torch.full((CONFIG.layers,), math.nan)
    for step in range(steps):
        if step == min(AGREEMENT_AFTER, steps - 1):
            agreed = agreement(model, torch.Generator().manual_seed(1000 + seed))
        watching = step % WATCHED_EVERY == 0
        for attention in model.attentions:
            attention.watching = watching
        *given, answers = batch_of(CONFIG.batch, generator)
        loss = F.cross_entropy(model(*given).flatten(0, 1), answers.flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        for i, block in enumerate(model.blocks):
            gradients[step, i] = block.qkv.weight.grad[: 2 * CONFIG.width].norm()
        if watching:
            watched.append(step)
            rows.append(rows_of(model.attentions, answers.numel()))
        optimizer.step()
        losses.append(loss.item())
        if (step + 1) % WATCHED_EVERY == 0:
            advance()
    *given, answers = batch_of(1024 // PAIRS, generator)
    with torch.no_grad():
        right = model(*given).argmax(-1) == answers
    accuracy = right.double().mean().item()
    return Run(scale, seed, losses, gradients, watched, rows, agreed, accuracy)


# --- the chapter ----------------------------------------------------------------------------------

# Those of plots.scaling, so that a scale has one colour in both chapters.
COLORS = dict(zip(SCALES, ("#0072B2", "#D55E00", "#009E73"), strict=True))


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
        "What documents 000, 003 and 004 say of gradients, inside a transformer that learns",
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
        A loss below half of what guessing costs, as a mean of ten steps, is reached

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
        differs ({number(rms[NONE], 2)} and {number(rms[ROOT], 2)}), since the few undecided rows
        make up for the others, and the factor scale · √dₖ, through which dS becomes dQ and dK, is
        {HEAD_DIM**0.5:.1f} instead of 1.
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
        steps, before anybody has learned, the mean cosine between the gradients of two batches is,
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
            "the beginning; with the others it rises until the task is learned.",
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
