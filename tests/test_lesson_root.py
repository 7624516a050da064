"""The lesson's chapter on the root of d_k: what is measured is what theory says, within its error.

Bounds are five standard errors. Errors of variances are derived; other errors come from the
spread over independent draws.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from examples.lesson import scaling, theory
from examples.lesson.root import MANY, SIGMAS, _check, sizes


@pytest.fixture(scope="module")
def measured() -> dict[str, list[scaling.Measured]]:
    return scaling.measure_all(sizes(quick=True))


@pytest.mark.parametrize("scale", scaling.SCALES)
def test_variance_of_scores(measured: dict[str, list[scaling.Measured]], scale: str) -> None:
    for found in measured[scale]:
        expected = theory.variance_of_scores(found.size, found.scale)
        assert expected == pytest.approx({"1": found.size, "1/√dₖ": 1}.get(scale, 1 / found.size))
        error = abs(found.variance.mean().item() / expected - 1)
        assert error < SIGMAS * theory.variance_error(
            found.size, scaling.QUERIES, scaling.KEYS, scaling.DRAWS
        )


@pytest.mark.parametrize("size", [1, 3, 20])
def test_error_of_the_variance_is_the_spread_of_many_repeats(size: int) -> None:
    """The derived standard error against 400 repeats; the spread of a spread is about 1/√(2 n)."""
    generator = torch.Generator().manual_seed(size)
    query, key = (
        torch.randn(400, length, size, generator=generator, dtype=torch.float64)
        for length in (scaling.QUERIES, scaling.KEYS)
    )
    variances = (query @ key.mT).square().mean((-2, -1)) / size
    # Heavier tails than a normal distribution's make it spread more: half as much again.
    assert variances.std().item() == pytest.approx(
        theory.variance_error(size, scaling.QUERIES, scaling.KEYS, draws=1),
        rel=SIGMAS * 1.5 / math.sqrt(2 * 400),
    )


@pytest.mark.parametrize("scale", scaling.SCALES)
def test_dscores_are_as_long_as_the_jacobian_lets_expect(
    measured: dict[str, list[scaling.Measured]], scale: str
) -> None:
    for found in measured[scale]:
        squares = found.dscores.square().mean(-1)
        difference = squares - found.expected_dscores.square()
        assert abs(difference.mean().item()) < SIGMAS * scaling.standard_error(difference)


def test_the_median_row_of_dscores_falls_without_the_scale_and_stays_with_it(
    measured: dict[str, list[scaling.Measured]],
) -> None:
    """By more than 100 from d_k = 16 to 1024, and by 1.5 at most from 1 on."""
    _check(measured)  # what the text says of it
    without, with_it = (
        {m.size: m.median_dscores for m in measured[scale]} for scale in ("1", "1/√dₖ")
    )
    assert (without[16] / without[1024]).log().mean() > math.log(100)
    assert with_it[1024].mean() < 1.5 * with_it[1].mean()


def test_entropy_of_many_keys(measured: dict[str, list[scaling.Measured]]) -> None:
    checked = 0
    for found in itertools.chain(*measured.values()):
        variance = theory.variance_of_scores(found.size, found.scale)
        # With few dimensions, |q|^2 / d_k differs from query to query: the mean is not as for 1.
        if variance <= MANY and found.size >= 64:
            error = found.entropy.mean().item() - theory.entropy_of_many(variance, scaling.KEYS)
            # What is left out is of 1 / S^2.
            left_out = math.exp(4 * variance) / scaling.KEYS**2
            assert abs(error) < SIGMAS * scaling.standard_error(found.entropy) + left_out
            checked += 1
    assert checked == 6


def test_two_keys(measured: dict[str, list[scaling.Measured]]) -> None:
    """Entropy, largest weight and gradients of rows on which one key has nearly all weight."""
    found = measured["1"][-1]
    limit = theory.two_keys(found.size**0.5, scaling.KEYS)
    left_out = math.sqrt(2 * math.log(scaling.KEYS) / found.size)
    for draws, expected in (
        (found.entropy, limit.entropy),
        (1 - found.largest, 1 - limit.largest),
        (found.dscores.square().mean(-1), limit.root_mean_square_dscores**2),
    ):
        error = abs(draws.mean().item() - expected)
        assert error < SIGMAS * scaling.standard_error(draws) + left_out * expected
    below = (found.dscores < limit.median_dscores).double().mean(-1)
    assert abs(below.mean().item() - 0.5) < SIGMAS * scaling.standard_error(below)


def test_gap_between_the_two_largest() -> None:
    """The quadrature against 20,000 rows of normal numbers."""
    rows = 5 * torch.randn(20_000, 64, dtype=torch.float64)
    top = rows.topk(2).values
    p = torch.softmax(top, dim=-1)
    entropy = torch.special.entr(p).sum(-1)
    difference = torch.randn(20_000, dtype=torch.float64) * math.sqrt(2)
    lengths = math.sqrt(2) * p.prod(-1) * difference.abs()
    limit = theory.two_keys(5, keys=64)
    for draws, expected in (
        (entropy, limit.entropy),
        (p[:, 0], limit.largest),
        (lengths.square(), limit.root_mean_square_dscores**2),
        ((lengths < limit.median_dscores).double(), 0.5),
    ):
        assert abs(draws.mean().item() - expected) < SIGMAS * scaling.standard_error(draws)


def test_gradients_of_query_and_key_carry_the_root_of_head_dim(
    measured: dict[str, list[scaling.Measured]],
) -> None:
    """|dQ| = scale √d_k |dS| in many dimensions, where keys are as long and nearly orthogonal.

    The keys that a row's gradient adds are independent of it but for one direction, the query's,
    of d_k; so |dQ|^2 is a sum of d_k squares, and its relative error √(2 / d_k) a row.
    """
    for scale in scaling.SCALES:
        found = measured[scale][-1]
        ratio = (found.dquery / found.dquery_predicted).median(dim=-1).values
        assert ratio.mean().item() == pytest.approx(1, abs=SIGMAS / math.sqrt(found.size))
        ratio = (found.dkey / found.dkey_predicted).median(dim=-1).values
        assert ratio.mean().item() == pytest.approx(1, abs=SIGMAS / math.sqrt(found.size))
