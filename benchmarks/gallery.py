"""Twelve functions for flex_attention, as a page: ``python benchmarks/gallery.py``.

It writes docs/flex-gallery.md and docs/pictures/flex-<name>.png. The page has the source of each
function, a picture of what the function does to the pairs, and what it costs. Beside it stand two
other ways to compute the same: a floating bias for sdpa, and PyTorch's compiled FlexAttention. The
times alternate in one process. To compile FlexAttention twelve times takes most of the run.

``--no-times`` measures nothing and leaves the times of the page as they are. ``--only NAME`` draws
and measures one function, and prints its times. The page keeps its old times, because all times of
the page are from one run.
"""

from __future__ import annotations

import argparse
import inspect
import io
import math
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
import torch.nn.attention.flex_attention as pytorchs
from common import Timing, about, wall_clock
from matplotlib.colors import ListedColormap, Normalize, to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from PIL import Image
from rich.console import Console
from torch import Tensor

import torch_attn
from torch_attn.plots import PALETTE

DOCS = Path(__file__).parents[1] / "docs"
PAGE = "flex-gallery.md"
BATCH, HEADS, LENGTH, HEAD_DIM = 1, 8, 1024, 64  # of the times
SHOWN = 48  # queries and keys of a picture
Arguments = dict[str, Any]

# --- The functions, as the page shows them --------------------------------------------------------


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def sliding_window(left, right=0):
    def mask_mod(b, h, q_idx, kv_idx):
        return (q_idx - kv_idx <= left) & (kv_idx - q_idx <= right)

    return mask_mod


def prefix_lm(lengths):
    def mask_mod(b, h, q_idx, kv_idx):
        return (kv_idx < lengths[b]) | (q_idx >= kv_idx)

    return mask_mod


def documents(ids):
    def mask_mod(b, h, q_idx, kv_idx):
        return (ids[b, q_idx] == ids[b, kv_idx]) & (q_idx >= kv_idx)

    return mask_mod


def alibi(slopes):
    def score_mod(score, b, h, q_idx, kv_idx):
        return score - slopes[h] * (q_idx - kv_idx).abs()

    return score_mod


def t5(table, max_distance=128):
    def score_mod(score, b, h, q_idx, kv_idx):
        near = table.size(0) // 4
        distance = (kv_idx - q_idx).abs()
        growth = torch.log(distance.clamp(min=1) / near) / math.log(max_distance / near)
        far = (near + (growth * near).long()).clamp(max=2 * near - 1)
        bucket = torch.where(distance < near, distance, far)
        return score + table[torch.where(kv_idx > q_idx, bucket + 2 * near, bucket), h]

    return score_mod


def distances(table):
    R = table.size(1) // 2

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + table[h, (q_idx - kv_idx).clamp(-R, R) + R]

    return score_mod


def softcap(cap):
    def score_mod(score, b, h, q_idx, kv_idx):
        return cap * torch.tanh(score / cap)

    return score_mod


