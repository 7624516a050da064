"""Part 4: attention among four tokens of two numbers each, small enough to see all of it."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from torch import Tensor

import torch_attn
from examples import plots
from torch_attn import reference

from .plots import COLORS, figure, save
from .report import check, console, heading, table

# Query, key and value at once: the projections are the identity.
TOKENS = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.1, 0.9], [0.8, 0.2]])
NAMES = [f"Token {i + 1}" for i in range(len(TOKENS))]


def tips(ax: Axes, vectors: Tensor, low: float, high: float) -> None:
    """The ends of vectors alone, in a small square piece of the plane."""
    for i, (x, y) in enumerate(vectors.tolist()):
        ax.plot(x, y, "o", color=COLORS[i], markersize=9)
        # Tokens 1 and 2 lie right below their neighbours 4 and 3.
        below = i < 2
        ax.annotate(
            f"{NAMES[i]}\n({x:.3f}, {y:.3f})",
            (x, y),
            (9, 3 if below else -3),
            textcoords="offset points",
            va="top" if below else "bottom",
            linespacing=1.1,
        )
    ticks = torch.arange(low, high + 0.01, 0.05).tolist()
    ends = (low, high)
    ax.set(xlabel="first number", ylabel="second number", xlim=ends, ylim=ends)
    ax.set(xticks=ticks, yticks=ticks, aspect="equal")


def draw(path: Path, raw: Tensor, scaled: Tensor, weights: Tensor, output: Tensor) -> Path:
    picture = figure(15, 12)
    picture.suptitle("The four tokens (Q = K = V = X)", fontsize=18, weight="bold")
    picture.supxlabel("Computed by torch_attn.sdpa_with_weights(X, X, X)", fontsize=11, color="0.4")
    (embeddings, scores, divided), (softmax, result, zoom) = picture.subplots(2, 3)
    picture.get_layout_engine().set(w_pad=0.2, h_pad=0.2)

    plots.embeddings(TOKENS, NAMES, title="1  Embeddings X: query, key and value", ax=embeddings)
    # One scale for both, so that the division is seen: what was bright is darker.
    scale = {"digits": 3, "vmax": raw.max().item(), "label": "score"}
    plots.heatmap(raw, NAMES, title="2  Raw scores X Xᵀ", ax=scores, **scale)
    plots.heatmap(scaled, NAMES, title="3  Scaled scores X Xᵀ / √2", ax=divided, **scale)
    plots.heatmap(weights, NAMES, digits=3, title="4  Weights: softmax of each row", ax=softmax)
    plots.embeddings(
        output, NAMES, before=TOKENS, title="5  Contextualised vectors: weights times X", ax=result
    )
    low, high = 0.4, 0.7
    corner = {"fill": False, "edgecolor": "0.4", "zorder": 2}
    result.add_patch(Rectangle((low, low), high - low, high - low, **corner))
    result.text(low, high + 0.02, "enlarged in 6", color="0.4", va="bottom")
    result.text(0.24, 0.86, "dots: the embeddings", color="0.4")

    zoom.set_title("6  Their tips, enlarged")
    tips(zoom, output, low, high)
    return save(picture, path)


def run(out: Path) -> list[Path]:
    heading(
        "4  Four tokens",
        "Each is query, key and value at once. Attention pulls every token towards those it is "
        "like.",
    )
    _, _, raw = torch_attn.sdpa_with_weights(TOKENS, TOKENS, TOKENS, scale=1.0)
    output, weights, scaled = torch_attn.sdpa_with_weights(TOKENS, TOKENS, TOKENS)

    results = table("", "before", *(f"of {i + 1}" for i in range(4)), "after")
    for name, before, row, after in zip(NAMES, TOKENS, weights, output, strict=True):
        results.add_row(
            name,
            f"({before[0]:.1f}, {before[1]:.1f})",
            *(f"{weight:.3f}" for weight in row),
            f"({after[0]:.3f}, {after[1]:.3f})",
        )
    console.print(results)

    exact = reference.sdpa_with_weights(*[TOKENS.double()] * 3)
    difference = max(
        (a - e).abs().max().item() for a, e in zip((output, weights, scaled), exact, strict=True)
    )
    check(difference < 1e-6, f"output, weights and scores are the formula's (to {difference:.0e})")
    check(
        torch.allclose(raw / math.sqrt(2), scaled),
        "the scaled scores are the raw ones divided by the square root of 2, the size of a key",
    )
    return [draw(out / "four_tokens.png", raw, scaled, weights, output)]
