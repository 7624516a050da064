"""How a ring scales over machines, by a formula of what each computes and sends, with a chart."""

from __future__ import annotations

import itertools
import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

# Which pairs of queries and keys count, and which rows a process has: a block of them in a row or,
# balanced, the first piece and the last, the second and the last but one ...
ALL, IN_ORDER, BALANCED = "all pairs", "causal", "causal, balanced"
MACHINES = (1, 2, 4, 8, 16, 32, 64)
MOST = 2**20  # tokens in all


@dataclass(frozen=True)
class Job:
    """Attention of as many queries as keys, and what a machine computes in a second.

    A causal call counts half of the pairs. It is balanced, so that in every step all machines have
    equally many of them.
    """

    forward: float  # FLOP/s of a machine
    backward: float
    is_causal: bool = False
    heads: int = 8
    kv_heads: int = 8
    head_dim: int = 64
    itemsize: int = 4

    @property
    def share(self) -> float:
        """The part of the pairs that counts."""
        return 0.5 if self.is_causal else 1.0


def flops(job: Job, length: float) -> float:
    """A forward has two products over every pair. The backward has five, 2.5 times as many."""
    return 4 * job.heads * job.head_dim * length**2 * job.share


def bytes_of(job: Job, length: float) -> tuple[float, float]:
    """Keys and values, then their gradients, which travel in float32 for half types too."""
    numbers = 2 * job.kv_heads * job.head_dim * length
    return numbers * job.itemsize, numbers * max(4, job.itemsize)


def bytes_sent(way: str, job: Job, length: int, world: int, in_order: bool) -> tuple[float, float]:
    """What a process sends in a forward and in a backward, on the average.

    P processes; the bytes of all keys and values are b, of their gradients g (in float32 for half
    types), of all queries and outputs a. A ring sends b (P - 1) / P in the forward and
    (b + g) (P - 1) / P in the backward; a causal call over blocks in order needs half of it. A
    gather sends g (P - 1) / P, all_to_all (a + b) (P - 1) / P², each as much in the backward.
    """
    keys, gradients = bytes_of(job, length)
    rows = 2 * job.heads * job.head_dim * length * job.itemsize
    others = (world - 1) / world
    if way == "gather":
        return gradients * others, gradients * others
    if way == "all_to_all":
        return (rows + keys) * others / world, (rows + keys) * others / world
    needed = others * (0.5 if job.is_causal and in_order else 1)
    return keys * needed, (keys + gradients) * needed


def step_times(job: Job, length: float, machines: int, gbits: float) -> tuple[float, float]:
    """Seconds of a forward and of a backward of a ring whose links carry so much each way at once.

    In step s of P a machine computes with one block and sends its own for step s + 1: the step
    takes as long as the longer of the two. In the backward the gradients of the block of step s - 1
    go home at the same time; the last block's gradients go when all is computed, and nothing hides
    them. The time that a message takes beside its bytes is left out.
    """
    block = length / machines
    keys, gradients = (8 * size / (gbits * 1e9) for size in bytes_of(job, block))
    forward = flops(job, block) / job.forward
    backward = 2.5 * flops(job, block) / job.backward
    last = machines - 1
    of_forward = last * max(forward, keys) + forward
    of_backward = sum(
        max(backward, keys * (step < last) + gradients * (step > 1)) for step in range(machines)
    )
    return of_forward, of_backward + gradients * (machines > 1)


def efficiency(job: Job, length: float, machines: int, gbits: float) -> float:
    """The time of one machine, forward and backward, divided by the sum of all machines' times."""
    alone = sum(step_times(job, length, 1, gbits))
    return alone / (machines * sum(step_times(job, length, machines, gbits)))


def hiding_lengths(job: Job, gbits: float) -> tuple[float, float]:
    """The tokens a machine needs so that a step hides what it sends, in forward and backward.

    With H heads of queries and h of keys, head_dim D, i bytes in a number and k in one of a
    gradient, a share u of the pairs, rates F and G in FLOP/s and a link of B bytes a second, a
    block of n tokens is computed in 4 H D u n² / F and sent in 2 h D n i / B. Computing takes
    longer from

        n = i h F / (2 u H B).

    A backward computes 10 H D u n² / G and sends 2 h D n (i + k) / B, keys, values and gradients:

        n = (i + k) h G / (5 u H B).

    D cancels. The gradients of the last block are not counted, because nothing hides them.
    """
    keys, gradients = job.itemsize, max(4, job.itemsize)
    rate = job.share * job.heads / job.kv_heads * gbits * 1e9 / 8
    return keys * job.forward / (2 * rate), (keys + gradients) * job.backward / (5 * rate)


