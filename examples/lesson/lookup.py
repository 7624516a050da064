"""Chapter: attention derived from looking things up in a dictionary."""

from __future__ import annotations

import json
import string
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import torch_attn
from examples import plots
from examples.demo.report import check

from .page import Numbers, Picture, Section, theme
from .threads import threads
from .wording import fixed, number

WORDS = ["apple", "banana", "chair"]
VALUES = torch.tensor([[10.0], [5.0], [2.0]], dtype=torch.float64)
VECTOR_VALUES = torch.tensor(
    [[0.9, 0.2, -0.5, 1.0], [1.2, 2.0, 0.1, 0.2], [-1.2, -2.0, 1.0, -0.2]], dtype=torch.float64
)
BY_HAND = torch.tensor([0.6, 0.4, 0.0], dtype=torch.float64)

# A plane of meanings, made up for this page.
PLANE = {
    "fruit": (2.0, 1.6),
    "apple": (2.3, 1.5),
    "banana": (1.7, 1.9),
    "carrot": (-1.5, 1.9),
    "leek": (-2.1, 1.5),
    "chair": (-0.4, -2.0),
    "table": (0.5, -2.1),
}
KINDS = {
    "fruit": ["apple", "banana"],
    "vegetable": ["carrot", "leek"],
    "furniture": ["chair", "table"],
}
ROYALTY = {"man": (2.0, 0.2), "woman": (0.2, 2.0), "king": (2.8, 1.2), "queen": (1.1, 2.9)}


def with_scores(scores: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Output and weights [L, S] for any scores [L, S], by the operator's own softmax.

    Scores come in as an additive mask over queries of 0.
    """
    query = scores.new_zeros(scores.shape[0], 1)
    key = scores.new_zeros(scores.shape[1], 1)
    output, weights, _ = torch_attn.sdpa_with_weights(query, key, value, scores)
    return output, weights


def softmax(scores: list[float]) -> Tensor:
    """[S]: the weights that the operator makes of S scores."""
    row = torch.tensor([scores], dtype=torch.float64)
    return with_scores(row, row.new_zeros(len(scores), 1))[1][0]


def jacobian(scores: list[float]) -> Tensor:
    """[S, S]: the derivative of weight i by score j, from the operator's backward.

    With the identity as values the output is the weights.
    """
    row = torch.tensor([scores], dtype=torch.float64)
    zero, identity = row.new_zeros(1, 1), torch.eye(len(scores), dtype=torch.float64)
    keys = row.new_zeros(len(scores), 1)

    def weights(mask: Tensor) -> Tensor:
        return torch_attn.sdpa(zero, keys, identity, mask)[0]

    result: Tensor = torch.autograd.functional.jacobian(weights, row)
    return result[:, 0]


def exact_lookup(word: str) -> float:
    """A dictionary's lookup: keys at right angles, scores so far apart that softmax chooses one."""
    key = torch.eye(3, dtype=torch.float64)
    query = key[[WORDS.index(word)]]
    return torch_attn.sdpa(query, key, VALUES, scale=1000.0).item()


def lookup_by_hand() -> float:
    """The weights 0.6, 0.4 and 0, which are the softmax of their logarithms."""
    return with_scores(BY_HAND.log()[None], VALUES)[0].item()


def vector(word: str) -> Tensor:
    """[2]"""
    return torch.tensor((PLANE | ROYALTY)[word], dtype=torch.float64)


@dataclass
class Lookup:
    """A query over the words: scores and weights [3]."""

    scores: Tensor
    weights: Tensor
    output: float


def lookup_by_meaning(word: str = "fruit") -> Lookup:
    key = torch.stack([vector(w) for w in WORDS])
    # as derived in Mody's text up to there: not scaled yet
    output, weights, scores = torch_attn.sdpa_with_weights(
        vector(word)[None], key, VALUES, scale=1.0
    )
    return Lookup(scores[0], weights[0], output.item())


def distances() -> dict[str, float]:
    """Between the centres of the kinds of words."""
    centres = {k: torch.stack([vector(w) for w in v]).mean(0) for k, v in KINDS.items()}
    pairs = [("fruit", "vegetable"), ("fruit", "furniture"), ("vegetable", "furniture")]
    return {f"{a} – {b}": (centres[a] - centres[b]).norm().item() for a, b in pairs}


def arithmetic() -> tuple[Tensor, Tensor]:
    """queen − woman + man, [2], and its weights over man, woman, king and queen, [4]."""
    query = vector("queen") - vector("woman") + vector("man")
    key = torch.stack([vector(w) for w in ROYALTY])
    return query, torch_attn.sdpa_with_weights(query[None], key, key, scale=1.0)[1][0]


def kv_lookup(count: int) -> Tensor:
    """[count]: Mody's lookup with random vectors of eight numbers, `count` times."""
    draw = torch.Generator().manual_seed(0)
    query = torch.randn(count, 1, 8, generator=draw, dtype=torch.float64)
    key = torch.randn(count, 3, 8, generator=draw, dtype=torch.float64)
    return torch_attn.sdpa(query, key, VALUES.expand(count, 3, 1), scale=1.0).flatten()


@dataclass
class Loop:
    """Queries one at a time and all at once: numbers and seconds."""

    queries: int
    difference: float
    one_by_one: float
    at_once: float


def loop(count: int) -> Loop:
    draw = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, count, 64, generator=draw)

    def one_by_one() -> Tensor:
        return torch.cat([torch_attn.sdpa(q[None], key, value) for q in query])

    def at_once() -> Tensor:
        return torch_attn.sdpa(query, key, value)

    difference = (one_by_one() - at_once()).abs().max().item()
    return Loop(count, difference, _best(one_by_one), _best(at_once))


