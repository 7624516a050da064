"""What a GPU is given to do first, without one: the steps' processes, the table, a rehearsal."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import pytest

from _variants import ROOT, run_python
from tests.cuda import first_run, new
from tests.cuda.first_run import Report, Step, run
from tests.cuda.programs import MEASURING, PROGRAMS

ENDLESS = "import time; print('begun', flush=True); time.sleep(100)"


def python(code: str, seconds: float = 60, missing: str = "") -> Step:
    return Step("a step", [sys.executable, "-c", code], seconds, missing)


@pytest.fixture(autouse=True)
def interruptible() -> None:
    """Undoes what a shell does to a background job, as main() does."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.mark.parametrize(
    ("step", "state", "said"),
    [
        (python("print('a'); print('done'); print()"), "right", "done"),
        (python("print('bad'); raise SystemExit(3)"), "wrong", "bad"),
        (python(ENDLESS, seconds=2), "too long", "KeyboardInterrupt"),
        (python("", missing="pytest"), "not run", "not there: pytest"),
        (python("import os; os.abort()"), "wrong", ""),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_outcome_of_a_step(step: Step, state: str, said: str, tmp_path: Path) -> None:
    report = Report(tmp_path / "report.txt")
    outcome = run(step, report, time.monotonic() + 100)
    assert (outcome.state, outcome.said) == (state, said)
    printed = (tmp_path / "report.txt").read_text()
    assert all(line.startswith("a step| ") for line in printed.splitlines())
    assert f"{state:8}" in first_run.table([outcome])


def test_nothing_begins_when_the_time_is_over(tmp_path: Path) -> None:
    outcome = run(python(ENDLESS), Report(tmp_path / "report.txt"), time.monotonic())
    assert (outcome.state, outcome.said) == ("not run", "the time is over")


def test_a_report_has_an_end(tmp_path: Path) -> None:
    report = Report(tmp_path / "report.txt", most=1000)
    for _ in range(1000):
        report.write("a step", "words")
    assert 900 < (tmp_path / "report.txt").stat().st_size <= 1000


def test_what_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry leaves the list when a GPU has found it right, and comes back when it changes."""
    source = tmp_path / "csrc" / "kernel.cuh"
    source.parent.mkdir()
    source.write_text("one")
    entries = [new.Entry("a", ("csrc/*",), 1), new.Entry("b", ("csrc/*.cuh",), 1)]
    for name, value in (("ROOT", tmp_path), ("SEEN", tmp_path / "seen.json"), ("ENTRIES", entries)):
        monkeypatch.setattr(new, name, value)

    def names() -> list[str]:
        return [entry.name for entry in new.pending()]

    assert names() == ["a", "b"]
    new.write_seen({"b"}, tmp_path / "seen.json")
    assert names() == ["a"]
    new.write_seen({"a"}, tmp_path / "seen.json")
    assert names() == []
    source.write_text("two")
    assert names() == ["a", "b"]
    new.write_seen({"a"}, tmp_path / "seen.json")
    assert names() == ["b"]


def test_every_kernel_is_in_an_entry() -> None:
    """Who changes a kernel makes some entry new. Programs and modules of entries exist."""
    of_entries = {path for e in new.ENTRIES for p in e.sources for path in ROOT.glob(p)}
    kernels = {path for path in (ROOT / "csrc" / "cuda").rglob("*") if path.is_file()}
    assert kernels
    assert kernels <= of_entries
    for entry in new.ENTRIES:
        assert entry.program in ("", *PROGRAMS, *MEASURING)
        assert all(any(ROOT.glob(pattern)) for pattern in entry.sources), entry
        for path in entry.module[1:]:
            assert not path.startswith("tests/") or (ROOT / path).exists(), path


@pytest.mark.slow  # compares every call of tests/test_cuda.py
def test_rehearsal(tmp_path: Path) -> None:
    """Runs to its last line, on a pretended GPU: `--pretend`."""
    command = ["-m", "tests.cuda.first_run", "--pretend", "--out", str(tmp_path)]
    command += ["--only", "smoke,ncu,check_delta", "--programs", str(tmp_path)]
    printed = run_python(*command, CUDA_VISIBLE_DEVICES="")
    summary = (tmp_path / "summary.txt").read_text()
    assert printed.endswith(summary)
    assert summary.count(" right ") == 5  # the environment, and a smoke test for each dtype
    assert summary.count("not run") == len(summary.splitlines()) - 6