def telling_lengths(job: Job, gbits: list[float]) -> tuple[int, int]:
    """Tokens in all, and of a machine, at which the bandwidths differ; powers of two.

    All tokens: on the most machines each block is a little too short to hide what the fastest link
    sends. Tokens of a machine: likewise for the link in the middle. At most a million in all.
    """
    fastest, middle = (
        2 ** math.floor(math.log2(max(1, *hiding_lengths(job, rate))))
        for rate in (max(gbits), statistics.median_high(gbits))
    )
    return min(MACHINES[-1] * fastest, MOST), min(middle, MOST // MACHINES[-1])


def scaling(jobs: list[Job], gbits: list[float]) -> list[dict[str, Any]]:
    """Rows over machines, with equal tokens in all (strong) or on each machine (weak)."""
    whole, each = telling_lengths(jobs[-1], gbits)
    cases = [("strong", n) for n in sorted({whole, MOST // 8, MOST})]
    cases += [("weak", n) for n in sorted({each, MOST // 8 // MACHINES[-1], MOST // MACHINES[-1]})]
    rows = []
    for (kind, tokens), machines, job in itertools.product(cases, MACHINES, jobs):
        length = tokens * machines if kind == "weak" else tokens
        for rate in gbits:
            forward, backward = step_times(job, length, machines, rate)
            row: dict[str, Any] = {"scaling": kind, "tokens": tokens, "machines": machines}
            row |= {"causal": job.is_causal, "gbits": rate}
            row |= {"forward_s": forward, "backward_s": backward}
            rows.append(row | {"efficiency": efficiency(job, length, machines, rate)})
    return rows


def hiding_table(rows: list[dict[str, Any]], gbits: list[float]) -> Table:
    title = "Tokens of a machine from which a step hides what it sends"
    table = table_of_links(title, ["pairs", "pass"], gbits)
    for is_causal, which in itertools.product((False, True), ("forward", "backward")):
        chosen = [f"{math.ceil(r[which]):,}" for r in rows if r["causal"] == is_causal]
        table.add_row(BALANCED if is_causal else ALL, which, *chosen)
    return table


def scaling_table(rows: list[dict[str, Any]], gbits: list[float]) -> Table:
    title = "Efficiency of forward and backward, by the formula: all pairs / causal"
    table = table_of_links(title, ["scaling", "tokens", "machines"], gbits)
    found: dict[Any, dict[Any, str]] = {}
    for r in rows:
        if r["machines"] in MACHINES[2::2]:
            cells = found.setdefault((r["scaling"], r["tokens"], r["machines"]), {})
            cells[r["gbits"], r["causal"]] = f"{r['efficiency']:.0%}"
    for (kind, tokens, machines), cells in found.items():
        table.add_row(
            kind,
            f"{tokens:,} {'in all' if kind == 'strong' else 'each'}",
            str(machines),
            *(f"{cells[rate, False]} / {cells[rate, True]}" for rate in gbits),
            end_section=machines == MACHINES[-1],
        )
    return table


def table_of_links(title: str, headings: list[str], gbits: list[float]) -> Table:
    table = Table(title=title, min_width=len(title) + 2)
    for heading in headings:
        table.add_column(heading)
    for rate in gbits:
        table.add_column(f"{rate:g} Gbit/s", justify="right")
    return table


def rates_in_words(job: Job) -> str:
    unit, size = ("TFLOP/s", 1e12) if min(job.forward, job.backward) >= 1e12 else ("GFLOP/s", 1e9)
    return f"forward {job.forward / size:.0f}, backward {job.backward / size:.0f} {unit}"


def draw(job: Job, gbits: list[float], title: str, path: Path) -> None:
    """Efficiency over machines, with equal tokens in all, then on each machine."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    whole, each = telling_lengths(job, gbits)
    panels = {
        f"strong: {whole:,} tokens in all": [whole] * len(MACHINES),
        f"weak: {each:,} tokens a machine": [each * m for m in MACHINES],
    }
    figure, axes = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained", sharey=True)
    styles = list(zip(("#d55e00", "#009e73", "#0072b2", "#cc79a7"), "s^oD", strict=True))
    for axis, (heading, lengths) in zip(axes, panels.items(), strict=True):
        for place, rate in enumerate(gbits):
            color, marker = styles[place % len(styles)]
            values = [
                100 * efficiency(job, length, machines, rate)
                for length, machines in zip(lengths, MACHINES, strict=True)
            ]
            axis.plot(MACHINES, values, marker + "-", color=color, label=f"{rate:g} Gbit/s")
        axis.set_xscale("log", base=2)
        axis.set_xticks(MACHINES, [str(m) for m in MACHINES])
        axis.minorticks_off()
        axis.set_ylim(0, 105)
        axis.set_title(heading, loc="left", fontweight="bold")
        axis.set_xlabel("number of machines")
        axis.grid(color="0.9")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("efficiency (%)")
    lines, names = axes[0].get_legend_handles_labels()
    figure.legend(lines, names, loc="outside lower center", ncols=len(names), frameon=False)
    figure.suptitle(title, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
