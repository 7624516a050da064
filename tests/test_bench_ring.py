"""The benchmark of several processes: its formula in cases that are known, and what it counts."""

from __future__ import annotations

import functools
import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from test_bench import imported, run
from torch_attn.distributed._layout import Call, Layout
from torch_attn.distributed._methods import sent

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def ring() -> Iterator[Any]:
    with imported("ring") as module:
        yield module


@pytest.fixture(scope="module")
def formula(ring: Any) -> Any:
    return sys.modules[ring.Job.__module__]


@pytest.fixture(scope="module")
def processes(ring: Any) -> Iterator[Any]:
    with ring.Processes(2) as processes:
        yield processes


# ---------------------------------------------------------------------------------------------
# The formula


@pytest.fixture(params=[False, True], ids=["all pairs", "causal"])
def job(formula: Any, request: pytest.FixtureRequest) -> Any:
    return formula.Job(3e14, 2e14, request.param, heads=32, kv_heads=8, head_dim=128, itemsize=2)


def test_nothing_is_lost_over_infinite_bandwidth(formula: Any, job: Any) -> None:
    for machines in (2, 3, 64):
        assert formula.efficiency(job, 2**20, machines, math.inf) == pytest.approx(1)
        assert formula.efficiency(job, 2**20, machines, 1) < 1
    # One machine sends nothing.
    assert formula.step_times(job, 2**20, 1, 1e-3) == formula.step_times(job, 2**20, 1, math.inf)


def test_a_causal_call_has_half_of_the_work(formula: Any, job: Any) -> None:
    both = (
        formula.step_times(replace(job, is_causal=c), 2**20, 8, math.inf) for c in (True, False)
    )
    for causal, all_pairs in zip(*both, strict=True):
        assert 2 * causal == pytest.approx(all_pairs)


@pytest.mark.parametrize(
    ("seconds", "forward", "backward"),
    [
        (0.5, 4, [2, 2, 2, 2, 0.5]),
        (1.5, 3 * 1.5 + 1, [2, 2, 3, 2, 1.5]),
        (3.0, 3 * 3 + 1, [3, 3, 6, 3, 3]),
    ],
)
def test_steps_of_four_machines(
    formula: Any, seconds: float, forward: float, backward: list[float]
) -> None:
    """A block of one token, computed in 1 s and backward in 2 s; 8 bytes of keys, 8 back."""
    job = formula.Job(forward=4, backward=5, heads=1, kv_heads=1, head_dim=1)
    found = formula.step_times(job, 4, 4, 64 / seconds / 1e9)
    assert found == pytest.approx((forward, sum(backward)))


def crossing(is_hidden: Callable[[float], bool]) -> float:
    """The least length that is hidden, by bisection."""
    low, high = 1.0, 1e9
    assert is_hidden(high)
    assert not is_hidden(low)
    while high / low > 1 + 1e-9:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if is_hidden(middle) else (middle, high)
    return high


@pytest.mark.parametrize("itemsize", [2, 4, 8])
@pytest.mark.parametrize("kv_heads", [1, 32])
def test_closed_form_of_the_length_that_hides(
    formula: Any, job: Any, kv_heads: int, itemsize: int
) -> None:
    """Against the times of steps, less the times of computing alone and of the last gradients."""
    machines, gbits = 8, 25.0
    job = replace(job, kv_heads=kv_heads, itemsize=itemsize)

    def is_hidden(place: int, block: float) -> bool:
        took, least = (
            formula.step_times(job, machines * block, machines, rate)[place]
            for rate in (gbits, math.inf)
        )
        last = 8 * formula.bytes_of(job, block)[1] / (gbits * 1e9) if place else 0
        return bool(took <= (least + last) * (1 + 1e-12))

    found = [crossing(functools.partial(is_hidden, place)) for place in range(2)]
    assert found == pytest.approx(formula.hiding_lengths(job, gbits), rel=1e-6)


def test_weak_scaling_levels_off_and_strong_does_not(formula: Any, job: Any) -> None:
    """At twice the hiding length nearly all is hidden; at a quarter, three quarters are lost."""
    block = max(formula.hiding_lengths(job, 100))
    weak = [formula.efficiency(job, 2 * block * machines, machines, 100) for machines in (16, 64)]
    strong = [formula.efficiency(job, 16 * block, machines, 100) for machines in (16, 64)]
    assert min(weak) > 0.95
    assert weak[1] > weak[0]
    assert strong[0] > 0.9
    assert 0.2 < strong[1] < 0.35


def test_what_a_hidden_part_is(ring: Any) -> None:
    computing, sending = [3.0, 3.0, 4.0, 3.0], [2.0] * 4
    steps = {1.0: computing, 0.5: [4.0, 4.0, 5.0, 4.0], 0.0: [5.0, 5.0, 6.0, 5.0]}
    for part, step in steps.items():
        found = ring.hidden(computing, sending, step)
        assert found == {"rounds": 4, "hidden": part, "hidden_error": 0.0}
    assert ring.hidden(computing, sending, [9.0] * 4)["hidden"] == 0
    assert ring.hidden(computing, sending, [1.0] * 4)["hidden"] == 1


# ---------------------------------------------------------------------------------------------
# What is sent


def settings(ring: Any, **given: Any) -> Any:
    given = {"training": True, "length": 16, "heads": 4, "kv_heads": 2, "head_dim": 8} | given
    return ring.Setting(**given)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("order", ["all pairs", "causal", "causal, balanced"])
