"""The benchmarks run, and what they write is complete. Figures are not judged: machines differ."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import importlib
import io
import json
import re
import sys
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import torch_attn
from _variants import ROOT, run_python

pytestmark = pytest.mark.long

BENCHMARKS = ROOT / "benchmarks"


def run(program: str, *arguments: str) -> str:
    return run_python(str(BENCHMARKS / program), *arguments)


@contextlib.contextmanager
def imported(program: str) -> Iterator[Any]:
    """A program as a module. Afterwards it, and the others that it imports, are forgotten: their
    names, such as `memory`, are common ones."""
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield importlib.import_module(program)
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").parent == BENCHMARKS:
            del sys.modules[name]


@pytest.mark.slow  # a whole run
def test_bench(tmp_path: Path) -> None:
    results, chart = tmp_path / "new" / "results.json", tmp_path / "speed.png"
    arguments = ["--device", "cpu", "--quick", "--filter", "length 1x12x64 "]
    printed = run("bench.py", *arguments, "--json", str(results), "--chart", str(chart))
    assert "GFLOP/s: f32" in printed
    written = json.loads(results.read_text())
    assert {"date", "cpu", "cores", "threads", "torch", "capability", "peak_gflops"} <= set(
        written["machine"]
    )
    rows = written["speed"]
    assert [(r["pass"], r["dtype"]) for r in rows] == [
        (which, dtype) for which in ("forward", "backward") for dtype in ("f32", "bf16", "f16")
    ]
    for r in rows:
        assert r["ratio"] == pytest.approx(r["builtin_ms"] / r["ours_ms"])
        assert r["unfused_ms"] > 0
        flops = 4 * 12 * 64 * 64 * 64 * (2.5 if r["pass"] == "backward" else 1)
        assert r["gflops"] == pytest.approx(flops / r["ours_ms"] / 1e6)
        peak = written["machine"]["peak_gflops"][r["dtype"]]
        assert r["of_peak"] == pytest.approx(r["gflops"] / peak)
    assert chart.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow  # a whole run
def test_bench_of_decoding_and_derivatives(tmp_path: Path) -> None:
    """Held to an instruction set, of the CPU."""
    results = tmp_path / "results.json"
    arguments = ["--capability", "default", "--quick", "--json", str(results)]
    run("bench.py", *arguments, "--filter", "decode GQA")
    written = json.loads(results.read_text())
    assert written["machine"]["capability"] == "default"
    assert written["speed"]
    assert all("gbytes" in r for r in written["speed"])
    run("bench.py", *arguments, "--filter", "jvp 512")
    (row,) = json.loads(results.read_text())["derivatives"]
    assert row["ours_mib"] < row["builtin_mib"]


@pytest.mark.slow  # a whole run
def test_bench_of_the_grid_of_decoding(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    arguments = ["--dtype", "bf16", "--head-dim", "20", "--seconds", "0.001", "--no-grouped"]
    printed = run("decode.py", *arguments, "--capability", "default", "--json", str(results))
    written = json.loads(results.read_text())
    rows = written["decode"]
    assert written["machine"]["capability"] == "default"
    assert {(r["dtype"], r["head_dim"]) for r in rows} == {("bf16", 20)}
    assert len({(r["queries"], r["keys"]) for r in rows}) == len(rows) == 5 * 7
    for r in rows:
        assert r["ratio"] == pytest.approx(r["builtin_us"] / r["ours_us"])
    slower = sum(r["ratio"] < 1 for r in rows)
    assert f"{slower} of {len(rows)} slower than the built-in" in printed


def silent() -> Console:
    return Console(width=150, file=io.StringIO())


def render(table: Any) -> str:
    console = silent()
    console.print(table)
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.fixture
def bench() -> Iterator[Any]:
    """While it lasts, tests can import the other programs too."""
    with imported("bench") as module:
        yield module


def test_unfused_is_the_same_function(bench: Any) -> None:
    case = bench.Case("", 2, 4, 7, keys=9, kv_heads=2, value_dim=16, mask="bool")
    functions = bench.OPERATORS[0], bench.unfused
    ours, unfused = [bench.runner(f, case, torch.float64, "forward")() for f in functions]
    torch.testing.assert_close(unfused, ours)


def test_many_heads_on_few_key_heads(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import decode

    monkeypatch.setattr(decode, "GROUPED", ((4, 2, 3),))
    monkeypatch.setattr(decode, "GROUPED_DIMS", ((8, 4),))
    rows = decode.measure_grouped(silent(), ["f32", "bf16"], 0.001)
    assert [(r["dtype"], r["heads"], r["kv_heads"], r["queries"]) for r in rows] == [
        ("f32", 4, 2, 3),
        ("bf16", 4, 2, 3),
    ]
    assert all(r["gflops"] > 0 and r["of_long"] > 0 for r in rows)
    share = r"\(\d+\.\d\d\)"
    assert re.search(f"8 / 4.*4 : 2, 3.*{share}.*{share}", render(decode.grouped_table(rows)))


def test_caches_that_come_from_memory(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import decode

    monkeypatch.setattr(decode, "ENOUGH", 800_000)
    case = dataclasses.replace(decode.CACHES[1], keys=50)
    run, count, size = decode.over_caches(case, torch.int8)
    assert count == 8  # of 102,400 bytes without scales
    assert size == 2 * 8 * 50 * (128 + 4)
    run()
    machine = types.SimpleNamespace(read_gbytes=lambda size: 2.0)
    rows = decode.measure_caches(silent(), machine, [case], 0.001)
    assert [r["stored"] for r in rows] == ["bfloat16", "int8", "float8_e4m3fn"]
    for r in rows:
        assert r["ratio"] == pytest.approx(rows[0]["us"] / r["us"])
        assert r["of_read"] == r["gbytes"] / 2 > 0
    assert rows[1]["gbytes"] * rows[1]["us"] == pytest.approx(size / 1e3)
    assert "float8_e4m3fn" in render(decode.caches_table(rows))


def test_gpt_with_keys_and_values_of_8_bits(bench: Any) -> None:
    """Decoding over a cache, against the whole sequence at once with keys and values in floats."""
    import eight_bits

    from examples.demo.gpt import GPT, Config

    torch.manual_seed(0)
    model = GPT(11, Config(context=64, layers=2, heads=2, width=32), torch_attn.sdpa)
    tokens = torch.randint(11, (3, 40))
    for bits in eight_bits.BITS:
        decoded = eight_bits.decode(model, tokens, bits)

        def attend(query: Any, key: Any, value: Any, bits: Any = bits, **options: Any) -> Any:
            if bits is not None:
                parts = [torch_attn.quantize_kv(x, bits) for x in (key, value)]
                key, value = (x.float() * scale[..., None] for x, scale in parts)
            return torch_attn.sdpa(query, key, value, **options)

        for block in model.blocks:
            block.attention = attend  # type: ignore[assignment]
        torch.testing.assert_close(decoded, model(tokens).double(), rtol=1e-4, atol=1e-5)


def test_bench_of_8_bits(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import eight_bits

    small = {"LESSONS": [(16, 4, 2), (64, 2, 1)], "LENGTH": 24, "SENTENCES": 3}
    for name, value in small.items():
        monkeypatch.setattr(eight_bits, name, value)
    results = tmp_path / "results.json"
    monkeypatch.setattr(sys, "argv", ["eight_bits.py", "--json", str(results)])
    eight_bits.main()
    written = json.loads(results.read_text())
    both = [(r["model"], r["keys and values"]) for r in written["gpt"]]
    assert both == [(r["model"], r["keys and values"]) for r in written["minilm"]]
    for whole in range(0, 6, 3):
        assert [keys for _, keys in both[whole + 1 : whole + 3]] == ["int8", "float8_e4m3fn"]
    first, _, _, other = written["gpt"][:4]
    assert first["change"] == 0
    assert first["same"] == 1
    assert other["change"] == pytest.approx(other["perplexity"] / first["perplexity"] - 1)
    for r in written["minilm"]:
        assert 0.99 < r["smallest"] <= r["mean"] < 1 + 1e-12


@pytest.mark.slow  # processes of their own
def test_memory_rows(bench: Any) -> None:
    plain, dropout = bench.bench_memory([1024], "memory")
    assert [r["kind"] for r in (plain, dropout)] == [bench.BACKWARD, bench.DROPOUT]
    scores = 2 * 1024 * 1024 * 4 / 2**20
    assert dropout["ours_mib"] < scores < dropout["builtin_mib"]
    assert max(plain["ours_mib"], plain["builtin_mib"]) < 2 * scores
    assert "dropout 0.1" in render(bench.memory_table([plain, dropout]))


VISIBLE = {  # of the numbers of queries and keys: how many pairs
    "window 256 of 1x12x4096": 4096 * 256 - 256 * 255 // 2,
    "16 documents, 1x12x2048": 16 * 128 * 128,
    "cache 200 of 4k D128": 200,
    "padding 64 of 8x12x512": 512 * 64,
}


def test_masked_rows(bench: Any) -> None:
    import masked

    assert [m.case.name for m in masked.MASKED] == list(VISIBLE)
    cases = []
    for m in masked.MASKED:
        queries, keys = m.case.queries, m.case.keys or m.case.queries
        mask = m.visible(torch.arange(queries)[:, None], torch.arange(keys))
        assert mask.expand(queries, keys).sum() == VISIBLE[m.case.name]
        few = {"batch": 1, "heads": 1, "queries": min(queries, 512)}
        case = dataclasses.replace(m.case, **few, dtypes=("f32",))
        cases.append(dataclasses.replace(m, case=case))
    rows = bench.bench_masked(silent(), cases, 0.0, "")
    passes = [(r["case"], r["pass"]) for r in rows]
    assert len(passes) == 7
    assert ("cache 200 of 4k D128", "backward") not in passes
    for r in rows:
        assert r["of_instead"] == pytest.approx(r["ours_ms"] / r["instead_ms"])
        assert r["ratio"] == pytest.approx(r["builtin_ms"] / r["ours_ms"])
    rows[0] |= {"of_instead": 0.26}
    rows[1:] = [r | {"of_instead": r["at_most"]} for r in rows[1:]]
    assert bench.above(rows) == 1
    printed = render(bench.masked_table(rows))
    assert all(name in printed for name in VISIBLE)


def test_what_masked_rows_are_held_against(bench: Any) -> None:
    """The same work without the mask: where the same keys are in sight, the same output."""
    import masked

    _, documents, cache, padding = masked.MASKED
    for m, dim in (documents, -2), (cache, -2):
        tensors, _ = dataclasses.replace(m.case, heads=2).inputs(torch.float32)
        queries, keys = tensors[0].size(-2), tensors[1].size(-2)
        mask = m.visible(torch.arange(queries)[:, None], torch.arange(keys))
        parts = [torch.ops.attn.sdpa(*part, **options) for part, options in m.instead(tensors)]
        expected = torch.ops.attn.sdpa(*tensors, mask)
        torch.testing.assert_close(torch.cat(parts, dim), expected)
    ((_, options),) = padding.instead(tensors)
    assert not options
    ((_, options),) = masked.MASKED[0].instead(tensors)
    assert options == {"is_causal": True}


def test_rows_of_options(bench: Any) -> None:
    """Rows compare the options of their names with the calls `instead`, which compute the same."""
    import options

    small = {}
    for name, option in options.OPTIONS.items():
        fewer = {"queries": min(option.case.queries, 300), "heads": 2, "kv_heads": 1}
        small[name] = dataclasses.replace(
            option, case=dataclasses.replace(option.case, **fewer, keys=2100, dtypes=("f32",))
        )
    rows = bench.bench_options(silent(), small, 0.0, "", with_flex=False)
    assert [(r["option"], r["pass"]) for r in rows[:3]] == [
        *[("window 256", "forward"), ("window 256", "backward")],
        ("window 256, offset 37", "forward"),
    ]
    assert len(rows) == 9
    for r in rows:
        assert r["of_instead"] == pytest.approx(r["ours_ms"] / r["instead_ms"])
        assert 0 < r["at_most"] < 1.2
    rows = [r | {"of_instead": r["at_most"]} for r in rows]
    assert bench.above(rows) == 0
    printed = render(bench.options_table(rows, "Options"))
    assert all(name in printed for name in options.OPTIONS)
    cache = options.OPTIONS["half of a cache"]
    tensors, plain = cache.case.inputs(torch.float32)
    expected = torch.ops.attn.sdpa(*cache.instead(tensors), **plain)
    actual = torch.ops.attn.attention(*tensors, **plain, **cache.options(cache.case))[0]
    torch.testing.assert_close(actual, expected)


def test_share_of_the_peak_in_cycles(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from common import Case

    cycles = 0

    def sdpa(*tensors: torch.Tensor, **options: Any) -> torch.Tensor:
        """As if each call took 80,000 cycles."""
        nonlocal cycles
        cycles += 80_000
        return torch.ops.attn.sdpa(*tensors, **options)

    counter = types.SimpleNamespace(read=lambda: cycles)
    monkeypatch.setattr(bench, "Counter", lambda: contextlib.nullcontext(counter))
    monkeypatch.setattr(bench, "OPERATORS", (sdpa, bench.OPERATORS[1]))
    cases = [Case("8x8", 1, 8, 64, passes=("forward",), dtypes=("f32",))]
    machine = types.SimpleNamespace(gflops={"f32": 100.0}, per_cycle={"f32": 64.0})

    def rows(counted: bool) -> list[dict[str, Any]]:
        return bench.bench_speed(silent(), machine, cases, 0.0, "", counted)

    (row,) = rows(counted=True)
    assert row["of_peak_cycles"] == pytest.approx(4 * 8 * 64 * 64 * 64 / 80_000 / 64)
    assert "in cycles" in render(bench.speed_table([row]))
    (row,) = rows(counted=False)
    assert "of_peak_cycles" not in row
    assert "in cycles" not in render(bench.speed_table([row]))


def test_cycles_are_read_or_it_is_said_why_not(bench: Any) -> None:
    import cycles

    reason = bench.why_no_cycles()
    if reason:
        clear = "no counter of cycles|perf_event_paranoid is -?[0-9]|written for|perf_event_open: "
        assert re.search(clear, reason)
        return
    work = torch.randn(256, 256)
    with cycles.Counter() as counter:
        few, many = (cycles.cycles_of(lambda n=n: work.matrix_power(n), counter) for n in (2, 64))
    assert 0 < few < many


def test_counter_counts_all_threads(bench: Any) -> None:
    """With the kernel's own clock of a thread, which needs no counter of the processor."""
    import cycles

    task_clock = (1, 1)  # PERF_TYPE_SOFTWARE, PERF_COUNT_SW_TASK_CLOCK: nanoseconds
    begin, end = threading.Event(), threading.Event()

    def spin() -> None:
        begin.wait()
        clock = time.thread_time()
        while time.thread_time() - clock < 0.2:
            pass
        end.set()

    threading.Thread(target=spin, daemon=True).start()
    try:
        with cycles.Counter(task_clock) as counter:
            before, clock = counter.read(), time.process_time_ns()
            begin.set()
            end.wait()
            passed, expected = counter.read() - before, time.process_time_ns() - clock
    except cycles.UnreadableError as reason:
        begin.set()
        pytest.skip(f"not run: {reason}")
    assert expected >= 0.2e9
    assert passed == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (errno.ENOENT, "no counter of cycles"),
        (errno.EACCES, "perf_event_paranoid is"),
        (errno.ENOSYS, "perf_event_open: Function not implemented"),
    ],
)
def test_why_cycles_cannot_be_read(
    bench: Any, code: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import cycles

    class Libc:
        @staticmethod
        def syscall(*_: Any) -> int:
            ctypes.set_errno(code)
            return -1

    monkeypatch.setattr(cycles.ctypes, "CDLL", lambda *_, **__: Libc)
    assert reason in bench.why_no_cycles()


# ---------------------------------------------------------------------------------------------
# What is made of results, the committed ones among them


def test_tables_are_those_of_the_documentation(bench: Any) -> None:
    """Line by line, both ways: of the result that it quotes, and of the latest others."""
    import tables

    text = "".join((ROOT / name).read_text() for name in ("docs/performance.md", "README.md"))
    (name,) = set(re.findall(r"benchmarks/results/([\w-]+)\.png", text))
    directory = BENCHMARKS / "results"
    kinds = ("peers", "models", "functions", "gpu")
    files = [directory / f"{name}.json", *(max(directory.glob(f"*-{kind}.json")) for kind in kinds)]
    results = [json.loads(file.read_text()) for file in files]
    printed = [line for r in results for made in tables.tables(r) for line in made.splitlines()]
    made = {line for line in printed if line.startswith("|")}
    section = text[text.index("## Results") : text.index("## What bounds it")]
    written = {line for line in section.splitlines() if line.startswith("|")}
    assert len(written) > 50
    assert written <= made
    assert made <= set(text.splitlines())


def test_functions_of_the_pair_and_what_stands_beside_them(bench: Any) -> None:
    """Both compute the same, but beside the plain call."""
    import flex

    torch.manual_seed(0)
    same = ("causal", "16 documents", "neighbourhood 13 of 64 x 64")
    same += ("T5, L = 512, eager", "DeBERTa, L = 512, eager")
    assert set(same) < set(flex.jobs())
    for name in same:
        job = flex.jobs()[name][0]()
        heads = job.shape[1] if job.captured else 1
        x = [torch.randn(1, heads, n, 16) for n in (job.shape[2], job.shape[3], job.shape[3])]
        torch.testing.assert_close(job.ours(*x, *job.captured), job.instead(*x, *job.captured))


def test_tables_of_what_is_new(bench: Any) -> None:
    import tables

    row = {"case": "c", "pass": "forward", "dtype": "f32", "ours_ms": 1.5, "ratio": 2.0}
    memory = {"kind": "k", "length": 512, "ours_mib": 2.4, "builtin_mib": 10.0}
    made = tables.tables(
        {
            "speed": [row | {"of_peak": 0.5, "of_peak_cycles": 0.75}],
            "masked": [row | {"of_instead": 0.25}],
            "memory": [memory],
        }
    )
    text = "\n\n".join(made)
    assert "of peak, in cycles" in text
    assert "| c | forward | 1.5, 2.00x, 50%, 75% |  |  |" in text
    assert "| c | forward | 1.5, 0.25, 2.00x |  |  |" in text
    assert "| k | 512 | 2 | 10 |" in text


def test_chart_of_new_and_old_results(bench: Any, tmp_path: Path) -> None:
    import chart

    old = json.loads((ROOT / "benchmarks/results/2026-11-21-amd-epyc-zen4.json").read_text())
    lengths = {
        (r["dtype"], r["length"], r["pass"]): r
        for r in old["speed"]
        if r["case"].startswith("length ")
    }
    speed = [r | {"dtype": d} for d in ("f32", "bf16", "f16") for r in lengths.values()]
    kinds = ("forward and backward", "forward and backward, dropout 0.1")
    memory = [
        {"kind": kind, "length": n, "ours_mib": 0.0, "builtin_mib": 4.0 * n}
        for kind in kinds
        for n in (512, 1024)
    ]
    new = {**old, "speed": speed, "memory": memory, "machine": old["machine"] | {"cores": 8}}
    rows = chart.cpu_panels(new)
    assert [[panel.unit for panel in row] for row in rows] == [["GFLOP/s"] * 3] * 2 + [["MiB"] * 3]
    assert "8 cores, 2 threads" in chart.title_of(new)
    assert [len(row) for row in chart.cpu_panels(old)] == [len({d for d, *_ in lengths})] * 2
    for result in (old, new):
        assert chart.draw(result, tmp_path / "speed.png")
    nothing = {**old, "speed": [], "memory": []}
    assert not chart.draw(nothing, tmp_path / "nothing.png")


@pytest.mark.slow  # whole models
@pytest.mark.parametrize("row", ["MiniLM forward bf16", "GPT, 4 layers decode f32"])
def test_models(row: str, tmp_path: Path) -> None:
    results = tmp_path / "models.json"
    printed = run("models.py", "--quick", "--filter", row, "--json", str(results))
    assert row.split()[0] in printed
    (r,) = json.loads(results.read_text())["models"]
    assert f"{r['model']} {r['pass']} {r['dtype']}" == row
    assert r["ratio"] == pytest.approx(r["attn"] / r["builtin"])
    assert r["ratio_eager"] == pytest.approx(r["attn"] / r["eager"])
    assert 0 < r["attention"] < 1


@pytest.mark.slow  # whole models
def test_unpad(tmp_path: Path) -> None:
    results = tmp_path / "unpad.json"
    row = "MiniLM forward f32 skewed"
    printed = run("unpad.py", "--quick", "--filter", row, "--json", str(results))
    (r,) = json.loads(results.read_text())["unpad"]
    assert f"{r['model']} {r['pass']} {r['dtype']} {r['lengths']}" == row
    assert f"{r['unpad']:.2f}" in printed
    assert r["tokens"] < r["padded_tokens"] == 2 * 32 * 32
    assert r["mib_padded"] > 0
    assert min(r[way] for way in ("unpad", "sorted", "unpad_sorted", "packed")) > 0


@pytest.mark.slow  # whole models
def test_models_without_ours_are_not_measured(bench: Any) -> None:
    import models

    with pytest.raises(SystemExit, match="MiniLM: the model does not call attn"):
        models.check([lambda: 0], "MiniLM", 0.1, False)


def test_peers_are_measured_until_the_noise_allows_it(bench: Any) -> None:
    import peers

    assert not peers.settled([], [])
    assert not peers.settled([11.0], [10.0])  # near, once
    assert peers.settled([21.0], [10.0])  # far, once
    assert peers.settled([11.0, 11.1, 10.9], [10.0])  # near and quiet
    assert not peers.settled([11.0, 12.0, 10.0], [10.0])  # near and noisy


@pytest.mark.slow  # compiles the peers
@pytest.mark.parametrize("peer", ["attn", "built-in"])
def test_peers_check_what_they_measure(peer: str) -> None:
    """The others are extras, which the tests do not need."""
    assert float(run("peers.py", "--run", peer, "8x12x128", "bf16", "2")) > 0