def neighbourhood(height, width, window):
    def mask_mod(b, h, q_idx, kv_idx):
        top = (q_idx // width - window // 2).clamp(0, height - window)
        left = (q_idx % width - window // 2).clamp(0, width - window)
        row, column = kv_idx // width - top, kv_idx % width - left
        return (row >= 0) & (row < window) & (column >= 0) & (column < window)

    return mask_mod


def two_axes(rel_h, rel_w):
    width = rel_w.size(3)

    def score_mod(score, b, h, q_idx, kv_idx):
        row, column = kv_idx // width, kv_idx % width
        return score + rel_h[b, h, q_idx, row] + rel_w[b, h, q_idx, column]

    return score_mod


def relative_shift(positions):
    L = positions.size(2)

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + positions[b, h, q_idx, kv_idx - q_idx + L - 1]

    return score_mod


def time_between(table, time):
    longest = table.size(1) - 1

    def score_mod(score, b, h, q_idx, kv_idx):
        passed = (time[b, q_idx] - time[b, kv_idx]).clamp(0, longest)
        return score + table[h, passed]

    return score_mod


# --- The same as a bias over all pairs ------------------------------------------------------------


def looked_up(table: Tensor, index: Tensor) -> Tensor:
    """`table[:, index]` in half the time, or less than half of an embedding's, in both passes."""
    return table.index_select(1, index.flatten()).unflatten(1, index.shape)


def bias_alibi(i: Tensor, j: Tensor, slopes: Tensor) -> Tensor:
    return -slopes[None, :, None, None] * (i - j).abs()


def bias_t5(i: Tensor, j: Tensor, table: Tensor, max_distance: int = 128) -> Tensor:
    near, size = table.size(0) // 4, (j - i).abs()
    growth = (size.float() / near).clamp(min=1).log() / math.log(max_distance / near)
    bucket = torch.where(size < near, size, (near + growth * near).long().clamp(max=2 * near - 1))
    bucket = bucket + 2 * near * (j > i)
    return looked_up(table.T, bucket)[None]


def bias_distances(i: Tensor, j: Tensor, table: Tensor) -> Tensor:
    R = table.size(1) // 2
    return looked_up(table, (i - j).clamp(-R, R) + R)[None]


def bias_two_axes(i: Tensor, j: Tensor, rel_h: Tensor, rel_w: Tensor) -> Tensor:
    return (rel_h[..., None] + rel_w[..., None, :]).flatten(3)


def bias_relative_shift(i: Tensor, j: Tensor, positions: Tensor) -> Tensor:
    """In rows that are one number shorter, each row starts one number earlier than in the last."""
    B, H, L, W = positions.shape
    rows = positions.flatten(2)[..., L - 1 : L - 1 + L * (W - 1)].view(B, H, L, W - 1)
    return rows[..., : len(j)]


def bias_time_between(i: Tensor, j: Tensor, table: Tensor, time: Tensor) -> Tensor:
    passed = (time[:, :, None] - time[:, None, :]).clamp(0, table.size(1) - 1)
    return looked_up(table, passed).transpose(0, 1)


# --- What they capture, as if it were learned -----------------------------------------------------


def grid(length: int) -> tuple[int, int]:
    """Height and width of a picture with this many tokens, as near to a square as possible."""
    height = max(n for n in range(1, math.isqrt(length) + 1) if length % n == 0)
    return height, length // height


def prefixes(batch: int, heads: int, length: int) -> Arguments:
    return {"lengths": length * torch.arange(1, batch + 1) // 4}


def packed(batch: int, heads: int, length: int) -> Arguments:
    """Documents of different lengths, others in each batch entry."""
    ends = torch.rand(batch, max(2, min(length // 12, 8))) * length
    return {"ids": (torch.arange(length)[:, None] >= ends[:, None]).sum(-1)}


def slopes(batch: int, heads: int, length: int) -> Arguments:
    return {"slopes": 0.5 ** (torch.arange(1, heads + 1) * 8 / heads)}


def buckets(batch: int, heads: int, length: int) -> Arguments:
    """32 buckets: those of keys before and at the query, then those of keys after it."""
    near_first = 1.5 - 0.2 * torch.arange(16.0)
    trend = torch.stack([torch.cat([near_first, near_first]), torch.cat([near_first, -near_first])])
    return {"table": trend.repeat(heads // 2, 1).T + 0.3 * torch.randn(32, heads)}


def clamped(batch: int, heads: int, length: int) -> Arguments:
    R = min(16, length // 6)
    waves = torch.sin(torch.arange(-R, R + 1) * torch.linspace(0.4, 1.2, heads)[:, None])
    return {"table": waves + 0.3 * torch.randn(heads, 2 * R + 1)}


def window_of_grid(batch: int, heads: int, length: int) -> Arguments:
    height, width = grid(length)
    return {"height": height, "width": width, "window": 7 if height > 7 else 3}


def rows_and_columns(batch: int, heads: int, length: int) -> Arguments:
    """Each query likes keys of near rows, and of columns at a distance of its own."""
    height, width = grid(length)
    place = torch.arange(length)[:, None]
    rows = 1.0 - 0.7 * (place // width - torch.arange(height)).abs()
    columns = torch.cos((place % width - torch.arange(width)) * math.pi / 3)
    noise = (0.3 * torch.randn(batch, heads, length, n) for n in (height, width))
    return dict(zip(("rel_h", "rel_w"), map(torch.add, (rows, columns), noise), strict=True))


def scores_of_positions(batch: int, heads: int, length: int) -> Arguments:
    """Scores of queries with sinusoids of the distance."""
    distance = torch.arange(length - 1, -length, -1)
    angles = distance * 0.5 ** torch.arange(1.0, 7.0)[:, None]
    queries = 0.15 * torch.randn(batch, heads, length, 12) + torch.randn(heads, 1, 12)
    return {"positions": queries @ torch.cat([angles.sin(), angles.cos()])}


def events(batch: int, heads: int, length: int) -> Arguments:
    """Times of events that come in bursts, and tables of biases that fall with the time passed."""
    gaps = torch.where(torch.rand(batch, length) < 0.15, 20, torch.randint(0, 3, (batch, length)))
    fall = torch.exp(-torch.arange(65) / torch.linspace(8, 32, heads)[:, None])
    return {"table": 3 * fall - 1.5 + 0.1 * torch.randn(heads, 65), "time": gaps.cumsum(1)}


# --- The gallery ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """A function, what the page says of it, and how it is called."""

    name: str
    title: str
    says: str
    function: Callable[..., Any]
    call: str  # of the function, as the arguments after query, key and value
    takes: str  # what it captures
    same: str  # where torch_attn has it ready-made
    mods: Callable[..., tuple[Any, Any]]  # the score_mod and the mask_mod
    captured: Callable[[int, int, int], Arguments] = lambda batch, heads, length: {}
    bias: Callable[..., Tensor] | None = None  # the term of the score; None where it adds nothing
    scale: float | None = None
    options: Arguments = field(default_factory=dict)  # of sdpa, beside the bias
    panels: Callable[[Entry], list[Panel]] = lambda entry: shown_pairs(entry)
    label: str | None = None  # of the colour bar; None for a mask
    alt: str = ""

    def example(self, batch: int, heads: int, length: int) -> Arguments:
        torch.manual_seed(0)
        return self.captured(batch, heads, length)

    def source(self) -> str:
        """The function with the imports that it needs: a block that runs alone."""
        text = inspect.getsource(self.function)
        imports = "\n\n".join(f"import {m}" for m in ("math", "torch") if f"{m}." in text)
        return f"{imports}\n\n\n{text}" if imports else text


@dataclass(frozen=True)
class Panel:
    """A matrix of scores, or of pairs that are visible. Cells of -inf are hidden."""

    title: str
    values: Tensor
    x: str = "key"
    y: str = "query"
    marked: tuple[int, int, int, int] | None = None  # first column and row, width, height
    line: tuple[int, int] | None = None  # the columns of a line in the first and in the last row


def over_pairs(mods: tuple[Any, Any], shape: tuple[int, int, int, int], score: Tensor) -> Tensor:
    """What PyTorch computes for all pairs at once: the scores, -inf where the mask hides a pair."""
    B, H, L, S = shape
    b, h = torch.arange(B)[:, None, None, None], torch.arange(H)[:, None, None]
    i, j = torch.arange(L)[:, None], torch.arange(S)
    score_mod, mask_mod = mods
    if score_mod is not None:
        score = score_mod(score, b, h, i, j)
    if mask_mod is not None:
        score = torch.where(mask_mod(b, h, i, j), score, -math.inf)
    return score.expand(shape)


def bias_of(entry: Entry, arguments: Arguments, length: int, dtype: torch.dtype) -> Tensor:
    """The bias of the score and the mask, for sdpa; it broadcasts to `[B, H, L, S]`."""
    i, j = torch.arange(length)[:, None], torch.arange(length)
    score = torch.zeros((), dtype=dtype)
    if entry.bias is not None:
        score = entry.bias(i, j, **arguments)
    _, mask_mod = entry.mods(**arguments)
    if mask_mod is None:
        return score
    # The masks of the gallery are the same for all heads. Tensors that they capture begin with B.
    per_entry = [x for x in arguments.values() if isinstance(x, Tensor) and entry.bias is None]
    batch = len(per_entry[0]) if per_entry else 1
    visible = mask_mod(torch.arange(batch)[:, None, None, None], torch.tensor(0), i, j)
    return torch.where(visible, score, -math.inf)


def scores_shown(entry: Entry, batch: int = 1, heads: int = 8) -> Tensor:
    mods = entry.mods(**entry.example(batch, heads, SHOWN))
    return over_pairs(mods, (batch, heads, SHOWN, SHOWN), torch.zeros(()))


def shown_pairs(entry: Entry) -> list[Panel]:
    return [Panel("which keys a query sees", scores_shown(entry)[0, 0])]


def two_entries(entry: Entry) -> list[Panel]:
    both = scores_shown(entry, batch=2)[:, 0]
    arguments = entry.example(2, 8, SHOWN)
    lengths = arguments.get("lengths")
    what = [""] * 2 if lengths is None else [f": a prefix of {n}" for n in lengths.tolist()]
    return [Panel(f"batch entry {n}{what[n]}", both[n]) for n in (0, 1)]


def two_windows(entry: Entry) -> list[Panel]:
    def panel(left: int, right: int) -> Panel:
        shape = (1, 1, SHOWN, SHOWN)
        mods = (None, sliding_window(left, right))
        return Panel(
            f"left = {left}, right = {right}", over_pairs(mods, shape, torch.zeros(()))[0, 0]
        )

    return [panel(12, 0), panel(6, 6)]


def two_heads(
    entry: Entry, heads: tuple[int, int] = (0, 1), names: tuple[str, str] = ("", "")
) -> Any:
    chosen = scores_shown(entry)[0, list(heads)]
    return [
        Panel(f"head {h}{name}", values)
        for h, name, values in zip(heads, names, chosen, strict=True)
    ]


def before_and_after(entry: Entry) -> list[Panel]:
    place = torch.arange(SHOWN)
    before = 150 * torch.sin(place[:, None] / 7) * torch.cos(place / 5)
    shape = (1, 1, SHOWN, SHOWN)
    after = over_pairs(entry.mods(cap=50.0), shape, before)[0, 0]
    masked = torch.where(after.isfinite(), before, -math.inf)
    return [
        Panel("before", masked),
        Panel("after, with cap = 50", after),
    ]


def shifted(entry: Entry) -> list[Panel]:
    positions = entry.example(1, 8, SHOWN)["positions"][0, 0]
    after = scores_shown(entry)[0, 0]
    return [
        Panel("positions", positions, "column: key − query + L − 1", line=(SHOWN - 1, SHOWN - 1)),
        Panel("shifted: added to the score", after, line=(0, SHOWN - 1)),
    ]


def of_a_query(entry: Entry, query: int) -> list[Panel]:
    """All pairs, and the keys of one query as a picture."""
    pairs = scores_shown(entry)[0, 0]
    height, width = grid(SHOWN)
    row, column = query // width, query % width
    grid_of_keys = pairs[query].view(height, width)
    return [
        Panel(f"all pairs of {height} × {width} tokens", pairs, marked=(0, query, SHOWN, 1)),
        Panel(
            f"the keys of query {query}",
            grid_of_keys,
            "column of the key",
            "row of the key",
            (column, row, 1, 1),
        ),
    ]


ENTRIES = {
    entry.name: entry
    for entry in [
        Entry(
            "causal",
            "Causal",
            "Hide the keys after the query, because a decoder predicts them: the Transformer "
            "([Vaswani et al., 2017](https://arxiv.org/abs/1706.03762)), GPT.",
            causal,
            "block_mask=causal",
            "",
            "`mods.causal`, and `sdpa(..., is_causal=True)`",
            lambda: (None, causal),
            alt="A triangle of visible pairs",
        ),
        Entry(
            "sliding-window",
            "Sliding window",
            "Show the keys near the query, because the cost of a query then does not grow with the "
            "sequence: Longformer ([Beltagy et al., 2020](https://arxiv.org/abs/2004.05150)), "
            "Mistral 7B ([Jiang et al., 2023](https://arxiv.org/abs/2310.06825)).",
            sliding_window,
            "block_mask=sliding_window(left, right)",
            "`left` and `right` are numbers of keys, 127 and 0 in the times",
            "`mods.sliding_window(left, right)`, and `sdpa(..., window_size=(left, right))`",
            lambda left, right: (None, sliding_window(left, right)),
            lambda batch, heads, length: {"left": min(127, length // 4), "right": 0},
            panels=two_windows,
            alt="A band of visible pairs before the query, and one around the query",
        ),
        Entry(
            "prefix-lm",
            "Prefix-LM",
            "Show the whole prompt to every query, the other keys as in a decoder: T5's prefix LM "
            "([Raffel et al., 2020](https://arxiv.org/abs/1910.10683)), PaliGemma "
            "([Beyer et al., 2024](https://arxiv.org/abs/2407.07726)).",
            prefix_lm,
            "block_mask=prefix_lm(lengths)",
            "`lengths` has shape `[B]`: the length of each prefix",
            "`mods.prefix(lengths)`",
            lambda lengths: (None, prefix_lm(lengths)),
            prefixes,
            panels=two_entries,
            alt="A triangle of visible pairs, with a visible block of the first keys, in two sizes",
        ),
        Entry(
            "documents",
            "Packed documents",
            "Hide the other documents of a row. Documents are packed because padding costs time: "
            "Llama 3 ([Grattafiori et al., 2024](https://arxiv.org/abs/2407.21783)).",
            documents,
            "block_mask=documents(ids)",
            "`ids` has shape `[B, L]`: the document of each token",
            "`mods.both(mods.causal, mods.documents(ids))`, and [`varlen_attn`](packed.md)",
            lambda ids: (None, documents(ids)),
            packed,
            panels=two_entries,
            alt="A triangle of visible pairs for each document",
        ),
        Entry(
            "alibi",
            "ALiBi",
            "Subtract a penalty that grows with the distance, with a slope for each head. The "
            "model then reads longer sequences than it was trained on: "
            "[Press et al., 2022](https://arxiv.org/abs/2108.12409), BLOOM, MPT.",
            alibi,
            "alibi(slopes), causal",
            "`slopes` has shape `[H]`",
            "`mods.alibi(slopes)`, and `sdpa(..., alibi_slopes=slopes)`",
            lambda slopes: (alibi(slopes), causal),
            slopes,
            bias_alibi,
            panels=lambda entry: two_heads(entry, (0, 1), (": slope 1/2", ": slope 1/4")),
            label="added to the score",
            alt="Penalties that grow with the distance, steeply in one head and slowly in another",
        ),
        Entry(
            "t5",
            "T5's buckets",
            "Add a learned bias for the distance, in buckets that get wider: T5 "
            "([Raffel et al., 2020](https://arxiv.org/abs/1910.10683)). T5 does not scale scores.",
            t5,
            "t5(table), scale=1.0",
            "`table` has shape `[32, H]`, and is learned",
            "`mods.t5(table)`, also for T5's decoder",
            lambda table: (t5(table), None),
            buckets,
            bias_t5,
            scale=1.0,
            panels=two_heads,
            label="added to the score",
            alt="Diagonal stripes that get wider with the distance, in two heads",
        ),
        Entry(
            "distances",
            "Clamped distances",
            "Add a learned bias for each distance up to R. Longer distances count as R: the rule "
            "of [Shaw et al., 2018](https://arxiv.org/abs/1803.02155), who learn vectors.",
            distances,
            "distances(table)",
            "`table` has shape `[H, 2 R + 1]`, and is learned; R is 16 in the times",
            "`mods.distances(table)`",
            lambda table: (distances(table), None),
            clamped,
            bias_distances,
            panels=lambda entry: two_heads(entry, (0, 7)),
            label="added to the score",
            alt="Narrow diagonal stripes near the diagonal, and two plain corners, in two heads",
        ),
        Entry(
            "softcap",
            "Soft cap",
            "Keep scores between -cap and cap, because large scores make training unstable: "
            "Gemma 2 ([Gemma team, 2024](https://arxiv.org/abs/2408.00118)).",
            softcap,
            "softcap(50.0), causal",
            "",
            "`mods.softcap(cap)`, and `sdpa(..., softcap=50.0)`",
            lambda cap: (softcap(cap), causal),
            lambda batch, heads, length: {"cap": 50.0},
            options={"softcap": 50.0},
            panels=before_and_after,
            label="score",
            alt="Scores up to 150 in size before the soft cap, and below 50 after it",
        ),
        Entry(
            "neighbourhood",
            "Neighbourhood",
            "Show the tokens of a picture that are near the query. At a border the window moves "
            "inwards, because every query sees the same number of keys: NATTEN "
            "([Hassani et al., 2023](https://arxiv.org/abs/2204.07143)).",
            neighbourhood,
            "block_mask=neighbourhood(height, width, window)",
            "the three are numbers: 32, 32 and 7 in the times",
            "`mods.neighbourhood((height, width), window)`, also with stride and dilation",
            lambda height, width, window: (None, neighbourhood(height, width, window)),
            window_of_grid,
            panels=lambda entry: of_a_query(entry, 11),
            alt="Diagonal blocks of visible pairs, and the window of one query in the picture",
        ),
        Entry(
            "two-axes",
            "Two axes",
            "Add a term for the row of the key and one for its column: MViT v2 "
            "([Li et al., 2022](https://arxiv.org/abs/2112.01526)), SAM "
            "([Kirillov et al., 2023](https://arxiv.org/abs/2304.02643)).",
            two_axes,
            "two_axes(rel_h, rel_w)",
            "`rel_h` `[B, H, L, height]` and `rel_w` `[B, H, L, width]` are the scores of "
            "each query with learned vectors of rows and columns",
            "`mods.two_axes(rel_h, rel_w)`",
            lambda rel_h, rel_w: (two_axes(rel_h, rel_w), None),
            rows_and_columns,
            bias_two_axes,
            panels=lambda entry: of_a_query(entry, 19),
            label="added to the score",
            alt="Blocks of biases, and the biases of one query in the picture",
        ),
        Entry(
            "relative-shift",
            "Relative shift",
            "Add the score of the query with the relative position of the key, without a shift of "
            "the matrix: Transformer-XL ([Dai et al., 2019](https://arxiv.org/abs/1901.02860)), "
            "Conformer ([Gulati et al., 2020](https://arxiv.org/abs/2005.08100)).",
            relative_shift,
            "relative_shift(positions)",
            "`positions` has shape `[B, H, L, L + S - 1]`: the scores of each query with learned "
            "positions",
            "`mods.transformer_xl(positions)`",
            lambda positions: (relative_shift(positions), None),
            scores_of_positions,
            bias_relative_shift,
            panels=shifted,
            label="score of the query with a relative position",
            alt="Scores of queries with relative positions, and the same scores shifted to keys",
        ),
        Entry(
            "time-between",
            "Event times",
            "Add a learned bias for the time that has passed between two events of a history: "
            "after TiSASRec ([Li et al., 2020](https://doi.org/10.1145/3336191.3371786)), with "
            "vectors, and HSTU ([Zhai et al., 2024](https://arxiv.org/abs/2402.17152)). The index "
            "of the table depends on the pair, so the kernel gathers from the table.",
            time_between,
            "time_between(table, time), causal",
            "`table` `[H, longest + 1]` is learned, `time` `[B, L]` has whole numbers",
            "",
            lambda table, time: (time_between(table, time), causal),
            events,
            bias_time_between,
            panels=lambda entry: two_heads(entry, (0, 7)),
            label="added to the score",
            alt="Blocks of events that are near in time, in two heads",
        ),
    ]
}

# --- Pictures -------------------------------------------------------------------------------------

HIDDEN: Arguments = {"facecolor": "0.88", "edgecolor": "0.6", "hatch": "////", "linewidth": 0}
VISIBLE, MARK = PALETTE[5], PALETTE[2]
# In inches: the width of a picture, the side of a panel, the gap between panels. A cell has 10 x 10
# pixels.
WIDTH, SIDE, GAP = 6.0, 2.4, 0.62
DPI = 200
SCALE = mpl.colormaps["PuOr_r"].resampled(33)


def with_few_colours(image: Image.Image) -> Image.Image:
    """A third of the bytes: the colours of scores, greys, and marks mixed with white."""
    greys = np.linspace(0, 1, 24)[:, None].repeat(3, 1)
    marks = np.array([to_rgb(VISIBLE), to_rgb(MARK)])
    mixed = [1 - (1 - marks) * share for share in (0.25, 0.5, 0.75, 1.0)]
    table = np.concatenate([SCALE(np.linspace(0, 1, SCALE.N))[:, :3], greys, *mixed])
    palette = Image.new("P", (1, 1))
    palette.putpalette((255 * table).round().astype(np.uint8).tobytes())
    return image.convert("RGB").quantize(palette=palette, dither=Image.Dither.NONE)


def draw(entry: Entry, path: Path) -> None:
    """One or two panels in the colours of torch_attn.plots; below them a bar and a legend."""
    panels = entry.panels(entry)
    values = [panel.values.detach() for panel in panels]
    finite = torch.cat([x[x.isfinite()] for x in values])
    reach = None if entry.label is None else float(finite.abs().max())
    handles: list[Any] = [Patch(color=VISIBLE, label="visible")] if reach is None else []
    if any(x.isneginf().any() for x in values):
        handles.append(Patch(**HIDDEN, label="hidden by the mask"))
    if panels[0].marked is not None:
        query = f"query {panels[0].marked[1]}"
        handles.append(Patch(fill=False, edgecolor=MARK, linewidth=1.5, label=query))
    if panels[0].line is not None:
        handles.append(Line2D([], [], color=MARK, linestyle="--", label="key = query"))
    legend = 0.28 if handles else 0.05
    bottom = legend + 0.45 + (0.0 if reach is None else 0.6)
    height = bottom + SIDE + 0.28
    with mpl.rc_context({**mpl.rcParamsDefault, "font.size": 9, "hatch.linewidth": 0.6}):
        figure = Figure(figsize=(WIDTH, height))
        first = 0.55 if len(panels) == 2 else (WIDTH - SIDE) / 2
        for n, panel in enumerate(panels):
            left = first + n * (SIDE + GAP)
            box = (left / WIDTH, bottom / height, SIDE / WIDTH, SIDE / height)
            image = draw_panel(figure.add_axes(box), panel, reach)
        if reach is not None:
            place = figure.add_axes((0.25, (legend + 0.4) / height, 0.5, 0.09 / height))
            bar = figure.colorbar(image, cax=place, orientation="horizontal")
            bar.set_label(entry.label, labelpad=2)
            bar.outline.set_visible(False)
            place.set_xlim(min(0.0, float(finite.min())), max(0.0, float(finite.max())))
        if handles:
            place = {"loc": "lower center", "bbox_to_anchor": (0.5, 0.0), "borderaxespad": 0.2}
            figure.legend(handles=handles, ncols=3, frameon=False, **place)
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = io.BytesIO()
        figure.savefig(pixels, dpi=DPI)
    with_few_colours(Image.open(pixels)).save(path, optimize=True)


def draw_panel(ax: Any, panel: Panel, reach: float | None) -> Any:
    """Scores from -reach to reach, or with None the visible pairs in one colour."""
    colours = ListedColormap([VISIBLE]) if reach is None else SCALE
    ends = None if reach is None else Normalize(-reach, reach)
    values = np.ma.masked_invalid(panel.values.detach().numpy())
    rows, columns = values.shape
    if values.mask.any():  # the image leaves hidden pairs transparent
        ax.add_patch(Rectangle((0, 0), 1, 1, transform=ax.transAxes, zorder=0, **HIDDEN))
    aspect = "equal" if columns < 2 * rows - 1 else "auto"
    image = ax.imshow(values, colours, ends, aspect=aspect, interpolation="none", zorder=1)
    if panel.marked is not None:
        x, y, width, height = panel.marked
        edge = {"edgecolor": MARK, "linewidth": 1.5, "fill": False, "clip_on": False}
        ax.add_patch(Rectangle((x - 0.5, y - 0.5), width, height, zorder=2, **edge))
    if panel.line is not None:
        ax.plot(panel.line, (0, rows - 1), color=MARK, linestyle="--", zorder=2)
    for axis, count in ((ax.yaxis, rows), (ax.xaxis, columns)):
        axis.set_ticks(range(0, count, 1 if count <= 8 else 8 if count <= SHOWN else 16))
    ax.set_xlabel(panel.x, labelpad=2)
    ax.set_ylabel(panel.y, labelpad=2)
    ax.set_title(panel.title, fontsize=9.5, loc="left")
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    return image


# --- Times ----------------------------------------------------------------------------------------


@dataclass
class Times:
    """What the page says of a run: the machine, and the cells of each row."""

    machine: str = ""
    rows: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def of_page(cls, page: str) -> Times:
        machine = re.search(r"^Measured on .*?(?=\n\n|\n\Z)", page, re.MULTILINE | re.DOTALL)
        rows = re.findall(r"^\| \[(.+)\]\(#.+?\) \| (.+) \|$", page, re.MULTILINE)
        if machine is None:
            return cls()
        names = {entry.title: entry.name for entry in ENTRIES.values()}
        known = {names[title]: cells.split(" | ") for title, cells in rows if "–" not in cells}
        return cls(machine.group(), known)


def functions_of(entry: Entry) -> tuple[list[Callable[[], Any]], Callable[[], Any]]:
    """What is timed, in the order of the table, and the backward of PyTorch's FlexAttention."""
    arguments = entry.example(BATCH, HEADS, LENGTH)
    learned = [
        x.requires_grad_()
        for x in arguments.values()
        if isinstance(x, Tensor) and x.is_floating_point()
    ]
    inputs = [torch.randn(BATCH, HEADS, LENGTH, HEAD_DIM).requires_grad_() for _ in range(3)]
    gradient = torch.randn(BATCH, HEADS, LENGTH, HEAD_DIM)

    def ours() -> Tensor:
        score_mod, mask_mod = entry.mods(**arguments)
        return torch_attn.flex_attention(*inputs, score_mod, mask_mod, scale=entry.scale)

    def biased() -> Tensor:
        bias = bias_of(entry, arguments, LENGTH, torch.float32)
        return torch_attn.sdpa(*inputs, attn_mask=bias, scale=entry.scale, **entry.options)

    torch.compiler.reset()
    compiled = torch.compile(pytorchs.flex_attention)
    detached = {k: x.detach() if isinstance(x, Tensor) else x for k, x in arguments.items()}
    score_mod, mask_mod = entry.mods(**detached)
    shape = (LENGTH, LENGTH)
    batch = None if entry.name == "causal" else BATCH
    blocks = mask_mod and pytorchs.create_block_mask(mask_mod, batch, None, *shape, device="cpu")

    def theirs(*x: Tensor) -> Any:
        return compiled(*x, score_mod, blocks, scale=entry.scale)

    def forward(call: Callable[..., Any], *x: Tensor) -> Callable[[], Any]:
        def run() -> Any:
            with torch.no_grad():
                return call(*x)

        return run

    def training(call: Callable[[], Tensor]) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(call(), inputs + learned, gradient)

    their_inputs = [x.detach() for x in inputs]
    calls = [forward(ours), forward(biased), forward(theirs, *their_inputs)]
    calls += [training(ours), training(biased)]
    return calls, lambda: theirs(*inputs).backward(gradient)


def measure(entry: Entry, rounds: int) -> list[str]:
    """The cells of a row. The first call of each function, which may compile, is not timed."""
    calls, backward_of_theirs = functions_of(entry)
    ours, biased, theirs, *_ = (call() for call in calls)
    for other in (biased, theirs):
        torch.testing.assert_close(ours, other, rtol=1e-3, atol=1e-4)
    timings = [Timing() for _ in calls]
    for _ in range(rounds):
        for call, timing in zip(calls, timings, strict=True):
            timing.samples.append(wall_clock(call, 1))
    cells = [f"{1e3 * t.median:.1f} ({100 * t.spread:.0f}%)" for t in timings]
    try:
        backward_of_theirs()
    except NotImplementedError:
        return [*cells, "raises"]
    return [*cells, "computes"]


def machine_of_now(rounds: int) -> str:
    found = about()
    text = (
        f"Measured on {found['date']}: {found['cpu']}, {found['cores']} cores, instruction set "
        f"`{found['capability']}`, {found['threads']} threads, torch {found['torch']}. The times "
        f"alternate in one process. A time is the median of {rounds} rounds, in ms. The brackets "
        "have the distance between the quartiles, relative to the median."
    )
    return filled(text)


# --- The page -------------------------------------------------------------------------------------

HEAD = f"""\
<!-- `make gallery` (benchmarks/gallery.py) makes this page and its pictures. Do not edit it. -->

# Twelve functions for FlexAttention

Each section has the function of a well-known model: a `score_mod`, a `mask_mod`, or a function that
makes one of them. Copy it, and pass it to `torch_attn.flex_attention`, or to PyTorch's
FlexAttention, which takes the same functions. [FlexAttention on a CPU](flex.md) says what such a
function may do. `mods` is `torch_attn.mods`, and `sdpa` is `torch_attn.sdpa`.

The pictures have {SHOWN} rows, the queries, and {SHOWN} columns, the keys. Pairs that the mask
hides are hatched. The numbers in the tables are invented. [A table](#what-they-cost) has all times,
and says how they were measured.
"""

COSTS = f"""\
## What they cost

All rows have batch {BATCH}, {HEADS} heads, {LENGTH} queries and keys, head_dim {HEAD_DIM}, and
float32. "Training" is a forward and a backward, with the gradients of query, key, value and every
floating tensor that the function captures. The columns are three ways to compute the same:

- **flex**: `torch_attn.flex_attention` with the function. Each call evaluates function and mask.
- **bias**: `torch_attn.sdpa` with a floating bias for every pair. Each call computes the bias from
  the same tables, by `index_select`, which is faster than an embedding or `table[:, index]`. A mask
  becomes a bias of 0 and -inf. The soft cap is no bias: that row passes `softcap=50.0` and a mask.
- **PyTorch**: FlexAttention, compiled by `torch.compile`. Its `BlockMask` is made once, in advance.
  Neither this nor compiling is timed. Its backward raises [an error](flex.md) on a CPU.

| ms | flex | bias | PyTorch | flex, training | bias, training | PyTorch, training |
|---|---|---|---|---|---|---|
"""


def filled(text: str) -> str:
    """A paragraph. Code and links stay on a line."""
    whole = re.sub(r"`.*?`|\[.*?\]\(.*?\)", lambda found: found.group().replace(" ", "\0"), text)
    lines = textwrap.fill(whole, 120, break_long_words=False, break_on_hyphens=False)
    return lines.replace("\0", " ")


def section(entry: Entry, cells: list[str] | None) -> str:
    use = f"Call: `flex_attention(query, key, value, {entry.call})`."
    use += f" {entry.takes}." if entry.takes else ""
    use += f" Ready-made: {entry.same}." if entry.same else ""
    parts = [
        f"## {entry.title}",
        filled(entry.says),
        f"```python\n{entry.source()}```",
        filled(use),
        f"![{entry.alt}](pictures/flex-{entry.name}.png)",
    ]
    if cells is not None:
        flex, bias, other, flex_training, bias_training, other_training = (
            cell.split(" (")[0] for cell in cells
        )
        parts.append(
            filled(
                f"Forward: {flex} ms; with a bias {bias} ms; PyTorch's FlexAttention {other} ms. "
                f"Training: {flex_training} ms; with a bias {bias_training} ms; PyTorch's "
                f"FlexAttention {other_training}."
            )
        )
    return "\n\n".join(parts)


def page(times: Times) -> str:
    parts = [HEAD.rstrip()]
    parts += [section(entry, times.rows.get(name)) for name, entry in ENTRIES.items()]
    table = COSTS
    for name, entry in ENTRIES.items():
        cells = times.rows.get(name, ["–"] * 6)
        table += f"| [{entry.title}](#{anchor(entry.title)}) | {' | '.join(cells)} |\n"
    parts += [table.rstrip(), times.machine or "Nothing has been measured."]
    return "\n\n".join(parts) + "\n"


def anchor(title: str) -> str:
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=ENTRIES, metavar="NAME", help=", ".join(ENTRIES))
    parser.add_argument("--no-times", action="store_true", help="keep the times of the page")
    parser.add_argument("--rounds", type=int, default=11, help="of each function; at least 2")
    parser.add_argument("--out", type=Path, default=DOCS, help="the folder of the page; docs")
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error(f"--rounds is {options.rounds}; it must be at least 2")

    console = Console()
    target = options.out / PAGE
    times = Times.of_page(target.read_text()) if target.exists() else Times()
    chosen = [options.only] if options.only else list(ENTRIES)
    rows = {}
    for count, name in enumerate(chosen, 1):
        with console.status(f"{count}/{len(chosen)} {name}"):
            draw(ENTRIES[name], options.out / "pictures" / f"flex-{name}.png")
            if not options.no_times:
                rows[name] = measure(ENTRIES[name], options.rounds)
        console.print(
            f"{count}/{len(chosen)} {name}: {', '.join(rows.get(name, ['drawn']))}", soft_wrap=True
        )
    if len(rows) == len(ENTRIES):
        times = Times(machine_of_now(options.rounds), rows)
    options.out.mkdir(parents=True, exist_ok=True)
    target.write_text(page(times))
    console.print(f"wrote {target}", soft_wrap=True)


if __name__ == "__main__":
    main()
