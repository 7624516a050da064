"""`python -m torch_attn`."""

import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torch_attn
from helpers import CPU_CAPABILITIES
from torch_attn import _bench
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


BENCH = "from torch_attn.__main__ import main; main()"


@pytest.mark.long
@pytest.mark.parametrize("missing", ["", "transformers"])
def test_bench(missing: str, tmp_path: Path) -> None:
    """Also with torch alone; a library that is None in sys.modules cannot be imported."""
    without = f"import sys; sys.modules[{missing!r}] = None; " if missing else ""
    options = ["bench", "--seconds=0", f"--json={tmp_path / 'bench.json'}"]
    run = subprocess.run(
        [sys.executable, "-c", without + BENCH, *options], text=True, capture_output=True
    )
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    rows = json.loads((tmp_path / "bench.json").read_text())
    assert len(rows["calls"]) == len(_bench.SHAPES) >= 12
    for row in rows["calls"]:
        assert row["model"] in run.stdout
        assert 0.01 < row["times"] < 1000, row
        assert row["times"] == row["builtin_ms"] / row["attn_ms"], row
    assert rows["machine"]["instruction set"] in CPU_CAPABILITIES
    assert rows["encoder"]["kind"].startswith(
        "3 layers of BERT" if not missing else "3 layers of nn"
    )
    assert rows["memory"]["builtin"] > 3 * rows["memory"]["attn"] > 0
    for line in ("unpad(model)", "torch_attn.replace_sdpa()"):
        assert re.search(rf"^    {re.escape(line)}$", run.stdout, re.MULTILINE), line


def test_bench_stops_where_results_differ() -> None:
    x = torch.ones(3)
    _bench._check("same", (x, x), (x, x + 1e-6))
    with pytest.raises(
        SystemExit, match=r"another: built-in and attn differ by 1\.0e-01, of 1\.0e"
    ):
        _bench._check("another", (x, x), (x, x + torch.tensor([0, 0, 0.1])))


def test_bench_says_first_that_there_is_no_directory() -> None:
    command = [sys.executable, "-m", "torch_attn", "bench", "--json=/no/such/bench.json"]
    run = subprocess.run(command, text=True, capture_output=True)
    assert (run.returncode, run.stdout) == (2, "")
    assert "there is no directory /no/such" in run.stderr


def test_version() -> None:
    said = subprocess.check_output([sys.executable, "-m", "torch_attn", "--version"], text=True)
    assert said == f"{torch_attn.__version__}\n"