@pytest.mark.parametrize("way", ["ring", "gather", "all_to_all"])
def test_bytes_are_those_of_the_formula(
    ring: Any, processes: Any, way: str, order: str, dtype: str
) -> None:
    setting = settings(ring, way=way, order=order, dtype=dtype)
    forward, both = (
        sum(processes(ring.bytes_counted, replace(setting, training=training))) / 2
        for training in (False, True)
    )
    found = ring.bytes_sent(way, setting.job(), setting.length, 2, order == ring.IN_ORDER)
    assert found == (forward, both - forward)
    assert forward > 0


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("order", ["all pairs", "causal", "causal, balanced"])
def test_formula_is_that_of_the_library(ring: Any, order: str, dtype: str) -> None:
    world, length = 4, 64
    setting = settings(ring, way="", order=order, dtype=dtype, heads=16, kv_heads=4, length=length)
    cut = Layout.head_and_tail if order == ring.BALANCED else Layout.chunks
    pieces = cut(length, world)
    options = {"is_causal": order != ring.ALL, "window_size": (-1, -1)}
    group: Any = None
    offset = torch.zeros((), dtype=torch.int64)
    call = Call(Layout(0, pieces, pieces), group, options, offset, None)
    shapes = [
        torch.empty(1, heads, length, 8, dtype=ring.DTYPES[dtype], device="meta")
        for heads in (16, 4, 4)
    ]
    ways = sent(call, *shapes)
    assert set(ways) == set(ring.WAYS)
    for way, size in ways.items():
        found = ring.bytes_sent(way, setting.job(), length, world, order == ring.IN_ORDER)
        assert found[0] == size, way


def check_cut(setting: Any) -> int:
    """With a cut wire nothing is sent, and all is computed."""
    from ring import Wire, step_of

    def start(_: list[Any]) -> Any:
        raise AssertionError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "batch_isend_irecv", start)
        with Wire(is_cut=True) as wire:
            step_of(setting)()
    return len(wire.batches)


def test_nothing_passes_a_cut_wire(ring: Any, processes: Any) -> None:
    batches = {"ring": 3, "gather": 4, "all_to_all": 8}  # of keys, of gradients; of each tensor
    for way, count in batches.items():
        setting = settings(ring, way=way, order=ring.ALL)
        assert processes(check_cut, setting) == [count] * 2
        assert [len(b) for b in processes(ring.messages_of, setting)] == [count] * 2


def test_a_slow_wire_is_as_slow_as_its_link(ring: Any, processes: Any) -> None:
    setting = settings(ring, way="ring", order=ring.ALL)
    gbits = 1e-3
    least = 8 * sum(ring.bytes_sent("ring", setting.job(), setting.length, 2, False)) / gbits / 1e9
    assert least > 0.02
    for kind in ("sending", "step"):
        assert processes.longest(setting, kind, gbits) >= least


# ---------------------------------------------------------------------------------------------
# The program


@pytest.mark.slow  # a whole run
def test_scaling_at_given_rates(tmp_path: Path) -> None:
    results, chart = tmp_path / "new" / "results.json", tmp_path / "ring.png"
    arguments = ["--tflops", "300", "--dtype", "bf16", "--json", str(results)]
    printed = run("ring.py", *arguments, "--chart", str(chart))
    assert "given, causal, balanced: forward 300, backward 300 TFLOP/s" in printed
    written = json.loads(results.read_text())
    assert written["measured"] == []
    assert [(r["causal"], r["gbits"], r["forward"], r["backward"]) for r in written["hiding"]] == [
        (causal, gbits, share * 2.4e6 / gbits, share * 2.88e6 / gbits)
        for causal, share in ((False, 1), (True, 2))
        for gbits in (10, 25, 100)
    ]
    most = [r for r in written["scaling"] if (r["tokens"], r["machines"]) == (2**20, 64)]
    assert {r["scaling"] for r in most} == {"strong"}
    assert [r["efficiency"] for r in most] == sorted(r["efficiency"] for r in most[:3]) + sorted(
        r["efficiency"] for r in most[3:]
    )
    assert all(r["efficiency"] == 1 for r in written["scaling"] if r["machines"] == 1)
    assert chart.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow  # a whole run
def test_bench_ring(tmp_path: Path) -> None:
    results, chart = tmp_path / "results.json", tmp_path / "ring.png"
    sizes = ["--lengths", "64", "128", "--heads", "4", "--kv-heads", "2", "--head-dim", "8"]
    arguments = [*sizes, "--seconds", "0.01", "--slow", "0.1"]
    printed = run("ring.py", *arguments, "--json", str(results), "--chart", str(chart))
    assert "this is no network" in printed
    written = json.loads(results.read_text())
    rows = written["measured"]
    assert len(rows) == 2 * 3 * 2 * 4  # lengths, orders, passes, and a slow link beside three ways
    for r in rows:
        assert r["sent_bytes"] == r["formula_bytes"] > 0
        assert r["efficiency"] == pytest.approx(r["alone_ms"] / r["ms"] / 2)
        assert 0 <= r["hidden"] <= 1
        assert ("formula_ms" in r) == (r["method"] == "ring" and r["order"] != "causal")
        if r["gbits"]:
            assert r["sending_ms"] >= 8 * r["sent_bytes"] / 0.1e6
    whole = next(r for r in rows if (r["length"], r["pass"]) == (128, "forward"))
    rate = 4 * 4 * 8 * 128**2 / whole["alone_ms"] * 1e3
    assert written["jobs"][0]["forward"] == pytest.approx(rate)
    assert chart.read_bytes().startswith(b"\x89PNG")
