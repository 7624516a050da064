"""The device tests run, on a pretended GPU: else only a real one would show that they do not."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Some of every file, without what would take long or asks the device itself.
TESTS = {
    "test_cuda.py": "not (repeats or peak or scores or mixed or second or program or sanitizer)",
    "test_forward.py": "expanded or lowest or no_keys or need",
    "test_backward.py": "masked or expanded",
    "test_nan.py": "many or fully or infinite",
    "test_dropout.py": "test_seed or accuracy or depend or rate or draws",
    "test_determinism.py": "concurrent",
    "test_precision.py": "float64",
    "test_opinfo.py": "dtype3",
    "test_weights.py": "values",
    "test_autocast.py": "cuda",
    "test_autograd.py": "asked or flags",
    "test_derivatives.py": "masked or empty or gradgradcheck and plain",
    "test_func.py": "each_sample or randomness or mixed or heads-query",
    "test_memory.py": "cuda",
    "test_replace.py": "that_of_attn",
    "test_validate.py": "bad_input",
    "test_varlen.py": "each_sequence or third or vmap",
    "test_paged.py": "generation or table or page",
    "test_invariance.py": "entries or differ",
}


@pytest.mark.slow  # runs 700 tests of other files
def test_device_tests() -> None:
    chosen = " or ".join(f"({file} and ({names}))" for file, names in TESTS.items())
    options = ["-q", "-p", "no:cacheprovider", "-p", "pretend_cuda", "-k", f"cuda and ({chosen})"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *(f"tests/{file}" for file in TESTS)],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
            "CUDA_VISIBLE_DEVICES": "",
        },
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-4000:]
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed, run.stdout
    assert int(passed[1]) >= 700, run.stdout[-1000:]
