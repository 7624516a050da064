"""The library as it was built, on processors older than this one, which qemu-user imitates."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

QEMU = shutil.which("qemu-x86_64") or shutil.which("qemu-x86_64-static")
# The processor, and the instruction set that is to be chosen on it; qemu knows none with AVX-512.
PROCESSORS = {"Nehalem": "default", "Haswell": "avx2"}

pytestmark = pytest.mark.skipif(
    QEMU is None or platform.machine() != "x86_64",
    reason="not run: no qemu-x86_64 (Debian: qemu-user), or another processor's Python",
)


def run_on(processor: str, *arguments: str) -> str:
    process = subprocess.run(
        [str(QEMU), "-cpu", processor, sys.executable, *arguments],
        cwd=Path(__file__).parent.parent,
        env=os.environ | {"OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-2000:]
    return process.stdout


@pytest.mark.slow("csrc", "torch_attn", "tests/old_processor.py")  # half a minute each
@pytest.mark.regression
@pytest.mark.parametrize("processor", PROCESSORS)
def test_derivatives_of_every_dtype(processor: str) -> None:
    """The program compares with the textbook in float64 and ends with an error if it differs."""
    assert run_on(processor, "tests/old_processor.py", PROCESSORS[processor]) == "all right\n"


@pytest.mark.slow("csrc", "torch_attn")  # in software
def test_report() -> None:
    """`python -m torch_attn`, without NumPy, whose own build needs a newer processor."""
    program = (
        "import sys, runpy; sys.modules['numpy'] = None; "
        "runpy.run_module('torch_attn', run_name='__main__')"
    )
    rows = run_on("Nehalem", "-W", "ignore", "-c", program)
    (row,) = [line for line in rows.splitlines() if line.startswith("instruction set")]
    assert row.split()[2] == "default"
