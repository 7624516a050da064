"""Labels of points. They never overlap each other, and avoid the points."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.text import Annotation, Text

from torch_attn.plots._style import Array, font, muted

# Distances from point to label (in 1/72 inch) and directions to try.
_DISTANCES = (4.0, 9.0, 16.0, 25.0, 36.0, 50.0, 66.0)
_LEADS_FROM = 9.0  # from this distance on, a line joins point and label
_DIRECTIONS = np.linspace(0, 2 * np.pi, 24, endpoint=False)


class Labels(Artist):
    """Places the labels of points at every draw of the axes; draws nothing itself.

    The sizes of text and axes are known only when matplotlib draws the figure. Matplotlib draws
    artists in the order of their `zorder`. This artist has the least `zorder`, so it places labels
    before matplotlib draws the labels.

    Labels are placed one after another, bold labels first, each at the cheapest place near its
    point. A label is left out if every place would cover another label or leave the axes.

    Args:
        ax: the axes.
        points: `[N, 2]`, in the coordinates of the data.
        names: N labels.
        away: `[N, 2]`, the preferred direction from each point to its label.
        covered: `[M, 2]`, further places that labels should not cover.
        radius: of the points' markers, in 1/72 inch.
        bold: which labels are bold; bold labels are placed first.
    """

    def __init__(
        self,
        ax: Axes,
        points: Array,
        names: Sequence[str],
        *,
        away: Array,
        covered: Array,
        radius: float = 4.0,
        bold: Sequence[bool] | None = None,
    ) -> None:
        super().__init__()
        self.set_zorder(-1000)
        self.set_in_layout(False)
        bold = bold or [False] * len(names)
        self._away = np.arctan2(away[:, 1], away[:, 0])
        self._covered = np.concatenate([covered, points])
        self._radius = radius
        self._order = sorted(range(len(names)), key=lambda i: not bold[i])
        self.annotations: list[Annotation] = []
        for (x, y), name, is_bold in zip(points.tolist(), names, bold, strict=True):
            annotation = ax.annotate(
                name,
                (x, y),
                (0, 0),
                textcoords="offset points",
                ha="center",
                va="center",
                fontsize=font(0.85),
                fontweight="bold" if is_bold else "normal",
                color=mpl.rcParams["text.color"],
                linespacing=1.1,
                zorder=5,
                arrowprops={
                    "arrowstyle": "-",
                    "color": muted(),
                    "linewidth": 0.5,
                    "alpha": 0.6,
                    "shrinkA": 0,
                    "shrinkB": radius,
                },
            )
            annotation.set_in_layout(False)
            self.annotations.append(annotation)
        ax.add_artist(self)

    def draw(self, renderer: Any) -> None:
        ax = self.axes
        assert isinstance(ax, Axes)
        point = renderer.points_to_pixels(1.0)
        frame = ax.get_window_extent(renderer)
        covered = ax.transData.transform(self._covered)
        covered = covered[covered[:, 0].argsort()]
        anchors = ax.transData.transform([a.xy for a in self.annotations])
        boxes = np.empty((0, 4))  # left, bottom, right, top of the labels placed so far
        for i in self._order:
            annotation = self.annotations[i]
            annotation.set_visible(True)
            extent = Text.get_window_extent(annotation, renderer)
            size = np.array([extent.width, extent.height]) + 2 * point
            center, distance = self._candidates(anchors[i], self._away[i], size, point)
            candidates = np.concatenate([center - size / 2, center + size / 2], axis=1)
            # Most labels of a crowded picture fit nowhere, so this cheap test comes first.
            free = np.flatnonzero(
                ~(_overlaps(candidates, boxes).any(1) | _outside(candidates, frame))
            )
            annotation.set_visible(bool(free.size))
            if not free.size:
                continue
            center, distance, candidates = center[free], distance[free], candidates[free]
            cost = 0.15 * distance
            # Turning away from the preferred direction costs a little.
            turned = np.arctan2(*(center - anchors[i])[:, ::-1].T) - self._away[i]
            cost += 1.5 * (1 - np.cos(turned))
            best = self._cheapest(candidates, cost, covered, point)
            annotation.set_position(tuple((center[best] - anchors[i]) / point))
            if annotation.arrow_patch is not None:
                annotation.arrow_patch.set_visible(bool(distance[best] >= _LEADS_FROM))
            boxes = np.concatenate([boxes, candidates[best : best + 1]])

    def _cheapest(self, boxes: Array, cost: Array, covered: Array, point: float) -> int:
        """The index of the cheapest of the boxes `[C, 4]`, with a penalty for covered points.

        `covered` is `[M, 2]`, sorted by its first coordinate. The search tries the boxes in the
        order of `cost`. It stops when `cost` alone reaches the least total so far, because
        penalties are never negative.
        """
        reach = self._radius * point
        low, high = boxes[:, 1].min() - reach, boxes[:, 3].max() + reach
        near = covered[(covered[:, 1] > low) & (covered[:, 1] < high)]
        ends = np.searchsorted(near[:, 0], np.stack([boxes[:, 0] - reach, boxes[:, 2] + reach]))
        best, least = -1, np.inf
        for i in np.argsort(cost, kind="stable"):
            if cost[i] >= least:
                break
            distances = _distances(boxes[i : i + 1], near[ends[0, i] : ends[1, i]])
            total = cost[i] + np.maximum(0, reach - distances).sum() / point
            if total < least:
                best, least = int(i), float(total)
        return best

    def _candidates(
        self, anchor: Array, away: float, size: Array, point: float
    ) -> tuple[Array, Array]:
        """Possible centers `[C, 2]` of a label, in pixels, and their distances, in points."""
        angles = away + _DIRECTIONS
        towards = np.stack([np.cos(angles), np.sin(angles)], axis=1)
        distances = np.repeat(_DISTANCES, len(angles))
        directions = np.tile(towards, (len(_DISTANCES), 1))
        gap = (self._radius * 0.5 + distances[:, None]) * point
        return anchor + directions * (gap + size / 2), distances


def _overlaps(a: Array, b: Array) -> Any:
    """For each pair of boxes of a `[N, 4]` and b `[M, 4]`, whether they overlap: `[N, M]`."""
    apart = (a[:, None, :2] >= b[None, :, 2:]) | (b[None, :, :2] >= a[:, None, 2:])
    return ~apart.any(-1)


def _outside(boxes: Array, frame: Any) -> Any:
    return (boxes[:, :2] < frame.min).any(1) | (boxes[:, 2:] > frame.max).any(1)


def _distances(boxes: Array, points: Array) -> Any:
    """Distances from boxes `[N, 4]` to points `[M, 2]`, 0 for points inside: `[N, M]`."""
    beside = np.maximum(boxes[:, None, :2] - points, points - boxes[:, None, 2:])
    return np.linalg.norm(np.maximum(beside, 0), axis=-1)
