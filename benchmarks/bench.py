"""Ours, the built-in and the formula, in one process, alternating: ``python benchmarks/bench.py``.

On a GPU, if there is one and the library has kernels for it, gpu.py does it. On the CPU:

Times are medians; ``ratio`` is the built-in's time divided by ours (above 1: ours is faster). The
spread is the distance between the quartiles, relative to the median; peak.cpp measures the peak
first. If the processor's cycles can be read (cycles.py), the share of the peak is given in cycles
as well. Further tables: masks that hide most keys, against ours without a mask (masked.py); two
threads against one; second derivatives and forward mode, which the built-in has on its math backend
only; and the growth of the process's peak memory, each case in a process of its own. ``--chart``
draws speed and memory over length.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu
import torch
from common import (
    DTYPES,
    HELD_TO,
    Case,
    Machine,
    about,
    alternate,
    hold_to,
    jobs_of,
    runner,
    write,
)
from cycles import Counter, UnreadableError, cycles_of
from flex import bench_flex
from masked import MASKED, above, bench_masked, masked_table
from memory import BACKWARD, DOUBLE, DROPOUT, JVP, derivative_runner, memory_of
from options import OPTIONS, bench_options, options_table
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch.nn.attention import SDPBackend, sdpa_kernel

import torch_attn  # noqa: F401  (registers the operators)

FORWARD = ("forward",)
CASES = [
    Case("1x12x2048", 1, 12, 2048),
    Case("1x8x2048 D128", 1, 8, 2048, 128),
    Case("causal 1x12x2048", 1, 12, 2048, causal=True),
    Case("causal 2x12x512", 2, 12, 512, causal=True),
    Case("bool mask 2x12x1024", 2, 12, 1024, mask="bool", passes=FORWARD),
    Case("8x12x128", 8, 12, 128),
    Case("4x12x197", 4, 12, 197),
    Case("64x12x16", 64, 12, 16),
    Case("8x12x128 D32", 8, 12, 128, 32),
    Case("decode 32 heads x 4k D128", 1, 32, 1, 128, keys=4096, passes=FORWARD),
    Case("decode GQA 32:8 x 4k D128", 1, 32, 1, 128, keys=4096, kv_heads=8, passes=FORWARD),
    Case("decode MQA 8:1 x 16k D128", 1, 8, 1, 128, keys=16384, kv_heads=1, passes=FORWARD),
    Case("decode 1 head x 64k D128", 1, 1, 1, 128, keys=65536, passes=FORWARD),
    Case("decode 32:1 x 4k", 1, 32, 1, keys=4096, kv_heads=1, passes=FORWARD),
    Case("drafts of 8, 32:8 x 4k D128", 1, 32, 8, 128, keys=4096, kv_heads=8, passes=FORWARD),
    Case("MLA 16:1 x 4k 576/512", 1, 16, 1, 576, 4096, kv_heads=1, value_dim=512, passes=FORWARD),
    Case("MLA 128:1 x 4k 576/512", 1, 128, 1, 576, 4096, kv_heads=1, value_dim=512, passes=FORWARD),
    Case("dropout 0.1 1x12x1024", 1, 12, 1024, dropout=0.1),
    Case("d_v = 96 1x12x1024", 1, 12, 1024, value_dim=96),
    Case("mask gradient 1x12x1024", 1, 12, 1024, mask="grad", passes=("backward",)),
    Case("3-D 12x1024", 1, 12, 1024, flat=True),
    Case("1x1x1 (call overhead)", 1, 1, 1),
]
CHART_CASES = [Case(f"length 1x12x{n}", 1, 12, n) for n in (64, 128, 256, 512, 1024, 2048, 4096)]
THREAD_DTYPES = ("f32", "bf16")
THREAD_CASES = [
    Case("threads 1x12x2048", 1, 12, 2048, dtypes=THREAD_DTYPES),
    Case("threads one head 1x1x4096", 1, 1, 4096, dtypes=THREAD_DTYPES),
    Case("threads 8x12x128", 8, 12, 128, dtypes=THREAD_DTYPES),
]


# Through torch.ops: it costs microseconds that a call of one query would count.
OPERATORS = (torch.ops.attn.sdpa, torch.ops.aten.scaled_dot_product_attention)


def unfused(*tensors: torch.Tensor, **options: Any) -> torch.Tensor:
    """The built-in's formula, by products of whole matrices; the choice takes microseconds, too."""
    with sdpa_kernel(SDPBackend.MATH):
        return torch.ops.aten.scaled_dot_product_attention(*tensors, **options)


