"""What a GPU is given to do first, without one: the steps' processes, the table, a rehearsal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cuda import first_run
from tests.cuda.first_run import Report, Step, run

ROOT = Path(__file__).parents[1]
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
def test_a_step(step: Step, state: str, said: str, tmp_path: Path) -> None:
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


@pytest.mark.slow  # compares every call of tests/test_cuda.py
def test_rehearsal(tmp_path: Path) -> None:
    """Runs to its last line, on a pretended GPU: `--pretend`."""
    command = [sys.executable, "-m", "tests.cuda.first_run", "--pretend", "--out", str(tmp_path)]
    ended = subprocess.run(
        [*command, "--only", "smoke,ncu,check_delta", "--programs", str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]
    summary = (tmp_path / "summary.txt").read_text()
    assert ended.stdout.endswith(summary)
    assert summary.count(" right ") == 5  # the environment, and a smoke test for each dtype
    assert summary.count("not run") == len(summary.splitlines()) - 6
