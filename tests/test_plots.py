"""Pictures: what they show, that nothing covers anything else or is cut off, and wrong input."""

from __future__ import annotations

import io
import itertools
import time
from collections.abc import Iterator
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import FancyArrowPatch, Rectangle
from matplotlib.quiver import Quiver
from matplotlib.text import Text
from matplotlib.transforms import Bbox
from torch import Tensor

import torch_attn
from _variants import run_python
from examples import plots
from torch_attn.plots import _labels

pytestmark = pytest.mark.long

DARK = {
    "text.color": "#eeeeee",
    "axes.labelcolor": "#eeeeee",
    "axes.edgecolor": "#cccccc",
    "xtick.color": "#eeeeee",
    "ytick.color": "#eeeeee",
    "figure.facecolor": "#181818",
    "axes.facecolor": "#181818",
}
SENTENCE = (
    "[CLS] the quick brown fox jumps over internationalization of the lazy dog because it was "
    "##ing too tired $x$ to walk $5 home on a cold antidisestablishmentarianism day . [SEP]"
)
WORDS = SENTENCE.split()
assert len(WORDS) == 30


@pytest.fixture(autouse=True)
def _settings_of_matplotlib() -> Iterator[None]:
    """Settings of a fresh process: the demo's pictures, drawn in this one, have their own."""
    with mpl.rc_context(mpl.rcParamsDefault):
        yield


def weights(L: int, S: int | None = None, heads: int = 1) -> Tensor:
    query, key = torch.randn(heads, L, 8) * 1.5, torch.randn(heads, S or L, 8)
    return torch_attn.sdpa_with_weights(query, key, key)[1]


def every_kind(n: int) -> dict[str, Figure]:
    tokens = WORDS[:n]
    x = torch.randn(n, 2)
    sizes = 2.0 ** torch.arange(n)
    figures = {
        "heatmap": plots.heatmap(weights(n)[0], tokens, title="Weights of a layer and a head"),
        "cross": plots.heatmap(weights(n, 5)[0], tokens, ["Je", "mange", "une", "pomme", "."]),
        "heads": plots.heads(weights(n, heads=12), tokens, title="All heads"),
        "one head": plots.heads(weights(n), tokens),
        "embeddings": plots.embeddings(x, tokens, before=2 * x + 1, title="Before and after"),
        "activations": plots.activations({"one": x[:, 0], "four": x[:, 1]}, tokens),
        "graph": plots.graph(weights(n)[0], tokens, title="Ring"),
        "two columns": plots.graph(weights(n, 3)[0], tokens, ["Je", "mange", "bien"]),
        "scaling": plots.scaling(
            sizes[:13], {"a": sizes[:13], "b": sizes[:13] * 0}, theory={"a": sizes[:13]}, ylabel="y"
        ),
    }
    if n > 2:
        options: dict[str, Any] = {"perplexity": 3, "highlight": tokens[:1]}
        figures["tsne"] = plots.tsne(torch.randn(n, 4), torch.randn(n, 4), tokens, **options)
    return figures


def drawn_texts(figure: Figure) -> list[tuple[Text, Bbox]]:
    """All that is written when the picture is made, and where, in pixels."""
    found: dict[int, tuple[Text, Bbox]] = {}
    draw = Text.draw

    def remember(text: Text, renderer: Any) -> None:
        if text.get_visible() and text.get_text().strip():
            found[id(text)] = text, Text.get_window_extent(text, renderer)
        draw(text, renderer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Text, "draw", remember)
        figure.savefig(io.BytesIO(), dpi=figure.dpi)
    return list(found.values())


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for text, _ in drawn_texts(figure)]


