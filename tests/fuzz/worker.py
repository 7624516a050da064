"""What one process of the harness does, and what it reports."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import multiprocessing
import time
from typing import Any

from .drawing import draw

SAMPLE = 401  # one problem in 401 is also held to the suite's bound; odd, for all processes
MADE_SMALL = 5  # of the failures of a process
Worst = dict[tuple[str, str, str], tuple[float, int, str]]


@dataclasses.dataclass
class Report:
    """What a process has found since its last report, and their sum."""

    problems: collections.Counter[tuple[str, str]] = dataclasses.field(
        default_factory=collections.Counter
    )  # by kind and dtype
    options: collections.Counter[tuple[str, str]] = dataclasses.field(
        default_factory=collections.Counter
    )  # pairs of options, and each with itself; ("", "") for problems that the built-in could have
    calls: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    worst: Worst = dataclasses.field(default_factory=dict)  # by kind, dtype and result
    results: int = 0
    say_nothing: int = 0  # bounds that every number of a result is within
    packed: collections.Counter[str] = dataclasses.field(
        default_factory=collections.Counter
    )  # by kind, of which a problem may have several
    samples: int = 0  # problems held to the suite's bound
    worst_of_samples: Worst = dataclasses.field(default_factory=dict)
    excesses: list[str] = dataclasses.field(default_factory=list)
    failures: list[str] = dataclasses.field(default_factory=list)

    def add(self, other: Report) -> None:
        self.problems += other.problems
        self.options += other.options
        self.calls += other.calls
        self.packed += other.packed
        for name in ("worst", "worst_of_samples"):
            mine = getattr(self, name)
            for key, value in getattr(other, name).items():
                mine[key] = max(value, mine.get(key, value))
        self.results += other.results
        self.say_nothing += other.say_nothing
        self.samples += other.samples
        self.excesses += other.excesses
        self.failures += other.failures


def note(worst: Worst, key: tuple[str, str, str], found: tuple[float, int, str]) -> None:
    worst[key] = max(found, worst.get(key, found))


def work(
    device: str, seed: int, first: int, step: int, last: int, seconds: float, reports: Any, at: Any
) -> None:
    """Problems first, first + step, ... below last; `at` says which one is under way."""
    import torch

    from . import check, packed, relative

    torch.set_num_threads(1)
    if device == "gpu":
        torch.set_default_device("cuda")
    # Without a device, each call of torch.manual_seed is kept, with its stack, for a later device.
    for module in (torch.xpu, torch.mtia, *([] if device == "gpu" else [torch.cuda])):
        setattr(module, "manual_seed_all", lambda _: None)  # noqa: B010, not what it is typed as
    everything = torch.ops.attn._cpu_capabilities()
    if device != "cpu":
        everything = [device]
    failures = 0
    end, report, reported = time.monotonic() + seconds, Report(), time.monotonic()
    for index in range(first, last, step):
        parent = multiprocessing.parent_process()
        if time.monotonic() > end or (parent and not parent.is_alive()):
            break
        at.value = index
        problem = draw(seed, index, device)
        capabilities = problem.capabilities(everything)
        failure, ratios = check.check(problem, capabilities)
        report.problems[problem.kind, problem.dtype] += 1
        given = problem.given_options
        report.options.update(itertools.combinations_with_replacement(given, 2))
        report.options["", ""] += problem.is_plain
        report.calls.update(capabilities)
        for r in ratios:
            key = (problem.kind, problem.dtype, r.result)
            note(report.worst, key, (r.ratio, index, r.capability))
            report.results += 1
            report.say_nothing += r.says_nothing
        if failure:
            failures += 1
            if device == "gpu":
                torch.cuda.synchronize()  # after an error of memory the process ends here
            if failures <= MADE_SMALL:
                failure = check.shrunk(failure)
        elif index % SAMPLE == 0:
            sample = relative.draw_plain(seed, index, device)
            failure, excesses, worst = relative.check(sample, sample.capabilities(everything))
            report.samples += 1
            for name, ratio in worst.items():
                key = (sample.kind, sample.dtype, name)
                note(report.worst_of_samples, key, (ratio, index, ""))
            report.excesses += [
                f"problem {index} {device} {e.problem.dtype} {e.capability} {e.result}: "
                f"{e.ratio:.3f} of the bound, {e.ratio_of_more:.3f} with more neighbours"
                for e in excesses
            ]
        if failure:
            report.failures.append(described(failure, seed, index, device))
        if index % packed.EVERY == 0:
            of_sequences = packed.draw(seed, index, device)
            report.packed.update(of_sequences.kinds)
            failure, _ = packed.check(of_sequences, of_sequences.capabilities(everything))
            if failure:
                failures += 1
                if device == "gpu":
                    torch.cuda.synchronize()
                failure = packed.shrunk(failure) if failures <= MADE_SMALL else failure
                report.failures.append(described(failure, seed, index, device))
        if time.monotonic() > reported + 1:
            reports.put(report)
            report, reported = Report(), time.monotonic()
    reports.put(report)
    at.value = -1


def described(failure: Any, seed: int, index: int, device: str) -> str:
    return (
        f"# {device} {failure.capability} {failure.problem.dtype}, --seed {seed} --problem {index} "
        f"--only {device}\n" + "".join(f"# {line}\n" for line in failure.what.splitlines())
        + failure.program()
    )  # fmt: skip
