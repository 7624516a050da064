"""Queries and keys as points in the plane."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from torch_attn._import import install
from torch_attn.plots._labels import Labels
from torch_attn.plots._style import (
    WIDTH,
    Array,
    array,
    axes_of,
    colors,
    legend,
    set_title,
    shown,
    token_names,
)

_METRICS = ("cosine", "euclidean", "manhattan", "chebyshev")


def tsne(
    query: Any,
    key: Any,
    queries: Sequence[str] | None = None,
    keys: Sequence[str] | None = None,
    *,
    perplexity: float = 5.0,
    metric: str = "cosine",
    seed: int = 0,
    highlight: Sequence[str] = (),
    title: str | None = None,
    ax: Axes | None = None,
) -> Figure:
    """Queries and keys of one head as points in one plane, placed by t-SNE.

    Neighbours stay neighbours. Distances between far points, sizes of groups and directions mean
    nothing, so the axes have no numbers. A label that fits nowhere is left out. This function needs
    scikit-learn.

    Args:
        query: ``[L, E]``, drawn as triangles.
        key: ``[S, E]``, drawn as circles.
        queries: L tokens; None: their indices. Equal tokens have the same colour.
        keys: S tokens; None: the queries' tokens if L = S, else the keys' indices.
        perplexity: roughly how many neighbours each vector has, positive and below L + S.
        metric: the distance between vectors: "cosine", "euclidean", "manhattan" or "chebyshev".
            "cosine" does not allow vectors of zeros.
        seed: the seed of the random numbers; the same seed gives the same picture.
        highlight: tokens to draw large; the other tokens are faint.
        title: over the picture.
        ax: where to draw; None makes a figure.

    Raises:
        ImportError: scikit-learn is missing or cannot be imported.
        ValueError: a shape or option is wrong; query or key has a number that is not finite; or,
            with "cosine", all numbers of a vector are 0 or below about 1e-18 of the largest number
            in query and key.

    Source: van der Maaten & Hinton, *Visualizing Data using t-SNE*, 2008,
    https://jmlr.org/papers/v9/vandermaaten08a.html

    Example:
        >>> query, key = torch.randn(2, 10, 32)
        >>> figure = plots.tsne(query, key, "the cat sat on the mat , they all say".split())
    """
    q = array("tsne", "query", query, "[L, E]")
    k = array("tsne", "key", key, "[S, E]")
    if q.shape[1] != k.shape[1]:
        raise ValueError(
            f"plots.tsne: query has shape {list(q.shape)} and key {list(k.shape)}; "
            "they must be [L, E] and [S, E], with the same E"
        )
    if keys is None and len(q) == len(k):
        keys = queries
    names = token_names("tsne", "queries", queries, len(q))
    names += token_names("tsne", "keys", keys, len(k))
    chosen = {shown(token, 18) for token in highlight}
    if chosen - set(names) or isinstance(highlight, str):
        raise ValueError(
            f"plots.tsne: highlight is {highlight!r}; it must be a sequence of tokens "
            "that queries or keys contain"
        )
    if not 0 < perplexity < len(names):
        raise ValueError(
            f"plots.tsne: perplexity is {perplexity}; it must be positive and below the number of "
            f"queries and keys, {len(names)}"
        )
    if metric not in _METRICS:
        raise ValueError(
            f"plots.tsne: metric is {metric!r}; it must be one of {', '.join(map(repr, _METRICS))}"
        )
    if not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise ValueError(f"plots.tsne: seed is {seed!r}; it must be an integer from 0 to 2**32 - 1")
    points = _tsne(_comparable(q, k, metric), perplexity, metric, seed)

    figure, ax, given = axes_of("tsne", ax, WIDTH + min(2.0, 0.02 * len(names)))
    kinds = list(dict.fromkeys(names))
    color_of = dict(zip(kinds, colors(len(kinds)), strict=True))
    bold = [name in chosen for name in names]
    large = np.array(bold)
    handles = []
    queries_are = np.arange(len(names)) < len(q)
    for those, marker, label in ((queries_are, "^", "query"), (~queries_are, "o", "key")):
        for highlighted in (False, True):
            drawn = np.flatnonzero(those & (large == highlighted))
            ax.scatter(
                points[drawn, 0],
                points[drawn, 1],
                s=85 if highlighted else 30,
                marker=marker,
                c=[color_of[names[i]] for i in drawn],
                edgecolors=mpl.rcParams["text.color"] if highlighted else "none",
                linewidths=1.0,
                alpha=0.6 if chosen and not highlighted else 1.0,
                zorder=3 if highlighted else 2,
            )
        # The legend shows the marker in the colour of text, not of a token.
        dot = ax.scatter([], [], marker=marker, color=mpl.rcParams["text.color"], s=30, label=label)
        handles.append(dot)
    ax.margins(0.12)
    ax.set(xticks=[], yticks=[], xlabel="t-SNE, first direction", ylabel="t-SNE, second direction")
    center = points - points.mean(0)
    Labels(ax, points, names, away=center, covered=np.empty((0, 2)), radius=4.0, bold=bold)
    legend(figure, given, handles)
    set_title(figure, given, title)
    return figure


def _tsne(vectors: Array, perplexity: float, metric: str, seed: int) -> Array:
    """Returns positions `[N, 2]` in the plane for vectors `[N, E]`."""
    try:
        manifold: Any = importlib.import_module("sklearn.manifold")
    except ImportError as error:
        raise ImportError(
            f"plots.tsne needs scikit-learn: {install('lesson')} ({error})", name=error.name
        ) from error
    # With init="pca", scikit-learn divides by the standard deviation of the first principal
    # component. If this deviation is 0, scikit-learn's compiled code reads out of bounds. So the
    # points start at random if the vectors may all be equal after rounding to float32.
    spread = np.abs(vectors - vectors.mean(0)).max()
    directed = min(vectors.shape) > 1 and spread > 16 * np.finfo(np.float32).eps
    reduction = manifold.TSNE(
        n_components=2,
        perplexity=perplexity,
        metric=metric,
        init="pca" if directed else "random",
        random_state=seed,
    )
    points: Array = reduction.fit_transform(vectors.astype(np.float32)).astype(np.float64)
    return points


def _comparable(query: Array, key: Array, metric: str) -> Array:
    """Checks query and key; returns both, divided so that float32 can hold their squares.

    All numbers are divided by the same power of two, and lie between -1 and 1 afterwards. This
    division is exact and keeps ratios of distances.
    """
    for argument, vectors in (("query", query), ("key", key)):
        if not np.isfinite(vectors).all():
            raise ValueError(
                f"plots.tsne: {argument} has NaN or infinite numbers; all must be finite"
            )
    both: Array = np.concatenate([query, key])
    both = np.ldexp(both, -np.frexp(np.abs(both).max())[1])
    if metric == "cosine":
        zero = np.abs(both).max(1) < 1e-18
        for argument, rows in (("query", zero[: len(query)]), ("key", zero[len(query) :])):
            if rows.any():
                raise ValueError(
                    f"plots.tsne: {argument} has {rows.sum()} vectors of zeros, the first at "
                    f"{rows.argmax()}; with metric='cosine' all must have a direction "
                    "(metric='euclidean' takes zeros)"
                )
    return both