@pytest.mark.parametrize(("n", "theme"), [(2, "light"), (4, "dark"), (30, "light")])
def test_no_text_covers_another_or_leaves_the_picture(n: int, theme: str) -> None:
    torch.manual_seed(n)
    with mpl.rc_context(DARK if theme == "dark" else {}):
        figures = every_kind(n)
    for kind, figure in figures.items():
        assert figure.get_figwidth() <= 4.8, kind
        found = drawn_texts(figure)
        assert found, kind
        frame = figure.bbox.padded(1)
        for text, box in found:
            assert frame.x0 <= box.x0 < box.x1 <= frame.x1, (kind, text)
            assert frame.y0 <= box.y0 < box.y1 <= frame.y1, (kind, text)
            assert text.get_fontsize() >= 6, (kind, text)
            if theme == "dark" and kind not in ("heatmap", "cross"):  # there, the cell sets it
                assert to_rgba(text.get_color()) == to_rgba("#eeeeee"), (kind, text)
        assert_apart(found, kind)


def assert_apart(found: list[tuple[Text, Bbox]], kind: str) -> None:
    """No text covers another."""
    for (a, one), (b, other) in itertools.combinations(found, 2):
        if any(text.get_rotation() % 90 for text in (a, b)):
            continue  # of a slanted text, the box is much larger than the text
        width = min(one.x1, other.x1) - max(one.x0, other.x0)
        height = min(one.y1, other.y1) - max(one.y0, other.y0)
        # A line's height has room for accents and descenders, which few letters need.
        assert min(width, height) < 0.3 * a.get_fontsize(), (kind, a, b)


