"""`python -m torch_attn`."""

import os
import platform
import re
import subprocess
import sys

import torch

import torch_attn
from helpers import CPU_CAPABILITIES
from torch_attn._library import built_with


def report(**environment: str) -> dict[str, str]:
    """What the command prints, by the name of the row."""
    output = subprocess.run(
        [sys.executable, "-m", "torch_attn"],
        env=os.environ | environment,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return dict(re.split(r"\s{2,}", line, maxsplit=1) for line in output.splitlines())


def test_says_what_a_bug_report_needs() -> None:
    rows = report(OMP_NUM_THREADS="1", ATTN_CPU_CAPABILITY="default")
    assert rows["torch_attn"] == torch_attn.__version__
    assert rows["torch"] == torch.__version__
    assert rows["python"] == platform.python_version()
    assert rows["OS"] == platform.platform()
    assert rows["threads"] == "1"
    available = f"(available: {', '.join(CPU_CAPABILITIES)})"
    assert rows["instruction set"] == f"default {available}"
    assert rows["CPU"]
    assert re.fullmatch(r"torch 2\.\d+\.\S+, \S.*\d+\.\d+.*", rows["built with"])
    # A library without CUDA kernels says so also where torch has CUDA.
    assert rows["CUDA"].startswith("yes (" if built_with()["cuda"] else "no (")
