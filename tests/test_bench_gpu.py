"""The benchmark of a GPU, run on the CPU, where the built-in has FLASH and MATH."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import GPU
from test_bench import BENCHMARKS, imported, render, run, silent

pytestmark = pytest.mark.long


@pytest.fixture
def gpu() -> Iterator[Any]:
    with imported("gpu") as module:
        yield module


def gpu_cases() -> list[Any]:
    from common import Case

    half = {"dtypes": ("bf16",)}
    return [
        *(
            Case(f"{c}2x3x{n} D{d}", 2, 3, n, d, causal=bool(c), **half)
            for c in ("", "causal ")
            for n in (32, 64)
            for d in (16, 32)
        ),
        Case("decode", 2, 4, 1, 16, keys=512, kv_heads=2, passes=("forward",), **half),
        Case("bool mask", 2, 3, 32, mask="bool", **half),
        Case("mask gradient", 2, 3, 32, mask="grad", passes=("backward",), **half),
        Case("dropout", 2, 3, 32, dropout=0.1, **half),
        Case("twice", 2, 3, 32, passes=("double backward",), dtypes=("f32",)),
    ]


def run_on_cpu(gpu: Any, cases: list[Any], **options: Any) -> str:
    from common import wall_clock

    console = silent()
    defaults = {"seconds": 0.0, "limit": 100.0, "device": "cpu", "clock": wall_clock, "size": 64}
    gpu.main(console, cases, **(defaults | options))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_gpu_bench(gpu: Any, tmp_path: Path) -> None:
    results, chart = tmp_path / "new" / "results.json", tmp_path / "speed.png"
    printed = run_on_cpu(gpu, gpu_cases(), json=results, chart=chart)
    written = json.loads(results.read_text())
    assert {"f32", "bf16", "f16"} == set(written["machine"]["peak_tflops"])
    rows = {(r["case"], r["pass"]): r for r in written["speed"]}
    assert len(rows) == 16 + 1 + 2 + 1 + 2 + 1
    for (case, which), r in rows.items():
        assert {"attn", "MATH"} <= set(r["ms"]), case
        assert {"EFFICIENT", "CUDNN"} <= set(r["refused"]), "the CPU has none"
        assert set(r["ratio"]) == set(r["ms"]) - {"attn"}
        for name, ratio in r["ratio"].items():
            assert ratio == pytest.approx(r["ms"][name] / r["ms"]["attn"])
        takes_flash = case not in ("mask gradient", "dropout", "twice")
        assert ("FLASH" in r["ms"]) == takes_flash
        assert ("FLASH det." in r["ms"]) == (takes_flash and which == "backward")
    forward, backward = rows["causal 2x3x64 D32", "forward"], rows["causal 2x3x64 D32", "backward"]
    flops = 4 * 2 * 3 * 64 * 64 * 32 / 2
    assert forward["tflops"]["FLASH"] == pytest.approx(flops / forward["ms"]["FLASH"] / 1e9)
    assert backward["tflops"]["attn"] == pytest.approx(2.5 * flops / backward["ms"]["attn"] / 1e9)
    assert forward["floors"] == {"FLASH": 0.9}
    assert backward["floors"] == {"FLASH": 0.7, "FLASH det.": 0.9}
    masked = rows["bool mask", "forward"]
    assert masked["floors"] == {min(masked["ratio"], key=masked["ratio"].get): 1.0}
    assert rows["mask gradient", "backward"]["floors"] == {"MATH": 1.0}
    decode = rows["decode", "forward"]
    assert decode["gbytes"] == pytest.approx(2 * 2 * 2 * 512 * 16 * 2 / decode["ms"]["attn"] / 1e6)
    assert rows["twice", "double backward"]["floors"] == {"MATH": 1.0}
    assert "derivative" in rows["twice", "double backward"]["refused"]["FLASH"]
    assert "23/23 twice double backward f32" in printed
    assert "of 21 rows below a floor" in printed, "without dropout, which FLASH refuses on the CPU"
    assert chart.read_bytes().startswith(b"\x89PNG")
    assert not torch.are_deterministic_algorithms_enabled()


def test_gpu_cases(gpu: Any) -> None:
    """All shapes, without data."""
    from common import jobs_of

    for cases in (gpu.CASES, gpu.QUICK):
        jobs = [(case.name, which, name) for case, which, name in jobs_of(cases, "")]
        assert len(set(jobs)) == len(jobs)
    printed = run_on_cpu(gpu, gpu.QUICK, device="meta", clock=lambda function, repeat: 1e-3)
    assert f"{len(jobs)}/{len(jobs)} " in printed
    assert "0 of" in printed, "equal times are above every floor"


def test_gpu_bench_that_is_cut(gpu: Any, tmp_path: Path) -> None:
    from common import wall_clock

    results = tmp_path / "results.json"

    def cut(function: Callable[[], Any], repeat: int) -> float:
        if results.exists() and len(json.loads(results.read_text())["speed"]) == 2:
            raise KeyboardInterrupt
        return wall_clock(function, repeat)

    with pytest.raises(KeyboardInterrupt):
        run_on_cpu(gpu, gpu_cases(), json=results, clock=cut)
    assert len(json.loads(results.read_text())["speed"]) == 2
    assert "23 rows not measured" in run_on_cpu(gpu, gpu_cases(), json=results, limit=-1.0)


def test_gpu_bench_without_memory(gpu: Any) -> None:
    """Calls that run alone but not beside other calls are left out, the last first."""
    from common import wall_clock

    calls = 0

    def clock(function: Callable[[], Any], repeat: int) -> float:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return wall_clock(function, repeat)

    peaks = {"peak_tflops": {"bf16": 1.0}, "read_gbytes": 1.0}
    row = gpu.measure(gpu_cases()[0], "forward", "bf16", peaks, 0.0, "cpu", clock)
    assert set(row["ms"]) == {"attn", "FLASH"}
    assert row["refused"]["MATH"] == gpu.NO_MEMORY
    assert "memory" in render(gpu.table([row]))


def test_gpu_bench_says_that_ours_failed(gpu: Any, tmp_path: Path) -> None:
    from common import Case

    results = tmp_path / "results.json"
    wrong = Case("wrong", 1, 4, 16, kv_heads=3, passes=("forward",), dtypes=("f32",))
    with pytest.raises(SystemExit, match="wrong forward f32"):
        run_on_cpu(gpu, [wrong], json=results)
    (row,) = json.loads(results.read_text())["speed"]
    assert "enable_gqa" in row["refused"]["attn"]
    assert "failed" in render(gpu.table([row]))


def test_gpu_floors(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case, *_ = gpu_cases()
    ms = {"attn": 1.0, "FLASH": 0.85, "FLASH det.": 0.95, "MATH": 5.0}
    row = {
        "case": case.name,
        "pass": "backward",
        "dtype": "bf16",
        "ms": ms,
        "spread": {},
        "refused": {"CUDNN": "no"},
        "ratio": {who: t for who, t in ms.items() if who != "attn"},
        "floors": gpu.floors(case, "backward", ms),
    }
    assert gpu.missed(row) == []
    row["floors"] = gpu.floors(case, "forward", ms)
    assert gpu.missed(row) == ["FLASH"]
    assert "0.85 < 0.9" in render(gpu.table([row]))
    monkeypatch.setattr(gpu, "on_hopper", lambda: True)
    decoding = {case.name: case for case in gpu.others(("bf16",)) if case.name.startswith("decode")}
    of_one = gpu.floors(decoding["decode 32:8 1 x 16k D128"], "forward", ms)
    of_many = gpu.floors(decoding["decode 32:8 64 x 4k D128"], "forward", ms | {"CUDNN": 1.0})
    assert (of_one, of_many) == ({"FLASH": 1.0}, {"FLASH": 0.95, "CUDNN": 0.95})


@pytest.mark.skipif(GPU, reason="there is a GPU")
def test_without_a_gpu() -> None:
    command = [sys.executable, str(BENCHMARKS / "bench.py"), "--device", "cuda"]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 2
    assert "no GPU" in process.stderr


@pytest.mark.skipif(not GPU, reason="not run: no GPU, or no CUDA in torch or torch_attn")
def test_on_a_gpu(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    run("bench.py", "--quick", "--filter", "decode 32:8 1 x 16k", "--json", str(results))
    written = json.loads(results.read_text())
    assert written["machine"]["gpu"] == torch.cuda.get_device_name()
    (row,) = written["speed"]
    assert {"attn", "FLASH", "MATH"} <= set(row["ms"])
    assert 0 < row["of_peak"] < 1.2
