"""Attention of one sequence over several processes: ``python benchmarks/ring.py``.

Measured, with gloo, over two processes of one thread each: the time of a step in each of the ways
of ``torch_attn.distributed.method``, the bytes that a process sends beside those of the formula, and
which part of the communication is hidden behind computation. With w the time of computing alone, c
that of sending the same messages alone and t that of the step, it is (w + c - t) / c, held to [0, 1].
A slow link is imitated too: every message is held back for as long as the link would take.

Computed, from the rates that were measured or from ``--tflops``: how a ring scales over up to 64
machines, and from which length on it hides its communication. ``--chart`` draws the first.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import datetime
import functools
import math
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from common import DTYPES, about, alternate, write
from rich.console import Console
from rich.progress import track
from rich.table import Table

import torch_attn
from torch_attn.distributed._layout import Layout
from torch_attn.distributed._sdpa import attend

WORLD = 2
WAYS = ("ring", "gather", "all_to_all")
# Which pairs of queries and keys count, and which rows a process has.
ALL, IN_ORDER, BALANCED = "all pairs", "causal, in order", "causal, head and tail"
PASSES = ("forward", "training")
MACHINES = (1, 2, 4, 8, 16, 32, 64)
STRONG, WEAK = (2**14, 2**17, 2**20), (2**8, 2**11, 2**14)  # tokens in all; of a machine
NO_NETWORK = (
    "These two processes share the memory and the two cores of one machine: this is no network. What "
    "one sends the\nother is copied by the cores that compute, so that hiding it saves the waiting but "
    "not the copying. A slow link\nis imitated, by a clock: what arrives is held back, and nobody works "
    "while it waits."
)

# ---------------------------------------------------------------------------------------------
# The formula


@dataclass(frozen=True)
class Job:
    """Attention of as many queries as keys, and what a machine computes in a second.

    A causal call has half of the pairs; each machine has as many of them as another in every step,
    because it has the first and the last piece of the sequence, the second and the last but one ...
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
    """Of a forward: two products over every pair. The backward has five, 2.5 times as many."""
    return 4 * job.heads * job.head_dim * length**2 * job.share


def bytes_of(job: Job, length: float) -> tuple[float, float]:
    """Of keys and values; and of their gradients, which travel in float32 if keys are of half types."""
    numbers = 2 * job.kv_heads * job.head_dim * length
    return numbers * job.itemsize, numbers * max(4, job.itemsize)


def bytes_sent(way: str, job: Job, length: int, world: int, in_order: bool) -> tuple[float, float]:
    """What a process sends in a forward and in a backward, on the average.

    With P processes, b the bytes of all keys and values, g those of their gradients (of float32, for
    half types) and a those of all queries and outputs: in a ring b (P - 1) / P, and back
    (b + g) (P - 1) / P, of which a causal call over blocks in order needs half; for a gather
    g (P - 1) / P, and for all_to_all (a + b) (P - 1) / P², both as much again in the backward.
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

    In step s of P a machine computes with one block and sends its own for step s + 1: the step takes
    as long as the longer of the two. In the backward the gradients of the block of step s - 1 go home
    at the same time; those of the last block go when all is computed, and nothing hides them. The
    time that a message takes beside its bytes is left out.
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
    """Of a forward and a backward: the time of one machine in the machines' times together."""
    alone = sum(step_times(job, length, 1, gbits))
    return alone / (machines * sum(step_times(job, length, machines, gbits)))


def hiding_lengths(job: Job, gbits: float) -> tuple[float, float]:
    """The tokens of a machine from which a step hides what it sends, of forward and backward.

    With H heads of queries and h of keys, head_dim D, i bytes in a number and k those of a gradient,
    a share u of the pairs, rates F and G in FLOP/s and a link of B bytes a second, a block of n
    tokens is computed in 4 H D u n² / F and sent in 2 h D n i / B: the square outgrows the line at

        n = i h F / (2 u H B).

    A backward computes 10 H D u n² / G and sends 2 h D n (i + k) / B, keys, values and gradients:

        n = (i + k) h G / (5 u H B).

    D has gone. Not counted are the gradients of the last block, which nothing hides.
    """
    keys, gradients = job.itemsize, max(4, job.itemsize)
    rate = job.share * job.heads / job.kv_heads * gbits * 1e9 / 8
    return keys * job.forward / (2 * rate), (keys + gradients) * job.backward / (5 * rate)


