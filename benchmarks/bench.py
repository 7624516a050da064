"""Ours against the built-in, in one process, alternating: ``python benchmarks/bench.py``.

Times are medians; ``ratio`` is the built-in's time divided by ours (above 1: ours is faster), the
spread is the distance between the quartiles relative to the median. The second table takes second
derivatives and forward mode, which the built-in has on its math backend only, with the growth of
the process's peak memory, each case in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch.nn.attention import SDPBackend, sdpa_kernel

import torch_attn

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


@dataclass(frozen=True)
class Case:
    """One shape: query [batch, heads, queries, head_dim], key and value with their own heads."""

    name: str
    batch: int
    heads: int
    queries: int
    head_dim: int
    keys: int | None = None
    kv_heads: int | None = None
    value_dim: int | None = None
    causal: bool = False
    mask: str | None = None  # "bool", or "grad": a floating mask that wants a gradient
    dropout: float = 0.0
    flat: bool = False  # 3-D input
    passes: tuple[str, ...] = ("forward", "backward")
    dtypes: tuple[str, ...] = ("f32", "bf16", "f16")

    def inputs(self, dtype: torch.dtype) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
        keys, kv_heads = self.keys or self.queries, self.kv_heads or self.heads
        shapes = [
            (self.batch, self.heads, self.queries, self.head_dim),
            (self.batch, kv_heads, keys, self.head_dim),
            (self.batch, kv_heads, keys, self.value_dim or self.head_dim),
        ]
        if self.flat:
            shapes = [shape[1:] for shape in shapes]
        tensors = tuple(torch.randn(shape, dtype=dtype) for shape in shapes)
        options: dict[str, Any] = {"is_causal": self.causal, "dropout_p": self.dropout}
        if kv_heads != self.heads:
            options["enable_gqa"] = True
        if self.mask == "bool":
            options["attn_mask"] = torch.rand(self.queries, keys) > 0.3
        if self.mask == "grad":
            options["attn_mask"] = torch.randn(self.heads, self.queries, keys).to(dtype)
        return tensors, options

    def flops(self) -> float:
        """Of the forward: two products over every visible pair of query and key."""
        keys = self.keys or self.queries
        pairs = self.batch * self.heads * self.queries * keys * (0.5 if self.causal else 1)
        return 2 * pairs * (self.head_dim + (self.value_dim or self.head_dim))


FORWARD = ("forward",)
CASES = [
    Case("1x12x2048", 1, 12, 2048, 64),
    Case("1x8x2048 D128", 1, 8, 2048, 128),
    Case("causal 1x12x2048", 1, 12, 2048, 64, causal=True),
    Case("causal 2x12x512", 2, 12, 512, 64, causal=True),
    Case("bool mask 2x12x1024", 2, 12, 1024, 64, mask="bool", passes=FORWARD),
    Case("8x12x128", 8, 12, 128, 64),
    Case("4x12x197", 4, 12, 197, 64),
    Case("64x12x16", 64, 12, 16, 64),
    Case("8x12x128 D32", 8, 12, 128, 32),
    Case("decode 32 heads x 4k D128", 1, 32, 1, 128, keys=4096, passes=FORWARD),
    Case("decode GQA 32:8 x 4k D128", 1, 32, 1, 128, keys=4096, kv_heads=8, passes=FORWARD),
    Case("decode MQA 8:1 x 16k D128", 1, 8, 1, 128, keys=16384, kv_heads=1, passes=FORWARD),
    Case("decode 1 head x 64k D128", 1, 1, 1, 128, keys=65536, passes=FORWARD),
    Case("dropout 0.1 1x12x1024", 1, 12, 1024, 64, dropout=0.1),
    Case("d_v = 96 1x12x1024", 1, 12, 1024, 64, value_dim=96),
    Case("mask gradient 1x12x1024", 1, 12, 1024, 64, mask="grad", passes=("backward",)),
    Case("3-D 12x1024", 1, 12, 1024, 64, flat=True),
    Case("1x1x1 (call overhead)", 1, 1, 1, 64),
]


@dataclass
class Timing:
    """Seconds of repeated runs of one thing."""

    samples: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def spread(self) -> float:
        if len(self.samples) < 4:
            return 0.0
        low, _, high = statistics.quantiles(self.samples, n=4)
        return (high - low) / self.median


def alternate(functions: list[Callable[[], Any]], seconds: float) -> list[Timing]:
    """Times the functions in turn until `seconds` have passed, at least five rounds each.

    Functions of microseconds are called many times a sample.
    """
    repeats = []
    for function in functions:
        function()
        start = time.perf_counter()
        function()
        repeats.append(max(1, int(2e-3 / max(time.perf_counter() - start, 1e-7))))
    timings = [Timing() for _ in functions]
    deadline = time.perf_counter() + seconds
    while len(timings[0].samples) < 5 or time.perf_counter() < deadline:
        for function, timing, repeat in zip(functions, timings, repeats, strict=True):
            start = time.perf_counter()
            for _ in range(repeat):
                function()
            timing.samples.append((time.perf_counter() - start) / repeat)
    return timings


def runner(
    operator: Callable[..., torch.Tensor], case: Case, dtype: torch.dtype, which: str
) -> Callable[[], Any]:
    torch.manual_seed(0)
    tensors, options = case.inputs(dtype)
    if which == "forward":

        def forward() -> torch.Tensor:
            with torch.inference_mode():
                return operator(*tensors, **options)

        return forward
    inputs = [t.requires_grad_() for t in tensors]
    if case.mask == "grad":
        inputs.append(options["attn_mask"].requires_grad_())
    output = operator(*tensors, **options)
    gradient = torch.randn_like(output)
    return lambda: torch.autograd.grad(output, inputs, gradient, retain_graph=True)


def peak_flops() -> float:
    """float32 matrix products per second: the machine's practical peak, measured now."""
    a = torch.randn(2048, 2048)
    (timing,) = alternate([lambda: a @ a], 1.0)
    return 2 * 2048**3 / timing.median