LAYOUTS = ["one", "2 x 3", "subfigures", "constrained", "free in constrained", "adjusted", "tight"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tokens", ["the cat sat on it", SENTENCE[6:64]])
def test_the_bar_of_given_axes_covers_nothing(layout: str, tokens: str) -> None:
    torch.manual_seed(0)
    names = tokens.split()[:5]
    figure = Figure(layout="constrained" if "constrained" in layout else None)
    if layout == "2 x 3":
        figure.set_size_inches(11, 8)
        axes = list(figure.subplots(2, 3).ravel())
    elif layout == "subfigures":
        figure.set_size_inches(9, 4.8)
        axes = [part.subplots() for part in figure.subfigures(1, 2)]
    elif layout == "free in constrained":
        axes = [figure.add_axes((0.1, 0.1, 0.8, 0.8))]
    else:
        axes = [figure.subplots()]
    for ax in axes:
        plots.heatmap(weights(len(names))[0], names, title="T", ax=ax)
    if layout == "adjusted":
        figure.subplots_adjust(left=0.2, right=0.9, bottom=0.02)
    if layout == "tight":
        figure.tight_layout()
    found = drawn_texts(figure)
    assert_apart(found, layout)
    labels = [text.get_text() for text, _ in found]
    assert labels.count("attention weight") == labels.count("key") == len(axes)
    bars = [child for ax in axes for child in ax.child_axes] or figure.axes[len(axes) :]
    assert len(bars) == len(axes)
    for ax, bar in zip(axes, bars, strict=True):
        assert min(ax.bbox.height, ax.bbox.width) > 40
        assert not ax.bbox.overlaps(bar.bbox)
        for text, box in found:
            assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1, text
            assert figure.bbox.y0 <= box.y0 < box.y1 <= figure.bbox.y1, text
            # The numbers of the bar touch its lower edge at most.
            assert not Bbox.from_extents(*bar.bbox.padded(-1).extents).overlaps(box), text


# --- what they show -------------------------------------------------------------------------------


def image(ax: Axes) -> AxesImage:
    return ax.get_images()[0]


def test_heatmap_shows_the_matrix() -> None:
    matrix = torch.tensor([[0.25, 0.75], [0.5, 0.5], [0.9, 0.1]])
    figure = plots.heatmap(matrix, ["a", "b", "c"], ["x", "y"], title="T", label="weight")
    ax = figure.axes[0]
    assert np.array_equal(image(ax).get_array(), matrix.double())
    assert image(ax).get_clim() == (0, matrix.max().item())
    written = texts(figure)
    for text in ("0.25", "0.75", "0.90", "0.10", "a", "c", "x", "y", "query", "key", "T", "weight"):
        assert text in written, text
    assert texts(plots.heatmap(matrix, digits=1)).count("0.5") == 2
    assert "0.50" not in texts(plots.heatmap(matrix, digits=-1))


def test_the_numbers_in_cells_can_be_read() -> None:
    figure = plots.heatmap(torch.linspace(0, 1, 36).view(6, 6))
    ax = figure.axes[0]
    for text in ax.texts:
        red, green, blue, _ = image(ax).cmap(image(ax).norm(float(text.get_text())))
        linear = [((c + 0.055) / 1.055) ** 2.4 for c in (red, green, blue)]
        luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
        other = 1.0 if text.get_color() == "white" else 0.0
        contrast = (max(luminance, other) + 0.05) / (min(luminance, other) + 0.05)
        assert contrast > 4.4, (text, contrast)  # WCAG's 4.5 for text, of colours a hair apart


def test_masked_and_broken_cells_are_hatched_and_said_so() -> None:
    scores = torch.tensor([[1.0, -torch.inf], [torch.nan, 3.0]])
    figure = plots.heatmap(scores, label="score", vmin=None)
    ax = figure.axes[0]
    hatched = {patch.get_hatch(): patch.get_xy() for patch in ax.patches}
    assert hatched == {"////": (0.5, -0.5), "xxxx": (-0.5, 0.5)}
    assert "hatched: masked, −∞" in ax.get_xlabel()
    assert "crossed: NaN or +∞" in ax.get_xlabel()
    assert image(ax).get_clim() == (1, 3)
    assert "hatched" not in plots.heatmap(scores.nan_to_num(0, 0, 0)).axes[0].get_xlabel()


def test_scales_of_heatmaps() -> None:
    matrix = torch.tensor([[-1.0, 3.0]])
    assert image(plots.heatmap(matrix, vmin=None).axes[0]).get_clim() == (-1, 3)
    assert image(plots.heatmap(matrix, center=0).axes[0]).get_clim() == (-3, 3)
    assert image(plots.heatmap(matrix, center=1).axes[0]).get_clim() == (-1, 3)
    assert image(plots.heatmap(matrix, center=1, vmin=0, vmax=2).axes[0]).get_clim() == (0, 2)
    assert image(plots.heatmap(matrix).axes[0]).get_clim() == (-1, 3)
    assert image(plots.heatmap(matrix, vmin=0).axes[0]).get_clim() == (0, 3)
    assert image(plots.heatmap(matrix + 2).axes[0]).get_clim() == (0, 5)
    assert image(plots.heatmap(matrix, vmax=5).axes[0]).get_clim() == (-1, 5)
    masked = torch.tensor([[-torch.inf, 3.0]])
    assert image(plots.heatmap(masked).axes[0]).get_clim() == (0, 3)
    assert image(plots.heads(matrix[None]).axes[0]).get_clim() == (-1, 3)
    low, high = image(plots.heatmap(torch.full((2, 2), 0.5)).axes[0]).get_clim()
    assert low <= 0.5 <= high
    assert image(plots.heatmap(torch.zeros(2, 2)).axes[0]).get_clim() == (0, 1)


def test_the_bar_says_what_the_numbers_are() -> None:
    weight = torch.tensor([[0.0, 1.0], [torch.nan, 0.5]])
    assert "attention weight" in texts(plots.heatmap(weight))
    for scores in (-weight, 2 * weight, weight.log()):
        written = texts(plots.heatmap(scores))
        assert "score" in written
        assert "attention weight" not in written
    assert "logit" in texts(plots.heatmap(weight, label="logit"))


def test_heads_share_one_scale() -> None:
    w = weights(3, heads=5)
    figure = plots.heads(w, ["a", "b", "c"], names=[f"h{i}" for i in range(5)], columns=2)
    axes = [ax for ax in figure.axes if ax.get_images()]
    assert len(axes) == 5
    for ax, head in zip(axes, w, strict=True):
        assert np.array_equal(image(ax).get_array(), head.double())
        assert image(ax).get_clim() == (0, w.max().item())
    assert not [text for text in texts(figure) if "blank" in text or "last colour" in text]
    assert {f"h{i}" for i in range(5)} <= set(texts(figure))
    assert len(figure.axes) == 6  # and one colour bar


def test_heads_of_causal_attention() -> None:
    """Hidden keys are blank, and the only key of the first query does not stretch the colours."""
    w = torch.tensor([[[1.0, 0, 0], [0.3, 0.7, 0], [0.2, 0.2, 0.6]]])
    figure = plots.heads(w)
    shown = image(figure.axes[0])
    assert np.array_equal(np.ma.getmaskarray(shown.get_array()), np.triu(np.ones((3, 3)), 1) == 1)
    assert shown.get_clim() == pytest.approx((0, 0.7))
    (said,) = [text for text in texts(figure) if "blank" in text]
    assert "attention weight\nblank: exactly 0\nlast colour: 0.7 and more" in said
    assert image(plots.heads(w, vmax=1.0).axes[0]).get_clim() == (0, 1)
    assert image(plots.heads(w[:, :1]).axes[0]).get_clim() == (0, 1)  # of one query that is all


def test_embeddings_are_arrows_to_the_vectors() -> None:
    x = torch.tensor([[1.0, 2.0], [-3.0, 0.5]])
    figure = plots.embeddings(x, ["a", "b"], before=2 * x)
    ax = figure.axes[0]
    arrows = next(c for c in ax.collections if isinstance(c, Quiver))
    assert np.array_equal(np.stack([arrows.U, arrows.V], 1), x.double())
    assert arrows.scale == 1
    dots = next(c for c in ax.collections if isinstance(c, PathCollection))
    assert np.array_equal(dots.get_offsets(), 2 * x.double())
    (left, right), (bottom, top) = ax.get_xlim(), ax.get_ylim()
    assert left < -6 < 2 < right
    assert bottom < 0 < 4 < top
    assert {"a", "b"} <= set(texts(figure))


def test_activations_are_bars() -> None:
    values = {"one": torch.tensor([1.0, 2.0]), "four": torch.tensor([3.0, 4.0])}
    figure = plots.activations(values, ["a", "b"])
    bars = [patch.get_width() for patch in figure.axes[0].patches if isinstance(patch, Rectangle)]
    assert bars == [1, 2, 3, 4]
    assert {"one", "four", "a", "b"} <= set(texts(figure))


def test_edges_go_from_keys_to_queries_and_are_as_wide_as_weights() -> None:
    w = torch.tensor([[0.96, 0.04], [0.4, 0.6], [0.1, 0.9]])
    figure = plots.graph(w, ["q0", "q1", "q2"], ["k0", "k1"])
    edges = [p for p in figure.axes[0].patches if isinstance(p, FancyArrowPatch)]
    assert sorted(edge.get_linewidth() for edge in edges) == pytest.approx([0.5, 2, 3, 4.5, 4.8])
    for edge in edges:
        start, end = edge._posA_posB  # type: ignore[attr-defined]
        assert (start[0], end[0]) == (0, 1)
    assert "shown: weights of at least 0.05" in texts(figure)
    figure = plots.graph(w[:2], ["a", "b"])  # a ring: an edge, and two loops
    assert len(figure.axes[0].patches) == 1
    assert sorted(line.get_linewidth() for line in figure.axes[0].lines) == pytest.approx([3, 4.8])
    figure = plots.graph(torch.full((30, 30), 1 / 30))
    assert "no weight reaches 0.05; the largest is 0.033" in texts(figure)


def test_scaling_draws_zeros_on_a_logarithmic_axis() -> None:
    sizes = torch.tensor([1.0, 2.0, 4.0, 8.0])
    values = torch.tensor([3e-3, 2e-5, 0.0, 0.0])
    figure = plots.scaling(sizes, {"norm": values}, theory={"norm": values}, ylabel="row norm")
    ax = figure.axes[0]
    assert ax.get_yscale() == "symlog"
    assert np.array_equal(ax.lines[0].get_ydata(), values.double())
    low, high = ax.get_ylim()
    assert low < 0 < 3e-3 < high
    # 0 is drawn well below the least positive number.
    places = ax.transData.transform([[1, 0.0], [1, 2e-5], [1, 3e-3]])[:, 1]
    assert places[1] - places[0] > 0.1 * (places[2] - places[0])
    assert 0 in ax.get_yticks()
    assert ax.lines[0].get_color() == ax.lines[1].get_color()
    assert (ax.lines[0].get_linestyle(), ax.lines[1].get_linestyle()) == ("None", "--")
    positive = plots.scaling(sizes, {"norm": sizes}, ylabel="y").axes[0]
    assert (positive.get_xscale(), positive.get_yscale()) == ("log", "log")
    assert (
        plots.scaling(sizes, {"a": values}, ylabel="y", logy=False).axes[0].get_yscale() == "linear"
    )


def test_scaling_draws_quantiles_as_a_band() -> None:
    sizes = torch.tensor([4.0, 1.0, 2.0])
    quantiles = torch.tensor([[4.0, 5, 6], [1, 2, 3], [2, 3, 4]])
    ax = plots.scaling(sizes, {"a": quantiles}, ylabel="y").axes[0]
    assert ax.lines[0].get_xdata().tolist() == [1, 2, 4]
    assert ax.lines[0].get_ydata().tolist() == [2, 3, 5]
    band = ax.collections[0].get_paths()[0].vertices
    assert {(1, 1), (1, 3), (4, 4), (4, 6)} <= {tuple(point) for point in np.asarray(band)}


def test_tsne_puts_near_vectors_together_and_repeats() -> None:
    torch.manual_seed(0)
    middles = 9 * torch.eye(3)[[0] * 6 + [1] * 6 + [2] * 6]
    query, key = middles + torch.randn(18, 3) / 9, middles + torch.randn(18, 3) / 9
    tokens = ["a"] * 6 + ["b"] * 6 + ["c"] * 6
    first, second = (plots.tsne(query, key, tokens).axes[0] for _ in range(2))

    def places(ax: Axes) -> Tensor:
        dots = [c.get_offsets() for c in ax.collections if len(c.get_offsets())]
        return torch.tensor(np.concatenate(dots))

    points = places(first)
    assert torch.equal(points, places(second))
    assert len(points) == 36
    kinds = torch.tensor([0, 1, 2]).repeat_interleave(6).repeat(2)
    nearest = torch.cdist(points, points).fill_diagonal_(torch.inf).argmin(1)
    assert torch.equal(kinds[nearest], kinds)


def test_tsne_highlights_tokens() -> None:
    torch.manual_seed(0)
    query, key = torch.randn(2, 4, 8)
    ax = plots.tsne(query, key, ["a", "b", "a", "c"], perplexity=3, highlight=["a"]).axes[0]
    dots = [c for c in ax.collections if isinstance(c, PathCollection) and len(c.get_offsets())]
    found = [(len(c.get_offsets()), c.get_sizes().tolist(), c.get_alpha()) for c in dots]
    assert found == [(2, [30], 0.6), (2, [85], 1.0)] * 2
    bold = [t.get_text() for t, _ in drawn_texts(ax.figure) if t.get_fontweight() == "bold"]
    assert bold == ["a"] * 4


@pytest.mark.parametrize("overlapping", [False, True])
def test_the_cheapest_place_of_a_label_is_found(overlapping: bool) -> None:
    generator = np.random.default_rng(0)
    labels = _labels.Labels(
        Figure().subplots(), np.zeros((0, 2)), [], away=np.zeros((0, 2)), covered=np.zeros((0, 2))
    )
    for _ in range(50):
        corner = generator.uniform(0, 20 if overlapping else 300, (60, 2))
        boxes = np.concatenate([corner, corner + generator.uniform(5, 40, (60, 2))], 1)
        cost = generator.uniform(0, 10, 60)
        covered = generator.uniform(-20, 320, (400, 2))
        covered = covered[covered[:, 0].argsort()]
        beside = np.maximum(boxes[:, None, :2] - covered, covered - boxes[:, None, 2:]).clip(0)
        all_costs = cost + np.maximum(0, 8 - np.linalg.norm(beside, axis=-1)).sum(1) / 2
        assert labels._cheapest(boxes, cost, covered, 2.0) == all_costs.argmin()


@pytest.mark.slow  # large pictures
def test_many_labels_take_no_long_time() -> None:
    torch.manual_seed(0)
    times = {}
    for count in (100, 800):
        figure = plots.embeddings(torch.randn(count, 2), [f"token{i}" for i in range(count)])
        start = time.process_time()
        figure.savefig(io.BytesIO())
        times[count] = time.process_time() - start
    # Eight times as many labels; were all compared with all, 64 times as long.
    assert times[800] < 24 * times[100], times


@pytest.mark.slow  # imports scikit-learn
def test_tsne_draws_vectors_that_are_all_alike() -> None:
    # In a process of its own: what went wrong here ended it.
    script = """if True:
        import numpy, torch
        from examples import plots
        x = torch.randn(5, 4)
        for query, key, metric in (
            (x * 0, x * 0, "euclidean"),
            (x * 0 + 0.3, x * 0 + 0.3, "cosine"),
            (x * 0 + 0.3, x * 0 + 0.3, "manhattan"),
            (x * 1e-9 + 1, x * 1e-9 + 1, "cosine"),
            (x[:1].expand(5, 4), 2 * x[:1].expand(5, 4), "cosine"),
            (x[:, :1] * 0 + 1, x[:, :1] * 0 + 1, "chebyshev"),
            (x.double() * 1e-200, x.double() * 1e-200, "cosine"),
            (x.double() * 1e+200, x.double() * 1e+200, "euclidean"),
        ):
            ax = plots.tsne(query, key, metric=metric, perplexity=3).axes[0]
            places = numpy.concatenate([c.get_offsets() for c in ax.collections])
            assert places.shape == (10, 2) and numpy.isfinite(places).all(), (metric, places)
    """
    run_python("-c", script)


def test_tokens_are_no_formulas_and_spaces_are_seen() -> None:
    figure = plots.activations(torch.ones(4), ["$x$", "a $5 b $6", " ", "two\nlines"])
    labels = figure.axes[0].get_yticklabels()
    assert [label.get_text() for label in labels] == [r"\$x\$", r"a \$5 b \$6", "␣", "two↵lines"]
    assert not any(label._preprocess_math(label.get_text())[1] is True for label in labels)


# --- what they take -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int64])
def test_dtypes(dtype: torch.dtype) -> None:
    matrix = torch.tensor([[1, 0], [0, 1]]).to(dtype)
    if dtype.is_floating_point:
        matrix.requires_grad_()
    assert image(plots.heatmap(matrix).axes[0]).get_array().tolist() == [[1, 0], [0, 1]]
    for figure in (plots.graph(matrix), plots.embeddings(matrix), plots.heads(matrix[None])):
        assert isinstance(figure, Figure)
    plots.heatmap([[0.5, 0.5], [1.0, 0.0]])  # what torch.as_tensor takes


SOME = torch.tensor([[0.1, 0.9], [0.6, 0.4], [0.5, 0.3]])
ON_AXES: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
    (plots.heatmap, (SOME,), {}),
    (plots.graph, (SOME,), {}),
    (plots.embeddings, (SOME,), {"before": 2 * SOME}),
    (plots.activations, (SOME[0],), {}),
    (plots.scaling, ([1, 2], {"a": [1, 2], "b": [1, 2]}), {"ylabel": "y"}),
    (plots.tsne, (SOME, SOME.flip(0)), {"perplexity": 2}),
]


