"""The benchmarks run, and what they write is complete. Figures are not judged: machines differ."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def run(program: str, *arguments: str) -> str:
    process = subprocess.run(
        [sys.executable, str(BENCHMARKS / program), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


def test_bench(tmp_path: Path) -> None:
    results, chart = tmp_path / "new" / "results.json", tmp_path / "speed.png"
    arguments = ["--quick", "--filter", "length 1x12x64 "]
    printed = run("bench.py", *arguments, "--json", str(results), "--chart", str(chart))
    assert "GFLOP/s: f32" in printed
    written = json.loads(results.read_text())
    assert {"date", "cpu", "threads", "torch", "capability", "peak_gflops"} <= set(
        written["machine"]
    )
    rows = written["speed"]
    assert [(r["pass"], r["dtype"]) for r in rows] == [
        ("forward", "f32"),
        ("forward", "bf16"),
        ("backward", "f32"),
        ("backward", "bf16"),
    ]
    for r in rows:
        assert r["ratio"] == pytest.approx(r["builtin_ms"] / r["ours_ms"])
        flops = 4 * 12 * 64 * 64 * 64 * (2.5 if r["pass"] == "backward" else 1)
        assert r["gflops"] == pytest.approx(flops / r["ours_ms"] / 1e6)
        assert 0 < r["of_peak"] < 2, "far above the machine's peak (which other work may disturb)"
    assert chart.read_bytes().startswith(b"\x89PNG")


def test_bench_of_decoding_and_derivatives(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    run("bench.py", "--quick", "--filter", "decode GQA", "--json", str(results))
    assert all("gbytes" in r for r in json.loads(results.read_text())["speed"])
    run("bench.py", "--quick", "--filter", "jvp 512", "--json", str(results))
    (row,) = json.loads(results.read_text())["derivatives"]
    assert row["ours_mib"] < row["builtin_mib"]


def test_instruction_set_is_held(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    arguments = ["--quick", "--filter", "none", "--capability", "default"]
    run("bench.py", *arguments, "--json", str(results))
    assert json.loads(results.read_text())["machine"]["capability"] == "default"


@pytest.mark.parametrize("peer", ["attn", "built-in"])
def test_peers_check_what_they_measure(peer: str) -> None:
    """The others are extras, which the tests do not need."""
    assert float(run("peers.py", "--run", peer, "8x12x128", "bf16", "2")) > 0
