"""`make fuzz`: processes, progress, the table."""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import platform
import queue
import random
import sys
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tests._variants import STAND_INS, build_stand_in

from . import packed
from .drawing import draw
from .problem import DTYPES, OF_BUILTIN, OPTIONS, SCALES
from .worker import SAMPLE, Report, described, work

SHARES = {"cpu": 0.65, "functions": 0.1, "cuda": 0.15, "amx": 0.1, "gpu": 1.0}  # of the time


def devices() -> list[str]:
    """What can be run here."""
    import torch

    import torch_attn  # noqa: F401, registers the operators

    on_x86 = ["cuda"] if platform.machine() == "x86_64" else []
    has_bf16 = "avx512_bf16" in torch.ops.attn._cpu_capabilities()
    return ["cpu", "functions", *on_x86, *(["amx"] if has_bf16 else [])]


def has_gpu() -> bool:
    """Whether there is one, and kernels for it in the library."""
    import torch

    import torch_attn  # noqa: F401, registers the operators

    built = torch._C._dispatch_has_kernel_for_dispatch_key("attn::sdpa", "CUDA")
    return bool(built and torch.cuda.is_available())


def fuzz(
    device: str, seed: int, problems: int, seconds: float, processes: int, console: Console
) -> Report:
    """All processes of one device, to their end; "functions": functions of the pair, on the CPU."""
    target = work
    if device == "functions":  # only then, because it loads the library in this process
        from . import functions

        target = functions.work
    built = str(build_stand_in(device)) if device in STAND_INS else None
    # Read when a process loads the library.
    os.environ.update(OMP_WAIT_POLICY="passive", ATTN_STAND_IN_SEED=str(seed))
    os.environ.update({"ATTN_LIBRARY": built} if built else {})
    spawn = multiprocessing.get_context("spawn")
    reports = spawn.Queue()
    total = Report()
    workers = []
    for i in range(processes):
        at = spawn.Value("q", -1)
        arguments = (device, seed, i, processes, problems, seconds, reports, at)
        workers.append((spawn.Process(target=target, args=arguments, daemon=True), at))
        workers[-1][0].start()
    os.environ.pop("ATTN_LIBRARY", None)
    columns = (TextColumn(f"{device:5}{{task.description}}"), BarColumn(), TimeElapsedColumn())
    start = printed = time.monotonic()
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=1)
        while True:
            alive = any(w.is_alive() for w, _ in workers)
            try:
                report = reports.get(timeout=0.5)
                total.add(report)
                for failure in report.failures:
                    console.print(failure, markup=False, highlight=False, soft_wrap=True)
            except queue.Empty:
                if not alive:
                    break
            passed = time.monotonic() - start
            done = sum(total.problems.values())
            state = f"{done:9,} problems, {done / passed:5.0f} a second"
            state += f", {len(total.failures)} failures"
            share = max(passed / seconds, done / problems)
            progress.update(bar, completed=share, description=state)
            if not console.is_terminal and time.monotonic() > printed + 60:
                console.print(device, state)
                printed = time.monotonic()
            if passed > seconds + 300:  # a problem and making it small take less
                break
    for worker, at in workers:
        state = f"exit code {worker.exitcode}" if worker.exitcode is not None else "not coming back"
        if worker.is_alive():
            worker.terminate()
        if state != "exit code 0":
            said = f"# {device}: {state}, at problem {at.value} of seed {seed}\n"
            if at.value >= 0 and device != "functions":
                capability = "default" if device == "cpu" else device
                said += draw(seed, at.value, device).program(capability, [])
                if at.value % packed.EVERY == 0:
                    said += packed.draw(seed, at.value, device).program(capability, [])
            console.print(said, markup=False, highlight=False, soft_wrap=True)
            total.failures.append(said)
    return total


def show(total: dict[str, Report], console: Console) -> None:
    table = Table(title="Problems, and the largest error / bound of any number (in which problem)")
    table.add_column("kind")
    table.add_column("problems", justify="right")
    for dtype in DTYPES:
        table.add_column(dtype, justify="right")
    for device, report in total.items():
        for kind in sorted({k for k, _ in report.problems}):
            cells = []
            for dtype in DTYPES:
                worst = [w for (k, d, _), w in report.worst.items() if (k, d) == (kind, dtype)]
                cells.append("{:.3f} ({})".format(*max(worst)[:2]) if worst else "")
            number = sum(n for (k, _), n in report.problems.items() if k == kind)
            table.add_row(f"{device} {kind}", f"{number:,}", *cells)
    console.print(table)
    table = Table(title="The same by result")
    for column in ("result", *DTYPES):
        table.add_column(column)
    for device, report in total.items():
        for result in sorted({r for *_, r in report.worst}):
            cells = []
            for dtype in DTYPES:
                worst = [w for (_, d, r), w in report.worst.items() if (d, r) == (dtype, result)]
                cells.append("{:.3f} ({}, {})".format(*max(worst)) if worst else "")
            table.add_row(f"{device} {result}", *cells)
    console.print(table)
    for device, report in total.items():
        if device != "functions":
            show_options(device, report, console)
    for device, report in total.items():
        problems, samples = sum(report.problems.values()), report.worst_of_samples.values()
        calls = ", ".join(f"{name} {n:,}" for name, n in sorted(report.calls.items()))
        kinds = ", ".join(f"{n:,} {kind}" for kind, n in report.packed.most_common())
        console.print(
            f"{device}: {problems:,} problems, beside them {kinds or 'none packed'}, "
            f"on {calls}; {len(report.failures)} failures; "
            f"{report.results:,} results, the bound says nothing of {report.say_nothing:,}; "
            f"{report.samples:,} problems held to twice the built-in's error, "
            f"largest ratio {max(samples, default=(0,))[0]:.3f}, "
            f"{len(report.excesses)} above 1 by the bound's own error",
            highlight=False,
        )
        for excess in report.excesses:
            console.print("  " + excess, highlight=False)


