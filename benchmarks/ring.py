"""Attention of one sequence over several processes: ``python benchmarks/ring.py``.

Measured, with gloo, over two processes of one thread each: the time of a step in each of the ways
of ``torch_attn.distributed.method``, the bytes that a process sends beside the formula's bytes,
and which part of the communication is hidden behind computation. This is (w + c - t) / c, held to
[0, 1], where computing alone takes w, sending the same messages alone c and the step t. A slow
link is imitated too: messages are held back for as long as it would take.

Computed, from the rates that were measured or from ``--tflops``: how a ring scales over up to 64
machines, and from which length on it hides its communication. ``--chart`` draws the scaling. For
GPUs: ``python benchmarks/ring.py --tflops 300 --dtype bf16 --chart out/ring-gpu.png``.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import datetime
import functools
import itertools
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
from ring_formula import (
    ALL,
    BALANCED,
    IN_ORDER,
    Job,
    bytes_sent,
    draw,
    flops,
    hiding_lengths,
    hiding_table,
    rates_in_words,
    scaling,
    scaling_table,
    step_times,
)

import torch_attn
from torch_attn.distributed._layout import Layout
from torch_attn.distributed._sdpa import attend

WORLD = 2
WAYS = ("ring", "gather", "all_to_all")
PASSES = ("forward", "training")  # the second is a forward and a backward
UNCLEAR = 0.25  # an error above which a hidden part is not printed
NOTES = """\
These two processes share the memory and the two cores of one machine: this is no network. What one
sends is copied by the cores that compute: to hide it saves the waiting, not the copying. The slow
link is a clock: what arrives is held back, and no core works for it. Times are medians of
alternating runs, "compute" and "send" those of the same work and of the same messages alone; ± is
the error of a median. Balanced: a process has the first and the last piece of the sequence, or the
second and the last but one, and so on. The formula has the rates of one process."""

# ---------------------------------------------------------------------------------------------
# Two processes


class Message(NamedTuple):
    is_sent: bool
    peer: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class Late:
    """Work that a link is busy with until some time."""

    def __init__(self, work: Any, until: float) -> None:
        self.work, self.until = work, until

    def wait(self) -> None:
        self.work.wait()
        time.sleep(max(0.0, self.until - time.perf_counter()))


class Wire:
    """Sees, while it is entered, the messages of this process; it can be slow, or cut.

    A slow wire is as busy with a batch as a link of `gbits` Gbit/s each way. A cut wire carries
    nothing: tensors to be received are there at once, with other numbers.
    """

    def __init__(self, gbits: float = math.inf, is_cut: bool = False) -> None:
        self.gbits, self.is_cut, self.free = gbits, is_cut, 0.0
        self.batches: list[list[Message]] = []

    def __enter__(self) -> Wire:
        self.start = dist.batch_isend_irecv
        dist.batch_isend_irecv = self.pass_on  # type: ignore[assignment]
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
                    there = ready(tuple(op.tensor.shape), op.tensor.dtype)
                    op.tensor.set_(there.untyped_storage(), 0, there.shape, there.stride())
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
    query, key, value = tensors
    gradient = torch.randn_like(query)
    for tensor in tensors:
        tensor.requires_grad_(setting.training)
    options: dict[str, Any] = {
        "is_causal": setting.order != ALL,
        "enable_gqa": setting.heads != setting.kv_heads,
    }
    layout, group = Layout(rank, pieces, pieces), dist.group.WORLD
    assert group is not None

    def run() -> None:
        with torch_attn.distributed.method(setting.way):
            if is_alone:
                output = torch_attn.sdpa(query, key, value, **options)
            elif setting.order == BALANCED:
                output = attend(layout, group, query, key, value, **options)
            else:
                lengths = setting.length, setting.length
                output = torch_attn.distributed.sdpa(query, key, value, lengths=lengths, **options)
        if setting.training:
            torch.autograd.grad(output, tensors, gradient)

    return run


@functools.cache
def messages_of(setting: Setting) -> list[list[Message]]:
    """The messages of a step, in batches that are started together."""
    with Wire() as wire:
        step_of(setting)()
    return wire.batches


def bytes_counted(setting: Setting) -> int:
    messages = [m for batch in messages_of(setting) for m in batch if m.is_sent]
    return sum(math.prod(m.shape) * m.dtype.itemsize for m in messages)


def send(batches: list[list[Message]]) -> None:
    """Sends and receives these messages, one batch after the other."""
    for batch in batches:
        ops = [
            dist.P2POp(dist.isend, ready(m.shape, m.dtype), m.peer)
            if m.is_sent
            else dist.P2POp(dist.irecv, torch.empty(m.shape, dtype=m.dtype), m.peer)
            for m in batch
        ]
        for work in dist.batch_isend_irecv(ops) if ops else ():
            work.wait()


def timed(setting: Setting, kind: str, gbits: float = math.inf) -> tuple[float, float]:
    """Seconds of a "step", or of "computing" or "sending" alone, which all begin at once.

    Also the seconds for which a processor worked for this process meanwhile.
    """
    run = step_of(setting)
    if kind == "sending":
        run = functools.partial(send, messages_of(setting))
    with Wire(gbits, is_cut=kind == "computing"):
        dist.barrier()
        start, worked = time.perf_counter(), time.process_time()
        run()
        return time.perf_counter() - start, time.process_time() - worked


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
        self.busy: list[float] = []  # the shares of computing time in which they had a core

    def __enter__(self) -> Processes:
        self(dist.get_rank)  # all must have started before one can run alone
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
            future.result()  # raises an error, for whose process the others may wait
        return [future.result() for future in futures]

    def longest(self, setting: Setting, kind: str, gbits: float) -> float:
        found = self(timed, setting, kind, gbits)
        if kind == "computing":
            self.busy.append(min(worked / passed for passed, worked in found))
        seconds: float = max(passed for passed, _ in found)
        return seconds

    def alone(self, setting: Setting) -> float:
        seconds: float = self.pools[0].submit(timed_alone, setting).result()
        return seconds


# ---------------------------------------------------------------------------------------------
# Measured


def clock(function: Callable[[], float], repeat: int) -> float:
    """A clock for :func:`alternate`, by functions that return how long they took."""
    return sum(function() for _ in range(repeat)) / repeat


def measure(
    processes: Processes, setting: Setting, links: list[float], seconds: float
) -> list[dict[str, Any]]:
    """A row for each way, and one for a ring over each of `links`, in Gbit/s."""
    over = [(way, math.inf) for way in WAYS] + [("ring", gbits) for gbits in links]
    ways = [(replace(setting, way=way), gbits) for way, gbits in over]
    calls = [(way, "computing", math.inf) for way, _ in ways[: len(WAYS)]]
    calls += [(way, kind, gbits) for way, gbits in ways for kind in ("step", "sending")]
    functions = [functools.partial(processes.longest, *call) for call in calls]
    processes.busy.clear()
    alone, *timings = alternate(
        [functools.partial(processes.alone, setting), *functions], seconds, clock
    )
    found = dict(zip(calls, timings, strict=True))
    rows = []
    for way, gbits in ways:
        step, sending = (found[way, kind, gbits] for kind in ("step", "sending"))
        computing = found[way, "computing", math.inf]
        passes = bytes_sent(way.way, way.job(), way.length, WORLD, way.order == IN_ORDER)
        row: dict[str, Any] = {"order": way.order, "pass": PASSES[way.training], "method": way.way}
        row |= {"length": way.length, "gbits": None if math.isinf(gbits) else gbits}
        row |= {"alone_ms": alone.median * 1e3, "ms": step.median * 1e3}
        row |= {"efficiency": alone.median / step.median / WORLD, "spread": step.spread}
        row |= {"sent_bytes": statistics.mean(processes(bytes_counted, way))}
        row |= {"formula_bytes": sum(passes) if way.training else passes[0]}
        row |= {"computing_ms": computing.median * 1e3, "sending_ms": sending.median * 1e3}
        row |= hidden(computing.samples, sending.samples, step.samples)
        rows.append(row | {"busy": statistics.median(processes.busy)})
    return rows


def hidden(computing: list[float], sending: list[float], step: list[float]) -> dict[str, float]:
    """The median over rounds, and its error: in each, what is measured is a moment apart."""
    parts = [(w + c - t) / c for w, c, t in zip(computing, sending, step, strict=True)]
    low, median, high = statistics.quantiles(parts, n=4)
    # For a normal distribution: its deviation, from the quartiles, then the median's.
    error = (high - low) / 1.35 * 1.25 / math.sqrt(len(parts))
    return {"rounds": len(parts), "hidden": min(1.0, max(0.0, median)), "hidden_error": error}


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
    """Adds to the rows of a balanced ring the time and the hidden part by the formula."""
    for r in rows:
        if r["method"] != "ring" or r["order"] == IN_ORDER:
            continue
        given = replace(setting, order=r["order"], length=r["length"])
        job, passes = given.job(*rates_of(rows, given)), 1 + (r["pass"] == "training")
        gbits = r["gbits"] or 8 * r["sent_bytes"] / r["sending_ms"] / 1e6
        step, computing = (
            sum(step_times(job, r["length"], WORLD, rate)[:passes]) for rate in (gbits, math.inf)
        )
        sending = 8 * r["formula_bytes"] / (gbits * 1e9)
        r |= {"formula_ms": 1e3 * step, "formula_hidden": (computing + sending - step) / sending}


# ---------------------------------------------------------------------------------------------
# Shown


def measured_table(rows: list[dict[str, Any]], setting: Setting) -> Table:
    heads = f"{setting.heads} heads, {setting.kv_heads} of keys, head_dim {setting.head_dim}"
    table = Table(title=f"{WORLD} processes, {rows[0]['length']} tokens, {heads}, {setting.dtype}")
    for heading in ("pairs", "pass", "method", "link"):
        table.add_column(heading)
    headings = ["one\nms", "two\nms", "effi-\nciency", "sent\nMB", "by the\nformula"]
    headings += ["compute\nms", "send\nms", "hidden", "by the\nformula", "ms by the\nformula"]
    for heading in headings:
        table.add_column(heading, justify="right")
    for r in rows:
        is_clear = r["hidden_error"] <= UNCLEAR
        computed = "", ""
        if "formula_ms" in r:
            computed = f"{r['formula_hidden']:.2f}", f"{r['formula_ms']:.1f}"
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
            f"{r['hidden']:.2f} ± {r['hidden_error']:.2f}" if is_clear else "unclear",
            *computed,
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048], help="measured")
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
    parser.add_argument("--seconds", type=float, default=8.0, help="for each pass, default 8")
    parser.add_argument("--json", type=Path, help="also write the results here")
    parser.add_argument("--chart", type=Path, help="also draw the scaling, a PNG, here")
    arguments = parser.parse_args()
    kv_heads = arguments.kv_heads or arguments.heads
    if arguments.tflops and len(arguments.tflops) > 2:
        parser.error("--tflops takes the rate of the forward and that of the backward, no more")
    if arguments.heads % WORLD or kv_heads % WORLD:
        parser.error(f"all_to_all needs numbers of heads that are multiples of {WORLD}")
    console = Console()
    console = Console(width=max(console.width, 160))
    torch.set_num_threads(1)
    about_it = about()
    console.print(", ".join(f"{k} {v}" for k, v in about_it.items()))
    sizes = arguments.dtype, arguments.heads, kv_heads, arguments.head_dim
    setting = Setting("ring", ALL, True, max(arguments.lengths), *sizes)
    measured: list[dict[str, Any]] = []
    if not arguments.tflops:
        measured = measure_all(console, setting, arguments)
    jobs = []
    for order in (ALL, BALANCED):
        of_order = replace(setting, order=order)
        if arguments.tflops:
            jobs.append(of_order.job(*(1e12 * arguments.tflops[n] for n in (0, -1))))
        else:
            jobs.append(of_order.job(*rates_of(measured, of_order)))
    source = "given" if arguments.tflops else "measured, with one thread"
    for job in jobs:
        pairs = BALANCED if job.is_causal else ALL
        console.print(f"rates of a machine, {source}, {pairs}: {rates_in_words(job)}")
    hiding = []
    for job, rate in itertools.product(jobs, arguments.gbits):
        forward, backward = hiding_lengths(job, rate)
        row = {"causal": job.is_causal, "gbits": rate, "forward": forward, "backward": backward}
        hiding.append(row)
    console.print(hiding_table(hiding, arguments.gbits))
    rows = scaling(jobs, arguments.gbits)
    console.print(scaling_table(rows, arguments.gbits))
    if arguments.json:
        result = {"machine": about_it, "measured": measured, "jobs": [vars(job) for job in jobs]}
        write({**result, "hiding": hiding, "scaling": rows}, arguments.json)
        console.print(f"written: {arguments.json}")
    if arguments.chart:
        title = f"Ring, causal, forward and backward, {arguments.dtype}, by the formula\n"
        title += f"rates of a machine, {source}: {rates_in_words(jobs[-1])}"
        draw(jobs[-1], arguments.gbits, title, arguments.chart)
        console.print(f"written: {arguments.chart}")


def measure_all(
    console: Console, setting: Setting, arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """Every length, order and pass, printed."""
    todo = [
        replace(setting, length=length, order=order, training=training)
        for length in arguments.lengths
        for order in (ALL, IN_ORDER, BALANCED)
        for training in (False, True)
    ]
    rows: list[dict[str, Any]] = []
    with Processes() as processes:
        for one in track(todo, description=f"{WORLD} processes", console=console):
            rows += measure(processes, one, [arguments.slow], arguments.seconds)
    predict(rows, setting)
    for length in arguments.lengths:
        chosen = [r for r in rows if r["length"] == length]
        console.print(measured_table(chosen, setting))
    console.print(NOTES)
    least = min(r["busy"] for r in rows)
    if least < 0.95:
        console.print(
            f"[red]While they computed, the processes had a core for {least:.0%} of the time only: "
            "others use the machine, and these times are not to be trusted.[/]"
        )
    return rows


if __name__ == "__main__":
    main()