def bench_speed(console: Console, seconds: float, wanted: str) -> list[dict[str, Any]]:
    peak = peak_flops()
    console.print(f"float32 matmul on {torch.get_num_threads()} threads: {peak / 1e9:.0f} GFLOP/s")
    # Both through torch.ops: it costs microseconds that a call of one query would count.
    operators = [torch.ops.attn.sdpa, torch.ops.aten.scaled_dot_product_attention]
    rows = []
    jobs = [
        (case, which, name)
        for case in CASES
        for which in case.passes
        for name in case.dtypes
        if wanted in f"{case.name} {which} {name}"
    ]
    for case, which, name in track(jobs, description="forward and backward", console=console):
        functions = [runner(operator, case, DTYPES[name], which) for operator in operators]
        ours, builtin = alternate(functions, seconds)
        flops = case.flops() * (2.5 if which == "backward" else 1)
        rows.append(
            {
                "case": case.name,
                "pass": which,
                "dtype": name,
                "ours_ms": ours.median * 1e3,
                "builtin_ms": builtin.median * 1e3,
                "ratio": builtin.median / ours.median,
                "spread": max(ours.spread, builtin.spread),
                "gflops": flops / ours.median / 1e9,
                "of_f32_matmul": flops / ours.median / peak,
            }
        )
    return rows


def speed_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="Time of one call")
    for heading in ("shape (B x H x L, D = 64)", "pass", "dtype"):
        table.add_column(heading)
    for heading in ("attn ms", "built-in ms", "ratio", "spread", "GFLOP/s", "of f32 matmul"):
        table.add_column(heading, justify="right")
    for r in rows:
        color = "green" if r["ratio"] >= 1 else "red"
        table.add_row(
            r["case"],
            r["pass"],
            r["dtype"],
            f"{r['ours_ms']:.3f}",
            f"{r['builtin_ms']:.3f}",
            f"[{color}]{r['ratio']:.2f}[/]",
            f"{r['spread']:.0%}",
            f"{r['gflops']:.0f}",
            f"{r['of_f32_matmul']:.0%}",
        )
    return table


# ---------------------------------------------------------------------------------------------
# Second derivatives and forward mode, with memory