def scaling(jobs: list[Job], gbits: list[float]) -> list[dict[str, Any]]:
    """Efficiencies over machines, of whole lengths (strong) and of lengths of a machine (weak)."""
    cases = [("strong", n, m) for n in STRONG for m in MACHINES]
    cases += [("weak", n, m) for n in WEAK for m in MACHINES]
    rows = []
    for kind, tokens, machines in cases:
        length = tokens * (machines if kind == "weak" else 1)
        for job in jobs:
            for rate in gbits:
                forward, backward = step_times(job, length, machines, rate)
                row = {"scaling": kind, "tokens": tokens, "machines": machines}
                row |= {"causal": job.is_causal, "gbits": rate}
                row |= {"forward_s": forward, "backward_s": backward}
                rows.append(row | {"efficiency": efficiency(job, length, machines, rate)})
    return rows


def telling_lengths(job: Job, gbits: list[float]) -> tuple[int, int]:
    """For a chart: tokens in all, and of a machine, between which the bandwidths differ.

    Powers of two, up to a million tokens on the most machines: 64 blocks that the fastest link just
    hides, and one that the link in the middle does.
    """
    fastest, middle = (
        2 ** round(math.log2(max(hiding_lengths(job, rate))))
        for rate in (max(gbits), statistics.median_high(gbits))
    )
    most = MACHINES[-1]
    return min(most * fastest, 2**20), min(middle, 2**20 // most)


# ---------------------------------------------------------------------------------------------
# Two processes


class Message(NamedTuple):
    is_sent: bool
    peer: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class Late:
    """What a link is still busy with until some time."""

    def __init__(self, work: Any, until: float) -> None:
        self.work, self.until = work, until

    def wait(self) -> None:
        self.work.wait()
        time.sleep(max(0.0, self.until - time.perf_counter()))


class Wire:
    """Sees, while it is entered, the messages of this process; it can be slow, or cut.

    A slow one is as busy with a batch as a link of so many Gbit/s each way. On a cut one nothing
    travels: what is to be received is there at once, with other numbers.
    """

    def __init__(self, gbits: float = math.inf, is_cut: bool = False) -> None:
        self.gbits, self.is_cut, self.free = gbits, is_cut, 0.0
        self.batches: list[list[Message]] = []

    def __enter__(self) -> Wire:
        self.start = dist.batch_isend_irecv
        dist.batch_isend_irecv = self.pass_on
        return self

    def __exit__(self, *_: object) -> None:
        dist.batch_isend_irecv = self.start

    def pass_on(self, ops: list[dist.P2POp]) -> list[Any]:
        self.batches.append(
            [
                Message(o.op is dist.isend, o.peer, tuple(o.tensor.shape), o.tensor.dtype)
                for o in ops
            ]
        )
        if self.is_cut:
            for op in ops:
                if op.op is dist.irecv:
                    op.tensor.set_(ready(tuple(op.tensor.shape), op.tensor.dtype))
            return []
        works: list[Any] = self.start(ops)
        if math.isinf(self.gbits):
            return works
        size = max(sum(o.tensor.nbytes for o in ops if o.op is f) for f in (dist.isend, dist.irecv))
        self.free = max(self.free, time.perf_counter()) + 8 * size / (self.gbits * 1e9)
        return [Late(work, self.free) for work in works]


@functools.cache
def ready(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype)


@dataclass(frozen=True)
class Setting:
    """What is timed."""

    way: str  # of WAYS
    order: str  # of ALL, IN_ORDER and BALANCED
    training: bool
    length: int
    dtype: str = "f32"
    heads: int = 8
    kv_heads: int = 8
    head_dim: int = 64

    def job(self, forward: float = 1.0, backward: float = 1.0) -> Job:
        sizes = self.heads, self.kv_heads, self.head_dim, DTYPES[self.dtype].itemsize
        return Job(forward, backward, self.order != ALL, *sizes)


@functools.lru_cache(maxsize=8)
def step_of(setting: Setting, is_alone: bool = False) -> Callable[[], None]:
    """A step of this process, with its block or, alone, with all of the sequence."""
    rank, world = dist.get_rank(), dist.get_world_size()
    cut = Layout.head_and_tail if setting.order == BALANCED else Layout.chunks
    pieces = cut(setting.length, world)
    rows = setting.length if is_alone else Layout.length(pieces[rank])
    tensors = [
        torch.randn(1, heads, rows, setting.head_dim, dtype=DTYPES[setting.dtype])
        for heads in (setting.heads, setting.kv_heads, setting.kv_heads)
    ]
    gradient = torch.randn_like(tensors[0])
    for tensor in tensors:
        tensor.requires_grad_(setting.training)
    options: dict[str, Any] = {
        "is_causal": setting.order != ALL,
        "enable_gqa": setting.heads != setting.kv_heads,
    }
    group = dist.group.WORLD
    assert group is not None

    def run() -> None:
        with torch_attn.distributed.method(setting.way):
            if is_alone:
                output = torch_attn.sdpa(*tensors, **options)
            elif setting.order == BALANCED:
                output = attend(Layout(rank, pieces, pieces), group, *tensors, **options)
            else:
                lengths = (setting.length, setting.length)
                output = torch_attn.distributed.sdpa(*tensors, lengths=lengths, **options)
        if setting.training:
            torch.autograd.grad(output, tensors, gradient)

    return run


@functools.cache
def messages_of(setting: Setting) -> list[list[Message]]:
    """Of a step, in batches that are started together."""
    with Wire() as wire:
        step_of(setting)()
    return wire.batches


def bytes_counted(setting: Setting) -> int:
    messages = [m for batch in messages_of(setting) for m in batch if m.is_sent]
    return sum(math.prod(m.shape) * m.dtype.itemsize for m in messages)


def send(batches: list[list[Message]]) -> None:
    """Those messages, one batch behind the other."""
    for batch in batches:
        ops = [
            dist.P2POp(dist.isend, ready(m.shape, m.dtype), m.peer)
            if m.is_sent
            else dist.P2POp(dist.irecv, torch.empty(m.shape, dtype=m.dtype), m.peer)
            for m in batch
        ]
        for work in dist.batch_isend_irecv(ops) if ops else ():
            work.wait()


def timed(setting: Setting, kind: str, gbits: float = math.inf) -> float:
    """Seconds of a "step", or of "computing" or "sending" alone, which all processes begin at once."""
    run = step_of(setting)
    if kind == "sending":
        run = functools.partial(send, messages_of(setting))
    with Wire(gbits, is_cut=kind == "computing"):
        dist.barrier()
        start = time.perf_counter()
        run()
        return time.perf_counter() - start


def timed_alone(setting: Setting) -> float:
    run = step_of(setting, is_alone=True)
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def join(rank: int, world: int, rendezvous: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    where = "gloo", f"file://{rendezvous}", datetime.timedelta(seconds=60)
    dist.init_process_group(*where, rank=rank, world_size=world)


class Processes:
    """Some of this machine, in a group of gloo, each with one thread."""

    def __init__(self, world: int = WORLD) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="attn-bench-")
        spawn, store = multiprocessing.get_context("spawn"), f"{self.folder.name}/store"
        self.pools = [
            concurrent.futures.ProcessPoolExecutor(1, spawn, join, (rank, world, store))
            for rank in range(world)
        ]

    def __enter__(self) -> Processes:
        self(dist.get_rank)  # all have to be there before one can be asked alone
        return self

    def __exit__(self, *_: object) -> None:
        for pool in self.pools:
            for process in (pool._processes or {}).values():
                process.terminate()
            pool.shutdown()
        self.folder.cleanup()

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Calls a function in every process at once."""
        futures = [pool.submit(function, *arguments) for pool in self.pools]
        when = concurrent.futures.FIRST_EXCEPTION
        for future in concurrent.futures.wait(futures, return_when=when).done:
            future.result()  # an error: the others may wait for who had it
        return [future.result() for future in futures]

    def longest(self, *arguments: Any) -> float:
        return max(self(timed, *arguments))

    def alone(self, setting: Setting) -> float:
        seconds: float = self.pools[0].submit(timed_alone, setting).result()
        return seconds


# ---------------------------------------------------------------------------------------------
# Measured


def clock(function: Callable[[], float], repeat: int) -> float:
    """For :func:`alternate`: the functions say themselves how long they took."""
    return sum(function() for _ in range(repeat)) / repeat


def measure(
    processes: Processes, setting: Setting, links: list[float], seconds: float
) -> list[dict[str, Any]]:
    """A row of each way, and more of a ring over links of so many Gbit/s."""
    ways = [(replace(setting, way=way), math.inf) for way in WAYS]
    ways += [(replace(setting, way="ring"), gbits) for gbits in links]
    functions = [functools.partial(processes.alone, setting)]
    for way, gbits in ways:
        for kind, link in (("step", gbits), ("computing", math.inf), ("sending", gbits)):
            functions.append(functools.partial(processes.longest, way, kind, link))
    alone, *timings = alternate(functions, seconds, clock)
    rows = []
    for place, (way, gbits) in enumerate(ways):
        step, computing, sending = timings[3 * place : 3 * place + 3]
        t, w, c = step.median, computing.median, sending.median
        samples = zip(step.samples, computing.samples, sending.samples, strict=True)
        parts = [(computed + sent - whole) / sent for whole, computed, sent in samples]
        low, _, high = statistics.quantiles(parts, n=4)
        passes = bytes_sent(way.way, way.job(), way.length, WORLD, way.order == IN_ORDER)
        row = {"order": way.order, "pass": PASSES[way.training], "method": way.way}
        row |= {"length": way.length, "gbits": None if math.isinf(gbits) else gbits}
        row |= {"alone_ms": alone.median * 1e3, "ms": t * 1e3}
        row |= {"efficiency": alone.median / t / WORLD, "rounds": len(parts)}
        row |= {"sent_bytes": statistics.mean(processes(bytes_counted, way))}
        row |= {"formula_bytes": sum(passes) if way.training else passes[0]}
        row |= {"computing_ms": w * 1e3, "sending_ms": c * 1e3}
        row |= {"hidden": min(1.0, max(0.0, (w + c - t) / c)), "hidden_spread": (high - low) / 2}
        rows.append(row)
    return rows


def rates_of(rows: list[dict[str, Any]], setting: Setting) -> tuple[float, float]:
    """FLOP/s of a process alone, of forward and backward, of the rows with a setting's pairs."""
    alone = {
        r["pass"]: r["alone_ms"] / 1e3
        for r in rows
        if (r["order"], r["length"]) == (setting.order, setting.length)
    }
    work = flops(setting.job(), setting.length)
    return work / alone["forward"], 2.5 * work / (alone["training"] - alone["forward"])


def predict(rows: list[dict[str, Any]], setting: Setting) -> None:
    """Adds to the rows of a ring that is in balance what the formula says of their time."""
    for r in rows:
        if r["method"] != "ring" or r["order"] == IN_ORDER:
            continue
        given = replace(setting, order=r["order"], length=r["length"])
        gbits = r["gbits"] or 8 * r["sent_bytes"] / r["sending_ms"] / 1e6
        times = step_times(given.job(*rates_of(rows, given)), r["length"], WORLD, gbits)
        r["formula_ms"] = 1e3 * (sum(times) if r["pass"] == "training" else times[0])


# ---------------------------------------------------------------------------------------------
# Shown


def measured_table(rows: list[dict[str, Any]], setting: Setting) -> Table:
    heads = f"{setting.heads} heads, {setting.kv_heads} of keys, head_dim {setting.head_dim}"
    table = Table(title=f"{WORLD} processes, {rows[0]['length']} tokens, {heads}, {setting.dtype}")
    for heading in ("pairs, order", "pass", "method", "link"):
        table.add_column(heading)
    headings = ["one\nms", "two\nms", "effi-\nciency", "sent\nMB", "formula\nMB"]
    headings += ["compute\nms", "send\nms", "hidden", "formula\nms"]
    for heading in headings:
        table.add_column(heading, justify="right")
    for r in rows:
        table.add_row(
            *(r["order"], r["pass"], r["method"]),
            f"{r['gbits']:g} Gbit/s" if r["gbits"] else "memory",
            f"{r['alone_ms']:.1f}",
            f"{r['ms']:.1f}",
            f"{r['efficiency']:.2f}",
            f"{r['sent_bytes'] / 1e6:.2f}",
            f"{r['formula_bytes'] / 1e6:.2f}",
            f"{r['computing_ms']:.1f}",
            f"{r['sending_ms']:.1f}",
            f"{r['hidden']:.2f} ± {r['hidden_spread']:.2f}",
            f"{r['formula_ms']:.1f}" if "formula_ms" in r else "",
        )
    return table


def hiding_table(rows: list[dict[str, Any]], gbits: list[float]) -> Table:
    table = Table(title="Tokens of a machine from which a step of the ring hides what it sends")
    for heading in ("pairs", "pass"):
        table.add_column(heading)
    for rate in gbits:
        table.add_column(f"{rate:g} Gbit/s", justify="right")
    for is_causal in (False, True):
        for which in ("forward", "backward"):
            chosen = [r[which] for r in rows if r["causal"] == is_causal]
            pairs = BALANCED if is_causal else ALL
            table.add_row(pairs, which, *(f"{math.ceil(tokens):,}" for tokens in chosen))
    return table


def scaling_table(rows: list[dict[str, Any]], gbits: list[float]) -> Table:
    table = Table(
        title="Efficiency of a ring, forward and backward, by the formula: all pairs / causal"
    )
    for heading in ("tokens", "machines"):
        table.add_column(heading, justify="right")
    for rate in gbits:
        table.add_column(f"{rate:g} Gbit/s", justify="right")
    for kind, lengths in (("strong", STRONG), ("weak", WEAK)):
        for tokens in lengths:
            for machines in MACHINES[1::2]:
                found = {
                    (r["gbits"], r["causal"]): f"{r['efficiency']:.0%}"
                    for r in rows
                    if (r["scaling"], r["tokens"], r["machines"]) == (kind, tokens, machines)
                }
                cells = [f"{found[rate, False]} / {found[rate, True]}" for rate in gbits]
                of_each = "of each" if kind == "weak" else "in all"
                last = machines == MACHINES[1::2][-1]
                table.add_row(f"{tokens:,} {of_each}", str(machines), *cells, end_section=last)
    return table


def draw(job: Job, gbits: list[float], about_it: str, path: Path) -> None:
    """Efficiency over machines: a length in all, and a length of each machine."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    whole, each = telling_lengths(job, gbits)
    panels = {
        f"strong: {whole:,} tokens in all": [whole] * len(MACHINES),
        f"weak: {each:,} tokens of each machine": [each * m for m in MACHINES],
    }
    figure, axes = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained", sharey=True)
    styles = list(zip(("#d55e00", "#009e73", "#0072b2", "#cc79a7"), "s^oD", strict=True))
    for axis, (title, lengths) in zip(axes, panels.items(), strict=True):
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
        axis.set_title(title, loc="left", fontweight="bold")
        axis.set_xlabel("number of machines")
        axis.grid(color="0.9")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("efficiency, % of one machine")
    lines, names = axes[0].get_legend_handles_labels()
    where = "outside lower center"
    figure.legend(lines, names, loc=where, ncols=len(names), frameon=False)
    figure.suptitle(about_it, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096], help="measured")
    parser.add_argument("--dtype", choices=DTYPES, default="f32")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, help="of keys and values, default: as many")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument(
        "--tflops",
        type=float,
        nargs="+",
        help="of a machine's forward, and of its backward if it differs: nothing is measured",
    )
    parser.add_argument("--gbits", type=float, nargs="+", default=[10, 25, 100], help="of links")
    parser.add_argument("--slow", type=float, default=1.0, help="Gbit/s of the link imitated")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each pass, default 2")
    parser.add_argument("--json", type=Path, help="also write the results here")
    parser.add_argument("--chart", type=Path, help="also draw the scaling, a PNG, here")
    arguments = parser.parse_args()
    if arguments.tflops and len(arguments.tflops) > 2:
        parser.error("--tflops takes the rate of the forward and that of the backward, no more")
    console = Console()
    console = Console(width=max(console.width, 150))
    torch.set_num_threads(1)
    about_it = about()
    console.print(", ".join(f"{k} {v}" for k, v in about_it.items()))
    kv_heads = arguments.kv_heads or arguments.heads
    sizes = arguments.dtype, arguments.heads, kv_heads, arguments.head_dim
    setting = Setting("ring", ALL, True, max(arguments.lengths), *sizes)
    orders = {False: ALL, True: BALANCED}

    measured: list[dict[str, Any]] = []
    if arguments.tflops:
        given = tuple(1e12 * arguments.tflops[n] for n in (0, -1))
        rates = dict.fromkeys(orders, given)
        source = "given"
    else:
        todo = [
            replace(setting, length=length, order=order, training=training)
            for length in arguments.lengths
            for order in (ALL, IN_ORDER, BALANCED)
            for training in (False, True)
        ]
        with Processes() as processes:
            for one in track(todo, description="two processes", console=console):
                measured += measure(processes, one, [arguments.slow], arguments.seconds)
        predict(measured, setting)
        for length in arguments.lengths:
            chosen = [r for r in measured if r["length"] == length]
            console.print(measured_table(chosen, setting))
        console.print(NO_NETWORK)
        rates = {
            is_causal: rates_of(measured, replace(setting, order=order))
            for is_causal, order in orders.items()
        }
        source = "measured"

    jobs = [replace(setting, order=o).job(*rates[is_causal]) for is_causal, o in orders.items()]
    for job in jobs:
        both = " and ".join(f"{rate / 1e12:.3g}" for rate in (job.forward, job.backward))
        console.print(
            f"TFLOP/s of a machine, {source}, {orders[job.is_causal]}: "
            f"forward and backward {both}; {job.itemsize} bytes in a number of keys and values"
        )
    hiding = []
    for job in jobs:
        for rate in arguments.gbits:
            forward, backward = hiding_lengths(job, rate)
            row = {"causal": job.is_causal, "gbits": rate}
            hiding.append(row | {"forward": forward, "backward": backward})
    console.print(hiding_table(hiding, arguments.gbits))
    rows = scaling(jobs, arguments.gbits)
    console.print(scaling_table(rows, arguments.gbits))
    if arguments.json:
        of_machines = [{"causal": j.is_causal, **vars(j)} for j in jobs]
        result = {"machine": about_it, "measured": measured, "jobs": of_machines}
        write({**result, "hiding": hiding, "scaling": rows}, arguments.json)
        console.print(f"written: {arguments.json}")
    if arguments.chart:
        causal = jobs[-1]
        both = " and ".join(f"{rate / 1e12:.3g}" for rate in (causal.forward, causal.backward))
        title = f"A ring by the formula, causal, forward and backward, {arguments.dtype}\n"
        title += f"rates {source}: {both} TFLOP/s of a machine"
        draw(causal, arguments.gbits, title, arguments.chart)
        console.print(f"written: {arguments.chart}")


if __name__ == "__main__":
    main()
