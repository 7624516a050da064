"""The model of Hopper's forward: what it predicts reaches what gpu.py asks for."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from test_cuda_sass import HOPPER_LIMITS

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
import hopper_model as model  # noqa: E402


@pytest.mark.parametrize("prediction", model.predictions(), ids=str)
def test_prediction(prediction: model.Prediction) -> None:
    assert prediction.tflops >= prediction.floor * prediction.cudnn
    if prediction.ours:
        assert abs(prediction.tflops / prediction.ours - 1) <= 0.15


def test_tasks_that_are_known_from_the_start_are_too_slow() -> None:
    """Each block would have every 132nd task: with 11 tasks a head, always the same of each."""
    of_64 = next(p for p in model.predictions(at_once=0) if str(p).startswith("causal 8x32x2048"))
    assert of_64.tflops < 0.6 * of_64.cudnn


def test_published() -> None:
    """The formula gives the numbers that it was made from, within 5%."""
    for shape, causal, tflops in model.PUBLISHED:
        call = model.Call(1, 2048 // shape.dim, 16384, shape.dim, causal)
        assert call.flop / model.seconds(call, shape) / 1e12 == pytest.approx(tflops, rel=0.05)


@pytest.mark.parametrize("dim", model.SHAPES)
def test_counts(dim: int) -> None:
    limit, shape = HOPPER_LIMITS[f"forward, {dim}"], model.SHAPES[dim]
    assert limit.kernel.split("<")[1].startswith(
        f"BFloat16, {dim}, {shape.consumers}, {shape.keys}, "
    )
    assert (limit.instructions, limit.copying) == (shape.instructions, shape.copying)