def _best(action: Callable[[], object], runs: int = 5) -> float:
    """Seconds of the fastest run: the one that was disturbed least."""
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return min(times)


@dataclass
class Footnote:
    """a = (1, 1, 1), b = (1000, 0, 0), c = (2, 2, 2)."""

    dot_b: float
    dot_c: float
    cosine_b: float
    cosine_c: float


def footnote_vectors() -> Footnote:
    vectors = torch.tensor([[1, 1, 1], [1000, 0, 0], [2, 2, 2]], dtype=torch.float64)
    dots = torch_attn.sdpa_with_weights(vectors, vectors, vectors, scale=1.0)[2]
    units = vectors / dots.diagonal().sqrt()[:, None]
    cosines = torch_attn.sdpa_with_weights(units, units, units, scale=1.0)[2]
    return Footnote(*(m[0, j].item() for m in (dots, cosines) for j in (1, 2)))


def footnote_scores() -> Tensor:
    """[3]: (2, 1, 3) times three keys, at once."""
    query = torch.tensor([[2.0, 1.0, 3.0]], dtype=torch.float64)
    key = torch.tensor([[-1, 2, -1], [1.5, 0, -1], [4, -2, -1]], dtype=torch.float64)
    return torch_attn.sdpa_with_weights(query, key, key, scale=1.0)[2][0]


def STEPS(quick: bool) -> int:  # noqa: N802
    return 4


def chapter(quick: bool, advance: Callable[[], None]) -> Section:
    section = Section(
        "lookup",
        "From a dictionary to attention",
        "After *An Intuition for Attention*, by Jay Mody (October 22, 2022).",
    )
    _dictionary(section)
    advance()
    _softmax(section)
    advance()
    _vectors(section, 64 if quick else 1024)
    advance()
    _notes(section)
    advance()
    return section


