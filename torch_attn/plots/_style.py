"""What the pictures have in common: checks of arguments, figures, colours and names of tokens."""

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

WIDTH = 4.8  # inches, of a figure that is made here

# Okabe & Ito's palette (https://jfly.uni-koeln.de/color/) without its black and its yellow, which
# would vanish on a dark and on a white page.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9")


def array(function: str, argument: str, values: Any, shape: str) -> Array:
    """The argument as float64 on the CPU, of as many dimensions as `shape` names: "[L, S]"."""
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
    """What :func:`torch.as_tensor` makes of the argument."""
    try:
        return torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        # A list whose rows differ in length is of the right type.
        kind = ValueError if isinstance(error, ValueError) else TypeError
        raise kind(
            f"plots.{function}: {argument} is {reprlib.repr(values)}; it must be real numbers of "
            f"shape {shape}, a tensor or what torch.as_tensor takes ({error})"
        ) from error


def token_names(
    function: str, argument: str, tokens: Sequence[str] | None, count: int, longest: int = 18
) -> list[str]:
    """The tokens as they are written in a picture; their numbers if there are none."""
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
    """A token as it is written: spaces visible, of one line, not too long, never a formula."""
    token = token.replace("\n", "↵").replace("\t", "⇥")
    if not token.strip():
        token = "␣" * len(token)
    if len(token) > longest:
        token = token[: longest - 1] + "…"
    return plain(token)


def plain(text: str) -> str:
    """A text as it is, for matplotlib takes what stands between two dollars for a formula."""
    return text.replace("$", r"\$")


def font(factor: float = 0.9) -> float:
    """A size of text, in points."""
    return factor * float(mpl.rcParams["font.size"])


def muted() -> Any:
    """The colour of what should step back, such as the lines that lead to labels."""
    return mpl.rcParams["axes.edgecolor"]


def colors(count: int) -> list[str]:
    """As many colours, for that many things that are told apart; many are a sequence."""
    if count <= len(PALETTE):
        return list(PALETTE[:count])
    # Its two ends would vanish on a dark and on a white page.
    scale = mpl.colormaps["viridis"]
    return [to_hex(scale(x)) for x in np.linspace(0.28, 0.88, count)]


def axes_of(
    function: str, ax: Axes | None, height: float, width: float = WIDTH
) -> tuple[Figure, Any, Axes | None]:
    """The figure, the axes to draw on, and `ax` as it was given; sizes in inches."""
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
    """Within the axes, or below a whole figure, where it covers nothing.

    It shows the artists given, and before them what else is labelled in the axes.
    """
    labelled, _ = (ax or figure.axes[0]).get_legend_handles_labels()
    handles = [*(handle for handle in labelled if handle not in ours), *ours]
    labels = [handle.get_label() for handle in handles]
    # matplotlib leaves out names that start with "_": these get theirs afterwards.
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
    """A title over the axes, or over a whole figure, in which it has more room."""
    if title is not None and ax is not None:
        ax.set_title(plain(title))
    elif title is not None:
        letters = int(figure.get_figwidth() * 72 / (0.6 * font(1.1)))
        lines = plain(textwrap.fill(title, letters))
        figure.suptitle(lines, x=0.01, ha="left", fontsize=font(1.1), fontweight="bold")


def size_in_points(ax: Axes) -> tuple[float, float]:
    """About how large the axes are, before the layout is known."""
    figure = ax.get_figure(root=True)
    assert figure is not None
    width, height = figure.get_size_inches() * 72
    box = ax.get_position()
    return float(box.width * width), float(box.height * height)