def test_given_axes_are_drawn_on() -> None:
    figure = Figure(layout="constrained")
    axes = figure.subplots(2, 3).ravel()
    for (function, arguments, options), ax in zip(ON_AXES, axes, strict=True):
        assert function(*arguments, title="T", ax=ax, **options) is figure
        assert ax.get_title() == "T"
        assert ax.has_data()


@pytest.mark.parametrize(("function", "arguments", "options"), ON_AXES)
def test_wrong_axes(function: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    name = rf"plots\.{function.__name__}: ax "
    for wrong in ("no", Figure()):
        with pytest.raises(TypeError, match=name + r"is .*; it must be a matplotlib\.axes\.Axes"):
            function(*arguments, ax=wrong, **options)
    for projection in ("polar", "3d"):
        ax = Figure().add_subplot(projection=projection)
        with pytest.raises(ValueError, match=name + f"has the projection '{projection}'; it must"):
            function(*arguments, ax=ax, **options)


@pytest.mark.slow  # draws everything
def test_no_setting_of_matplotlib_is_changed() -> None:
    before = dict(mpl.rcParams)
    every_kind(4)
    assert dict(mpl.rcParams) == before
    script = (
        "import sys, torch_attn; assert 'matplotlib' not in sys.modules; from torch_attn import *;"
        "assert 'matplotlib' not in sys.modules; torch_attn.plots.heatmap([[1.0]]);"
        "assert 'matplotlib.pyplot' not in sys.modules; from torch_attn import plots"
    )
    run_python("-c", script)


@pytest.mark.parametrize(
    ("missing", "call"),
    [
        ("matplotlib", "torch_attn.plots"),
        ("sklearn", "torch_attn.plots.tsne(torch.ones(9, 2), torch.ones(9, 2))"),
    ],
)
def test_what_is_missing_is_named_with_the_extra(missing: str, call: str) -> None:
    script = (
        f"import sys, torch, torch_attn; sys.modules[{missing!r}] = None\n"
        f"try: {call}\nexcept ImportError as error: print(error)"
    )
    printed = run_python("-c", script)
    assert "in a checkout of torch_attn, pip install --no-build-isolation -e '.[lesson]'" in printed
    assert ("scikit-learn" if missing == "sklearn" else missing) in printed


ONE = torch.ones(3, 2)
WRONG: list[tuple[Any, tuple[Any, ...], dict[str, Any], str]] = [
    (plots.heatmap, (torch.ones(3),), {}, r"matrix .* shape \[3\]; it must be .* \[L, S\]"),
    (plots.heatmap, (torch.ones(0, 2),), {}, "matrix has shape .*nothing to draw"),
    (plots.heatmap, (ONE, ["a"]), {}, "queries is 1 tokens; it must be a sequence of 3 strings"),
    (plots.heatmap, (ONE, None, "ab"), {}, "keys is the string 'ab'; it must be a seq"),
    (plots.heatmap, (ONE,), {"vmin": "low"}, "vmin is 'low'; it must be None, 'auto' or finite"),
    (plots.heatmap, (ONE,), {"center": torch.nan}, "center is nan; it must be None or finite"),
    (plots.heatmap, (ONE,), {"vmax": -1}, "vmax is -1; it must be larger"),
    (plots.heatmap, (ONE * 1j,), {}, ".*must be of real numbers"),
    (plots.heads, (ONE,), {}, r"weights .* \[H, L, S\]"),
    (plots.heads, (ONE[None],), {"columns": 0}, "columns is 0"),
    (plots.heads, (ONE[None],), {"names": ["a", "b"]}, "names is 2 tokens"),
    (plots.embeddings, (torch.ones(3, 4),), {}, r"vectors has shape \[3, 4\]; it must be \[N, 2\]"),
    (plots.embeddings, (ONE * torch.nan,), {}, "vectors is not finite"),
    (plots.embeddings, (ONE,), {"before": ONE[:2]}, r"before has shape \[2, 2\]; .*\[3, 2\]"),
    (plots.activations, (ONE,), {}, r"values .* \[N\]"),
    (plots.activations, ({"a": ONE[0], "b": ONE[:, 0]},), {}, "values have lengths {'a': 2"),
    (plots.activations, ({},), {}, "values is an empty mapping"),
    (plots.graph, (2 * ONE,), {}, "weights reach from 2 to 2; they must be from 0 to 1"),
    (plots.scaling, ([1, 0], {"a": [1, 2]}), {"ylabel": "y"}, r"sizes are \[1.0, 0.0\]"),
    (plots.scaling, ([1, 2], {}), {"ylabel": "y"}, "measured is empty"),
    (plots.scaling, ([1, 2], {"a": [1]}), {"ylabel": "y"}, r"measured\['a'\] has shape \[1\]"),
    (
        plots.scaling,
        ([1, 2], {"a": [1, 2]}),
        {"ylabel": "y", "theory": {"a": [1]}},
        r"theory\['a'\] has shape \[1\]; it must be \[2\]",
    ),
    (plots.tsne, (ONE, torch.ones(3, 3)), {}, r"query has shape \[3, 2\] and key \[3, 3\]"),
    (plots.tsne, (ONE, ONE), {"perplexity": 6}, "perplexity is 6; .* below .* 6"),
    (plots.tsne, (ONE, ONE), {"highlight": ["z"]}, r"highlight is \['z'\]"),
    (plots.tsne, (ONE, ONE * torch.nan), {}, "key has NaN or infinite numbers"),
    (plots.tsne, (ONE * torch.inf, ONE), {}, "query has NaN or infinite numbers"),
    (plots.tsne, (ONE * 0, ONE * 0), {}, "query has 3 vectors of zeros, the first at 0"),
    (plots.tsne, (ONE, ONE.tril(-1)), {}, "key has 1 vectors of zeros, the first at 0; .*'cosine'"),
    (plots.tsne, (ONE, ONE), {"metric": "nearness"}, "metric is 'nearness'; .* 'cosine', 'eucl"),
    (plots.tsne, (ONE, ONE), {"seed": -1}, "seed is -1; it must be an integer"),
]
OF_WRONG_TYPES: list[tuple[Any, tuple[Any, ...], dict[str, Any], str]] = [
    (plots.heatmap, ("abc",), {}, r"matrix is 'abc'; it must be .* shape \[L, S\]"),
    (plots.heatmap, (None,), {}, "matrix is None; it must be real numbers"),
    (plots.heatmap, (ONE, 3), {}, "queries is 3; it must be a sequence of 3 str"),
    (
        plots.scaling,
        ([1, 2], [1.0, 2.0]),
        {"ylabel": "y"},
        r"measured is \[1.0, 2.0\]; it must be a mapping of names",
    ),
    (
        plots.scaling,
        ([1], {"a": [1]}),
        {"theory": [1], "ylabel": "y"},
        r"theory is \[1\]; it must be a mapping of names",
    ),
    (plots.scaling, ([1], {"a": "x"}), {"ylabel": "y"}, r"measured\['a'\] is 'x'; "),
]


@pytest.mark.parametrize(
    ("error", "function", "arguments", "options", "message"),
    [(ValueError, *case) for case in WRONG] + [(TypeError, *case) for case in OF_WRONG_TYPES],
)
def test_wrong_input(
    error: type[Exception],
    function: Any,
    arguments: tuple[Any, ...],
    options: dict[str, Any],
    message: str,
) -> None:
    with pytest.raises(error, match=rf"plots\.{function.__name__}: {message}"):
        function(*arguments, **options)


def test_texts_are_written_as_they_are() -> None:
    values = {"_a": torch.ones(2), "$x$": torch.ones(2), "b": torch.ones(2)}
    options: dict[str, Any] = {"title": "$t$"}
    for figure in (
        plots.activations(values, label="$y$", **options),
        plots.scaling([1, 2], values, ylabel="$y$", xlabel="$z$", **options),
        plots.scaling([1, 2], values, ylabel="$y$", ax=Figure().subplots(), **options),
        plots.heatmap(ONE, label="$y$", **options),
        plots.heatmap(ONE, label="$y$", ax=Figure().subplots(), **options),
    ):
        found = [text for text, _ in drawn_texts(figure)]
        written = [text.get_text() for text in found]
        assert {r"\$t\$", r"\$y\$"} <= set(written)
        if len(figure.axes[0].images) == 0:
            assert {"_a", r"\$x\$", "b"} <= set(written)
        ours = [text for text in found if r"\$" in text.get_text()]
        assert not any(text._preprocess_math(text.get_text())[1] is True for text in ours)


def test_the_legend_keeps_what_is_in_given_axes() -> None:
    ax = Figure().subplots()
    ax.plot([1, 2], [1, 2], label="before")
    plots.scaling([1, 2], {"a": [1, 2], "b": [2, 1]}, ylabel="y", ax=ax)
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["before", "a", "b"]
    plots.scaling([1, 2], {"c": [1, 2], "d": [2, 1]}, ylabel="y", ax=ax)
    names = [text.get_text() for text in ax.get_legend().get_texts()]
    assert names == ["before", "a", "b", "c", "d"]