def _dictionary(section: Section) -> None:
    exact, by_hand = exact_lookup("apple"), lookup_by_hand()
    check(exact == 10, "attention with keys at right angles looks up as a dictionary does")
    check(abs(by_hand - 8) < 1e-14, "0.6 of 10 and 0.4 of 5 are 8")
    section.text(f"""
        A dictionary holds apple: 10, banana: 5, chair: 2. Asked for *apple* it gives 10, and asked
        for *fruit* nothing, for no key is exactly that. Attention can do the first: with keys at
        right angles to each other, and scores so large that softmax takes one alone, the query
        *apple* gets {fixed(exact, 0)}. It can also do the second. Say *fruit* is 60% apple, 40%
        banana and not at all chair:

        > 0.6 · 10 + 0.4 · 5 + 0 · 2 = {fixed(by_hand, 1)}

        The operator computes the same, given the logarithms of the three as scores (log 0 is −∞, a
        masked key).
    """)
    section.differs(
        "*An Intuition for Attention*",
        "It calls 0.6, 0.4 and 0 attention *scores*. On this page they are **weights**; softmax "
        "makes them of scores.",
    )
    section.heading("Words as places in a plane")
    found, gaps = lookup_by_meaning(), distances()
    check(
        gaps["fruit – vegetable"] < min(gaps["fruit – furniture"], gaps["vegetable – furniture"]),
        "fruits are closer to vegetables than either is to furniture",
    )
    between = ", ".join(f"{k} {fixed(v, 1)}" for k, v in gaps.items())
    section.text(f"""
        Where do such weights come from? From vectors whose directions stand for meanings. These
        are made up: fruits to the right, vegetables to the left, furniture below. The distances of
        the centres are: {between}. The dot products of *fruit* with the three keys (not divided by
        anything yet: `scale=1`) are
        {", ".join(fixed(s, 2) for s in found.scores.tolist())}; softmax makes the weights
        {", ".join(fixed(w, 3) for w in found.weights.tolist())} of them, and the answer is
        **{fixed(found.output, 2)}**: some apple, some banana, no chair.
    """)
    query, weights = arithmetic()
    check(list(ROYALTY)[int(weights.argmax())] == "king", "queen − woman + man is next to king")
    with theme():
        plane = plots.embeddings(torch.tensor(list(PLANE.values())), list(PLANE))
        royal = plots.embeddings(
            torch.stack([*(vector(w) for w in ROYALTY), query]),
            [*ROYALTY, "queen−woman+man"],
        )
    section.pictures(
        Picture(
            "lookup-plane",
            plane,
            "**Meanings in a plane**, made up: what is alike points the same way.",
            "Arrows: fruits to the upper right, vegetables to the upper left, furniture down.",
            Numbers(["word", "x", "y"], [[w, *v] for w, v in PLANE.items()]),
        ),
        Picture(
            "lookup-royalty",
            royal,
            "**Arithmetic with meanings**: queen − woman + man ends close to king.",
            "Arrows of man, woman, king, queen, and of queen minus woman plus man, near king.",
            Numbers(
                ["word", "x", "y", "weight for queen − woman + man"],
                [
                    [w, *v, weight]
                    for (w, v), weight in zip(ROYALTY.items(), weights.tolist(), strict=True)
                ],
            ),
        ),
    )
    places = ", ".join(fixed(x, 1) for x in query.tolist())
    section.text(f"""
        Directions can be added: queen − woman + man is ({places}). As a query over the four words
        it gives *king* the largest weight, {fixed(weights.max().item(), 2)}.
    """)


