"""Ours against the backends of the built-in on a GPU: what bench.py runs where there is one.

Ours and every backend that takes the case alternate in one process. Times are medians of the GPU's
own time between two events around a call, which finds nothing of its inputs in the cache; ``ratio``
is a backend's time divided by ours (above 1: ours is faster). The peak is a matrix product's rate,
or the rate of reading memory where one query reads keys and values. "FLASH det." is FLASH's
backward under torch.use_deterministic_algorithms, as ours always is. "dense" is attn's own time for
the same rows and keys without packing, pages, a window, sinks, a cap, ALiBi, keys of 8 bits or
values that are the keys' first columns ("latent"). "peak" is for latent rows. It compares the row
with two goals: 0.6 of the rate of a matrix product, and 0.85 of the rate of reading. 1 or more: one
is reached.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import DTYPES, Case, Clock, Timing, about, alternate, jobs_of, run_of, runner, write
from rich import box
from rich.console import Console
from rich.table import Table
from torch.nn.attention import SDPBackend, sdpa_kernel

import torch_attn

TOKENS = 16384  # batch x length, and heads x head_dim = 2048, as in FlashAttention's papers
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
HALF = ("bf16", "f16")


def over_length(
    lengths: tuple[int, ...], dims: tuple[int, ...], dtypes: tuple[str, ...]
) -> list[Case]:
    return [
        Case(
            f"{'causal ' if causal else ''}{TOKENS // n}x{2048 // dim}x{n} D{dim}",
            TOKENS // n,
            2048 // dim,
            n,
            dim,
            causal=causal,
            dtypes=dtypes,
        )
        for dim in dims
        for causal in (False, True)
        for n in lengths
    ]


# Heads of the query and of the key, batch, keys and head_dim.
DECODING = (
    (32, 8, 64, 4096, 128),
    (32, 8, 1, 16384, 128),
    (32, 8, 1, 65536, 128),
    (32, 32, 16, 4096, 128),
    (32, 4, 64, 4096, 64),
)
# Likewise of latent attention, whose keys have one head of 576 columns.
LATENT = ((128, 32, 16384), (128, 1, 16384), (128, 1, 65536), (16, 64, 4096))
EIGHT_BITS = {"int8": torch.int8, "e4m3": torch.float8_e4m3fn}  # forms of a call
OPTIONS = ("softcap", "alibi", "learned alibi")  # likewise


def decoding(dtypes: tuple[str, ...], form: str = "") -> list[Case]:
    return [
        Case(
            f"decode {heads}:{kv_heads} {batch} x {keys // 1024}k D{dim}" + f" {form}" * bool(form),
            batch,
            heads,
            1,
            dim,
            keys=keys,
            kv_heads=kv_heads,
            passes=("forward",),
            dtypes=dtypes,
            form=form,
        )
        for heads, kv_heads, batch, keys, dim in DECODING
    ]


def latent(dtypes: tuple[str, ...]) -> list[Case]:
    return [
        Case(f"latent {heads}:1 {batch} x {keys // 1024}k D576/512", batch, heads, 1, 576,
             keys=keys, kv_heads=1, value_dim=512, passes=("forward",), dtypes=dtypes,
             form="latent")
        for heads, batch, keys in LATENT
    ]  # fmt: skip


def others(dtypes: tuple[str, ...]) -> list[Case]:
    """Decoding, and what FLASH refuses."""
    return [
        *decoding(dtypes),
        Case("bool mask 8x32x2048 D64", 8, 32, 2048, mask="bool", dtypes=dtypes),
        Case("bool mask 8x16x2048 D128", 8, 16, 2048, 128, mask="bool", dtypes=dtypes),
        Case(
            "mask gradient 8x32x2048 D64",
            8,
            32,
            2048,
            mask="grad",
            passes=("backward",),
            dtypes=dtypes,
        ),
        Case("dropout 0.1 8x32x2048 D64", 8, 32, 2048, dropout=0.1, dtypes=dtypes),
        Case("4x32x1024 D64", 4, 32, 1024, passes=("double backward",), dtypes=dtypes),
        Case("1x32x4096 D64", 1, 32, 4096, passes=("double backward",), dtypes=dtypes),
    ]


def forms(dtypes: tuple[str, ...]) -> list[Case]:
    """What the built-in has not, beside the same call without it; and grouped heads and MLA."""
    shape = {"batch": 8, "heads": 16, "queries": 2048, "head_dim": 128, "causal": True}
    return [
        Case("causal 32:8 8x2048 D128", 8, 32, 2048, 128, kv_heads=8, causal=True, dtypes=dtypes),
        Case("causal MLA 8x16x2048 D192/128", 8, 16, 2048, 192, value_dim=128, causal=True,
             dtypes=dtypes),
        *(Case(f"causal {form} 8x16x2048 D128", form=form, dtypes=dtypes, **shape)
          for form in ("packed", "window", "sinks")),
        Case("causal pages 8x16x2048 D128", form="pages", passes=("forward",), dtypes=dtypes,
             **shape),
        *(Case(f"causal {form} 8x{2048 // dim}x2048 D{dim}", 8, 2048 // dim, 2048, dim, causal=True,
               form=form, dtypes=dtypes)
          for form in OPTIONS for dim in DIMS),
    ]  # fmt: skip


DIMS = (64, 128, 256)
# What matters most comes first: a run that takes too long is cut.
CASES = [
    *over_length(LENGTHS, DIMS, ("bf16",)),
    *others(HALF),
    *forms(("bf16",)),
    *(case for form in EIGHT_BITS for case in decoding(("bf16",), form)),
    *latent(("bf16",)),
    *over_length((1024, 4096), DIMS, ("f32",)),
    Case("4x32x1024 D64", 4, 32, 1024, passes=("double backward",), dtypes=("f32",)),
    *over_length(LENGTHS, DIMS, ("f16",)),
]
QUICK = [
    *over_length((2048, 8192), DIMS, ("bf16",)),
    *forms(("bf16",)),
    *others(("bf16",)),
    *(case for form in EIGHT_BITS for case in decoding(("bf16",), form)),
    *latent(("bf16",)),
]

OURS = "attn"
DENSE = "dense"
PEAK = "peak"
DETERMINISTIC = "FLASH det."
BACKENDS = {
    "FLASH": SDPBackend.FLASH_ATTENTION,
    DETERMINISTIC: SDPBackend.FLASH_ATTENTION,
    "EFFICIENT": SDPBackend.EFFICIENT_ATTENTION,
    "CUDNN": SDPBackend.CUDNN_ATTENTION,
    "MATH": SDPBackend.MATH,  # last: it may leave no memory for others
}
NO_MEMORY = "out of memory"


def usable() -> bool:
    """Whether there is a GPU and the library has kernels for it."""
    return torch.cuda.is_available() and torch._C._dispatch_has_kernel_for_dispatch_key(
        "attn::sdpa", "CUDA"
    )


def about_gpu() -> dict[str, Any]:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    cudnn = torch.backends.cudnn.version() if torch.version.cuda else None
    return {"gpu": gpu, "cuda": torch.version.cuda, "cudnn": cudnn, "tokens": TOKENS}


def gpu_clock() -> Clock:
    """Seconds between two events around a call, of the GPU."""
    much = torch.ones(2**27, device="cuda")  # 512 MiB, several times any L2 cache

    def clock(function: Callable[[], Any], repeat: int) -> float:
        spans = []
        for _ in range(repeat):
            much.sum()  # empties the cache, and lasts while the call is queued
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            function()
            end.record()
            spans.append((start, end))
        torch.cuda.synchronize()
        return sum(start.elapsed_time(end) for start, end in spans) / 1e3 / repeat

    return clock


def measure_peaks(device: str, clock: Clock, size: int) -> dict[str, Any]:
    """TFLOP/s of a product of size x size matrices; GB/s of reading size x 128 KiB."""
    tflops = {}
    for name, dtype in DTYPES.items():
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        (timing,) = alternate([lambda a=a, b=b: a @ b], 0.3, clock)
        tflops[name] = 2 * size**3 / timing.median / 1e12
    much = torch.ones(size, 2**15, device=device)
    (timing,) = alternate([much.sum], 0.3, clock)
    read = much.nbytes / timing.median / 1e9
    return {"peak_tflops": tflops, "read_gbytes": read}


# ---------------------------------------------------------------------------------------------
# One row


def builtin_on(backend: SDPBackend) -> Callable[..., torch.Tensor]:
    def operator(*tensors: torch.Tensor, **options: Any) -> torch.Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(*tensors, **options)

    return operator


FORMS = ("packed", "window", "sinks", "pages", "latent", *OPTIONS, *EIGHT_BITS)


def in_form(case: Case, dtype: torch.dtype, which: str, device: str) -> Callable[[], Any]:
    """A call of ours in case.form."""
    if case.form not in FORMS:
        raise ValueError(f"{case.name} has the form {case.form!r}; it must be one of {FORMS}")
    torch.manual_seed(0)
    tensors, options = case.inputs(dtype, device)
    if case.form in EIGHT_BITS:
        stored = [torch_attn.quantize_kv(x, EIGHT_BITS[case.form]) for x in tensors[1:]]
        (key, options["key_scale"]), (value, options["value_scale"]) = stored
        return run_of(torch_attn.sdpa, (tensors[0], key, value), options, which)
    if case.form == "latent":
        query, key, _ = tensors
        return run_of(torch_attn.sdpa, (query, key, key[..., : case.value_dim]), options, which)
    batch, length = case.batch, case.queries
    starts = torch.arange(batch + 1, device=device, dtype=torch.int32) * length
    if case.form == "window":
        return run_of(torch_attn.sdpa, tensors, options | {"window_size": (255, 0)}, which)
    if case.form == "sinks":
        sinks = torch.zeros(case.heads, device=device)
        return run_of(torch_attn.sdpa, tensors, options | {"sinks": sinks}, which)
    if case.form == "softcap":
        return run_of(torch_attn.sdpa, tensors, options | {"softcap": 50.0}, which)
    if case.form in OPTIONS:
        slopes = 2 ** -torch.linspace(1, 8, case.heads, device=device)
        slopes.requires_grad_(case.form == "learned alibi")
        return run_of(torch_attn.sdpa, tensors, options | {"alibi_slopes": slopes}, which)
    rows = tuple(x.transpose(1, 2).flatten(0, 1).contiguous() for x in tensors)
    if case.form == "packed":

        def packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: Any) -> torch.Tensor:
            return torch_attn.varlen_attn(  # type: ignore[return-value]
                q, k, v, starts, starts, length, length, window_size=(-1, 0)
            )

        return run_of(packed, rows, {}, which)
    pages = length // 16
    table = torch.randperm(batch * pages, device=device, dtype=torch.int32).view(batch, pages)
    used = torch.full((batch,), length, device=device)

    def paged(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: Any) -> torch.Tensor:
        pool = (x.view(batch * pages, 16, *x.shape[1:]) for x in (k, v))
        return torch_attn.varlen_attn(  # type: ignore[return-value]
            q, *pool, starts, None, length, length, window_size=(-1, 0), seqused_k=used,
            block_table=table,
        )  # fmt: skip

    return run_of(paged, rows, {}, which)


def deterministic(run: Callable[[], Any]) -> Callable[[], Any]:
    def call() -> Any:
        # The algorithms do not need every new tensor to be filled with NaNs.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.use_deterministic_algorithms(True)
        try:
            return run()
        finally:
            torch.use_deterministic_algorithms(False)
            torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]

    return call


def prepare(
    case: Case, which: str, dtype: torch.dtype, device: str
) -> tuple[dict[str, Callable[[], Any]], dict[str, str]]:
    """A call for each backend that takes the case; for other backends why they do not."""
    operators = {OURS: torch.ops.attn.sdpa}
    operators |= {name: builtin_on(backend) for name, backend in BACKENDS.items()}
    if which != "backward":
        del operators[DETERMINISTIC]
    if case.form:
        runs = {OURS: in_form(case, dtype, which, device)}
        runs[DENSE] = runner(operators[OURS], case, dtype, which, device)
        refused = {name: f"has no {case.form}" for name in operators if name != OURS}
        return runs, refused
    runs: dict[str, Callable[[], Any]] = {}
    refused: dict[str, str] = {}
    for name, operator in operators.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that a backend refuses
                run = runner(operator, case, dtype, which, device)
                if name == DETERMINISTIC:
                    run = deterministic(run)
                run()
        except torch.AcceleratorError:
            raise  # of an earlier kernel; nothing runs after it
        except torch.OutOfMemoryError:
            refused[name] = NO_MEMORY
        except RuntimeError as error:
            refused[name] = str(error).splitlines()[0]
        else:
            runs[name] = run
    return runs, refused


# The part of cuDNN's speed that the forward has to reach with bfloat16, by head_dim: up to 4096
# keys, and with more.
OF_CUDNN = {64: (0.80, 0.90), 128: (0.85, 0.95), 256: (0.0, 0.80)}

# The part that the backward has to reach with more than 4096 keys.
BACKWARD_OF_CUDNN = {64: 0.70, 128: 0.80}


# The part of the speed of the same call without an option, by head_dim. Slopes that need a gradient
# have no floor.
OF_PLAIN = {
    ("alibi", "forward"): {64: 0.85, 128: 0.90},
    ("alibi", "backward"): {64: 0.85, 128: 0.90},
    ("softcap", "forward"): {128: 0.55, 256: 0.70},
    ("softcap", "backward"): {64: 0.80, 128: 0.80},
    # Not asked of a row: the same call without a mask is another row.
    ("bool", "forward"): {64: 0.80, 128: 0.80},
    ("bool", "backward"): {64: 0.80, 128: 0.80},
    ("grad", "forward"): {},
}


def floors(case: Case, which: str, ms: dict[str, float]) -> dict[str, float]:
    """The ratio that ours has to reach, by what it is compared with."""
    if case.form in EIGHT_BITS and on_hopper():  # half of the bytes; a short call waits, too
        return {DENSE: 1.3 if (case.batch, case.keys) == (1, 16384) else 1.5}
    if case.form == "latent" and on_hopper():
        return {PEAK: 1.0 if case.heads == 128 else 0.95}
    if (case.form, which) in OF_PLAIN and on_hopper():
        floor = OF_PLAIN[case.form, which].get(case.head_dim)
        return {DENSE: floor} if floor else {}
    if case.form:
        return {DENSE: 0.95} if case.form == "packed" else {}
    if case.dropout and on_hopper():
        return {"FLASH": 1.0} if "FLASH" in ms else {}
    if case.mask or which == "double backward":
        theirs = [name for name in ms if name not in (OURS, DETERMINISTIC)]
        return {min(theirs, key=lambda name: ms[name]): 1.0} if theirs else {}
    wanted = {"FLASH": 0.9} if which == "forward" else {"FLASH": 0.7, DETERMINISTIC: 0.9}
    if which == "forward" and case.queries == 1 and on_hopper():  # decoding
        of_each = 1.0 if (case.batch, case.keys) == (1, 16384) else 0.95
        wanted = {"FLASH": of_each, "CUDNN": of_each}
    elif which == "forward" and case.queries > 1 and case.head_dim in OF_CUDNN and on_hopper():
        wanted["CUDNN"] = OF_CUDNN[case.head_dim][case.queries > 4096]
    elif which == "backward" and case.queries > 4096 and on_hopper():
        wanted["CUDNN"] = BACKWARD_OF_CUDNN.get(case.head_dim, 0.0)
        if case.head_dim == 128:
            wanted[DETERMINISTIC] = 2.2
    return {name: floor for name, floor in wanted.items() if name in ms}


def on_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def alternate_within_memory(
    runs: list[Callable[[], Any]], seconds: float, clock: Clock
) -> list[Timing] | None:
    """Times the runs in turn; None if memory suffices for each, but not for all."""
    try:
        return alternate(runs, seconds, clock) if runs else []
    except torch.OutOfMemoryError:
        return None


def measure(
    case: Case,
    which: str,
    name: str,
    peaks: dict[str, Any],
    seconds: float,
    device: str,
    clock: Clock,
) -> dict[str, Any]:
    runs, refused = prepare(case, which, DTYPES[name], device)
    while (timings := alternate_within_memory(list(runs.values()), seconds, clock)) is None:
        last = list(runs)[-1]
        del runs[last]
        refused[last] = NO_MEMORY
    ms = {who: timing.median * 1e3 for who, timing in zip(runs, timings, strict=True)}
    row: dict[str, Any] = {
        "case": case.name,
        "pass": which,
        "dtype": name,
        "length": case.queries,
        "keys": case.keys or case.queries,
        "head_dim": case.head_dim,
        "causal": case.causal,
        "mask": case.mask,
        "dropout": case.dropout,
        "ms": ms,
        "spread": {who: timing.spread for who, timing in zip(runs, timings, strict=True)},
        "refused": refused,
    }
    if which != "double backward":
        row["tflops"] = {who: case.flops(which) / t / 1e9 for who, t in ms.items()}
    if OURS not in ms:
        return row
    row["ratio"] = {who: t / ms[OURS] for who, t in ms.items() if who != OURS}
    row["floors"] = floors(case, which, ms)
    if case.queries == 1:  # bound by reading key and value
        row["gbytes"] = case.bytes_of_keys(EIGHT_BITS.get(case.form, DTYPES[name])) / ms[OURS] / 1e6
        row["of_peak"] = row["gbytes"] / peaks["read_gbytes"]
    elif "tflops" in row:
        row["of_peak"] = row["tflops"][OURS] / peaks["peak_tflops"][name]
    if case.form == "latent":
        products = row["tflops"][OURS] / peaks["peak_tflops"][name]
        row["ratio"][PEAK] = max(products / 0.6, row["of_peak"] / 0.85)
    return row


def missed(row: dict[str, Any]) -> list[str]:
    return [who for who, floor in row.get("floors", {}).items() if row["ratio"][who] < floor]


# ---------------------------------------------------------------------------------------------
# All rows


def rate(row: dict[str, Any]) -> str:
    if "gbytes" in row:
        return f"{row['gbytes']:.0f} GB/s"
    return f"{row['tflops'][OURS]:.0f}" if "tflops" in row else ""


def one_line(row: dict[str, Any]) -> str:
    ours = f"{row['ms'][OURS]:.3f} ms" if OURS in row["ms"] else row["refused"][OURS]
    ratios = [f"{who} {ratio:.2f}" for who, ratio in row.get("ratio", {}).items()]
    return ", ".join([f"{row['case']} {row['pass']} {row['dtype']}: {ours}", *ratios])


def table(rows: list[dict[str, Any]]) -> Table:
    table = Table(
        title="B x H x L; time of each backend divided by attn's, and the floor it falls below; "
        "-: the backend refuses",
        box=box.SIMPLE,
    )
    for heading in ("shape", "pass", "dtype"):
        table.add_column(heading, no_wrap=True)
    for heading in ("attn ms", "TFLOP/s", "of peak", *BACKENDS, DENSE, PEAK, "spread"):
        table.add_column(heading, justify="right", no_wrap=True)

    def cell(row: dict[str, Any], who: str) -> str:
        if who not in row.get("ratio", {}):
            return "memory" if row["refused"].get(who) == NO_MEMORY else "-"
        ratio = f"{row['ratio'][who]:.2f}"
        if who not in row["floors"]:
            return ratio
        if who in missed(row):
            return f"[red]{ratio} < {row['floors'][who]:.2f}[/]"
        return f"[green]{ratio}[/]"

    for r in rows:
        table.add_row(
            r["case"],
            r["pass"],
            r["dtype"],
            f"{r['ms'][OURS]:.3f}" if OURS in r["ms"] else "[red]failed[/]",
            rate(r) if OURS in r["ms"] else "",
            f"{r['of_peak']:.0%}" if "of_peak" in r else "",
            *(cell(r, who) for who in (*BACKENDS, DENSE, PEAK)),
            f"{max(r['spread'].values(), default=0):.0%}",
        )
    return table


def bench(
    console: Console,
    cases: list[Case],
    peaks: dict[str, Any],
    seconds: float,
    limit: float,
    wanted: str,
    device: str,
    clock: Clock,
) -> Iterator[dict[str, Any]]:
    """The rows, one by one, until `limit` seconds have passed."""
    end = time.perf_counter() + limit
    jobs = jobs_of(cases, wanted)
    for i, (case, which, name) in enumerate(jobs):
        if time.perf_counter() > end:
            console.print(f"[red]{len(jobs) - i} rows not measured: {limit:.0f} s are over[/]")
            return
        row = measure(case, which, name, peaks, seconds, device, clock)
        if device == "cuda":
            torch.cuda.empty_cache()  # the next row has other sizes
        console.print(f"{i + 1}/{len(jobs)} {one_line(row)}", highlight=False, markup=False)
        yield row


def main(
    console: Console,
    cases: list[Case],
    *,
    seconds: float,
    limit: float,
    wanted: str = "",
    json: Path | None = None,
    chart: Path | None = None,
    device: str = "cuda",
    clock: Clock | None = None,
    size: int = 8192,
) -> None:
    """`size`: rows of the matrices whose product is the peak."""
    clock = clock or gpu_clock()
    torch.set_float32_matmul_precision("highest")
    machine = about() | about_gpu()
    console.print(", ".join(f"{k} {v}" for k, v in machine.items()))
    machine |= measure_peaks(device, clock, size)
    rates = ", ".join(f"{name} {rate:.0f}" for name, rate in machine["peak_tflops"].items())
    reading = f"reading memory: {machine['read_gbytes']:.0f} GB/s"
    console.print(f"peak of matrix products, TFLOP/s: {rates}; {reading}")
    result: dict[str, Any] = {"machine": machine, "speed": []}
    rows = result["speed"]
    for row in bench(console, cases, machine, seconds, limit, wanted, device, clock):
        rows.append(row)
        if json:
            write(result, json)  # after each row: a run that is cut leaves what it has
    if json:
        write(result, json)
        console.print(f"written: {json}")
    if rows:
        console.print(table(rows))
        below = sum(bool(missed(row)) for row in rows)
        console.print(f"{below} of {sum(bool(r.get('floors')) for r in rows)} rows below a floor")
    if chart:
        from chart import draw

        drawn = draw(result, chart)
        console.print(f"written: {chart}" if drawn else "no chart: no rows over length")
    failed = [f"{r['case']} {r['pass']} {r['dtype']}" for r in rows if OURS not in r["ms"]]
    if failed:
        raise SystemExit(f"attn failed: {', '.join(failed)}")
