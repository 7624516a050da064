"""Masks that hide whole tiles of scores, against what ours takes without the mask.

A mask that hides most keys should cost about as much as the visible keys alone. So each case is
compared with another call of ours, and should take at most `at_most` times as long.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from common import DTYPES, Case, alternate, jobs_of, run_of
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

Call = tuple[tuple[Tensor, ...], dict[str, Any]]


@dataclass(frozen=True)
class Masked:
    case: Case
    visible: Callable[[Tensor, Tensor], Tensor]  # of the numbers of queries [L, 1] and keys [S]
    instead: Callable[[tuple[Tensor, ...]], list[Call]]  # the calls it is held against
    at_most: float


def documents(tensors: tuple[Tensor, ...], length: int) -> list[Call]:
    parts = zip(*(t.split(length, -2) for t in tensors), strict=True)
    return [(tuple(t.contiguous() for t in part), {}) for part in parts]


def slice_of_cache(tensors: tuple[Tensor, ...], used: int) -> list[Call]:
    query, key, value = tensors
    return [((query, key[..., :used, :], value[..., :used, :]), {})]


MASKED = [
    Masked(
        # Not in float16: the built-in takes 10 s for a backward.
        Case("window 256 of 1x12x4096", 1, 12, 4096, dtypes=("f32", "bf16")),
        lambda i, j: (j <= i) & (j > i - 256),
        lambda tensors: [(tensors, {"is_causal": True})],
        0.25,
    ),
    Masked(
        Case("16 documents, 1x12x2048", 1, 12, 2048),
        lambda i, j: i // 128 == j // 128,
        lambda tensors: documents(tensors, 128),
        1.3,
    ),
    Masked(
        Case("cache 200 of 4k D128", 1, 32, 1, 128, keys=4096, passes=("forward",)),
        lambda i, j: (j < 200)[None],
        lambda tensors: slice_of_cache(tensors, 200),
        1.3,
    ),
    Masked(
        Case("padding 64 of 8x12x512", 8, 12, 512),
        lambda i, j: (j < 64)[None],
        lambda tensors: [(tensors, {})],
        0.3,
    ),
]


def runners(masked: Masked, dtype: torch.dtype, which: str) -> list[Callable[[], Any]]:
    """Ours with the mask, what it is held against, the built-in with the mask."""
    ours, builtin = torch.ops.attn.sdpa, torch.ops.aten.scaled_dot_product_attention
    torch.manual_seed(0)
    tensors, _ = masked.case.inputs(dtype)
    queries, keys = torch.arange(tensors[0].size(-2)), torch.arange(tensors[1].size(-2))
    mask = {"attn_mask": masked.visible(queries[:, None], keys)}
    calls = [run_of(ours, *call, which) for call in masked.instead(tensors)]

    def instead() -> None:
        for call in calls:
            call()

    return [run_of(ours, tensors, mask, which), instead, run_of(builtin, tensors, mask, which)]


def bench_masked(
    console: Console, cases: list[Masked], seconds: float, wanted: str
) -> list[dict[str, Any]]:
    by_name = {masked.case.name: masked for masked in cases}
    jobs = jobs_of([masked.case for masked in cases], wanted)
    rows = []
    for case, which, name in track(jobs, description="masked", console=console):
        masked = by_name[case.name]
        run, run_instead, run_builtin = runners(masked, DTYPES[name], which)
        # By itself: it reads all keys, and what runs next would find the caches full of them.
        (builtin,) = alternate([run_builtin], seconds / 3)
        timings = ours, instead = alternate([run, run_instead], 2 * seconds / 3)
        rows.append(
            {
                "case": case.name,
                "pass": which,
                "dtype": name,
                "ours_ms": ours.median * 1e3,
                "instead_ms": instead.median * 1e3,
                "builtin_ms": builtin.median * 1e3,
                "of_instead": ours.median / instead.median,
                "at_most": masked.at_most,
                "ratio": builtin.median / ours.median,
                "spread": max(timing.spread for timing in (*timings, builtin)),
            }
        )
    return rows


def above(rows: list[dict[str, Any]]) -> int:
    return sum(r["at_most"] is not None and r["of_instead"] > r["at_most"] for r in rows)


def masked_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(
        title="Boolean masks that hide most; instead: ours without (causal; 16 calls of 128; the "
        "slice; all keys)"
    )
    for heading in ("mask", "pass", "dtype"):
        table.add_column(heading)
    for heading in ("attn ms", "instead ms", "of it", "at most", "built-in ms", "ratio", "spread"):
        table.add_column(heading, justify="right")
    for r in rows:
        color = "green" if r["of_instead"] <= r["at_most"] else "red"
        table.add_row(
            r["case"],
            r["pass"],
            r["dtype"],
            f"{r['ours_ms']:.3f}",
            f"{r['instead_ms']:.3f}",
            f"[{color}]{r['of_instead']:.2f}[/]",
            f"{r['at_most']:.2f}",
            f"{r['builtin_ms']:.3f}",
            f"{r['ratio']:.2f}",
            f"{r['spread']:.0%}",
        )
    return table
