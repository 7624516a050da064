"""Part 4: attention among four tokens of two numbers each, small enough to see all of it."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from torch import Tensor

import torch_attn
from torch_attn import reference

from .plots import BLACK, BLUE, GREEN, VERMILION, figure, save
from .report import check, console, heading, table

# Query, key and value at once: the projections are the identity.
TOKENS = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.1, 0.9], [0.8, 0.2]])
NAMES = [f"Token {i + 1}" for i in range(len(TOKENS))]
COLORS = [VERMILION, BLUE, GREEN, BLACK]


def arrows(ax: Axes, vectors: Tensor) -> None:
    """Each vector as an arrow from the origin."""
    origin = torch.zeros(len(vectors))
    lengths = {"angles": "xy", "scale_units": "xy", "scale": 1}
    ax.quiver(
        origin, origin, *vectors.T, color=COLORS, **lengths, units="inches", width=0.035, zorder=3
    )


def names(ax: Axes, vectors: Tensor, digits: int) -> None:
    """The name and the numbers of each vector, to the right of its tip."""
    for i, (x, y) in enumerate(vectors.tolist()):
        # Tokens 1 and 2 lie right below their neighbours 4 and 3.
        below = i < 2
        ax.annotate(
            f"{NAMES[i]}\n({x:.{digits}f}, {y:.{digits}f})",
            (x, y),
            (8, 5 if below else -5),
            textcoords="offset points",
            va="top" if below else "bottom",
            color=COLORS[i],
            fontsize=9.5,
            fontweight="bold",
            linespacing=1.1,
        )


def plane(ax: Axes, title: str, low: float, high: float, step: float) -> None:
    """A square piece of the plane."""
    ticks = torch.arange(low, high, step).tolist()
    ax.set(
        title=title,
        xlabel="first number",
        ylabel="second number",
        xlim=(low, high),
        ylim=(low, high),
        xticks=ticks,
        yticks=ticks,
        aspect="equal",
    )


def heatmap(ax: Axes, title: str, matrix: Tensor) -> None:
    """Rows are queries and columns keys; the darker, the larger."""
    # The darkest blue is beyond the largest value: the numbers stay readable.
    image = ax.imshow(matrix, cmap="Blues", vmin=0, vmax=1.3 * matrix.max().item())
    for i, row in enumerate(matrix.tolist()):
        for j, value in enumerate(row):
            color = "white" if image.norm(value) > 0.55 else "black"
            ax.text(j, i, f"{value:.3f}", ha="center", va="center", color=color, fontsize=12)
    ax.set(title=title, xlabel="key", ylabel="query")
    ax.set_xticks(range(len(NAMES)), NAMES)
    ax.set_yticks(range(len(NAMES)), NAMES)
    for labels in (ax.get_xticklabels(), ax.get_yticklabels()):
        for label, color in zip(labels, COLORS, strict=True):
            label.set(color=color, fontweight="bold")
    ax.tick_params(length=0)
    ax.grid(visible=False)
    ax.spines[:].set_visible(False)


def draw(path: Path, raw: Tensor, scaled: Tensor, weights: Tensor, output: Tensor) -> Path:
    picture = figure(16, 10.5)
    picture.suptitle("Scaled dot-product attention among four tokens", fontsize=18, weight="bold")
    picture.supxlabel("Computed by torch_attn.sdpa_with_weights(X, X, X)", fontsize=11, color="0.4")
    (embeddings, scores, divided), (softmax, result, zoom) = picture.subplots(2, 3)
    picture.get_layout_engine().set(w_pad=0.2, h_pad=0.2)

    plane(embeddings, "1  Embeddings X: query, key and value", 0, 1.25, 0.25)
    arrows(embeddings, TOKENS)
    names(embeddings, TOKENS, digits=1)

    heatmap(scores, "2  Raw scores X Xᵀ", raw)
    heatmap(divided, "3  Scaled scores X Xᵀ / √2", scaled)
    heatmap(softmax, "4  Weights: softmax of each row", weights)

    plane(result, "5  Contextualised vectors: weights times X", 0, 1.25, 0.25)
    for color, before, after in zip(COLORS, TOKENS.tolist(), output.tolist(), strict=True):
        result.plot(*zip(before, after, strict=True), ":", color=color, linewidth=1.5)
        result.plot(*before, "o", color=color, markersize=7)
    arrows(result, output)
    low, high = 0.4, 0.65
    corner = {"fill": False, "edgecolor": "0.4", "zorder": 2}
    result.add_patch(Rectangle((low, low), high - low, high - low, **corner))
    result.text(high + 0.02, high, "enlarged in 6", color="0.4", va="top")
    result.text(0.24, 0.86, "dots: the embeddings", color="0.4")

    plane(zoom, "6  Their tips, five times as large", low, high, 0.05)
    arrows(zoom, output)
    names(zoom, output, digits=3)
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