def bench_speed(
    console: Console,
    machine: Machine,
    cases: list[Case],
    seconds: float,
    wanted: str,
    counted: bool,
) -> list[dict[str, Any]]:
    """With the share of the peak in cycles where these are `counted`."""
    jobs = jobs_of(cases, wanted)
    rows = []
    for case, which, name in track(jobs, description="forward and backward", console=console):
        dtype = DTYPES[name]
        functions = [runner(f, case, dtype, which) for f in (*OPERATORS, unfused)]
        ours, builtin, plain = alternate(functions, seconds)
        row = {
            "case": case.name,
            "pass": which,
            "dtype": name,
            "length": case.queries,
            "ours_ms": ours.median * 1e3,
            "builtin_ms": builtin.median * 1e3,
            "unfused_ms": plain.median * 1e3,
            "ratio": builtin.median / ours.median,
            "spread": max(ours.spread, builtin.spread),
            "gflops": case.flops(which) / ours.median / 1e9,
            "builtin_gflops": case.flops(which) / builtin.median / 1e9,
        }
        row["of_peak"] = row["gflops"] / machine.gflops[name]
        if case.rows_of_key_head <= 8 and case.keys:  # bound by reading key and value
            row["gbytes"] = case.bytes_of_keys(dtype) / ours.median / 1e9
            row["of_peak"] = row["gbytes"] / machine.read_gbytes(case.bytes_of_keys(dtype))
        elif counted:
            with Counter() as counter:
                per_cycle = case.flops(which) / cycles_of(functions[0], counter)
            row["of_peak_cycles"] = per_cycle / machine.per_cycle[name]
        rows.append(row)
    return rows


def speed_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="Time of one call, B x H x L, D = 64; peak: of FMAs, or of reading (GB/s)")
    for heading in ("shape", "pass", "dtype"):
        table.add_column(heading)
    counted = any("of_peak_cycles" in r for r in rows)
    headings = ("attn ms", "built-in ms", "ratio", "unfused ms", "spread", "GFLOP/s", "of peak")
    for heading in (*headings, *(["in cycles"] if counted else [])):
        table.add_column(heading, justify="right")
    for r in rows:
        rate = f"{r['gbytes']:.0f} GB/s" if "gbytes" in r else f"{r['gflops']:.0f}"
        table.add_row(
            r["case"],
            r["pass"],
            r["dtype"],
            f"{r['ours_ms']:.3f}",
            f"{r['builtin_ms']:.3f}",
            f"[{'green' if r['ratio'] >= 1 else 'red'}]{r['ratio']:.2f}[/]",
            f"{r['unfused_ms']:.3f}",
            f"{r['spread']:.0%}",
            rate,
            f"{r['of_peak']:.0%}",
            *([f"{r['of_peak_cycles']:.0%}"] if "of_peak_cycles" in r else []),
        )
    return table


# ---------------------------------------------------------------------------------------------
# Threads


