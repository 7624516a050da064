"""The lesson's chapter on MiniLM: its weights are the model's, and what it shows first is right."""

from __future__ import annotations

import copy
import functools
import json
import math
import re

import pytest
import torch

from _accuracy import hold
from examples.lesson import minilm
from helpers import largest

TOKENS = ["[CLS]", "i", "was", "watching", "the", "door", "when", "it", "opened", ".", "[SEP]"]


@pytest.fixture(scope="module")
def captured() -> dict[str, minilm.Captured]:
    return {sentence: minilm.capture(sentence) for sentence in minilm.SENTENCES}


def test_tokens(captured: dict[str, minilm.Captured]) -> None:
    """A word a token; [MASK] is the token of that name and not five pieces."""
    masked = [
        [minilm.MASK if i == at else token for i, token in enumerate(TOKENS)] for at in (7, 5, None)
    ]
    assert [c.tokens for c in captured.values()] == masked
    tokenizer, _ = minilm.load("eager")
    assert tokenizer.mask_token == minilm.MASK


@functools.cache
def of_eager(sentence: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Its weights in float32 and in float64."""
    tokenizer, model = minilm.load("eager")
    batch = tokenizer(sentence, return_tensors="pt")
    with torch.inference_mode():
        rough, exact = (
            torch.stack(m(**batch, output_attentions=True).attentions)[:, 0]
            for m in (model, copy.deepcopy(model).double())
        )
    assert exact.dtype == torch.float64
    return rough, exact


@pytest.mark.parametrize("sentence", minilm.SENTENCES)
def test_weights_are_those_of_eager_attention(
    captured: dict[str, minilm.Captured], sentence: str
) -> None:
    """No further from the model in float64 than twice what its own attention is, in any of them."""
    error = max(largest(torch.sub(*of_eager(other))) for other in minilm.SENTENCES)
    actual = captured[sentence].weights
    assert actual.shape == (6, 12, 11, 11)
    hold("weights", actual, of_eager(sentence)[1], error, torch.float32)


@pytest.mark.parametrize("sentence", minilm.SENTENCES)
def test_queries_and_keys_are_those_of_the_weights(
    captured: dict[str, minilm.Captured], sentence: str
) -> None:
    found = captured[sentence]
    assert found.query.shape == found.key.shape == (6, 12, 11, 32)
    scores = found.query @ found.key.mT / math.sqrt(32)
    torch.testing.assert_close(torch.softmax(scores, dim=-1), found.weights)


def test_the_first_head_is_the_one_with_the_largest_weight(
    captured: dict[str, minilm.Captured],
) -> None:
    found = captured[minilm.DOCUMENT]
    layer, head = found.strongest(minilm.MASK, "door")
    best = max((found.weights[i, j, 7, 5].item(), i, j) for i in range(6) for j in range(12))
    assert best[1:] == (layer, head)


def test_cosines(captured: dict[str, minilm.Captured]) -> None:
    found = captured[minilm.DOCUMENT]
    cosines = found.cosines(2, 3)
    for i, j in ((7, 5), (3, 5), (0, 10)):
        query, key = found.query[2, 3, i].double(), found.key[2, 3, j].double()
        expected = (query @ key / query.norm() / key.norm()).item()
        assert cosines[i, j].item() == pytest.approx(expected, abs=1e-6)


def test_explorer_shows_that_head_first_and_has_all_others(
    captured: dict[str, minilm.Captured],
) -> None:
    """What is seen without scripts, and the numbers that scripts show, to three digits."""
    found = captured[minilm.DOCUMENT]
    layer, head = found.strongest(minilm.MASK, "door")
    page = minilm._explorer(captured)
    pressed = re.findall(r'data-head="(\d+),(\d+)"[^>]*aria-pressed="true"', page)
    assert pressed == [(str(layer), str(head))]
    cells = re.findall(r'<td data-cell="(\d+),(\d+)" style="--w:([\d.]+)">', page)
    shown = torch.tensor([float(weight) for *_, weight in cells]).view(11, 11)
    assert (shown - found.weights[layer, head]).abs().max() <= 0.5e-3 + 1e-6
    assert [(int(i), int(j)) for i, j, _ in cells] == [(i, j) for i in range(11) for j in range(11)]

    data = json.loads(re.search(r'<script type="application/json">(.*?)</script>', page)[1])
    assert [s["tokens"] for s in data["sentences"]] == [c.tokens for c in captured.values()]
    for sentence, c in zip(data["sentences"], captured.values(), strict=True):
        weights = torch.tensor(sentence["weights"]).view(6, 12, 11, 11) / 1000
        assert (weights - c.weights).abs().max() <= 0.5e-3 + 1e-6
        entropy = torch.tensor(sentence["entropy"]).view(6, 12) / 1000
        assert (entropy - c.entropy).abs().max() <= 0.5e-3 + 1e-6
    assert "$" not in page
