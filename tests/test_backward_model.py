"""The model of Hopper's backward: what it predicts reaches what gpu.py asks for."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from test_cuda_sass import GRADIENT_LIMITS

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
import backward_model as model  # noqa: E402


@pytest.mark.parametrize("prediction", model.predictions(), ids=str)
def test_prediction(prediction: model.Prediction) -> None:
    assert prediction.cudnn / prediction.ms >= prediction.floor


@pytest.mark.parametrize("dim", model.PASSES)
def test_counts(dim: int) -> None:
    for of, name in zip(model.PASSES[dim], ("grad_query", "grad_key and grad_value"), strict=True):
        limit = GRADIENT_LIMITS[f"{name}, {dim}"]
        assert f"<BFloat16, {dim}, {of.others}, " in limit.kernel
        counted = (limit.start, limit.weigh, limit.slopes, limit.copying)
        assert counted == (of.start, of.weigh, of.slopes, of.copy)
        products = 2 * dim // 16 + (1 if of.of_query else 2) * of.others // 16
        assert limit.products == products


@pytest.mark.parametrize("of", [of for passes in model.PASSES.values() for of in passes])
def test_simulation(of: model.Pass) -> None:
    """Tensor cores do what they have to, and are never busy without."""
    simulation = model.Simulation(of, 30)
    cycles = simulation.cycles()
    assert simulation.busy == pytest.approx(30 * of.tensor, rel=0.05)
    assert 0.5 <= simulation.busy / cycles <= 1
