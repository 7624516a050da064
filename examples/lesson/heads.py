"""Chapter: dot product and cosine, and one head against four heads of sizes 1, 2, 3 and 2."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import torch_attn
from examples import plots
from examples.demo.report import check

from .page import Numbers, Picture, Section, theme
from .wording import fixed

TOKENS = ["I", "prefer", "apple", "over", "orange", "because", "it", "is", "less", "acidic"]
# The numbers of a token that each head reads.
HEADS = {
    "fruit": [2],
    "preference": [1, 3],
    "acidity": [4, 6, 7],
    "pronoun": [2, 5],
}
# fmt: off
X = torch.tensor([
    [1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0],  # I
    [0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0],  # prefer
    [0.0, 0.1, 1.0, 0.2, 0.0, 0.0, 0.1, 0.0],  # apple
    [0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0],  # over
    [0.0, 0.1, 1.0, 0.2, 0.0, 0.0, 0.3, 0.0],  # orange
    [0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.1, 0.0],  # because
    [0.0, 0.0, 0.4, 0.0, 0.0, 1.0, 0.1, 0.0],  # it
    [0.0, 0.0, 0.0, 0.0, 0.2, 0.0, 0.0, 0.0],  # is
    [0.0, 0.0, 0.0, 0.0, 0.1, 0.0, 0.4, 1.0],  # less
    [0.0, 0.0, 0.2, 0.0, 0.4, 0.0, 1.0, 0.0],  # acidic
], dtype=torch.float64)
# fmt: on


@dataclass
class Similarity:
    """How alike two vectors of four numbers are; `angle` in degrees."""

    dot: float
    x_norm: float
    y_norm: float
    cosine: float
    angle: float
    x_unit: Tensor
    y_unit: Tensor
    unit_dot: float


@dataclass
class Head:
    """Scores and weights [10, 10], output [10, size of the head]."""

    scores: Tensor
    weights: Tensor
    output: Tensor

    @property
    def activation(self) -> Tensor:
        """[10]: the L2 norm of each output."""
        return self.output.norm(dim=-1)


def similarity() -> Similarity:
    """Dot products are attention scores with scale 1; a norm is the root of one."""
    x = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    y = torch.tensor([1.2, 2.1, 2.9, 3.7], dtype=torch.float64)
    both = torch.stack([x, y])
    dots = _dots(both)
    x_norm, y_norm = dots.diagonal().sqrt().tolist()
    unit = both / dots.diagonal().sqrt()[:, None]
    cosine = dots[0, 1].item() / (x_norm * y_norm)
    return Similarity(
        dots[0, 1].item(),
        x_norm,
        y_norm,
        cosine,
        math.degrees(math.acos(cosine)),
        *unit,
        _dots(unit)[0, 1].item(),
    )


def _dots(vectors: Tensor) -> Tensor:
    return torch_attn.sdpa_with_weights(vectors, vectors, vectors, scale=1.0)[2]


def head(dims: list[int]) -> Head:
    """Self-attention of the sentence that reads these of its eight numbers."""
    part = X[:, dims]
    output, weights, scores = torch_attn.sdpa_with_weights(part, part, part)
    return Head(scores, weights, output)


def single_head() -> Head:
    return head(list(range(8)))


def four_heads() -> dict[str, Head]:
    return {name: head(dims) for name, dims in HEADS.items()}


def multi_head_output(heads: dict[str, Head]) -> Tensor:
    """[10, 8]: the outputs side by side."""
    return torch.cat([h.output for h in heads.values()], dim=-1)


def STEPS(quick: bool) -> int:  # noqa: N802
    return 2


def chapter(quick: bool, advance: Callable[[], None]) -> Section:
    section = Section(
        "four-heads",
        "One head and four",
        "After *Attention Mechanism*, a notebook of reflections on embeddings and heads.",
    )
    section.text("""
        The function of the last chapter, and its three results: scores, weights and output. All
        matrices below are what it gives. *One head* is one such computation; a model has several
        beside each other, each with queries, keys and values of its own.
    """)
    section.code("""
        output, weights, scores = torch_attn.sdpa_with_weights(Q, K, V)
        # scores  [L, S]:  Q Kᵀ / √E
        # weights [L, S]:  softmax of each row
        # output  [L, Ev]: weights times V; torch_attn.sdpa gives it without storing the other two
    """)
    _similarity(section)
    advance()
    _sentence(section)
    advance()
    return section


def _similarity(section: Section) -> None:
    s = similarity()
    section.heading("Dot product and cosine")
    section.text(f"""
        Take X = (1, 2, 3, 4) and Y = (1.2, 2.1, 2.9, 3.7). Their dot product is {fixed(s.dot, 2)}:
        large, since they point nearly the same way, and since both are long. Divided by the lengths
        it is the **cosine** of the angle between them, {fixed(s.cosine, 4)}, at {fixed(s.angle, 2)}
        degrees. Vectors of length 1 need no division: their dot product *is* the cosine. Attention
        uses the dot product as it is. A long key is thus heard by every query that points its way,
        which a model may make use of.
    """)
    section.table(
        ["quantity", "computed", "printed in the notebook"],
        [
            ["X · Y", fixed(s.dot, 6), "28.90"],
            ["length of X", fixed(s.x_norm, 6), "5.48"],
            ["length of Y", fixed(s.y_norm, 6), "5.29"],
            ["cosine", fixed(s.cosine, 6), "0.9980"],
            ["angle, degrees", fixed(s.angle, 6), "3.59"],
            ["X / length", _vector(s.x_unit), "(0.183, 0.365, 0.548, 0.73)"],
            ["Y / length", _vector(s.y_unit), "(0.227, 0.397, 0.549, 0.7)"],
            ["unit X · unit Y", fixed(s.unit_dot, 6), "0.9980"],
        ],
        "Dot products are attention scores with scale 1; lengths are roots of dot products.",
    )


def _vector(vector: Tensor) -> str:
    return "(" + ", ".join(f"{x:.3f}" for x in vector.tolist()) + ")"


def _sentence(section: Section) -> None:
    one, heads = single_head(), four_heads()
    many = multi_head_output(heads)
    check(list(many.shape) == [10, 8], "heads of sizes 1, 2, 3 and 2 are 8 numbers together")
    section.heading("A sentence of ten tokens, one head")
    it, apple, orange = (TOKENS.index(t) for t in ("it", "apple", "orange"))
    low, high = one.weights.min().item(), one.weights.max().item()
    section.text(f"""
        *I prefer apple over orange because it is less acidic*: ten tokens of eight numbers, made by
        hand so that each number means something, such as "fruit" or "acidity". One head compares
        all eight at once. Everything is mixed with everything: the weights lie between
        {fixed(low, 3)} and {fixed(high, 3)}, around the tenth that each would get if nothing were
        compared.
    """)
    with theme():
        single = plots.heatmap(one.weights, TOKENS)
        top = max(h.weights.max().item() for h in heads.values())
        each = plots.heads(
            torch.stack([h.weights for h in heads.values()]),
            TOKENS,
            names=[f"{n}, size {len(HEADS[n])}" for n in heads],
            vmax=top,
        )
        alone = plots.activations(one.activation, TOKENS)
        together = plots.activations(many.norm(dim=-1), TOKENS)
        longest = 1.05 * many.norm(dim=-1).max().item()
        for figure in (alone, together):
            figure.axes[0].set_xlim(0, longest)
        bars = plots.activations(
            {"single head": one.activation, "four heads": many.norm(dim=-1)}, TOKENS
        )
    section.picture(
        "heads-single",
        single,
        "**One head that reads all eight numbers.**",
        "Heat map of ten by ten weights, all close to a tenth.",
        Numbers.matrix(one.weights, TOKENS, TOKENS),
    )
    section.heading("Four heads of sizes 1, 2, 3 and 2")
    section.text("""
        Now four heads look at the same sentence, each at some of the numbers only, and each calls
        attention by itself. Heads are usually of one size and go into one call; these are of four
        sizes and take four. Their outputs side by side are eight numbers again. Who reads what is
        written down here by hand; a model learns it.
    """)
    section.picture(
        "heads-four",
        each,
        "**Four heads, on one colour scale.** Each sees other relations in the same sentence: the "
        "fruits, what is preferred over what, the reason, the pronoun.",
        "Four heat maps of ten by ten weights; each has its own few bright cells.",
        Numbers(
            ["head", "query", *TOKENS],
            [
                [name, token, *row]
                for name, h in heads.items()
                for token, row in zip(TOKENS, h.weights.tolist(), strict=True)
            ],
        ),
    )
    rows = [("single head", one, 8), *((n, h, len(HEADS[n])) for n, h in heads.items())]
    section.text("**What does “it” mean?** The row of *it*, read off:")
    section.table(
        ["head", "it → apple", "it → orange", "it → it", "largest at"],
        [
            [
                name,
                *(fixed(h.weights[it, j].item(), 4) for j in (apple, orange, it)),
                _largest(h.weights[it]),
            ]
            for name, h, _ in rows
        ],
        "Weights of the query “it”.",
    )
    uneven = max((h.weights[0] - 0.1).abs().max().item() for h in heads.values())
    check(uneven < 1e-15, "the token that no head reads attends to all alike")
    section.text("""
        Two things that only the numbers tell. *Apple* and *orange* have the same "fruit", so that
        neither the fruit head nor the pronoun head can say which of them "it" is. The acidity head
        has a small preference, and it is for *orange*, the more acidic: the sentence means the
        apple. And *I* has its only number where no head reads: all four give it a tenth of
        everything, and nothing of itself is in the concatenated output.
    """)
    check(bool((many.norm(dim=-1) > one.activation).all()), "four heads: every output is longer")
    section.heading("How strong the outputs are")
    section.text("""
        The length of a token's output vector, its *activation*, with one head, with four, and both
        beside each other. All ten are longer with four heads. Part of that is mere counting: two
        heads read the same "fruit", so it counts twice, and none reads the number of "I". A longer
        bar is not a better one.
    """)
    section.pictures(
        Picture(
            "heads-activation-single",
            alone,
            "**One head.**",
            "Bars: the length of each token's output with one head.",
        ),
        Picture(
            "heads-activation-four",
            together,
            "**Four heads**, side by side.",
            "Bars: the length of each token's output with four heads.",
        ),
    )
    section.picture(
        "heads-activation",
        bars,
        "**One head against four.**",
        "Pairs of bars for each of ten tokens.",
        Numbers(
            ["token", "single head", "four heads"],
            [
                [t, a, b]
                for t, a, b in zip(
                    TOKENS, one.activation.tolist(), many.norm(dim=-1).tolist(), strict=True
                )
            ],
        ),
    )
    section.differs(
        "*Attention Mechanism*",
        """
        Its list of what ails recurrent networks says that training "can" be parallelised. It
        *cannot*, for the reason that the same line gives: each state waits for the one before.
        """,
    )


def _largest(row: Tensor) -> str:
    """The tokens of the largest weight."""
    found = [t for t, w in zip(TOKENS, row.tolist(), strict=True) if w > row.max().item() - 1e-12]
    return "all alike" if len(found) == len(TOKENS) else ", ".join(found)
