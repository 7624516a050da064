"""Options that the built-in has not, against what ours takes without them.

A window, an offset and lengths are compared with the work that they leave; soft cap, ALiBi and
sinks with the plain call, beside which they should cost little. FlexAttention, which has a soft cap
too, stands beside it where there is time to compile it.
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

import torch_attn

Tensors = tuple[Tensor, ...]
TYPES = ("f32", "bf16")
FORWARD = ("forward",)
SOFTCAP = 50.0


@dataclass(frozen=True)
class Option:
    case: Case
    options: Callable[[Case], dict[str, Any]]
    at_most: float | dict[str, float]  # of the call that it is held against; by dtype or pass
    instead: Callable[[Tensors], Tensors] = lambda tensors: tensors

    def bound(self, which: str, dtype: str) -> float:
        if isinstance(self.at_most, float):
            return self.at_most
        return self.at_most.get(which, self.at_most.get(dtype, 0.0))


def window(**more: Any) -> Callable[[Case], dict[str, Any]]:
    return lambda case: {"window_size": (255, 0), **more}


def first_half(tensors: Tensors) -> Tensors:
    query, *others = tensors
    return (query, *(t[..., : t.size(-2) // 2, :] for t in others))


LONG = Case("1x8x2048 D128", 1, 8, 2048, 128, passes=FORWARD, dtypes=TYPES)
WINDOW = Case("1x4x8192", 1, 4, 8192, causal=True, dtypes=TYPES)
DECODE = Case("decode GQA 32:8 x 4k D128", 1, 32, 1, 128, 4096, 8, passes=FORWARD, dtypes=TYPES)
OPTIONS = {
    "window 256": Option(WINDOW, window(), {"forward": 1 / 12, "backward": 1 / 9}),
    "window 256, offset 37": Option(WINDOW, window(query_offset=torch.tensor(37)), 1 / 10),
    "soft cap": Option(LONG, lambda case: {"softcap": SOFTCAP}, {"f32": 1.1, "bf16": 1.15}),
    "ALiBi": Option(LONG, lambda case: {"alibi_slopes": torch.rand(case.heads) / 8}, 1.1),
    "sinks": Option(LONG, lambda case: {"sinks": torch.randn(case.heads)}, 1.02),
    "half of the keys": Option(LONG, lambda case: {"key_lengths": torch.tensor(1024)}, 0.55),
    "half of a cache": Option(
        DECODE, lambda case: {"key_lengths": torch.tensor(2048)}, 1.02, first_half
    ),
}


def flex(tensors: Tensors) -> Callable[[], Tensor]:
    """FlexAttention with the soft cap; compiled in the first call."""
    from torch.nn.attention.flex_attention import flex_attention

    def cap(score: Tensor, *_: Tensor) -> Tensor:
        return SOFTCAP * torch.tanh(score / SOFTCAP)

    compiled = torch.compile(flex_attention)

    def run() -> Tensor:
        with torch.inference_mode():
            return compiled(*tensors, score_mod=cap)

    return run


def bench_options(
    console: Console, options: dict[str, Option], seconds: float, wanted: str, with_flex: bool
) -> list[dict[str, Any]]:
    jobs = [
        (name, which, dtype)
        for name, option in options.items()
        for _, which, dtype in jobs_of([option.case], "")
        if wanted in f"{name} {which} {dtype}"
    ]
    rows = []
    for name, which, dtype in track(jobs, description="options", console=console):
        option = options[name]
        torch.manual_seed(0)
        tensors, plain = option.case.inputs(DTYPES[dtype])
        given = {"enable_gqa": True, **option.options(option.case)}
        functions = [
            run_of(torch_attn.sdpa, tensors, given, which),
            run_of(torch.ops.attn.sdpa, option.instead(tensors), plain, which),
        ]
        if with_flex and "softcap" in given:
            functions.append(flex(tensors))
        ours, instead, *other = alternate(functions, seconds)
        rows.append(
            {
                "option": name,
                "case": option.case.name,
                "pass": which,
                "dtype": dtype,
                "ours_ms": ours.median * 1e3,
                "instead_ms": instead.median * 1e3,
                "of_instead": ours.median / instead.median,
                "at_most": option.bound(which, dtype),
                "spread": max(ours.spread, instead.spread),
            }
        )
        if other:
            rows[-1]["flex_ms"] = other[0].median * 1e3
    return rows


def options_table(rows: list[dict[str, Any]], title: str) -> Table:
    table = Table(title=title)
    for heading in ("option", "shape", "pass", "dtype"):
        table.add_column(heading)
    for heading in ("attn ms", "instead ms", "of it", "at most", "spread", "FlexAttention ms"):
        table.add_column(heading, justify="right")
    for r in rows:
        at_most = r["at_most"]  # None: there is no bound
        color = "green" if at_most is None or r["of_instead"] <= at_most else "red"
        table.add_row(
            *(r[name] for name in ("option", "case", "pass", "dtype")),
            f"{r['ours_ms']:.3f}",
            f"{r['instead_ms']:.3f}",
            f"[{color}]{r['of_instead']:.3f}[/]",
            "" if at_most is None else f"{at_most:.3f}",
            f"{r['spread']:.0%}",
            f"{r['flex_ms']:.3f}" if "flex_ms" in r else "",
        )
    return table
