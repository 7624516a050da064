"""The model of Hopper's forward: what it predicts reaches what gpu.py asks for."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from test_cuda_sass import HOPPER_LIMITS

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
import hopper_model as model  # noqa: E402
from gpu import OF_PLAIN  # noqa: E402


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


# The ends of their names, by form.
LIMITS = {
    "": "",
    "alibi": ", ALiBi",
    "softcap": ", cap",
    "bool": ", boolean mask",
    "grad": ", mask",
    "dropout": ", dropout",
}


@pytest.mark.parametrize(
    ("form", "dim"),
    [("", dim) for dim in model.SHAPES]
    + [(form, dim) for form, shapes in model.OPTIONS.items() for dim in shapes],
)
def test_counts(form: str, dim: int) -> None:
    limit = HOPPER_LIMITS[f"forward, {dim}{LIMITS[form]}"]
    shape = (model.OPTIONS[form] if form else model.SHAPES)[dim]
    assert limit.kernel.split("<")[1].startswith(
        f"BFloat16, {dim}, {shape.consumers}, {shape.keys}, "
    )
    assert (limit.instructions, limit.copying) == (shape.instructions, shape.copying)
    # Weights of a thread, and what a tile takes beside them. A cap has a reciprocal of each, too.
    of_scores = (2 if form == "softcap" else 1) * shape.keys // 2
    assert 2 <= limit.exponentials - of_scores <= 4
    assert shape.exponentials_of_score == (3 if form == "softcap" else 1)


SLOW = pytest.mark.xfail(
    strict=True, reason="with two consumers, weights take longer than products"
)


@pytest.mark.parametrize(
    ("form", "dim"),
    [
        pytest.param(form, dim, marks=SLOW if (form, dim) == ("bool", 64) else ())
        for form, shapes in model.OPTIONS.items()
        for dim in shapes
    ],
)
def test_part_of_plain(form: str, dim: int) -> None:
    assert model.of_plain(form, dim) >= OF_PLAIN.get((form, "forward"), {}).get(dim, 0.0)


@pytest.mark.parametrize(("form", "dim"), model.COMPARED)
def test_as_fast_as_others(form: str, dim: int) -> None:
    assert model.of_theirs(form, dim) >= 1
