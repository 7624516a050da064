"""The model of Hopper's backward: what it predicts reaches what gpu.py asks for."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from test_cuda_sass import GRADIENT_LIMITS

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
import backward_model as model  # noqa: E402
from gpu import OF_PLAIN  # noqa: E402


@pytest.mark.parametrize("prediction", model.predictions(), ids=str)
def test_prediction(prediction: model.Prediction) -> None:
    assert prediction.cudnn / prediction.ms >= prediction.floor


LIMITS = {
    "": "",
    "alibi": ", ALiBi",
    "learned alibi": ", ALiBi",
    "softcap": ", cap",
    "bool": ", boolean mask",
    "dropout": ", dropout",
}


@pytest.mark.parametrize("form", LIMITS)
@pytest.mark.parametrize("dim", model.PASSES)
def test_counts(dim: int, form: str) -> None:
    passes = (model.OPTIONS[form] if form else model.PASSES)[dim]
    for of, name in zip(passes, ("grad_query", "grad_key and grad_value"), strict=True):
        limit = GRADIENT_LIMITS[f"{name}, {dim}{LIMITS[form]}"]
        assert f"<BFloat16, {dim}, {of.others}, " in limit.kernel
        counted = (limit.start, limit.weigh, limit.slopes, limit.copying)
        if form == "alibi" and of.of_query:  # without the sum for the slopes: see the next test
            counted = (limit.start, limit.weigh, of.slopes, limit.copying)
        assert counted == (of.start, of.weigh, of.slopes, of.copy)
        products = 2 * dim // 16 + (1 if of.of_query else 2) * of.others // 16
        assert limit.products == products


@pytest.mark.parametrize("dim", model.PASSES)
def test_slopes_that_need_no_gradient(dim: int) -> None:
    """What follows dP takes as long as with a cap, which has no such sum."""
    of, with_cap = model.OPTIONS["alibi"][dim][0], model.OPTIONS["softcap"][dim][0]
    assert of.slopes == with_cap.slopes


@pytest.mark.parametrize("form", model.ONE_PASS)
@pytest.mark.parametrize("dim", model.PASSES)
def test_counts_of_one_pass(dim: int, form: str) -> None:
    (of,) = model.ONE_PASS[form][dim]
    limit = GRADIENT_LIMITS[f"one pass, {dim}{LIMITS[form]}"]
    assert limit.kernel.startswith(f"GradKeyWgmma<BFloat16, {dim}, {of.others}, ")
    counted = (limit.start, limit.weigh, limit.slopes, limit.copying)
    assert counted == (of.start, of.weigh, of.slopes + of.pass_on, of.copy)
    shares = model.CONSUMERS * model.ROWS // 16
    assert limit.products == 2 * dim // 16 + 2 * of.others // 16 + shares


@pytest.mark.parametrize("prediction", model.predictions(), ids=str)
def test_one_pass(prediction: model.Prediction) -> None:
    """It reaches what is asked of it, and with a cap four fifths of the plain backward."""
    call = prediction.call
    if call.length > 4096:
        asked = model.ONE_PASS_OF_CUDNN[call.dim]
        assert prediction.cudnn / 1e3 / model.seconds(call, one_pass=True) >= asked
    assert model.seconds(call) / model.seconds(call, "softcap", one_pass=True) >= 0.8


TWICE = "each of the two passes computes the cap: 2 x 3 exponentials and reciprocals of a score"


@pytest.mark.parametrize(
    ("form", "dim"),
    [
        *((form, dim) for form in ("alibi", "learned alibi", "bool") for dim in model.PASSES),
        *(
            pytest.param("softcap", dim, marks=pytest.mark.xfail(strict=True, reason=TWICE))
            for dim in model.PASSES
        ),
    ],
)
def test_part_of_plain(form: str, dim: int) -> None:
    assert model.of_plain(form, dim) >= OF_PLAIN.get((form, "backward"), {}).get(dim, 0.0)


@pytest.mark.parametrize(("form", "dim"), model.COMPARED)
def test_as_fast_as_others(form: str, dim: int) -> None:
    assert model.of_theirs(form, dim) >= 1


@pytest.mark.parametrize("of", [of for passes in model.PASSES.values() for of in passes])
def test_simulation(of: model.Pass) -> None:
    """Tensor cores do what they have to, and are never busy without."""
    simulation = model.Simulation(of, 30)
    cycles = simulation.cycles()
    assert simulation.busy == pytest.approx(30 * of.tensor, rel=0.05)
    assert 0.5 <= simulation.busy / cycles <= 1
