"""The kernels for AMX over tests/stand_in, its tile instructions in software.

Where the processor has AMX, the other files run the kernels as they are, as for every other
instruction set.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import CPU_CAPABILITIES

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build" / "amx"
LIBRARY = BUILD / "torch_attn" / "libattn.so"
pytestmark = [
    pytest.mark.slow,  # compiles a library
    pytest.mark.skipif(
        "avx512_bf16" not in CPU_CAPABILITIES, reason="not run: the vector code needs AVX-512 BF16"
    ),
]

# Tests of other files, with the numbers of them that there are at least.
TESTS = {
    "tests/test_forward.py": 682,
    "tests/test_backward.py": 631,
    "tests/test_nan.py": 676,
    "tests/test_dropout.py": 62,
    "tests/test_precision.py": 11,
    "tests/test_properties.py": 2,
}


@pytest.fixture(scope="module", autouse=True)
def _library() -> None:
    """Builds the variant of the library, what changed of it."""
    directories = ["--build-lib", str(BUILD), "--build-temp", str(BUILD / "objects")]
    subprocess.run(
        [sys.executable, "setup.py", "build_ext", *directories],
        cwd=ROOT,
        env={**os.environ, "ATTN_STAND_IN": "amx"},
        check=True,
    )


@pytest.mark.parametrize("file", TESTS)
def test_kernels(file: str) -> None:
    options = ["-q", "-p", "no:cacheprovider", "-k", "[amx"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, file],
        cwd=ROOT,
        env={**os.environ, "ATTN_LIBRARY": str(LIBRARY)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-4000:]
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed, run.stdout
    assert int(passed[1]) >= TESTS[file], run.stdout[-1000:]


def test_random_problems() -> None:
    """`make fuzz` finds nothing in a few of its problems."""
    command = "-m tests.fuzz --only amx --seed 1 --problems 150"
    run = subprocess.run(
        [sys.executable, *command.split()], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-4000:]
    assert "150 problems; on amx 150" in run.stdout