def bench_threads(console: Console, seconds: float, wanted: str) -> list[dict[str, Any]]:
    """Ours on one thread and on all."""
    threads = torch.get_num_threads()
    rows = []
    jobs = jobs_of(THREAD_CASES, wanted) if threads > 1 else []
    for case, which, name in track(jobs, description="threads", console=console):
        run = runner(OPERATORS[0], case, DTYPES[name], which)

        def on(n: int, run: Callable[[], Any] = run) -> Callable[[], Any]:
            def call() -> None:
                torch.set_num_threads(n)
                run()

            return call

        one, all_of_them = alternate([on(1), on(threads)], seconds)
        rows.append(
            {
                "case": case.name.removeprefix("threads "),
                "pass": which,
                "dtype": name,
                "threads": threads,
                "one_ms": one.median * 1e3,
                "all_ms": all_of_them.median * 1e3,
                "ratio": one.median / all_of_them.median,
            }
        )
    return rows


def threads_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title=f"{rows[0]['threads']} threads against one")
    for heading in ("shape", "pass", "dtype"):
        table.add_column(heading)
    for heading in ("one ms", "all ms", "ratio"):
        table.add_column(heading, justify="right")
    for r in rows:
        times = (f"{r['one_ms']:.2f}", f"{r['all_ms']:.2f}", f"{r['ratio']:.2f}")
        table.add_row(r["case"], r["pass"], r["dtype"], *times)
    return table


# ---------------------------------------------------------------------------------------------
# Second derivatives and forward mode; memory


def bench_derivatives(
    console: Console, seconds: float, lengths: list[int], wanted: str
) -> list[dict[str, Any]]:
    rows = []
    jobs = [(k, n) for k in (DOUBLE, JVP) for n in lengths if wanted in f"{k} {n}"]
    for kind, length in track(jobs, description="derivatives", console=console):
        ours, builtin = alternate(
            [derivative_runner(kind, o, length) for o in (True, False)], seconds
        )
        rows.append(
            {
                "kind": kind,
                "length": length,
                "ours_ms": ours.median * 1e3,
                "builtin_ms": builtin.median * 1e3,
                "ratio": builtin.median / ours.median,
            }
        )
    add_memory(rows)
    return rows


def bench_memory(lengths: list[int], wanted: str) -> list[dict[str, Any]]:
    jobs = [(k, n) for k in (BACKWARD, DROPOUT) for n in lengths if wanted in f"memory {k} {n}"]
    rows: list[dict[str, Any]] = [{"kind": kind, "length": length} for kind, length in jobs]
    add_memory(rows)
    return rows


def add_memory(rows: list[dict[str, Any]]) -> None:
    calls = [(r["kind"], ours, r["length"]) for r in rows for ours in (True, False)]
    mib = memory_of(calls) if calls else []
    for r, ours, builtin in zip(rows, mib[::2], mib[1::2], strict=True):
        r.update(ours_mib=ours, builtin_mib=builtin)


def memory_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="Peak memory beside the inputs: 1 x 2 x L, D = 64, float32")
    table.add_column("")
    for heading in ("L", "attn MiB", "built-in MiB"):
        table.add_column(heading, justify="right")
    for r in rows:
        mib = (f"{r['ours_mib']:.0f}", f"{r['builtin_mib']:.0f}")
        table.add_row(r["kind"], str(r["length"]), *mib)
    return table


def derivatives_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(
        title="Second derivatives and forward mode: 1 x 2 x L, D = 64, float32, built-in: math"
    )
    table.add_column("derivative")
    for heading in ("L", "attn ms", "built-in ms", "ratio", "attn MiB", "built-in MiB"):
        table.add_column(heading, justify="right")
    for r in rows:
        table.add_row(
            r["kind"],
            str(r["length"]),
            f"{r['ours_ms']:.1f}",
            f"{r['builtin_ms']:.1f}",
            f"{r['ratio']:.2f}",
            f"{r['ours_mib']:.0f}",
            f"{r['builtin_mib']:.0f}",
        )
    return table


