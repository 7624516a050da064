"""Matrices of scores and weights as heat maps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any, Literal

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from torch_attn.plots._bar import add_bar_within, laid_out, style_bar
from torch_attn.plots._style import (
    WIDTH,
    Array,
    array,
    axes_of,
    font,
    set_title,
    size_in_points,
    token_names,
)


def heatmap(
    matrix: Any,
    queries: Sequence[str] | None = None,
    keys: Sequence[str] | None = None,
    *,
    title: str | None = None,
    label: str | None = None,
    digits: int | None = None,
    vmin: float | Literal["auto"] | None = "auto",
    vmax: float | None = None,
    center: float | None = None,
    ax: Axes | None = None,
) -> Figure:
    """A heat map of weights or scores: rows are queries, columns are keys.

    Cells of -inf (masked scores) are hatched. Cells of NaN or +inf are crossed. A note below the
    axes explains each mark.

    Args:
        matrix: ``[L, S]``.
        queries: L tokens; None: the keys' tokens if L = S, else the queries' indices.
        keys: S tokens; None: the queries' tokens if L = S, else the keys' indices.
        title: over the picture.
        label: the label of the colour bar. None: "attention weight" if all numbers are from 0 to 1,
            else "score".
        digits: decimals of the numbers in the cells. None: two if they fit, otherwise no numbers.
            Negative: no numbers.
        vmin: the value of the first colour. "auto": 0, or the least value if that value is
            negative. None: the least value.
        vmax: the value of the last colour; None: the largest value.
        center: the value of the middle colour of a diverging colour map. The map reaches equally
            far below and above `center`, to `vmin` or `vmax`, whichever is farther. With `center`,
            the defaults of `vmin` and `vmax` are the least and the largest value.
        ax: where to draw; None makes a figure.

    Example:
        >>> query, key, value = torch.randn(3, 5, 8)
        >>> _, weights, scores = torch_attn.sdpa_with_weights(query, key, value, is_causal=True)
        >>> figure = plots.heatmap(weights, "the cat sat down .".split())
        >>> figure = plots.heatmap(scores, label="scaled score", center=0.0)
    """
    values = array("heatmap", "matrix", matrix, "[L, S]")
    rows, columns = _names("heatmap", queries, keys, *values.shape)
    scale = _scale("heatmap", values, vmin, vmax, center)

    longest = max(map(len, columns))
    width, cell = _own_size(values.shape, rows)
    tilted = longest * 0.6 * font(0.85) > 72 * cell
    below = longest * 0.6 * font(0.85) / 72 if tilted else 0.15
    extra = 1.1 + below + (0.3 if title else 0)
    height = extra + values.shape[0] * max(min(cell, 0.7), font() / 72)
    figure, ax, given = axes_of("heatmap", ax, min(height, 14.0), width)
    square = given is not None and 0.5 <= values.shape[0] / values.shape[1] <= 2
    _draw(ax, values, scale, aspect="equal" if square else "auto")
    ax.set_ylabel("query", fontsize=font())
    ax.set_xlabel("\n".join(["key", *_notes(values)]), fontsize=font())
    label = _kind(values) if label is None else label
    if given is None:
        cells = (72 * cell, 72 * (min(height, 14.0) - extra) / values.shape[0])
    else:
        cells = _cells(size_in_points(ax), values.shape, square)
    _ticks(ax, rows, columns, cells)
    if laid_out(ax):
        _bar(figure, [ax], scale, label)
    else:
        cells = _cells(add_bar_within(ax, scale, label), values.shape, square)
        _ticks(ax, rows, columns, cells)
    _write(ax, values, scale, digits, cells)
    set_title(figure, given, title)
    return figure


def heads(
    weights: Any,
    queries: Sequence[str] | None = None,
    keys: Sequence[str] | None = None,
    *,
    names: Sequence[str] | None = None,
    columns: int = 2,
    title: str | None = None,
    vmax: float | None = None,
) -> Figure:
    """One small heat map per head, all on the same colour scale.

    Weights of exactly 0, such as the weights of masked keys, are left blank.

    Args:
        weights: ``[H, L, S]``.
        queries: L tokens; None: the keys' tokens if L = S, else the queries' indices.
        keys: S tokens; None: the queries' tokens if L = S, else the keys' indices.
        names: H titles; None: "head 0" and so on.
        columns: how many heat maps stand side by side, at least 1.
        title: over the picture.
        vmax: the value of the last colour. None: the largest weight of the queries that attend to
            more than one key, because a lone key has weight 1. The value of the first colour is 0,
            or the least number if that number is negative.

    Example:
        >>> query, key, value = torch.randn(3, 4, 6, 8)
        >>> _, weights, _ = torch_attn.sdpa_with_weights(query, key, value)
        >>> figure = plots.heads(weights, "the cat sat down there .".split())
    """
    values = array("heads", "weights", weights, "[H, L, S]")
    if columns < 1:
        raise ValueError(f"plots.heads: columns is {columns}; it must be at least 1")
    rows, cols = _names("heads", queries, keys, *values.shape[1:])
    names = [f"head {i}" for i in range(len(values))] if names is None else names
    titles = token_names("heads", "names", names, len(values))
    blank = np.zeros(values.shape, bool)
    if _kind(values) == "attention weight":
        blank = values == 0
        several = values[(values != 0).sum(-1) > 1]
        several = several[several > 0]
        if vmax is None and several.size:
            vmax = float(several.max())
    scale = _scale("heads", values, "auto", vmax, None)

    columns = min(columns, len(values))
    lines = math.ceil(len(values) / columns)
    longest = max(map(len, rows)) * 0.6 * font(0.85) / 72
    width = (WIDTH - 0.35 - longest) / columns - 0.12
    ratio = min(max(values.shape[1] / values.shape[2], 0.4), 2.5)
    height = width * ratio
    names_below = min(max(map(len, cols)) * 0.6 * font(0.85) / 72, 1.4)
    total = lines * (height + 0.3) + names_below + 1.0 + (0.3 if title else 0)
    figure = Figure(figsize=(WIDTH, total), layout="constrained")
    grid: Any = figure.add_gridspec(lines, columns)
    cells = (72 * width / values.shape[2], 72 * height / values.shape[1])
    axes = []
    for i, (head, name) in enumerate(zip(values, titles, strict=True)):
        ax = figure.add_subplot(grid[i // columns, i % columns])
        axes.append(ax)
        _draw(ax, np.ma.masked_where(blank[i], head), scale)
        _ticks(ax, rows, cols, cells)
        ax.tick_params(labelleft=i % columns == 0, labelbottom=i + columns >= len(values))
        ax.set_title(name, fontsize=font(), pad=3, loc="left")
        if i + columns >= len(values):
            ax.set_xlabel("key", fontsize=font())
    figure.supylabel("query", fontsize=font())
    notes = [*_notes(values), *(["blank: exactly 0"] if blank.any() else [])]
    last = scale.get_clim()[1]
    if (values > last).any():
        notes.append(f"last colour: {last:.2g} and more")
    _bar(figure, axes, scale, "\n".join([_kind(values), *notes]))
    set_title(figure, None, title)
    return figure


def _names(
    function: str, queries: Sequence[str] | None, keys: Sequence[str] | None, L: int, S: int
) -> tuple[list[str], list[str]]:
    if L == S:
        queries, keys = (keys if queries is None else queries), (queries if keys is None else keys)
    return token_names(function, "queries", queries, L), token_names(function, "keys", keys, S)


def _scale(
    function: str,
    values: Array,
    vmin: float | Literal["auto"] | None,
    vmax: float | None,
    center: float | None,
) -> ScalarMappable:
    """The range of values and its colour map."""
    for argument, value in (("vmin", vmin), ("vmax", vmax), ("center", center)):
        left = value is None or (argument == "vmin" and value == "auto")
        if not left and not (isinstance(value, Real) and math.isfinite(value)):
            allowed = "None, 'auto'" if argument == "vmin" else "None"
            raise ValueError(
                f"plots.{function}: {argument} is {value!r}; it must be {allowed} or finite"
            )
    finite = values[np.isfinite(values)]
    least, most = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    if center is not None:
        ends = [
            least if vmin is None or isinstance(vmin, str) else vmin,
            most if vmax is None else vmax,
        ]
        reach = max(abs(end - center) for end in ends) or 1.0
        return ScalarMappable(Normalize(center - reach, center + reach), "PuOr_r")
    low = min(least, 0.0) if isinstance(vmin, str) else least if vmin is None else vmin
    high = most if vmax is None else vmax
    if vmax is not None and high <= low:
        raise ValueError(
            f"plots.{function}: vmax is {vmax}; it must be larger than the first colour's value, "
            f"{low}"
        )
    if high <= low:  # all values are equal, or no value is above vmin
        low, high = min(low, least), max(low, most) + (1.0 if most <= least else 0.0)
    return ScalarMappable(Normalize(low, high), "viridis")


def _kind(values: Array) -> str:
    """Guesses what the numbers are from their range.

    Numbers up to 1.01 count as weights, because a half type may round a weight to more than 1.
    """
    known = values[~np.isnan(values)]
    return "attention weight" if ((known >= 0) & (known <= 1 + 1e-2)).all() else "score"


def _own_size(shape: tuple[int, ...], rows: list[str]) -> tuple[float, float]:
    """The widths of a figure and of its cells, in inches."""
    beside = 0.55 + max(map(len, rows)) * 0.6 * font(0.85) / 72
    cell = min((WIDTH - beside) / shape[1], 0.75)
    return max(beside + cell * shape[1], 3.2), max(cell, (3.2 - beside) / shape[1])


def _draw(
    ax: Any, values: Array, scale: ScalarMappable, aspect: Literal["equal", "auto"] = "auto"
) -> None:
    shown = np.ma.masked_invalid(values)
    ax.imshow(shown, scale.cmap, scale.norm, aspect=aspect, interpolation="none")
    edge = mpl.rcParams["axes.edgecolor"]
    look: dict[str, Any] = {"fill": False, "edgecolor": edge, "linewidth": 0, "alpha": 0.5}
    for hatch, cells in (("////", np.isneginf(values)), ("xxxx", _broken(values))):
        for i, j in np.argwhere(cells):
            ax.add_patch(Rectangle((j - 0.5, i - 0.5), 1, 1, hatch=hatch, **look))
    ax.tick_params(length=0)
    ax.grid(visible=False)
    ax.spines[:].set_visible(False)


def _broken(values: Array) -> Any:
    return np.isnan(values) | np.isposinf(values)


def _notes(values: Array) -> list[str]:
    notes = []
    if np.isneginf(values).any():
        notes.append("hatched: masked, −∞")
    if _broken(values).any():
        notes.append("crossed: NaN or +∞")
    return notes


def _write(
    ax: Axes, values: Array, scale: ScalarMappable, digits: int | None, cell: tuple[float, float]
) -> None:
    """Writes the numbers into the cells; the size of a cell is in points."""
    finite = values[np.isfinite(values)]
    decimals = 2 if digits is None else digits
    if decimals < 0 or not finite.size:
        return
    letters = max(len(f"{value:.{decimals}f}") for value in (finite.min(), finite.max()))
    size = min(font(1.0), 0.85 * cell[0] / (0.62 * letters), 0.8 * cell[1])
    if size < font(0.6):
        if digits is None:
            return
        size = font(0.6)
    # Relative luminance, https://www.w3.org/TR/WCAG21/#dfn-relative-luminance. At a luminance of
    # 0.18, black and white text have the same contrast.
    rgb = scale.to_rgba(values)[..., :3]
    linear = np.where(rgb > 0.04045, ((rgb + 0.055) / 1.055) ** 2.4, rgb / 12.92)
    colors = np.where(linear @ (0.2126, 0.7152, 0.0722) > 0.18, "black", "white")
    for i, j in np.argwhere(np.isfinite(values)):
        text = f"{values[i, j]:.{decimals}f}".replace("-", "−")
        ax.text(j, i, text, ha="center", va="center", color=colors[i, j], fontsize=size)


def _ticks(ax: Axes, rows: list[str], columns: list[str], cell: tuple[float, float]) -> None:
    """Labels the axes with the tokens, or every n-th token if there is no room for all."""
    size = font(0.85)
    tilted = max(map(len, columns)) * 0.6 * size > cell[0] - 4
    for axis, names, room, needed in (
        (ax.xaxis, columns, cell[0], 1.0 * size if tilted else 0.0),
        (ax.yaxis, rows, cell[1], 1.0 * size),
    ):
        every = max(1, math.ceil(needed / room))
        places = range(0, len(names), every)
        axis.set_ticks(places, [names[i] for i in places], fontsize=size)
    if tilted:
        ax.tick_params(axis="x", rotation=90)


def _cells(size: tuple[float, float], shape: tuple[int, ...], square: bool) -> tuple[float, float]:
    """The width and the height of a cell, for axes of this size."""
    width, height = size[0] / shape[1], size[1] / shape[0]
    return (min(width, height),) * 2 if square else (width, height)


def _bar(figure: Figure, axes: list[Axes], scale: ScalarMappable, label: str) -> None:
    # matplotlib takes sizes as fractions of the height of the axes.
    height = sum({ax.get_position().y0: ax.get_position().height for ax in axes}.values())
    inch = 1 / max(height * figure.get_figheight(), 0.5)
    thick, gap = min(0.2 * inch, 0.3), min(0.08 * inch, 0.2)
    bar = figure.colorbar(
        scale, ax=axes, location="bottom", fraction=thick, pad=gap, aspect=40, shrink=0.9
    )
    style_bar(bar, label)