def show_options(device: str, report: Report, console: Console) -> None:
    """How many problems had each option (in the diagonal) and each pair of them."""
    names = [n for n in (*OF_BUILTIN, *OPTIONS, *SCALES) if report.options[n, n]]
    table = Table(title=f"{device}: problems with an option, and with a pair of them", padding=0)
    for column in ("", *names):
        table.add_column(column, justify="right" if column else "left")
    for i, name in enumerate(names):
        table.add_row(name, *(f"{report.options[other, name]:,}" for other in names[: i + 1]))
    console.print(table)
    problems, pairs = sum(report.problems.values()), itertools.combinations(names, 2)
    rarest = min(((report.options[pair], pair) for pair in pairs), default=None)
    if rarest:
        console.print(
            f"{device}: {report.options['', '']:,} of {problems:,} problems without an option that "
            f"the built-in has not; the rarest pair, {' and '.join(rarest[1])}, in "
            f"{rarest[0] / problems:.2%}",
            highlight=False,
        )


def one(seed: int, index: int, device: str, console: Console) -> int:
    """Problem `index` alone, with its program."""
    import torch

    from . import check, functions, relative

    everything = torch.ops.attn._cpu_capabilities()
    if device == "functions":
        wrong = functions.check(seed, index, everything)
        console.print(wrong or "# the function of the pair agrees", markup=False, soft_wrap=True)
        return 1 if wrong else 0
    if device != "cpu":
        everything = [device]
    if device == "gpu":
        torch.set_default_device("cuda")
    problem = draw(seed, index, device)
    capabilities = problem.capabilities(everything)
    print(problem.program(capabilities[-1], []))
    failure, ratios = check.check(problem, capabilities)
    failure = failure and check.shrunk(failure)
    for r in ratios:
        print(f"# {r.capability} {r.result}: {r.ratio:.3f} of the bound")
    if not failure and index % SAMPLE == 0:
        sample = relative.draw_plain(seed, index, device)
        failure, excesses, worst = relative.check(sample, sample.capabilities(everything))
        print(f"# twice the built-in's error: {worst} {excesses}")
        failure = failure and check.shrunk(failure)
    if not failure and index % packed.EVERY == 0:
        of_sequences = packed.draw(seed, index, device)
        capabilities = of_sequences.capabilities(everything)
        print(of_sequences.program(capabilities[-1], []))
        failure = packed.check(of_sequences, capabilities)[0]
        failure = failure and packed.shrunk(failure)
    if failure:
        console.print(described(failure, seed, index, device), markup=False,
                      highlight=False, soft_wrap=True)  # fmt: skip
    return 1 if failure else 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, help="a random one if not given")
    parser.add_argument("--problems", type=int, default=10**12, help="at most so many")
    parser.add_argument("--problem", type=int, help="only this one of the seed, with its program")
    parser.add_argument("--only", choices=list(SHARES), help="one kind of kernels")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args(arguments)
    if options.only == "gpu" and not has_gpu():
        parser.error("--only gpu: there is no GPU, or no kernels for it in the library")
    console = Console(width=None if sys.stdout.isatty() else 150)
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    if options.problem is not None:
        return one(seed, options.problem, options.only or "cpu", console)
    run = [options.only] if options.only else devices()
    left_out = [d for d in SHARES if d not in (*run, "gpu") and not options.only]
    console.print(f"seed {seed}, {options.processes} processes: {', '.join(run)}")
    if left_out:
        console.print(f"not run, this machine cannot: {', '.join(left_out)}")
    total = {}
    for device in run:
        seconds = options.seconds * SHARES[device] / sum(SHARES[d] for d in run)
        total[device] = fuzz(device, seed, options.problems, seconds, options.processes, console)
    show(total, console)
    failures = sum(len(r.failures) for r in total.values())
    console.print(f"seed {seed}: {failures} failures" if failures else f"seed {seed}: no failures")
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
