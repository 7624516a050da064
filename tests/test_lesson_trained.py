"""The lesson's chapter on training: its task, what it watches, and that learning is seen."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from examples.lesson import recall, threads
from examples.lesson.scaling import NONE, ROOT, SCALES


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with threads.one_thread():
        yield


def test_answers_are_in_the_text() -> None:
    keys, values, asked, answers = recall.batch_of(50, torch.Generator().manual_seed(0))
    for row in zip(*(t.tolist() for t in (keys, values, asked, answers)), strict=True):
        given = dict(zip(row[0], row[1], strict=True))
        assert len(given) == recall.PAIRS  # distinct keys, so that there is one answer
        assert [given[key] for key in row[2]] == row[3]


def test_watching_changes_nothing_and_gives_dscores() -> None:
    """The gradient of the mask of zeros against the gradient of scores which are written down."""
    attention = recall.Attention(0.3)
    query, key, value, doutput = torch.randn(4, 2, 1, 6, 8, dtype=torch.float64)
    plain = attention(query, key, value, is_causal=True)
    assert attention.mask is None
    attention.watching = True
    output = attention(query, key, value.requires_grad_(), is_causal=True)
    torch.testing.assert_close(output, plain)
    output.backward(doutput)

    scores = (0.3 * query @ key.mT).requires_grad_()
    causal = scores.masked_fill(torch.ones(6, 6).triu(1).bool(), -math.inf)
    (torch.softmax(causal, dim=-1) @ value).backward(doutput)
    torch.testing.assert_close(attention.mask.grad.double(), scores.grad, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("scale", SCALES)
def test_scores_begin_with_the_deviation_of_the_theory(scale: str) -> None:
    """scale √d_k. LayerNorm's numbers have variance 1 but are not independent; 20 % allows that."""
    run = recall.train(scale, seed=0, steps=1)
    expected = SCALES[scale](recall.HEAD_DIM) * recall.HEAD_DIM**0.5
    assert run.rows[0].deviation.tolist() == pytest.approx([expected] * 2, rel=0.2)


def test_agreement_is_1_for_the_same_batch_and_0_for_noise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    model = recall.Recall(0.1)
    batch = recall.batch_of(4, torch.Generator().manual_seed(0))
    monkeypatch.setattr(recall, "batch_of", lambda *_: batch)
    same = recall.agreement(model, torch.Generator(), batches=3)
    torch.testing.assert_close(same, torch.ones(2))

    size = (recall.CONFIG.layers, 3 * recall.CONFIG.width, recall.CONFIG.width)
    monkeypatch.setattr(torch.autograd, "grad", lambda *_: torch.randn(size).unbind())
    noise = recall.agreement(model, torch.Generator(), batches=8)
    # 28 cosines of vectors of 32,768 numbers, each with standard deviation 1/√32,768.
    assert (noise.abs() < 5 / math.sqrt(28 * 32768)).all()


def test_learned_at() -> None:
    def run(losses: list[float]) -> recall.Run:
        nothing = torch.empty(0)
        return recall.Run(ROOT, 0, losses, nothing, [], [], nothing, 0.0)

    assert run([4.0] * 30).learned_at is None
    # The ten steps from the sixteenth on have a mean of (5 · 4 + 5 · 0) / 10 = 2 < log(64) / 2.
    assert run([4.0] * 20 + [0.0] * 10).learned_at == 16


@pytest.mark.slow  # trains
def test_with_the_root_it_learns_first() -> None:
    first = recall.train(ROOT, seed=0, steps=150)
    assert first.learned_at is not None
    assert first.accuracy > 0.9
    without = recall.train(NONE, seed=0, steps=150)
    assert without.learned_at is None
    assert (without.agreement < first.agreement).all()
