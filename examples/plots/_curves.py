"""Bars of one number per token, and curves of measurements over a size."""

from __future__ import annotations

import itertools
import math
import reprlib
from collections.abc import ItemsView, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator

from torch_attn.plots._style import (
    Array,
    array,
    axes_of,
    colors,
    font,
    legend,
    muted,
    plain,
    set_title,
    size_in_points,
    tensor_of,
    token_names,
)

_MARKERS = "os^Dvp"


def activations(
    values: Any,
    tokens: Sequence[str] | None = None,
    *,
    title: str | None = None,
    label: str = "L2 norm of the output",
    ax: Axes | None = None,
) -> Figure:
    """Bars of numbers per token. If a token has several numbers, its bars stand side by side.

    Args:
        values: ``[N]``, or a mapping of names to ``[N]``. With a mapping, each token has one bar
            per name, and a legend shows the names.
        tokens: N names; None: their indices.
        title: over the picture.
        label: what the numbers are.
        ax: where to draw; None makes a figure.

    Example:
        >>> one, four = torch.randn(2, 5, 8)
        >>> norms = {"one head": one.norm(dim=-1), "four heads": four.norm(dim=-1)}
        >>> figure = plots.activations(norms, "the cat sat down .".split())
    """
    groups = values if isinstance(values, Mapping) else {"": values}
    if not groups:
        raise ValueError("plots.activations: values is an empty mapping")
    bars = {name: array("activations", "values", x, "[N]") for name, x in groups.items()}
    lengths = {name: len(x) for name, x in bars.items()}
    count, *others = set(lengths.values())
    if others:
        raise ValueError(f"plots.activations: values have lengths {lengths}; they must be equal")
    names = token_names("activations", "tokens", tokens, count)

    thick = 0.8 / len(bars)
    height = 0.9 + count * max(0.19, 0.11 * len(bars)) + (0.3 if title else 0)
    figure, ax, given = axes_of("activations", ax, min(max(height, 1.8), 14.0))
    handles = []
    for i, (name, color) in enumerate(zip(bars, colors(len(bars)), strict=True)):
        places = np.arange(count) - 0.4 + (i + 0.5) * thick
        drawn = ax.barh(places, bars[name], 0.92 * thick, color=color, label=plain(name))
        handles.append(drawn)
    ax.set_yticks(range(count), names, fontsize=font(0.85))
    ax.set_ylim(count - 0.4, -0.6)  # the first token on top
    ax.set_xlabel(plain(label), fontsize=font())
    ax.tick_params(axis="x", labelsize=font(0.85))
    ax.tick_params(axis="y", length=0)
    ax.spines[["top", "right"]].set_visible(False)
    if isinstance(values, Mapping):
        legend(figure, given, handles)
    set_title(figure, given, title)
    return figure


def scaling(
    sizes: Any,
    measured: Mapping[str, Any],
    *,
    ylabel: str,
    theory: Mapping[str, Any] | None = None,
    xlabel: str = "head_dim",
    title: str | None = None,
    ax: Axes | None = None,
    logy: bool = True,
) -> Figure:
    """Measurements, and theory if given, over a size on a logarithmic axis.

    Args:
        sizes: ``[N]``, positive; on a logarithmic axis.
        measured: a mapping of names to ``[N]`` or ``[N, 3]``. ``[N]`` is drawn as markers. A line
            joins the markers if `theory` lacks the name. ``[N, 3]`` has the quartiles. The median
            is drawn like ``[N]``, and the other two quartiles bound a band.
        ylabel: what was measured, with its unit.
        theory: a mapping of names to ``[N]``, drawn as dashed lines in the colour of the
            measurement with the same name.
        xlabel: what the sizes are.
        title: over the picture.
        ax: where to draw; None makes a figure.
        logy: whether the vertical axis is logarithmic. If a number is 0 or negative, the axis is
            logarithmic only above the least positive number, and linear around 0.

    Example:
        >>> sizes = torch.tensor([1, 4, 16, 64])
        >>> variance = torch.stack([torch.randn(2, n, 9999).prod(0).sum(0).var() for n in sizes])
        >>> figure = plots.scaling(
        ...     sizes, {"q . k": variance}, theory={"q . k": sizes}, ylabel="variance"
        ... )
    """
    x = array("scaling", "sizes", sizes, "[N]")
    if not (np.isfinite(x) & (x > 0)).all():
        raise ValueError(f"plots.scaling: sizes are {x.tolist()}; they must be positive and finite")
    lines = {
        name: _quantiles(f"measured[{name!r}]", values, len(x))
        for name, values in _named("measured", measured, "[N] or [N, 3]")
    }
    if not lines:
        raise ValueError("plots.scaling: measured is empty; it must have at least one measurement")
    dashed = {
        name: array("scaling", f"theory[{name!r}]", values, "[N]")
        for name, values in _named("theory", {} if theory is None else theory, "[N]")
    }
    for name, values in dashed.items():
        if len(values) != len(x):
            raise ValueError(
                f"plots.scaling: theory[{name!r}] has shape {list(values.shape)}; "
                f"it must be [{len(x)}], as sizes is"
            )

    rows = len(lines) + len(dashed)
    figure, ax, given = axes_of("scaling", ax, 3.2 + 0.11 * rows + (0.3 if title else 0))
    names = list(dict.fromkeys([*lines, *dashed]))
    color_of = dict(zip(names, colors(len(names)), strict=True))
    order = np.argsort(x)
    x = x[order]
    handles: list[Any] = []
    for (name, values), marker in zip(lines.items(), itertools.cycle(_MARKERS), strict=False):
        low, middle, high = np.broadcast_to(values.T, (3, len(x)))[:, order]
        color, line = color_of[name], "none" if name in dashed else "-"
        if not (low == high).all():
            ax.fill_between(x, low, high, color=color, alpha=0.25, linewidth=0)
        handles += ax.plot(
            x, middle, ls=line, marker=marker, color=color, markersize=4.5, label=plain(name)
        )
    for name, values in dashed.items():
        label = f"{name}, theory" if name in lines else name
        handles += ax.plot(
            x, values[order], "--", color=color_of[name], linewidth=1.4, label=plain(label)
        )

    ax.set_xscale("log", base=2)
    _sizes(ax, x)
    drawn = np.concatenate([v.ravel() for v in (*lines.values(), *dashed.values())])
    if logy:
        _logarithmic(ax, drawn[np.isfinite(drawn)])
    ax.set_xlabel(plain(xlabel), fontsize=font())
    ax.set_ylabel(plain(ylabel), fontsize=font())
    ax.tick_params(labelsize=font(0.85))
    ax.grid(visible=True, color=muted(), alpha=0.2, linewidth=0.6)
    ax.spines[["top", "right"]].set_visible(False)
    if len(names) + len(dashed) > 1:
        legend(figure, given, handles)
    set_title(figure, given, title)
    return figure


