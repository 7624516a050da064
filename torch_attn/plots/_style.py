"""Shared by all pictures: checks of arguments, figures, colours and names of tokens."""

from __future__ import annotations

import reprlib
import textwrap
from collections.abc import Sequence, Sized
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

Array = np.ndarray[Any, np.dtype[np.float64]]

WIDTH = 4.8  # the width of a figure made here, in inches

# Okabe & Ito's palette (https://jfly.uni-koeln.de/color/) without black and yellow. Black vanishes
# on a dark page, yellow on a white page.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9")


def array(function: str, argument: str, values: Any, shape: str) -> Array:
    """The argument as a float64 array with the dimensions that `shape` names, such as "[L, S]"."""
    tensor = tensor_of(function, argument, values, shape)
    dimensions = shape.count(",") + 1
    if tensor.dim() != dimensions or tensor.is_complex():
        raise ValueError(
            f"plots.{function}: {argument} is a tensor of {tensor.dtype} and shape "
            f"{list(tensor.shape)}; it must be of real numbers and shape {shape}"
        )
    if tensor.numel() == 0:
        raise ValueError(
            f"plots.{function}: {argument} has shape {list(tensor.shape)}; there is nothing to draw"
        )
    result: Array = tensor.detach().to("cpu", torch.float64).numpy()
    return result


def tensor_of(function: str, argument: str, values: Any, shape: str) -> torch.Tensor:
    """Converts the argument with :func:`torch.as_tensor`."""
    try:
        return torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        # A list with rows of different lengths has the right type, so the error is a ValueError.
        kind = ValueError if isinstance(error, ValueError) else TypeError
        raise kind(
            f"plots.{function}: {argument} is {reprlib.repr(values)}; it must be real numbers of "
            f"shape {shape}, a tensor or what torch.as_tensor takes ({error})"
        ) from error


def token_names(
    function: str, argument: str, tokens: Sequence[str] | None, count: int, longest: int = 18
) -> list[str]:
    """Returns the tokens as a picture shows them, or indices if `tokens` is None."""
    if tokens is None:
        return [str(i) for i in range(count)]
    if not isinstance(tokens, Sized):
        raise TypeError(
            f"plots.{function}: {argument} is {reprlib.repr(tokens)}; it must be a sequence of "
            f"{count} strings"
        )
    if isinstance(tokens, str) or len(tokens) != count:
        found = f"the string {tokens!r}" if isinstance(tokens, str) else f"{len(tokens)} tokens"
        raise ValueError(
            f"plots.{function}: {argument} is {found}; it must be a sequence of {count} strings"
        )
    return [shown(str(token), longest) for token in tokens]


def shown(token: str, longest: int) -> str:
    """A token as a picture shows it: on one line, shortened, whitespace visible, no formula."""
    token = token.replace("\n", "↵").replace("\t", "⇥")
    if not token.strip():
        token = "␣" * len(token)
    if len(token) > longest:
        token = token[: longest - 1] + "…"
    return plain(token)


def plain(text: str) -> str:
    """Escapes "$", because matplotlib reads text between two dollar signs as a formula."""
    return text.replace("$", r"\$")


def font(factor: float = 0.9) -> float:
    """A text size in points."""
    return factor * float(mpl.rcParams["font.size"])


def muted() -> Any:
    """The colour of secondary elements, such as lines from points to labels."""
    return mpl.rcParams["axes.edgecolor"]


def colors(count: int) -> list[str]:
    """`count` distinct colours: from the palette if it is large enough, else from a colour map."""
    if count <= len(PALETTE):
        return list(PALETTE[:count])
    # Viridis's dark end vanishes on a dark page, and its light end on a white page.
    scale = mpl.colormaps["viridis"]
    return [to_hex(scale(x)) for x in np.linspace(0.28, 0.88, count)]


def axes_of(
    function: str, ax: Axes | None, height: float, width: float = WIDTH
) -> tuple[Figure, Any, Axes | None]:
    """Returns the figure, the axes to draw on, and `ax` as the caller gave it.

    `height` and `width` are in inches.
    """
    if ax is not None:
        if not isinstance(ax, Axes):
            raise TypeError(
                f"plots.{function}: ax is {reprlib.repr(ax)}; it must be a matplotlib.axes.Axes"
            )
        figure = ax.get_figure(root=True)
        if not isinstance(figure, Figure):
            raise ValueError(f"plots.{function}: ax belongs to no figure; it must be in one")
        if ax.name != "rectilinear":
            raise ValueError(
                f"plots.{function}: ax has the projection {ax.name!r}; it must be 'rectilinear', "
                "which axes are by default"
            )
        return figure, ax, ax
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot(), None


def legend(figure: Figure, ax: Axes | None, ours: Sequence[Any]) -> None:
    """Adds a legend within `ax`. If `ax` is None, adds it below the axes, where it covers nothing.

    The legend first lists the labelled artists of the axes that are not in `ours`, and then `ours`.
    """
    labelled, _ = (ax or figure.axes[0]).get_legend_handles_labels()
    handles = [*(handle for handle in labelled if handle not in ours), *ours]
    labels = [handle.get_label() for handle in handles]
    # matplotlib leaves out names that start with "_", so the real names are set afterwards.
    allowed = [f"-{label}" for label in labels]
    columns = 2 if max(map(len, labels)) < 26 else 1
    owner: Any = figure if ax is None else ax
    place = "outside lower center" if ax is None else "best"
    made = owner.legend(
        handles, allowed, loc=place, ncols=columns, frameon=False, fontsize=font(0.85)
    )
    for text, label in zip(made.get_texts(), labels, strict=True):
        text.set_text(label)


def set_title(figure: Figure, ax: Axes | None, title: str | None) -> None:
    """Sets a title over `ax`. If `ax` is None, sets it over the whole figure, which is wider."""
    if title is not None and ax is not None:
        ax.set_title(plain(title))
    elif title is not None:
        letters = int(figure.get_figwidth() * 72 / (0.6 * font(1.1)))
        lines = plain(textwrap.fill(title, letters))
        figure.suptitle(lines, x=0.01, ha="left", fontsize=font(1.1), fontweight="bold")


def size_in_points(ax: Axes) -> tuple[float, float]:
    """The approximate size of the axes, before the layout is known."""
    figure = ax.get_figure(root=True)
    assert figure is not None
    width, height = figure.get_size_inches() * 72
    box = ax.get_position()
    return float(box.width * width), float(box.height * height)