def why_no_cycles() -> str:
    """Nothing where the processor's cycles can be read."""
    try:
        with Counter():
            return ""
    except UnreadableError as reason:
        return str(reason)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="short runs, short sequences")
    parser.add_argument(
        "--filter", default="", help="only cases whose 'shape pass dtype' contains this"
    )
    parser.add_argument("--json", type=Path, help="also write the results here")
    parser.add_argument("--chart", type=Path, help="also draw speed and memory, a PNG, here")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU if it can be")
    parser.add_argument(
        "--capability",
        choices=HELD_TO,
        help="hold ours, and PyTorch's libraries, to this instruction set; of the CPU",
    )
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not gpu.usable():
        parser.error("no GPU, or no CUDA in torch or torch_attn: see python -m torch_attn")
    if arguments.capability:
        hold_to(arguments.capability)

    on_gpu = arguments.device == "cuda" or not (
        arguments.device or arguments.capability or not gpu.usable()
    )
    console = Console()
    # Numbers are not cut, also where piped.
    console = Console(width=max(console.width, 150 if on_gpu else 120))
    if on_gpu:
        gpu.main(
            console,
            gpu.QUICK if arguments.quick else gpu.CASES,
            seconds=0.1 if arguments.quick else 0.3,
            limit=45 if arguments.quick else 270,
            wanted=arguments.filter,
            json=arguments.json,
            chart=arguments.chart,
        )
        return

    about_it = about()
    console.print(", ".join(f"{k} {v}" for k, v in about_it.items()))
    machine = Machine(arguments.capability)
    about_it["peak_gflops"] = machine.gflops
    rates = ", ".join(f"{name} {rate:.0f}" for name, rate in machine.gflops.items())
    console.print(f"peak of {torch.get_num_threads()} threads, GFLOP/s: {rates}")
    unreadable = why_no_cycles()
    if unreadable:
        console.print(f"share of the peak in cycles: left out, {unreadable}")
    else:
        about_it["peak_flops_per_cycle"] = machine.per_cycle
    seconds = 0.1 if arguments.quick else 1.0
    lengths = [512, 1024] if arguments.quick else [512, 1024, 2048, 4096, 8192]
    cases = CASES + (CHART_CASES if arguments.chart else [])
    speed = bench_speed(console, machine, cases, seconds, arguments.filter, not unreadable)
    if speed:
        console.print(speed_table(speed))
    masked = bench_masked(console, MASKED, seconds, arguments.filter)
    if masked:
        console.print(masked_table(masked))
        console.print(f"{above(masked)} of {len(masked)} rows above what they should take at most")
    options = bench_options(console, OPTIONS, seconds, arguments.filter, not arguments.quick)
    if options:
        title = "Options; instead: causal (windows), the slice (a cache), else the plain call"
        console.print(options_table(options, title))
        console.print(
            f"{above(options)} of {len(options)} rows above what they should take at most"
        )
    functions = bench_flex(console, seconds, arguments.filter, not arguments.quick)
    if functions:
        console.print(options_table(functions, "Functions of the pair; instead: see flex.py"))
        console.print(
            f"{above(functions)} of {len(functions)} rows above what they should take at most"
        )
    threads = bench_threads(console, seconds, arguments.filter)
    if threads:
        console.print(threads_table(threads))
    derivatives = bench_derivatives(console, seconds, lengths, arguments.filter)
    if derivatives:
        console.print(derivatives_table(derivatives))
    memory = bench_memory(lengths, arguments.filter)
    if memory:
        console.print(memory_table(memory))
    result = {
        "machine": about_it,
        "speed": speed,
        "masked": masked,
        "options": options,
        "functions": functions,
        "threads": threads,
        "derivatives": derivatives,
        "memory": memory,
    }
    if arguments.json:
        write(result, arguments.json)
        console.print(f"written: {arguments.json}")
    if arguments.chart:
        from chart import draw

        drawn = draw(result, arguments.chart)
        console.print(f"written: {arguments.chart}" if drawn else "no chart: no rows over length")


if __name__ == "__main__":
    main()
