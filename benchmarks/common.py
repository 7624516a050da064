"""What the benchmarks share: the cases, alternating measurement, and what the machine can do."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}

# What holds PyTorch's libraries to an instruction set, for a comparison on equal terms.
HELD_TO = {
    "default": ("default", "SSE4_2", "SSE41"),
    "avx2": ("avx2", "AVX2", "AVX2"),
    "avx512": ("avx512", "AVX512", "AVX512_CORE"),
}
# What the compiler calls these instruction sets.
MARCH = {"default": "x86-64", "avx2": "x86-64-v3", "avx512": "x86-64-v4"}


def hold_to(capability: str) -> None:
    """Starts this program again with ours and PyTorch's kernels held to an instruction set."""
    names = ("ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA")
    wanted = dict(zip(names, HELD_TO[capability], strict=True))
    wanted["ATTN_CPU_CAPABILITY"] = capability
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **wanted})


@dataclass(frozen=True)
class Case:
    """One shape: query [batch, heads, queries, head_dim], key and value with their own heads."""

    name: str
    batch: int
    heads: int
    queries: int
    head_dim: int = 64
    keys: int | None = None
    kv_heads: int | None = None
    value_dim: int | None = None
    causal: bool = False
    mask: str | None = None  # "bool", or "grad": a floating mask that wants a gradient
    dropout: float = 0.0
    flat: bool = False  # 3-D input
    form: str = ""  # of a call on a GPU that the built-in has not: see gpu.FORMS
    passes: tuple[str, ...] = ("forward", "backward")
    dtypes: tuple[str, ...] = ("f32", "bf16", "f16")

    @property
    def rows_of_key_head(self) -> int:
        """Queries that share a key."""
        return self.queries * self.heads // (self.kv_heads or self.heads)

    def inputs(
        self, dtype: torch.dtype, device: str = "cpu"
    ) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
        keys, kv_heads = self.keys or self.queries, self.kv_heads or self.heads
        shapes = [
            (self.batch, self.heads, self.queries, self.head_dim),
            (self.batch, kv_heads, keys, self.head_dim),
            (self.batch, kv_heads, keys, self.value_dim or self.head_dim),
        ]
        if self.flat:
            shapes = [shape[1:] for shape in shapes]
        tensors = tuple(torch.randn(shape, dtype=dtype, device=device) for shape in shapes)
        options: dict[str, Any] = {"is_causal": self.causal, "dropout_p": self.dropout}
        if kv_heads != self.heads:
            options["enable_gqa"] = True
        if self.mask == "bool":
            options["attn_mask"] = torch.rand(self.queries, keys, device=device) > 0.3
        if self.mask == "grad":
            shape = (1, self.heads, self.queries, keys)
            options["attn_mask"] = torch.randn(shape, device=device).to(dtype)
        return tensors, options

    def flops(self, which: str) -> float:
        """Two products over every visible pair of query and key; five in the backward."""
        keys = self.keys or self.queries
        pairs = self.batch * self.heads * self.queries * keys * (0.5 if self.causal else 1)
        forward = 2 * pairs * (self.head_dim + (self.value_dim or self.head_dim))
        return forward * (2.5 if which == "backward" else 1)

    def bytes_of_keys(self, dtype: torch.dtype) -> int:
        """The bytes of key and value, which decoding has to read."""
        heads, dims = self.kv_heads or self.heads, self.head_dim
        if self.form != "latent":  # whose values are in the keys
            dims += self.value_dim or self.head_dim
        return self.batch * heads * (self.keys or self.queries) * dims * dtype.itemsize


def jobs_of(cases: list[Case], wanted: str) -> list[tuple[Case, str, str]]:
    """Every case, pass and dtype whose names, joined by spaces, contain `wanted`."""
    return [
        (case, which, name)
        for case in cases
        for which in case.passes
        for name in case.dtypes
        if wanted in f"{case.name} {which} {name}"
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
        """The distance between the quartiles, relative to the median."""
        if len(self.samples) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.samples, n=4)
        return (high - low) / self.median


# Takes a function and a number of calls; returns the seconds of one call.
Clock = Callable[[Callable[[], Any], int], float]


def wall_clock(function: Callable[[], Any], repeat: int) -> float:
    start = time.perf_counter()
    for _ in range(repeat):
        function()
    return (time.perf_counter() - start) / repeat


def alternate(
    functions: list[Callable[[], Any]], seconds: float, clock: Clock = wall_clock
) -> list[Timing]:
    """Times the functions in turn until `seconds` have passed, at least five rounds each.

    At least three rounds if five take ten times as long. Functions of microseconds are called many
    times a sample. One call that is not timed comes first, because the caches still hold what the
    previous function has read.
    """
    repeats = []
    for function in functions:
        first = clock(function, 1)
        again = first if first > 0.5 else clock(function, 1)
        repeats.append(max(1, int(2e-3 / max(again, 1e-7))))
    timings = [Timing() for _ in functions]
    start = time.perf_counter()
    while (
        (rounds := len(timings[0].samples)) < 3
        or (elapsed := time.perf_counter() - start) < seconds
        or (rounds < 5 and elapsed < 10 * seconds)
    ):
        for function, timing, repeat in zip(functions, timings, repeats, strict=True):
            if repeat > 1:
                function()
            timing.samples.append(clock(function, repeat))
    return timings


