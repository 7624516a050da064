"""Few queries over many keys, as a grid: ``python benchmarks/decode.py``.

Queries (1 to 16) by keys (16 to 4096) by head_dim, eight heads, forward, ours and the built-in
alternating in one process. A number is the built-in's time divided by ours: at 1 or above no call
of decoding gets slower by changing the operator. head_dim 20 and 100 are no multiples of a vector.

Then many heads on few key heads, over 4096 keys: GFLOP/s, and their share of the rate of a long
forward with the same sizes of head. Then the same queries over caches of bfloat16 and of 8 bits.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bench import OPERATORS
from common import DTYPES, HELD_TO, Case, Machine, about, alternate, hold_to, runner, write
from rich.console import Console
from rich.progress import track
from rich.table import Table

import torch_attn

HEADS = 8
QUERIES = (1, 2, 4, 8, 16)
KEYS = (16, 32, 64, 128, 256, 1024, 4096)
HEAD_DIMS = (20, 64, 100, 128)


def measure(
    console: Console, dtypes: list[str], head_dims: list[int], seconds: float
) -> list[dict[str, Any]]:
    jobs = list(itertools.product(dtypes, head_dims, QUERIES, KEYS))
    rows = []
    for name, head_dim, queries, keys in track(jobs, description="decoding", console=console):
        case = Case("decode", 1, HEADS, queries, head_dim, keys=keys)
        functions = [runner(operator, case, DTYPES[name], "forward") for operator in OPERATORS]
        ours, builtin = alternate(functions, seconds)
        rows.append(
            {
                "dtype": name,
                "head_dim": head_dim,
                "queries": queries,
                "keys": keys,
                "ours_us": ours.median * 1e6,
                "builtin_us": builtin.median * 1e6,
                "ratio": builtin.median / ours.median,
                "spread": max(ours.spread, builtin.spread),
            }
        )
    return rows


GROUPED = ((8, 1, 1), (16, 1, 1), (32, 1, 1), (128, 1, 1), (32, 8, 4), (32, 8, 16))
GROUPED_DIMS = ((64, 64), (128, 128), (576, 512))


def measure_grouped(console: Console, dtypes: list[str], seconds: float) -> list[dict[str, Any]]:
    """The shapes of GROUPED; multi-head latent attention has heads of 576 and 512."""
    rows = []
    jobs = list(itertools.product(dtypes, GROUPED_DIMS))
    for name, (head_dim, value_dim) in track(jobs, description="grouped", console=console):
        long = Case("long", 1, 8, 1024, head_dim, keys=2048, value_dim=value_dim)
        few = [
            Case("few", 1, heads, queries, head_dim, 4096, kv_heads, value_dim)
            for heads, kv_heads, queries in GROUPED
        ]
        for case in few:
            functions = [runner(OPERATORS[0], c, DTYPES[name], "forward") for c in (case, long)]
            times = alternate(functions, seconds)
            rates = [
                c.flops("forward") / t.median / 1e9
                for c, t in zip((case, long), times, strict=True)
            ]
            rows.append(
                {
                    "dtype": name,
                    "head_dim": head_dim,
                    "value_dim": value_dim,
                    "heads": case.heads,
                    "kv_heads": case.kv_heads,
                    "queries": case.queries,
                    "gflops": rates[0],
                    "of_long": rates[0] / rates[1],
                }
            )
    return rows


def grouped_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="Queries that share a key, over 4096 keys: GFLOP/s (of a long forward's)")
    dtypes = list(dict.fromkeys(r["dtype"] for r in rows))
    for heading in ("head_dim", "heads : key heads, queries", *dtypes):
        table.add_column(heading, justify="right")
    keys = ("head_dim", "value_dim", "heads", "kv_heads", "queries")
    for shape in dict.fromkeys(tuple(r[k] for k in keys) for r in rows):
        found = [r for r in rows if tuple(r[k] for k in keys) == shape]
        head_dim, value_dim, heads, kv_heads, queries = shape
        table.add_row(
            f"{head_dim} / {value_dim}",
            f"{heads} : {kv_heads}, {queries}",
            *(f"{r['gflops']:.0f} ({r['of_long']:.2f})" for r in found),
        )
    return table


CACHES = [
    Case("32 : 32, 1 query, 4096 keys", 1, 32, 1, 128, 4096, 32),
    Case("32 : 8, 1 query, 16384 keys", 1, 32, 1, 128, 16384, 8),
    Case("32 : 4, 1 query, 16384 keys", 1, 32, 1, 128, 16384, 4),
    Case("32 : 8, 8 queries, 4096 keys", 1, 32, 8, 128, 4096, 8),
    Case("32 : 8, 64 queries, 4096 keys", 1, 32, 64, 128, 4096, 8),
]
STORED = (torch.bfloat16, torch.int8, torch.float8_e4m3fn)
ENOUGH = 200_000_000  # bytes of caches that are read in turn, so that they come from memory


def over_caches(case: Case, stored: torch.dtype) -> tuple[Callable[[], None], int, int]:
    """Calls over many caches of a dtype, their number, and the bytes that each call reads."""
    caches = []
    size = case.bytes_of_keys(stored)
    while len(caches) < 2 or len(caches) * size < ENOUGH:
        (query, key, value), options = case.inputs(torch.bfloat16)
        if stored != torch.bfloat16:
            key, options["key_scale"] = torch_attn.quantize_kv(key, stored)
            value, options["value_scale"] = torch_attn.quantize_kv(value, stored)
        caches.append(((query, key, value), options))
    scales = (options[n] for n in options if n.endswith("_scale"))

    def run() -> None:
        with torch.inference_mode():
            for tensors, options in caches:
                torch_attn.sdpa(*tensors, **options)

    return run, len(caches), size + sum(scale.nbytes for scale in scales)


def measure_caches(
    console: Console, machine: Machine, cases: list[Case], seconds: float
) -> list[dict[str, Any]]:
    rows = []
    for case in track(cases, description="caches", console=console):
        runs, counts, sizes = zip(*(over_caches(case, dtype) for dtype in STORED), strict=True)
        timings = alternate(list(runs), len(runs) * seconds)
        times = [t.median / count for t, count in zip(timings, counts, strict=True)]
        for dtype, took, size in zip(STORED, times, sizes, strict=True):
            rows.append(
                {
                    "case": case.name,
                    "stored": str(dtype).removeprefix("torch."),
                    "us": took * 1e6,
                    "gbytes": size / took / 1e9,
                    "of_read": size / took / 1e9 / machine.read_gbytes(ENOUGH),
                    "ratio": times[0] / took,
                }
            )
    return rows


def caches_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="Caches that come from memory, D = 128, queries in bfloat16")
    for heading in ("heads : key heads", "stored", "us", "GB/s", "of reading", "ratio"):
        table.add_column(heading, justify="right")
    for r in rows:
        numbers = (f"{r['us']:.0f}", f"{r['gbytes']:.1f}", f"{r['of_read']:.0%}")
        table.add_row(r["case"], r["stored"], *numbers, f"{r['ratio']:.2f}")
    return table


def tables(rows: list[dict[str, Any]]) -> list[Table]:
    """A table for every dtype and head_dim: queries down, keys across."""
    found = []
    for name, head_dim in dict.fromkeys((r["dtype"], r["head_dim"]) for r in rows):
        table = Table(title=f"{name}, head_dim {head_dim}: the built-in's time / ours")
        table.add_column("queries", justify="right")
        for keys in KEYS:
            table.add_column(f"{keys} keys", justify="right")
        for queries in QUERIES:
            ratios = [
                r["ratio"]
                for r in rows
                if (r["dtype"], r["head_dim"], r["queries"]) == (name, head_dim, queries)
            ]
            cells = [f"[{'green' if ratio >= 1 else 'red'}]{ratio:.2f}[/]" for ratio in ratios]
            table.add_row(str(queries), *cells)
        found.append(table)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument(
        "--head-dim", nargs="*", type=int, default=list(HEAD_DIMS), help="none: without the grid"
    )
    parser.add_argument("--seconds", type=float, default=0.2, help="for one number, default 0.2")
    parser.add_argument(
        "--grouped",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also many heads on few key heads, and caches of 8 bits",
    )
    parser.add_argument("--json", type=Path, help="also write the results here")
    parser.add_argument(
        "--capability",
        choices=HELD_TO,
        help="hold ours, and PyTorch's libraries, to this instruction set",
    )
    arguments = parser.parse_args()
    if arguments.capability:
        hold_to(arguments.capability)
    console = Console()
    console = Console(width=max(console.width, 120))
    about_it = about()
    console.print(", ".join(f"{k} {v}" for k, v in about_it.items()))
    torch.manual_seed(0)
    rows = measure(console, arguments.dtype, arguments.head_dim, arguments.seconds)
    for table in tables(rows):
        console.print(table)
    grouped, caches = [], []
    if arguments.grouped:
        grouped = measure_grouped(console, arguments.dtype, arguments.seconds)
        console.print(grouped_table(grouped))
        caches = measure_caches(console, Machine(arguments.capability), CACHES, arguments.seconds)
        console.print(caches_table(caches))
    slower = sum(r["ratio"] < 1 for r in rows)
    console.print(f"{slower} of {len(rows)} slower than the built-in")
    if arguments.json:
        write(
            {"machine": about_it, "decode": rows, "grouped": grouped, "caches": caches},
            arguments.json,
        )
        console.print(f"written: {arguments.json}")


if __name__ == "__main__":
    main()
