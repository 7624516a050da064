"""The model of latent attention on Hopper: what it predicts, and that what it counts is so."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from test_cuda_sass import LATENT_LIMITS

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
import latent_model as model  # noqa: E402


def test_many_sequences_reach_the_floor() -> None:
    """0.6 of the rate of products. One sequence does not: merging its splits takes as long."""
    of_floor = {call: model.of_floor(call) for call in model.CALLS}
    assert of_floor[model.Call(32, 128, 16384)] >= 1
    assert of_floor[model.Call(64, 16, 4096)] >= 0.95
    assert of_floor[model.Call(1, 128, 16384)] < 0.5


@pytest.mark.parametrize(
    ("bytes_a_cycle", "of_products", "of_rate"), [(20.0, 0.5, 0.9), (1e3, 0.7, 0)]
)
def test_what_binds(bytes_a_cycle: float, of_products: float, of_rate: float) -> None:
    """Memory, where it is slow; else tensor cores, which wait for weights some of the time."""
    tiles, times = 50, model.Times()
    simulation = model.Simulation(tiles, bytes_a_cycle)
    cycles = simulation.cycles()
    needed = tiles * (576 / 16 * times.scores + 2 * 64 / 16 * times.output)
    assert simulation.busy == pytest.approx(needed, rel=0.05)
    assert of_products <= needed / cycles <= 1
    assert of_rate <= tiles * 2 * 64 * 576 / (cycles * bytes_a_cycle) <= 1


def test_counts() -> None:
    assert {name: limit for name, (_, limit) in LATENT_LIMITS.items()} == model.INSTRUCTIONS
    # A scheduler has a warp of each warpgroup, and of the producer one of each half.
    issued = sum(model.INSTRUCTIONS.values()) + model.INSTRUCTIONS["copy"]
    assert issued < 0.5 * (576 / 16 * 32 + 2 * 64 / 16 * 128)
