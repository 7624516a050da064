"""A colour bar for figures without a layout engine. It does not cover labels."""

from __future__ import annotations

import textwrap
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import RendererAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colorbar import Colorbar
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.transforms import Bbox

from torch_attn.plots._style import font, plain

_THICK, _GAP = 8.0, 5.0  # height of the bar and the gap above it, in points
_LEAST = 0.3  # the picture keeps at least this fraction of the axes' original box


def laid_out(ax: Axes) -> bool:
    """Returns whether matplotlib makes room for the colour bar and the labels of these axes."""
    figure: Any = ax.get_figure(root=True)
    engine = figure.get_layout_engine()
    return isinstance(engine, ConstrainedLayoutEngine) and ax.get_subplotspec() is not None


def style_bar(bar: Colorbar, label: str) -> None:
    bar.set_label(plain(label), fontsize=font())
    bar.ax.tick_params(labelsize=font(0.85))
    bar.outline.set_visible(False)


def add_bar_within(ax: Axes, mappable: ScalarMappable, label: str) -> tuple[float, float]:
    """Adds a bar below the axes. Returns the size, in points, that remains for the axes.

    At every draw, the axes, the bar and all their labels fit into the box that the axes had before,
    whatever the size of the labels.
    """
    place = _Place(ax)
    root: Any = ax.get_figure(root=True)
    bar = root.colorbar(mappable, cax=place.bar, orientation="horizontal")
    measure: Any = RendererAgg
    renderer = measure(1, 1, root.dpi)
    width = place.of_axes(renderer).width * 72 / root.dpi
    style_bar(bar, textwrap.fill(label, max(int(width / (0.6 * font())), 8)))
    ax.set_axes_locator(place)
    place.bar.set_axes_locator(place.locate_bar)
    box = place.of_axes(renderer)
    return box.width * 72 / root.dpi, box.height * 72 / root.dpi


class _Place:
    """An axes locator for matplotlib: places the axes and their bar at every draw."""

    def __init__(self, ax: Axes) -> None:
        self._ax = ax
        figure: Any = ax.get_figure(root=False)  # a figure or a subfigure
        self._to_pixels = figure.transSubfigure
        self._locator = ax.get_axes_locator()  # None, except for inset axes
        self.bar = ax.inset_axes((0, 0, 1, 1))

    def __call__(self, ax: Any, renderer: Any) -> Bbox:
        return self._to_figure(self.of_axes(renderer))

    def get_subplotspec(self) -> Any:
        """`Figure.tight_layout` calls this method."""
        return self._ax.get_subplotspec()

    def of_axes(self, renderer: Any) -> Bbox:
        """The box of the axes alone, in pixels: the original box minus room for labels and bar."""
        whole = self._whole(renderer)
        bar = renderer.points_to_pixels(_GAP + _THICK)
        below = _below(self._ax, renderer) + (_below(self.bar, renderer) + bar)
        labels = self._ax.yaxis.get_tightbbox(renderer)
        beside = 0.0 if labels is None else max(self._ax.bbox.x0 - labels.x0, 0.0)
        return Bbox.from_extents(
            whole.x0 + min(beside, (1 - _LEAST) * whole.width),
            whole.y0 + min(below, (1 - _LEAST) * whole.height),
            whole.x1,
            whole.y1,
        )

    def locate_bar(self, bar: Any, renderer: Any) -> Bbox:
        """The bar's box: below the labels of the keys, nearly as wide as the axes."""
        room = self.of_axes(renderer)
        point = renderer.points_to_pixels(1.0)
        top = self._ax.bbox.y0 - _below(self._ax, renderer) - _GAP * point
        inset = 0.05 * room.width
        return self._to_figure(
            Bbox.from_extents(room.x0 + inset, top - _THICK * point, room.x1 - inset, top)
        )

    def _whole(self, renderer: Any) -> Bbox:
        """The axes' original box, before the bar was added, in pixels."""
        if self._locator is None:
            box = self._ax.get_position(original=True)
        else:
            box = self._locator(self._ax, renderer)
        return Bbox(self._to_pixels.transform(box))

    def _to_figure(self, box: Bbox) -> Bbox:
        return Bbox(self._to_pixels.inverted().transform(box))


def _below(ax: Axes, renderer: Any) -> float:
    """How far the labels of the horizontal axis reach below the axes, in pixels."""
    labels = ax.xaxis.get_tightbbox(renderer)
    return 0.0 if labels is None else max(ax.bbox.y0 - labels.y0, 0.0)