def _softmax(section: Section) -> None:
    scores = [4.0, -1.0, 2.1]
    weights, shifted = softmax(scores), softmax([s + 100 for s in scores])
    moved = (weights - shifted).abs().max().item()
    check(abs(weights.sum().item() - 1) < 1e-15, "softmax([4, −1, 2.1]) sums to 1")
    check(weights.argsort().tolist() == [1, 2, 0], "softmax keeps the order")
    section.heading("Softmax")
    section.text(f"""
        Scores can be any numbers; weights have to be positive and sum to 1. Softmax, eˣ of each
        divided by the sum of all, does that. The larger score gets the larger weight, and the order
        stays. Only differences count: with 100 added to every score the weights change by
        {number(moved, 1)}.
    """)
    section.table(
        ["score", "weight", "printed by Mody"],
        [
            [fixed(s, 1), fixed(w, 4), p]
            for s, w, p in zip(
                scores, weights.tolist(), ["0.8648", "0.0058", "0.1294"], strict=True
            )
        ],
        "softmax([4, −1, 2.1]), by the operator.",
    )
    section.heading("Why large scores are a problem")
    small, large = [3.0, 2.0, 1.0], [30.0, 20.0, 10.0]
    w, v = softmax(small), softmax(large)
    J, G = jacobian(small), jacobian(large)
    theory = torch.diag(w) - w[:, None] * w
    check((J - theory).abs().max().item() < 1e-15, "the Jacobian of softmax is diag(w) − w wᵀ")
    section.text(f"""
        Three scores, and the same ten times as large:

        - softmax([3, 2, 1]) = {", ".join(fixed(x, 4) for x in w.tolist())}
        - softmax([30, 20, 10]) = {", ".join(f"{x:.8e}" for x in v.tolist())}

        The second is all but a choice of one. What that does to learning is in the **Jacobian**,
        the derivative of every weight by every score; it is diag(w) − w wᵀ, and here it comes from
        the operator's backward. Its largest entry falls from
        {fixed(J.abs().max().item(), 3)} to {number(G.abs().max().item(), 1)}. No
        gradient reaches the scores except through it, and it has become
        {J.abs().max().item() / G.abs().max().item():,.0f} times smaller. Scores grow with dₖ;
        dividing by √dₖ keeps them where the Jacobian is not 0.
    """)
    names = ["3", "2", "1"], ["30", "20", "10"]
    reach = J.abs().max().item()
    pictures = []
    with theme():
        for name, matrix, labels in zip(("small", "large"), (J, G), names, strict=True):
            figure = plots.heatmap(
                matrix,
                [f"weight of {s}" for s in labels],
                [f"score {s}" for s in labels],
                label="derivative",
                digits=3 if name == "small" else -1,
                center=0.0,
                vmin=-reach,
                vmax=reach,
                title=f"softmax([{', '.join(labels)}])",
            )
            if name == "large":  # too small for decimals
                for i, row in enumerate(matrix.tolist()):
                    for j, entry in enumerate(row):
                        figure.axes[0].text(
                            j, i, number(entry, 1), ha="center", va="center", color="black"
                        )
            figure.axes[0].set(xlabel="by this score", ylabel="derivative of this weight")
            pictures.append(
                Picture(
                    f"lookup-jacobian-{name}",
                    figure,
                    f"**Jacobian at {', '.join(labels)}**, on one scale with the other.",
                    f"Heat map of three by three derivatives at scores {', '.join(labels)}.",
                    Numbers.matrix(matrix, labels, labels, "weight \\ score"),
                )
            )
    section.pictures(*pictures)
    section.html(_slider())
    naive = torch.tensor([1000.0, 0.0], dtype=torch.float64).exp()
    naive = naive / naive.sum()
    own = softmax([1000.0, 0.0])
    check(bool(naive.isnan()[0]) and own[0].item() == 1, "a score of 1000 does not overflow")
    section.text("""
        One more thing about large scores: the formula as it is written, eˣ and then the division,
        gives NaN for the scores (1000, 0), because e¹⁰⁰⁰ is too large for a float64. The operator
        subtracts the largest score first, which changes nothing else, and gives 1 and 0.
    """)


def tempered() -> list[tuple[float, list[float], float]]:
    """For factors from 0 to 10: weights of 3, 2, 1 times it, and the Jacobian's largest entry."""
    steps = []
    for quarters in range(41):
        factor = quarters / 4
        scores = [3 * factor, 2 * factor, factor]
        steps.append((factor, softmax(scores).tolist(), jacobian(scores).abs().max().item()))
    return steps


def _slider() -> str:
    steps = tempered()
    template = Path(__file__).with_name("softmax.html").read_text(encoding="utf-8")
    start = [factor for factor, _, _ in steps].index(1.0)
    return string.Template(template).substitute(
        steps=json.dumps(steps), start=start, last=len(steps) - 1
    )


