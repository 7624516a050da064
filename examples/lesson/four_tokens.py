"""Chapter: four tokens of two numbers each, from embeddings to contextualised vectors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import torch_attn
from examples import plots
from examples.demo.report import check

from .page import Numbers, Picture, Section, theme
from .wording import fixed, number

TOKENS = [f"Token-{i}" for i in (1, 2, 3, 4)]


@dataclass
class FourTokens:
    """X is [4, 2], the embeddings and Q = K = V; the output is [4, 2], the rest [4, 4]."""

    X: Tensor
    raw: Tensor
    scaled: Tensor
    weights: Tensor
    unscaled_weights: Tensor
    output: Tensor


def attend() -> FourTokens:
    X = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.1, 0.9], [0.8, 0.2]], dtype=torch.float64)
    _, unscaled_weights, raw = torch_attn.sdpa_with_weights(X, X, X, scale=1.0)
    _, weights, scaled = torch_attn.sdpa_with_weights(X, X, X)
    return FourTokens(X, raw, scaled, weights, unscaled_weights, torch_attn.sdpa(X, X, X))


def STEPS(quick: bool) -> int:  # noqa: N802
    return 1


def chapter(quick: bool, advance: Callable[[], None]) -> Section:
    section = Section(
        "four-tokens",
        "Four tokens, all of it",
        "After *Scaled Dot-Product Attention*, a page of notes with a NumPy example.",
    )
    f = attend()
    check((f.weights.sum(-1) - 1).abs().max().item() < 1e-15, "the weights of each query sum to 1")
    divided = (f.raw / 2**0.5 - f.scaled).abs().max().item()
    check(divided < 1e-15, "the scaled scores are the raw ones divided by the root of 2")

    section.text("""
        Four tokens, each a vector of two numbers. The matrices that would make queries, keys and
        values of them are the identity here, so the vectors X play all three parts:
        Q = K = V = X. The whole computation is

        > Attention(Q, K, V) = softmax(QKᵀ / √dₖ) V,

        where dₖ = 2 is the size of a key. First the vectors: tokens 1 and 4 point one way, 2 and 3
        another.
    """)
    with theme():
        before = plots.embeddings(f.X, TOKENS)
        after = plots.embeddings(f.output, TOKENS, before=f.X)
        top = f.raw.max().item()
        raw = plots.heatmap(f.raw, TOKENS, title="raw: QKᵀ", label="score", digits=3, vmax=top)
        scaled = plots.heatmap(
            f.scaled, TOKENS, title="scaled: QKᵀ / √2", label="score", digits=3, vmax=top
        )
        weights = plots.heatmap(f.weights, TOKENS, digits=3)
    section.picture(
        "four-tokens-embeddings",
        before,
        "**The four tokens** (Q = K = V = X).",
        "Four arrows from the origin: Token-1 and Token-4 to the right, Token-2 and Token-3 up.",
        Numbers(["token", "x", "y"], [[t, *x] for t, x in zip(TOKENS, f.X.tolist(), strict=True)]),
    )
    section.heading("Scores")
    section.text(f"""
        A score is the dot product of a query and a key: large where they point the same way. The
        largest, {fixed(top, 2)}, is that of Token-1 with itself, and of Token-3. Dividing by √2 =
        1.414 leaves the order as it is and makes every difference smaller: both pictures have one
        colour scale, and the second is darker everywhere.
    """)
    section.pictures(
        Picture(
            "four-tokens-raw",
            raw,
            "**Raw scores.**",
            "Heat map of raw scores, from 0.180 to 0.820.",
            Numbers.matrix(f.raw, TOKENS, TOKENS),
        ),
        Picture(
            "four-tokens-scaled",
            scaled,
            "**Scaled scores**, on the same colours.",
            "Heat map of scaled scores, from 0.127 to 0.580.",
            Numbers.matrix(f.scaled, TOKENS, TOKENS),
        ),
    )
    section.heading("Weights")
    most, least = f.weights.max().item(), f.weights.min().item()
    section.text(f"""
        Softmax of each row: every entry becomes positive and every row sums to 1. The weights reach
        from {fixed(least, 3)} to {fixed(most, 3)}; without the division they would have reached
        from {fixed(f.unscaled_weights.min().item(), 3)} to
        {fixed(f.unscaled_weights.max().item(), 3)}. With only two numbers a vector the division
        matters little. It is the size of real heads, 64 and more, that makes it matter.
    """)
    section.picture(
        "four-tokens-weights",
        weights,
        "**Weights.** Each row sums to 1; read it as the shares of what its token takes from each "
        "token.",
        "Heat map of four by four weights: tokens 1 and 4 attend to each other, as do 2 and 3.",
        Numbers(
            ["query \\ key", *TOKENS, "sum"],
            [[t, *row, sum(row)] for t, row in zip(TOKENS, f.weights.tolist(), strict=True)],
        ),
    )
    section.heading("Contextualised vectors")
    x, y = f.output[0].tolist()
    spread = [(v - v.mean(0)).norm(dim=1).mean().item() for v in (f.X, f.output)]
    section.text(f"""
        The output of a token is the mean of all values with its weights: Token-1 moves from
        (0.9, 0.1) to ({fixed(x, 3)}, {fixed(y, 3)}). Such a mean lies among the values, so the four
        have come closer: their mean distance from the centre went from {fixed(spread[0], 3)} to
        {fixed(spread[1], 3)}. The pairs are still told apart. All of this agrees with the
        formula of those notes, written out, to {number(_difference(f), 1)}.
    """)
    section.picture(
        "four-tokens-output",
        after,
        "**After attention.** Arrows: the outputs; dots: the tokens that they were.",
        "Four short arrows close to each other in the middle, and dots where the tokens were.",
        Numbers(
            ["token", "x before", "y before", "x after", "y after"],
            [[t, *a, *b] for t, a, b in zip(TOKENS, f.X.tolist(), f.output.tolist(), strict=True)],
        ),
    )
    advance()
    return section


def _difference(f: FourTokens) -> float:
    """From the formula of the notes, in float64."""
    weights = torch.exp(f.X @ f.X.T / 2**0.5)
    weights = weights / weights.sum(1, keepdim=True)
    return max(
        (weights - f.weights).abs().max().item(), (weights @ f.X - f.output).abs().max().item()
    )