def runner(
    operator: Callable[..., torch.Tensor],
    case: Case,
    dtype: torch.dtype,
    which: str,
    device: str = "cpu",
) -> Callable[[], Any]:
    """One call of the forward, of the backward or of the "double backward" of `operator`."""
    torch.manual_seed(0)
    tensors, options = case.inputs(dtype, device)
    return run_of(operator, tensors, options, which)


def run_of(
    operator: Callable[..., torch.Tensor],
    tensors: tuple[torch.Tensor, ...],
    options: dict[str, Any],
    which: str,
) -> Callable[[], Any]:
    """The same for given tensors and options; a floating mask gets its gradient, too."""
    if which == "forward":

        def forward() -> torch.Tensor:
            with torch.inference_mode():
                return operator(*tensors, **options)

        return forward
    inputs = [t.detach().requires_grad_() for t in tensors]
    mask = options.get("attn_mask")
    if mask is not None and mask.is_floating_point():
        options = {**options, "attn_mask": mask.requires_grad_()}
        inputs.append(mask)
    output = operator(*inputs[:3], **options)
    gradient = torch.randn_like(output)
    if which == "backward":
        return lambda: torch.autograd.grad(output, inputs, gradient, retain_graph=True)
    inputs.append(gradient.requires_grad_())
    first = torch.autograd.grad(output, inputs[:-1], gradient, create_graph=True)
    tangents = [torch.randn_like(g) for g in first]
    return lambda: torch.autograd.grad(first, inputs, tangents, retain_graph=True)


class Machine:
    """What the machine can do, measured now by peak.cpp on as many threads as PyTorch uses.

    With an instruction set of HELD_TO if one is given.
    """

    def __init__(self, capability: str | None = None) -> None:
        self._program = Path(tempfile.mkdtemp(prefix="attn-bench-")) / "peak"
        compiler = os.environ.get("CXX", "c++")
        march = MARCH[capability] if capability else "native"
        flags = ["-O3", "-std=c++20", f"-march={march}", "-fopenmp"]
        source, target = str(HERE / "peak.cpp"), str(self._program)
        subprocess.run([compiler, *flags, source, "-o", target], check=True)
        rates, per_cycle = self._run("flops").splitlines()
        self.gflops = _peaks(rates)
        self.per_cycle = _peaks(per_cycle)  # of a thread; NaN where cycles.py cannot read cycles
        self._read: dict[int, float] = {}

    def read_gbytes(self, size: int) -> float:
        """GB/s of reading `size` bytes again and again: of a cache, or of the memory."""
        if size not in self._read:
            self._read[size] = float(self._run("read", str(size)))
        return self._read[size]

    def _run(self, *arguments: str) -> str:
        environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
        command = [str(self._program), *arguments]
        return subprocess.run(
            command, env=environment, check=True, capture_output=True, text=True
        ).stdout


def _peaks(rates: str) -> dict[str, float]:
    """Reads a line of peak.cpp: the peak of each dtype."""
    fma, *others = map(float, rates.split())
    pairs, tiles = (*others, 0.0, 0.0)[:2]
    # With tiles, float16 takes four products of bfloat16.
    return {"f32": fma, "f16": max(fma, tiles / 4), "bf16": max(fma, pairs, tiles)}


def cores() -> int:
    """The cores whose processors this process may use; two may be threads of one core."""

    def core(processor: int) -> tuple[str, ...]:
        about_it = Path(f"/sys/devices/system/cpu/cpu{processor}/topology")
        files = [about_it / "physical_package_id", about_it / "core_id"]
        return tuple(f.read_text() if f.exists() else str(processor) for f in files)

    return len({core(processor) for processor in os.sched_getaffinity(0)})


def about() -> dict[str, Any]:
    """Machine, versions and date."""
    import torch_attn

    cpuinfo = Path("/proc/cpuinfo")
    model = platform.processor()
    if cpuinfo.exists():
        lines = cpuinfo.read_text().splitlines()
        names = [line.split(":", 1)[1] for line in lines if line.startswith("model name")]
        model = names[0].strip() if names else model
    return {
        "date": date.today().isoformat(),
        "cpu": model,
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "torch_attn": torch_attn.__version__,
        "capability": torch.ops.attn._cpu_capability(),
    }


def one_row_a_line(result: dict[str, Any]) -> str:
    """JSON whose lists have one entry a line, so that results can be read and compared by lines."""

    def text(value: Any) -> str:
        if not isinstance(value, list) or not value:
            return json.dumps(value)
        return "[\n  " + ",\n  ".join(map(json.dumps, value)) + "\n ]"

    return "{\n" + ",\n".join(f" {json.dumps(k)}: {text(v)}" for k, v in result.items()) + "\n}\n"


def write(result: dict[str, Any], path: Path) -> None:
    """As JSON; a run that is cut here leaves the file whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(path.name + ".new")
    new.write_text(one_row_a_line(result))
    new.replace(path)