def _vectors(section: Section, count: int) -> None:
    found = kv_lookup(1000)
    low, high, mean = found.min().item(), found.max().item(), found.mean().item()
    check(low >= 2 and high <= 10, "a lookup lies between the least and the largest value")
    output = with_scores(BY_HAND.log()[None], VECTOR_VALUES)[0][0]
    section.heading("A lookup with random words")
    section.text(f"""
        Mody's `kv_lookup` draws random vectors for the words, anew at every call, so that it
        "returns some float number": even *apple* is another vector each time. The answers of 1,000
        such lookups reach from {fixed(low, 2)} to {fixed(high, 2)}, with mean {fixed(mean, 2)} (the
        mean of the values is {fixed(VALUES.mean().item(), 2)}). A weighted mean can never leave the
        range of the values, 2 to 10.
    """)
    section.heading("Values as vectors")
    section.text("""
        A value can be a vector too, and of another size than the keys. With Mody's three
        values of dᵥ = 4 numbers and the weights 0.6, 0.4 and 0, the output has 4 numbers, too.
    """)
    section.table(
        ["", "weight", "1", "2", "3", "4"],
        [
            *(
                [w, a, *v]
                for w, a, v in zip(WORDS, BY_HAND.tolist(), VECTOR_VALUES.tolist(), strict=True)
            ),
            ["output", "", *output.tolist()],
        ],
        "The output is the weighted mean of the rows above it.",
    )
    section.heading("Many queries at once")
    run = loop(count)
    check(run.difference < 1e-6, "the loop over queries gives what one call gives")
    section.text(f"""
        Queries do not know of each other, so one call can take all of them: query i of the matrix
        gets what it would get alone. For {run.queries:,} queries and as many keys of 64 numbers, in
        float32, the loop and the one call differ by {number(run.difference, 1)}. The loop took
        {_time(run.one_by_one)}, the one call {_time(run.at_once)}:
        **{fixed(run.one_by_one / run.at_once, 1)} times** as fast (each the fastest of 5 runs, on
        {threads()} of a CPU).
    """)
    section.code("""
        torch.cat([torch_attn.sdpa(q[None], key, value) for q in query])  # one by one
        torch_attn.sdpa(query, key, value)                                # at once, the same
    """)


def _time(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def _notes(section: Section) -> None:
    f, x = footnote_vectors(), footnote_scores()
    check(x.tolist() == [-3, 0, 3], "the second footnote's scores are −3, 0 and 3")
    check(f.cosine_c > f.cosine_b and f.dot_b > f.dot_c, "c points where a does; b is long")
    section.heading("Two footnotes of Mody's")
    section.text(f"""
        **Length against direction.** For a = (1, 1, 1), b = (1000, 0, 0) and c = (2, 2, 2) the dot
        products are a · b = {fixed(f.dot_b, 0)} and a · c = {fixed(f.dot_c, 0)}. So the dot product
        takes *b* to be more like a. But it is **c** that points exactly where a does: the cosines
        are {fixed(f.cosine_b, 3)} for b and {fixed(f.cosine_c, 3)} for c. A long vector can win by
        length alone.

        **All dot products at once.** The query (2, 1, 3) with the keys (−1, 2, −1), (1.5, 0, −1)
        and (4, −2, −1), as one product with the matrix of the keys:
        {", ".join(fixed(s, 0) for s in x.tolist())}.
    """)
    section.differs(
        "*An Intuition for Attention*",
        f"""
        - It calls softmax monotonic. A weight rises with its own score, but falls when another
          score rises.
        - It prints softmax([3, 2, 1]) as 0.665, 0.244, 0.090. The second number is
          {fixed(softmax([3.0, 2.0, 1.0])[1].item(), 4)}, which rounds to 0.245.
        - Its listing of the values as vectors lacks the commas between the entries.
        - Its first footnote exchanges b and c in both sentences; the point stands.
        - In Python `0.6 * 10 + 0.4 * 5 + 0.0 * 2` prints 8.0, not 8.
        - A positive dot product does not need the *same* direction: any angle below 90 degrees
          will do.
        """,
    )
