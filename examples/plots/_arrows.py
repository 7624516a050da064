"""Vectors of two numbers as arrows in the plane."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from torch_attn.plots._labels import Labels
from torch_attn.plots._style import (
    WIDTH,
    Array,
    array,
    axes_of,
    colors,
    font,
    muted,
    set_title,
    token_names,
)


def embeddings(
    vectors: Any,
    tokens: Sequence[str] | None = None,
    *,
    before: Any = None,
    title: str | None = None,
    ax: Axes | None = None,
) -> Figure:
    """Two-dimensional vectors as arrows from the origin.

    Args:
        vectors: ``[N, 2]``.
        tokens: N names; None: their indices. A label that fits nowhere is left out.
        before: ``[N, 2]``, the vectors' earlier values, drawn as dots. Dotted lines join the dots
            to the arrows' tips.
        title: over the picture.
        ax: where to draw; None makes a figure.

    Example:
        >>> x = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.1, 0.9], [0.8, 0.2]])
        >>> figure = plots.embeddings(torch_attn.sdpa(x, x, x), ["a", "b", "c", "d"], before=x)
    """
    tips = _pairs("vectors", vectors)
    names = token_names("embeddings", "tokens", tokens, len(tips))
    starts = None if before is None else _pairs("before", before)
    if starts is not None and starts.shape != tips.shape:
        raise ValueError(
            f"plots.embeddings: before has shape {list(starts.shape)}; "
            f"it must have that of vectors, {list(tips.shape)}"
        )
    figure, ax, given = axes_of("embeddings", ax, WIDTH)

    ends = tips if starts is None else np.concatenate([tips, starts])
    low, high = np.minimum(ends.min(0), 0), np.maximum(ends.max(0), 0)
    # Both axes have the same length, with room for labels.
    half = 0.5 * max(float((high - low).max()), 1e-12) * 1.3
    center = (low + high) / 2
    ax.set(
        xlim=(center[0] - half, center[0] + half),
        ylim=(center[1] - half, center[1] + half),
        aspect="equal",
        xlabel="first number",
        ylabel="second number",
    )
    for line in (ax.axhline, ax.axvline):
        line(0, color=muted(), linewidth=0.6, alpha=0.5, zorder=0.5)

    palette = colors(len(tips))
    ax.quiver(
        *np.zeros((2, len(tips))),
        *tips.T,
        color=palette,
        angles="xy",
        scale_units="xy",
        scale=1,
        units="inches",
        width=0.022,
        minlength=0,
        zorder=3,
    )
    if starts is not None:
        for color, start, tip in zip(palette, starts, tips, strict=True):
            ax.plot(*zip(start, tip, strict=True), ":", color=color, linewidth=1.2, zorder=2)
        ax.scatter(starts[:, 0], starts[:, 1], c=palette, s=22, zorder=2.5)
    along = np.linspace(0, 1, 25)[:, None, None]
    covered = [along * tips] if starts is None else [along * tips, tips + along * (starts - tips)]
    Labels(ax, tips, names, away=tips, covered=np.concatenate(covered).reshape(-1, 2), radius=3.5)
    ax.tick_params(labelsize=font())
    set_title(figure, given, title)
    return figure


def _pairs(argument: str, values: Any) -> Array:
    pairs = array("embeddings", argument, values, "[N, 2]")
    if pairs.shape[1] != 2 or not np.isfinite(pairs).all():
        problem = f"has shape {list(pairs.shape)}" if pairs.shape[1] != 2 else "is not finite"
        raise ValueError(
            f"plots.embeddings: {argument} {problem}; it must be [N, 2] and finite "
            "(plots.tsne draws vectors of more numbers)"
        )
    return pairs
