"""What to run first on a machine with a GPU: `python -m tests.cuda.first_run`, ten minutes at most.

Any Python with torch and a built library will do (ATTN_LIBRARY names one that lies elsewhere);
pytest, nvcc, compute-sanitizer and ncu are used where they are there. Nothing is downloaded. Every
step is a process with a limit of its own. What a step prints goes to OUT/report.txt at once, and no
step stops the next but the first: without one right result there is nothing to look at. The end is
a table of all steps, also in OUT/summary.txt.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import glob
import importlib.metadata
import importlib.util
import itertools
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.cuda import new
from tests.cuda.programs import PROGRAMS, find

ROOT = Path(__file__).parents[2]
MODULE = [sys.executable, "-u", "-m"]
SANITIZED = ("check_forward", "check_backward", "check_backward_simt")
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
DTYPES = ("float64", "float32", "bfloat16", "float16")
# Steps of tests that a GPU can run, too, and their files.
FILES = {
    "tests": "options options_promises forward backward derivatives nan dropout stats varlen paged "
    "invariance determinism memory precision hidden_tiles",
    "tests with PyTorch": "autocast autograd compile convert dispatch export "
    "func meta nn opinfo properties replace stats_hidden stats_subsystems subclasses validate "
    "weights",
}
LARGE = "2_31 or 65535 or peak"
PROFILED = (
    "SpeedOfLight",
    "Occupancy",
    "SchedulerStats",
    "WarpStateStats",
    "MemoryWorkloadAnalysis",
)


class Step(NamedTuple):
    name: str
    command: list[str]
    seconds: float  # at most
    missing: str = ""  # what it needs and is not there: then it is not run
    environment: dict[str, str] = {}  # noqa: RUF012, never changed


def of_entry(entry: new.Entry, programs: Path) -> Step:
    """The step of an entry of new.py."""
    if entry.program:
        program = programs / entry.program
        return Step(f"new: {entry.name}", [str(program)], entry.seconds, unbuilt(program))
    missing = "" if has(entry.module[0].partition(".")[0]) else entry.module[0]
    return Step(f"new: {entry.name}", [*MODULE, *entry.module], entry.seconds, missing)


class Outcome(NamedTuple):
    step: Step
    state: str  # right, wrong, too long, not run
    seconds: float
    said: str  # the last line, or why it was not run


def has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def find_ncu() -> str:
    places = sorted(glob.glob("/opt/nvidia/nsight-compute/*/ncu"))
    return shutil.which("ncu") or find("ncu") or (places[-1] if places else "")


def beside_each_other(programs: Path, out: Path, pretended: bool) -> Iterator[Step]:
    """Steps that look at results alone, the longest first."""
    some = ["-k", f"cuda and not (program or sanitizer or {LARGE})"]
    yield pytest_step("tests of a GPU", ["tests/test_cuda.py", *some], pretended, 105)
    for name, files in FILES.items():
        paths = [f"tests/test_{file}.py" for file in files.split()]
        junit = f"--junitxml={out / name.replace(' ', '_')}.xml"
        yield pytest_step(name, [*paths, "--tiers", "quick", *some, junit], pretended, 150)
    device = ["--only", "gpu", "--seconds", "40", "--processes", "3"]
    yield Step("fuzz", [*MODULE, "tests.fuzz", *device], 120, "" if has("rich") else "rich")
    for dtype in DTYPES:
        yield Step(f"smoke, {dtype}", [*MODULE, "tests.cuda.smoke", "--dtype", dtype], 120)
    for name in PROGRAMS:
        yield Step(name, [str(programs / name)], 60, unbuilt(programs / name))
    sanitizer = find("compute-sanitizer")
    options = ["--print-limit", "20", "--error-exitcode", "1"]
    for name, tool in itertools.product(SANITIZED, TOOLS):
        yield Step(
            f"{tool}, {name}",
            [sanitizer, "--tool", tool, *options, str(programs / name)],
            120,
            unbuilt(programs / name) or ("" if sanitizer else "compute-sanitizer"),
            {"ATTN_GUARD_BYTES": "0"},
        )


def unbuilt(program: Path) -> str:
    return "" if program.exists() else f"{program}: make check-cuda"


def pytest_step(name: str, arguments: list[str], pretended: bool, seconds: float) -> Step:
    plugins = ["-p", "pretend_cuda"] if pretended else []
    plugins += ["--timeout", "60"] if has("pytest_timeout") else []
    processes = min(6, os.cpu_count() or 1)
    plugins += ["-n", str(processes), "--max-worker-restart", "40"] if has("xdist") else []
    command = [*MODULE, "pytest", "-q", "-p", "no:cacheprovider", *plugins, *arguments]
    return Step(name, command, seconds, "" if has("pytest") else "pytest")


def alone(out: Path, programs: Path, pretended: bool) -> Iterator[Step]:
    """Steps that measure, or take all of the memory."""
    speed = [sys.executable, "-u", "benchmarks/bench.py", "--quick", "--json", f"{out}/speed.json"]
    speed += ["--device", "cuda"]
    yield Step("speed", speed, 150, "" if has("rich") else "rich")
    ncu, kernels = find_ncu(), out / "kernels"
    of_hopper = [ncu, "--clock-control", "none", "-f", "-o", str(out / "hopper")]
    of_hopper += [x for name in PROFILED for x in ("--section", name)]
    of_hopper += ["-k", "regex:run_block", "-c", "2", str(programs / "variants_sm90")]
    missing = "" if ncu else "ncu"
    yield Step("ncu, Hopper", of_hopper, 40, missing or unbuilt(programs / "variants_sm90"))
    sections = [argument for name in PROFILED for argument in ("--section", name)]
    profile = [ncu, "--clock-control", "none", "-f", "-o", str(kernels), *sections]
    profile += ["-k", "regex:run_block|merge|delta", *MODULE, "tests.cuda.smoke", "--profile"]
    yield Step("ncu", profile, 90, "" if ncu else "ncu")
    read = [ncu, "--import", f"{kernels}.ncu-rep", "--page", "details"]
    yield Step("ncu, as text", read, 30, "" if ncu else "ncu")
    cpu = [sys.executable, "-u", "benchmarks/bench.py", "--quick", "--json", f"{out}/cpu.json"]
    cpu += ["--device", "cpu"]
    has_amx = "amx_tile" in Path("/proc/cpuinfo").read_text()
    yield Step("speed of the CPU", cpu, 60, "" if has_amx else "AMX")
    yield pytest_step("large", ["tests/test_cuda.py", "-k", LARGE], pretended, 120)


class Report:
    """Lines of several processes in one file, each with the name of its step."""

    def __init__(self, path: Path, most: int = 14 << 20) -> None:
        self.file, self.lock, self.left = path.open("w", buffering=1), threading.Lock(), most

    def write(self, name: str, line: str) -> None:
        with self.lock:
            self.left -= len(name) + len(line) + 3
            if self.left > 0:
                self.file.write(f"{name}| {line}\n")


def run(step: Step, report: Report, end: float) -> Outcome:
    start = time.monotonic()
    limit = min(step.seconds, end - start)
    if step.missing:
        return Outcome(step, "not run", 0, f"not there: {step.missing}")
    if limit < 1:
        return Outcome(step, "not run", 0, "the time is over")
    process = subprocess.Popen(
        step.command,
        cwd=ROOT,
        env=os.environ | step.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # so that all of its processes end with it
    )
    late = threading.Event()

    def interrupt() -> None:
        late.set()
        process.send_signal(signal.SIGINT)  # pytest then says what has failed so far

    timers = [
        threading.Timer(limit, interrupt),
        threading.Timer(limit + 10, os.killpg, (process.pid, signal.SIGKILL)),
    ]
    for timer in timers:
        timer.start()
    said = ""
    for line in process.stdout or ():
        report.write(step.name, line.rstrip())
        said = line.strip() or said
    code = process.wait()
    for timer in timers:
        timer.cancel()
    state = "too long" if late.is_set() else "right" if code == 0 else "wrong"
    return Outcome(step, state, time.monotonic() - start, said)


def table(outcomes: list[Outcome]) -> str:
    lines = [f"{'step':32} {'':8} {'s':>5}  last line"]
    for step, state, seconds, said in outcomes:
        lines.append(f"{step.name:32} {state:8} {seconds:5.0f}  {said[:90]}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out") / "first_run")
    parser.add_argument("--programs", type=Path, default=Path("build") / "cuda" / "programs")
    parser.add_argument("--seconds", type=float, default=600, help="all of it at most")
    parser.add_argument("--only", default="", help="names of steps, with commas between")
    parser.add_argument(
        "--pretend", action="store_true", help="rehearse without a GPU: tests/pretend_cuda.py"
    )
    given = parser.parse_args()
    # A shell's background job ignores SIGINT, and so would the steps.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    out, programs = given.out.resolve(), given.programs.resolve()
    out.mkdir(parents=True, exist_ok=True)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    os.environ["OMP_WAIT_POLICY"] = "passive"
    if given.pretend:
        os.environ["ATTN_PRETEND"] = "1"
    release = "_".join(importlib.metadata.version("torch").split(".")[:2])
    # The library that `make check-cuda` has built.
    built = Path("build", "cuda", "torch_attn", f"torch_{release}", "libattn.so")
    if built.exists() and not given.pretend and "ATTN_LIBRARY" not in os.environ:
        os.environ["ATTN_LIBRARY"] = str(built.resolve())
    end = time.monotonic() + given.seconds
    report, outcomes = Report(out / "report.txt"), []
    wanted = given.only.split(",") if given.only else []

    def chosen(steps: Iterator[Step]) -> list[Step]:
        return [s for s in steps if not wanted or any(s.name.startswith(w) for w in wanted)]

    def do(step: Step) -> Outcome:
        outcome = run(step, report, end)
        line = f"{outcome.state:8} {outcome.seconds:4.0f} s  {step.name}: {outcome.said[:100]}"
        print(line, flush=True)
        return outcome

    start = Step("environment", [*MODULE, "tests.cuda.smoke", "--environment"], 60)
    outcomes.append(do(start))
    if outcomes[0].state == "right":
        right = set()
        for entry in new.pending():
            for step in chosen(iter([of_entry(entry, programs)])):
                outcomes.append(do(step))
                ended = outcomes[-1]
                if ended.state == "right" and not ended.said.startswith("not run"):
                    right.add(entry.name)
        if not given.pretend:
            new.write_seen(right, out / "seen.json")
        with concurrent.futures.ThreadPoolExecutor(max(2, (os.cpu_count() or 2) * 3 // 4)) as pool:
            outcomes += pool.map(do, chosen(beside_each_other(programs, out, given.pretend)))
        outcomes += map(do, chosen(alone(out, programs, given.pretend)))
    (out / "summary.txt").write_text(table(outcomes) + "\n")
    print(table(outcomes))
    if any(outcome.state in ("wrong", "too long") for outcome in outcomes):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
