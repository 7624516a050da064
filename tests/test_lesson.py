"""The lesson's numbers equal the numbers that its sources print or that their NumPy code gives."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from examples.demo.report import check
from examples.lesson import extras, four_tokens, heads, lookup, threads, variants, words
from examples.lesson.wording import fixed, number

Array = NDArray[np.float64]


def softmax(x: Array) -> Array:
    e = np.exp(x)
    return e / e.sum(axis=-1, keepdims=True)


def attention(Q: Array, K: Array, V: Array) -> tuple[Array, Array, Array]:
    """Scores, weights and output, as the sources compute them."""
    scores = Q @ K.T / np.sqrt(Q.shape[-1])
    weights = softmax(scores)
    return scores, weights, weights @ V


def equal(found: torch.Tensor, expected: Array) -> None:
    """Up to a few roundings of float64 in numbers of order 1."""
    assert found.dtype == torch.float64
    np.testing.assert_allclose(found.numpy(), expected, rtol=0, atol=8 * np.finfo(float).eps)


class TestWords:
    def test_the_menu_is_the_formula(self) -> None:
        m = words.menu()
        scores, weights, output = attention(m.query.numpy(), m.key.numpy(), m.value.numpy())
        equal(m.scores, scores)
        equal(m.weights, weights)
        equal(m.output, output)
        assert (m.query @ m.key.mT).tolist() == [[2, -1]]  # as the text says


class TestFourTokens:
    """000"""

    def test_every_matrix_is_the_document_s(self) -> None:
        f = four_tokens.attend()
        X = np.array([[0.9, 0.1], [0.2, 0.8], [0.1, 0.9], [0.8, 0.2]])
        scores, weights, output = attention(X, X, X)
        equal(f.X, X)
        equal(f.raw, X @ X.T)
        equal(f.scaled, scores)
        equal(f.weights, weights)
        equal(f.unscaled_weights, softmax(X @ X.T))
        equal(f.output, output)


class TestHeads:
    """001"""

    def test_similarity_prints_what_the_document_prints(self) -> None:
        s = heads.similarity()
        assert f"{s.dot:.2f}" == "28.90"
        assert f"{s.x_norm:.2f}" == "5.48"
        assert f"{s.y_norm:.2f}" == "5.29"
        assert f"{s.cosine:.4f}" == "0.9980"
        assert f"{s.angle:.2f}" == "3.59"
        assert str(np.round(s.x_unit.numpy(), 3)) == "[0.183 0.365 0.548 0.73 ]"
        assert str(np.round(s.y_unit.numpy(), 3)) == "[0.227 0.397 0.549 0.7  ]"
        assert f"{s.unit_dot:.4f}" == "0.9980"

    def test_similarity_is_numpy_s(self) -> None:
        s = heads.similarity()
        X, Y = np.array([1.0, 2.0, 3.0, 4.0]), np.array([1.2, 2.1, 2.9, 3.7])
        cosine = X @ Y / (np.linalg.norm(X) * np.linalg.norm(Y))
        assert s.dot == pytest.approx(X @ Y, rel=1e-15)
        assert s.cosine == pytest.approx(cosine, rel=1e-15)
        # arccos is steep here: an ulp of the cosine moves the angle by ulp / sin(angle), 4e-15
        assert s.angle == pytest.approx(np.degrees(np.arccos(cosine)), rel=1e-12)

    @pytest.mark.parametrize("dims", [list(range(8)), *heads.HEADS.values()], ids=str)
    def test_each_head_is_the_document_s(self, dims: list[int]) -> None:
        projection = np.zeros((8, len(dims)))
        projection[dims, range(len(dims))] = 1.0
        part = heads.X.numpy() @ projection
        scores, weights, output = attention(part, part, part)
        head = heads.head(dims)
        equal(head.scores, scores)
        equal(head.weights, weights)
        equal(head.output, output)
        equal(head.activation, np.linalg.norm(output, axis=1))

    def test_shapes_are_those_that_the_document_prints(self) -> None:
        found = heads.four_heads()
        shapes = [tuple(head.output.shape) for head in found.values()]
        assert shapes == [(10, 1), (10, 2), (10, 3), (10, 2)]
        assert heads.multi_head_output(found).shape == (10, 8)
        assert [heads.TOKENS[2], heads.TOKENS[-1]] == ["apple", "acidic"]

    def test_what_the_text_says_of_the_heads(self) -> None:
        found, single = heads.four_heads(), heads.single_head()
        it, apple, orange = 6, 2, 4
        for name in ("fruit", "pronoun"):
            assert found[name].weights[it, apple] == found[name].weights[it, orange]
        assert found["acidity"].weights[it, orange] > found["acidity"].weights[it, apple]
        for head in found.values():
            equal(head.weights[0], np.full(10, 0.1))
        assert (heads.multi_head_output(found).norm(dim=-1) > single.activation).all()


class TestVariants:
    """003"""

    def test_self_masked_and_cross_attention_are_the_formula(self) -> None:
        X = variants.MEANINGS.numpy()
        scores, weights, _ = attention(X, X, X)
        equal(variants.self_attention(), weights)
        seen = np.where(np.tri(5, dtype=bool), scores, -np.inf)
        equal(variants.masked_attention(), softmax(seen))
        queries = 0.9 * X[variants.TRANSLATES]
        equal(variants.cross_attention(), attention(queries, X, X)[1])

    def test_a_translated_word_finds_its_word(self) -> None:
        assert variants.cross_attention().argmax(-1).tolist() == variants.TRANSLATES

    def test_graphs_lack_no_weight_but_masked_ones(self) -> None:
        for attend in (
            variants.self_attention,
            variants.masked_attention,
            variants.cross_attention,
        ):
            weights = attend()
            assert weights[weights > 0].min() > 0.01  # the least that is drawn

    def test_positions_are_sines_and_cosines(self) -> None:
        found = variants.positions(7, 6)
        for place in range(7):
            for i in range(3):
                angle = place / 10000 ** (2 * i / 6)
                assert found[place, 2 * i].item() == pytest.approx(np.sin(angle), abs=1e-6)
                assert found[place, 2 * i + 1].item() == pytest.approx(np.cos(angle), abs=1e-6)

    def test_positions_tell_equal_words_apart(self) -> None:
        found = variants.same_word()
        assert found.rows_differ(found.plain) == 0
        assert found.rows_differ(found.placed) > 0.05

    def test_what_does_not_matter_changes_nothing_and_what_does_much(self) -> None:
        found = variants.experiments()
        assert found["another text of the batch replaced"] == 0
        assert found["weights of a linear layer, likewise"] == 0
        # a few roundings of float32 in numbers up to 4
        limit = 32 * torch.finfo(torch.float32).eps
        assert max(found[name] for name in variants._NOTHING) < limit
        assert min(found[name] for name in set(found) - set(variants._NOTHING)) > 0.05


class TestLookup:
    """004"""

    def test_lookups_by_hand(self) -> None:
        assert lookup.exact_lookup("apple") == 10
        assert lookup.exact_lookup("banana") == 5
        assert lookup.exact_lookup("chair") == 2
        assert lookup.lookup_by_hand() == pytest.approx(8, rel=1e-15)

    def test_lookup_by_meaning_is_the_formula(self) -> None:
        found = lookup.lookup_by_meaning()
        query = np.array(lookup.PLANE["fruit"])
        keys = np.array([lookup.PLANE[w] for w in lookup.WORDS])
        equal(found.scores, keys @ query)
        equal(found.weights, softmax(keys @ query))
        assert found.output == pytest.approx(softmax(keys @ query) @ [10, 5, 2], rel=1e-14)
        assert found.weights[2] < 1e-3 < found.weights[1] < found.weights[0]

    def test_arithmetic_with_words_ends_at_the_king(self) -> None:
        query, weights = lookup.arithmetic()
        keys = np.array(list(lookup.ROYALTY.values()))
        equal(weights, softmax(keys @ query.numpy()))
        assert list(lookup.ROYALTY)[int(weights.argmax())] == "king"

    @pytest.mark.parametrize(
        ("scores", "digits", "printed"),
        [
            ([4.0, -1.0, 2.1], ".4f", "0.8648 0.0058 0.1294"),
            ([30.0, 20.0, 10.0], ".8e", "9.99954600e-01 4.53978686e-05 2.06106005e-09"),
            # Its 0.244 is cut off and not rounded.
            ([3.0, 2.0, 1.0], ".3f", "0.665 0.245 0.090"),
        ],
    )
    def test_softmax_and_its_jacobian_are_the_formula_and_as_printed(
        self, scores: list[float], digits: str, printed: str
    ) -> None:
        weights = softmax(np.array(scores))
        equal(lookup.softmax(scores), weights)
        equal(lookup.jacobian(scores), np.diag(weights) - np.outer(weights, weights))
        assert " ".join(f"{w:{digits}}" for w in lookup.softmax(scores).tolist()) == printed

    def test_softmax_knows_differences_only(self) -> None:
        scores = [4.0, -1.0, 2.1]
        # rounding 102.1 moves a score by half an ulp of 128
        shifted = lookup.softmax([s + 100 for s in scores])
        assert (lookup.softmax(scores) - shifted).abs().max() < np.spacing(128.0)

    def test_random_lookups_are_the_formula(self) -> None:
        found = lookup.kv_lookup(50)
        draw = torch.Generator().manual_seed(0)
        query = torch.randn(50, 1, 8, generator=draw, dtype=torch.float64).numpy()
        key = torch.randn(50, 3, 8, generator=draw, dtype=torch.float64).numpy()
        expected = [softmax(q @ k.T) @ [10, 5, 2] for q, k in zip(query, key, strict=True)]
        # scores of up to 30 carry their own rounding into the weights, values of 10 enlarge it
        np.testing.assert_allclose(found.numpy(), np.concatenate(expected), rtol=1e-12)

    def test_values_of_another_size_than_keys(self) -> None:
        output, _ = lookup.with_scores(lookup.BY_HAND.log()[None], lookup.VECTOR_VALUES)
        equal(output[0], np.array([0.6, 0.4, 0.0]) @ lookup.VECTOR_VALUES.numpy())
        assert [f"{x:.2f}" for x in output[0].tolist()] == ["1.02", "0.92", "-0.26", "0.68"]

    def test_the_slider_starts_even_and_ends_as_the_document_s_large_scores(self) -> None:
        steps = lookup.tempered()
        assert [steps[0][0], steps[-1][0]] == [0, 10]
        assert steps[0][1] == pytest.approx([1 / 3] * 3, rel=1e-15)
        assert f"{steps[-1][1][1]:.8e}" == "4.53978686e-05"

    def test_footnote_of_cosines(self) -> None:
        f = lookup.footnote_vectors()
        assert (f.dot_b, f.dot_c) == (1000, 6)
        # the other way round than the source says
        assert f.cosine_b == pytest.approx(3**-0.5, rel=1e-14)
        assert f.cosine_c == pytest.approx(1, rel=1e-14)


class TestExtras:
    @pytest.mark.parametrize("left", [-1, 3])
    def test_a_window_hides_all_but_near_keys(self, left: int) -> None:
        X = heads.X.numpy()
        seen = np.tri(10, dtype=bool) & ~np.tri(10, k=-4 if left == 3 else -10, dtype=bool)
        scores = np.where(seen, attention(X, X, X)[0], -np.inf)
        equal(extras.window(left), softmax(scores))
        assert extras.pairs(10, left) == seen.sum() == (34 if left == 3 else 55)
        assert extras.pairs(500, left) == (4 * 500 - 6 if left == 3 else 500 * 501 // 2)

    @pytest.mark.parametrize("c", [1.0, extras.CAP, 50.0, 0.0])
    def test_a_cap_bends_scores_and_slopes(self, c: float) -> None:
        raw = extras.RAW.numpy()
        bent = c * np.tanh(raw / c) if c else raw
        scores, weights, change = extras.row(extras.RAW, c)
        w = softmax(bent)
        equal(scores, bent)
        equal(weights, w)
        equal(change, w * (1 - w) * (1 / np.cosh(raw / c) ** 2 if c else 1))

    def test_a_sink_is_a_logit_without_a_value(self) -> None:
        query, key = (
            np.array([lookup.PLANE[word] for word in words])
            for words in (extras.QUERIES, extras.KEYS)
        )
        scores = np.broadcast_to(query @ key.T, (3, 2, 4))
        sinks = np.broadcast_to(extras.SINKS.numpy()[:, None, None], (3, 2, 1))
        w = softmax(np.concatenate([scores, sinks], axis=-1))
        weights, output, share, zero_key = extras.sunk()
        # scores of up to 7 carry their own rounding into the weights
        np.testing.assert_allclose(weights.numpy(), w[..., :4], rtol=0, atol=1e-14)
        np.testing.assert_allclose(share.numpy(), w[..., 4], rtol=0, atol=1e-14)
        np.testing.assert_allclose(output.numpy(), w[..., :4] @ key, rtol=0, atol=1e-14)
        np.testing.assert_allclose(zero_key.numpy(), w[1, :, :4] @ key, rtol=0, atol=1e-14)


class TestSayingIt:
    def test_numbers_in_sentences(self) -> None:
        assert fixed(-0.12345, 3) == "−0.123"
        assert number(2.4e-7, 1) == "2·10⁻⁷"
        assert number(-9.1e-14, 1) == "−9·10⁻¹⁴"
        assert number(0.0, 1) == "0"

    def test_one_thread_has_no_plural(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for count, said in ((1, "1 thread"), (8, "8 threads")):
            monkeypatch.setattr(torch, "get_num_threads", lambda count=count: count)
            assert threads.threads() == said

    def test_a_promise_that_does_not_hold_ends_with_its_reason(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        from examples.lesson import __main__ as lesson

        broken = types.SimpleNamespace(
            __name__="examples.lesson.broken",
            STEPS=lambda quick: 1,
            chapter=lambda quick, advance: check(False, "2 is 3"),
        )
        monkeypatch.setattr(sys, "argv", ["lesson", "--quick", "--out", str(tmp_path)])
        monkeypatch.setattr(lesson, "CHAPTERS", [broken])
        assert lesson.main() == 1
        assert "This does not hold: 2 is 3" in capsys.readouterr().out
        assert not (tmp_path / "lesson.html").exists()
