"""Attention as a graph with edges from keys to queries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch

from torch_attn.plots._style import (
    WIDTH,
    Array,
    array,
    axes_of,
    colors,
    font,
    set_title,
    size_in_points,
    token_names,
)

_WIDEST = 5.0  # width of an edge of weight 1, in points
_UPRIGHT = 10  # names are horizontal in a ring of up to 10 tokens, else they point outwards


def graph(
    weights: Any,
    queries: Sequence[str] | None = None,
    keys: Sequence[str] | None = None,
    *,
    least: float = 0.05,
    title: str | None = None,
    ax: Axes | None = None,
) -> Figure:
    """Weights as edges from keys to queries. The weight sets the width, and the key the colour.

    If L = S and `keys` equals `queries` or is left out, each token is a query and a key. The tokens
    then form a ring, where the edge from a token to itself is a loop. Otherwise the keys form a
    column on the left, and the queries form a column on the right.

    Args:
        weights: ``[L, S]``, from 0 to 1.
        queries: L tokens; None: their indices.
        keys: S tokens; None: the queries' tokens if L = S, else the keys' indices.
        least: smaller weights are not drawn; the picture says so.
        title: over the picture.
        ax: where to draw; None makes a figure.

    Example:
        >>> query, key, value = torch.randn(3, 4, 8)
        >>> _, weights, _ = torch_attn.sdpa_with_weights(query, key, value, is_causal=True)
        >>> figure = plots.graph(weights, "the cat sat down".split())
    """
    values = array("graph", "weights", weights, "[L, S]")
    if not ((values >= 0) & (values <= 1 + 1e-2)).all():  # half types may round above 1
        raise ValueError(
            f"plots.graph: weights reach from {values.min():g} to {values.max():g}; "
            "they must be from 0 to 1, as softmax gives them"
        )
    L, S = values.shape
    ring = L == S and (keys is None or (queries is not None and list(queries) == list(keys)))
    longest = 12 if ring and L > _UPRIGHT else 18
    receivers = token_names("graph", "queries", queries, L, longest)
    senders = receivers if ring else token_names("graph", "keys", keys, S)

    rows = max(L, S)
    figure, ax, given = axes_of(
        "graph", ax, WIDTH if ring else min(max(2.2, 0.9 + 0.27 * rows), 14.0)
    )
    ax.axis("off")
    draw = _ring if ring else _columns
    draw(ax, values, receivers, senders, least)
    number = f"{least:g}"
    if (values >= least).any():
        note = f"shown: weights of at least {number}"
    else:
        note = f"no weight reaches {number}; the largest is {values.max():.2g}"
    ax.text(0.5, -0.01, note, transform=ax.transAxes, ha="center", va="top", fontsize=font(0.85))
    set_title(figure, given, title)
    return figure


def _columns(
    ax: Any, values: Array, receivers: list[str], senders: list[str], least: float
) -> None:
    rows = max(len(receivers), len(senders))
    palette = colors(len(senders))
    # Both columns go from top to bottom, and have the same height.
    counts = len(senders), len(receivers)
    lefts, rights = (rows / 2 - (np.arange(n) + 0.5) * rows / n for n in counts)
    for i, j in _edges(values, least):
        _edge(ax, (0.0, lefts[j]), (1.0, rights[i]), values[i, j], palette[j], curve=0.0)
    text: dict[str, Any] = {"va": "center", "fontsize": font(0.85)}
    for x, names, places, side, title, marks in (
        (0.0, senders, lefts, "right", "keys", palette),
        (1.0, receivers, rights, "left", "queries", [mpl.rcParams["text.color"]] * len(rights)),
    ):
        ax.scatter(np.full(len(names), x), places, c=marks, s=36, zorder=4)
        away = -8 if side == "right" else 8
        for name, y in zip(names, places.tolist(), strict=True):
            ax.annotate(name, (x, y), (away, 0), textcoords="offset points", ha=side, **text)
        ax.text(
            x, rows / 2 + 0.2, title, ha="center", va="bottom", fontsize=font(), fontweight="bold"
        )
    ax.set(xlim=(-0.05, 1.05), ylim=(-rows / 2 - 0.2, rows / 2 + 0.6))


def _ring(ax: Any, values: Array, receivers: list[str], senders: list[str], least: float) -> None:
    count = len(senders)
    palette = colors(count)
    # Clockwise from the top.
    angles = np.pi / 2 - 2 * np.pi * np.arange(count) / count
    places = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    radial = count > _UPRIGHT
    # Labels start outside the loops, and the longest label ends within the axes.
    apart = 1.26 if (np.diag(values) >= least).any() else 1.12
    half = 0.6 * min(size_in_points(ax))  # the axes become wider, because they show no ticks
    longest = min(0.6 * font(0.85) * max(map(len, senders)), 0.6 * half)
    reach = apart * half / (half - longest)
    for i, j in _edges(values, least):
        if i == j:
            _loop(ax, places[j], values[i, j], palette[j], count)
        else:
            _edge(ax, places[j], places[i], values[i, j], palette[j], curve=0.18)
    ax.scatter(*places.T, c=palette, s=60 if count <= 12 else 30, zorder=4)
    for name, place, angle in zip(senders, places * apart, angles.tolist(), strict=True):
        turn = np.degrees(angle) % 360
        flipped = 90 < turn < 270
        cosine = np.cos(angle)
        side = "center" if abs(cosine) < 0.2 else "left" if cosine > 0 else "right"
        if radial:
            side = "right" if flipped else "left"
        ax.text(
            *place,
            name,
            ha=side,
            va="center",
            fontsize=font(0.85),
            rotation=(turn - 180 if flipped else turn) if radial else 0,
            rotation_mode="anchor",
        )
    high = reach if radial else apart + 0.15
    ax.set(xlim=(-reach, reach), ylim=(-high, high), aspect="equal")


def _edges(values: Array, least: float) -> Any:
    """Returns pairs of query and key. The heaviest pairs come last, so they are drawn on top."""
    pairs = np.argwhere(values >= max(least, 1e-12))
    return pairs[np.argsort(values[tuple(pairs.T)], kind="stable")]


def _edge(ax: Axes, start: Any, end: Any, weight: float, color: str, curve: float) -> None:
    width = _WIDEST * weight
    ax.add_patch(
        FancyArrowPatch(
            tuple(start),
            tuple(end),
            arrowstyle=f"-|>,head_length={3 + 1.2 * width:.2f},head_width={1.5 + 0.6 * width:.2f}",
            mutation_scale=1,
            connectionstyle=f"arc3,rad={curve}",
            shrinkA=4,
            shrinkB=5,
            linewidth=width,
            color=color,
            alpha=0.75,
            zorder=2,
        )
    )


def _loop(ax: Axes, place: Array, weight: float, color: str, count: int) -> None:
    """Draws a small circle outside the ring, through the token."""
    radius = min(0.1, 1.3 / count)
    around = np.linspace(0, 2 * np.pi, 60)
    x, y = (1 + radius) * place  # the loop's center: the ring has radius 1
    xs, ys = x + radius * np.cos(around), y + radius * np.sin(around)
    ax.plot(xs, ys, color=color, linewidth=_WIDEST * weight, alpha=0.75, zorder=2)