def _named(argument: str, values: Any, shape: str) -> ItemsView[str, Any]:
    """The items of an argument, which must be a mapping of names to numbers of `shape`."""
    if not isinstance(values, Mapping):
        raise TypeError(
            f"plots.scaling: {argument} is {reprlib.repr(values)}; it must be a mapping of "
            f"names to numbers of shape {shape}"
        )
    return values.items()


def _quantiles(argument: str, values: Any, count: int) -> Array:
    """The argument as an array, `[N]` or `[N, 3]`."""
    tensor = tensor_of("scaling", argument, values, "[N] or [N, 3]")
    result = array("scaling", argument, tensor, "[N]" if tensor.dim() == 1 else "[N, 3]")
    if result.shape not in ((count,), (count, 3)):
        raise ValueError(
            f"plots.scaling: {argument} has shape {list(tensor.shape)}; "
            f"it must be [{count}] or [{count}, 3], for sizes has {count}"
        )
    return result


def _sizes(ax: Axes, x: Array) -> None:
    """Sets a tick at each size, and labels the tick where there is room."""
    width, _ = size_in_points(ax)
    labels = [f"{value:g}" for value in x]
    span = max(float(np.log2(x[-1] / x[0])), 1e-9)
    needed = 0.65 * font(0.85) * max(map(len, labels)) + 4
    last = -np.inf
    for i, value in enumerate(x):
        place = float(np.log2(value / x[0])) / span * 0.9 * width
        if place - last < needed:
            labels[i] = ""
        else:
            last = place
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xticks(x.tolist(), labels)


def _logarithmic(ax: Axes, drawn: Array) -> None:
    positive = drawn[drawn > 0]
    if not positive.size:
        return
    if (drawn > 0).all():
        ax.set_yscale("log")
        least, most = float(positive.min()), float(positive.max())
        if most < 30 * least:  # too few powers of ten for ticks
            ticks = np.asarray(MaxNLocator(5).tick_values(least, most))
            ticks = ticks[(ticks >= 0.9 * least) & (ticks <= 1.1 * most) & (ticks > 0)]
            ax.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
            ax.yaxis.set_minor_locator(NullLocator())
        return
    # The axis is logarithmic down to the power of ten below the least positive number. From there
    # it is linear to 0, over the length of one power of ten.
    first = int(np.floor(np.log10(positive.min())))
    last = int(np.ceil(np.log10(positive.max())))
    bottom = float(drawn.min())
    ax.set_yscale("symlog", linthresh=10.0**first)
    every = max(1, math.ceil((last - first) / 7))
    powers = [10.0**e for e in range(last, first - 1, -every)]
    ax.set_yticks([*(-p for p in powers if -p >= bottom), 0, *powers])
    ax.yaxis.set_minor_locator(NullLocator())
    ax.set_ylim(2 * bottom if bottom < 0 else -(10.0**first) / 4, 2 * float(positive.max()))
