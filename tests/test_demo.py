"""The main job, small: `python -m examples.demo --quick` as a user runs it."""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib.image
import pytest
import torch

from _variants import run_python
from examples.demo import parity, report, text


@pytest.mark.slow  # trains
def test_quick_run(tmp_path: Path) -> None:
    command = ["-m", "examples.demo", "--quick", "--out", str(tmp_path / "pictures")]
    # One thread: the threads of several busy processes would wait for each other.
    printed = run_python(*command, COLUMNS="120", OMP_NUM_THREADS="1")
    assert "attn was called 12 times: 6 layers x 2 batches; 0 times by" in printed
    assert "the losses differ by at most" in printed
    assert "every error of attn is at most twice the built-in's" in printed
    assert "output, weights and scores are the formula's" in printed
    for name in ("loss.png", "four_tokens.png"):
        picture = tmp_path / "pictures" / name
        assert str(picture) in printed
        pixels = matplotlib.image.imread(picture)
        assert min(pixels.shape[:2]) > 500
        assert pixels[..., :3].std() > 0.05, f"{name} is nearly blank"


def test_a_promise_that_does_not_hold_ends_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from examples.demo import __main__ as demo

    monkeypatch.setattr(sys, "argv", ["demo", "--quick"])
    for part in (demo.training, demo.four_tokens):
        monkeypatch.setattr(part, "run", lambda *_: [])
    monkeypatch.setattr(demo.embeddings, "run", lambda *_: report.check(False, "2 is 3"))
    assert demo.main() == 1
    assert "This does not hold: 2 is 3" in capsys.readouterr().out


def test_parity_notices_an_error_of_one_percent(monkeypatch: pytest.MonkeyPatch) -> None:
    exact, cases = parity.OPERATORS["built-in"], parity.cases()
    monkeypatch.setattr(parity, "cases", lambda: cases[:1])
    monkeypatch.setitem(parity.OPERATORS, "attn", lambda *x, **y: exact(*x, **y) * 1.01)
    with pytest.raises(report.DemoError, match="every error of attn is at most twice"):
        parity.run()


def test_parity_knows_what_dropout_kept() -> None:
    query, key = torch.randn(2, 2, 30, 8), torch.randn(2, 2, 40, 8)
    kept = parity.kept_weights(parity.OPERATORS["attn"], query, key, 0.3)
    assert kept.shape == (2, 2, 30, 40)
    assert 0.6 < kept.double().mean() < 0.8


def test_sentences_are_real_and_distinct() -> None:
    found = text.sentences(256)
    assert len(found) == len(set(found)) == 256
    assert "I was watching the door when it opened." in found
    assert all(sentence[0].isupper() and sentence[-1] == "." for sentence in found)