def derivative_runner(kind: str, ours: bool, length: int) -> Callable[[], Any]:
    """Of 1 x 2 heads x length, D = 64, float32. The built-in runs on its math backend."""
    torch.manual_seed(0)
    tensors = [torch.randn(1, 2, length, 64) for _ in range(3)]
    tangents = [torch.randn_like(t) for t in tensors]

    def attention(*inputs: torch.Tensor) -> torch.Tensor:
        if ours:
            return torch.ops.attn.sdpa(*inputs)
        with sdpa_kernel(SDPBackend.MATH):
            return torch.nn.functional.scaled_dot_product_attention(*inputs)

    if kind == "jvp":
        return lambda: torch.func.jvp(attention, tuple(tensors), tuple(tangents))

    def double_backward() -> Any:
        inputs = [t.requires_grad_() for t in tensors]
        first = torch.autograd.grad(attention(*inputs).square().sum(), inputs, create_graph=True)
        product = sum((g * t).sum() for g, t in zip(first, tangents, strict=True))
        return torch.autograd.grad(product, inputs)

    return double_backward


def peak_memory() -> float:
    """MiB this process held at most. (getrusage's ru_maxrss would begin with the parent's.)"""
    lines = Path("/proc/self/status").read_text().splitlines()
    (kib,) = [line.split()[1] for line in lines if line.startswith("VmHWM")]
    return int(kib) / 1024


def measure_memory(kind: str, ours: bool, length: int) -> float:
    """MiB by which one call raises the peak of a fresh process above a call of 64 tokens."""
    derivative_runner(kind, ours, 64)()
    run = derivative_runner(kind, ours, length)
    before = peak_memory()
    run()
    return peak_memory() - before


def memory_of(kind: str, ours: bool, length: int) -> float:
    command = [
        sys.executable,
        __file__,
        "--memory-of",
        kind,
        "attn" if ours else "math",
        str(length),
    ]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def bench_derivatives(
    console: Console, seconds: float, lengths: list[int], wanted: str
) -> list[dict[str, Any]]:
    rows = []
    jobs = [(k, n) for k in ("double backward", "jvp") for n in lengths if wanted in f"{k} {n}"]
    for kind, length in track(jobs, description="derivatives", console=console):
        key = "jvp" if kind == "jvp" else "double"
        ours, builtin = alternate(
            [derivative_runner(key, o, length) for o in (True, False)], seconds
        )
        rows.append(
            {
                "kind": kind,
                "length": length,
                "ours_ms": ours.median * 1e3,
                "builtin_ms": builtin.median * 1e3,
                "ratio": builtin.median / ours.median,
                "ours_mib": memory_of(key, True, length),
                "builtin_mib": memory_of(key, False, length),
            }
        )
    return rows


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


def machine() -> dict[str, Any]:
    model = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [
            line.split(":", 1)[1]
            for line in cpuinfo.read_text().splitlines()
            if line.startswith("model name")
        ]
        model = names[0].strip() if names else model
    return {
        "date": date.today().isoformat(),
        "cpu": model,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "torch_attn": torch_attn.__version__,
        "capability": torch.ops.attn._cpu_capability(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="short runs, short sequences")
    parser.add_argument(
        "--filter", default="", help="only cases whose 'shape pass dtype' contains this"
    )
    parser.add_argument("--json", type=Path, help="also write the results here")
    parser.add_argument("--memory-of", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.memory_of:
        kind, whose, length = arguments.memory_of
        print(measure_memory(kind, whose == "attn", int(length)))
        return

    console = Console()
    console = Console(width=max(console.width, 120))  # numbers are not cut, also where piped
    about = machine()
    console.print(", ".join(f"{k} {v}" for k, v in about.items()))
    seconds = 0.1 if arguments.quick else 1.0
    lengths = [512, 1024] if arguments.quick else [512, 1024, 2048, 4096, 8192]
    speed = bench_speed(console, seconds, arguments.filter)
    if speed:
        console.print(speed_table(speed))
    derivatives = bench_derivatives(console, seconds, lengths, arguments.filter)
    if derivatives:
        console.print(derivatives_table(derivatives))
    if arguments.json:
        result = {"machine": about, "speed": speed, "derivatives": derivatives}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
        console.print(f"written: {arguments.json}")


if __name__ == "__main__":
    main()
