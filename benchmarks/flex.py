"""Functions of the pair, against the same call without one, or what stands in their place.

Rows "training" are forward and backward together, beside the attention of transformers' eager
models, without projections. Compiled FlexAttention, which has no backward on a CPU, stands beside
some forwards where there is time to compile it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from common import DTYPES, alternate
from rich.console import Console
from rich.progress import track
from torch import Tensor

import torch_attn
from torch_attn import mods

HEADS, LENGTH, HEAD_DIM = 12, 2048, 64
Call = Callable[..., Tensor]


@dataclass(frozen=True)
class Job:
    """A call of flex_attention whose function captures tensors, and the call beside it."""

    ours: Call  # of query, key, value and what is captured
    instead: Call  # of query, key and value, or of all that `ours` takes
    captured: tuple[Tensor, ...] = ()
    shape: tuple[int, int, int, int] = (1, HEADS, LENGTH, LENGTH)  # batch, heads, queries, keys
    key_heads: int = HEADS
    eager: bool = False  # `instead` takes all that `ours` takes
    flex: Callable[..., Any] | None = None  # makes the score_mod for compiled FlexAttention


def learned(*sizes: int) -> Tensor:
    return torch.randn(*sizes, requires_grad=True)


def scored(
    make: Callable[..., Any], *captured: Tensor, scale: float | None = None, **more: Any
) -> Job:
    """A job whose score_mod `make` makes from the captured tensors, beside the plain call."""
    options: dict[str, Any] = {"scale": scale, "enable_gqa": True}

    def ours(q: Tensor, k: Tensor, v: Tensor, *own: Tensor) -> Tensor:
        return torch_attn.flex_attention(q, k, v, make(*own), **options)

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch_attn.sdpa(q, k, v, **options)

    return Job(ours, plain, captured, **more)


def shown(mask_mod: Any, instead: Call, length: int = LENGTH) -> Job:
    def ours(*tensors: Tensor) -> Tensor:
        return torch_attn.flex_attention(*tensors, None, mask_mod)

    return Job(ours, instead, shape=(1, HEADS, length, length))


def documents() -> Job:
    lengths = torch.linspace(128, 1000, 16).long()
    ids = torch.repeat_interleave(torch.arange(16), lengths)
    starts, most = F.pad(lengths.cumsum(0), (1, 0)), int(lengths.max())

    def packed(*tensors: Tensor) -> Tensor:
        tokens = (x.squeeze(0).transpose(0, 1) for x in tensors)
        output = torch_attn.varlen_attn(*tokens, starts, starts, most, most)
        return output.transpose(0, 1).unsqueeze(0)

    return shown(mods.documents(ids), packed, len(ids))


def natten(side: int = 64, window: int = 13) -> Job:
    mask_mod = mods.neighbourhood((side, side), (window, window))
    place = torch.arange(side * side)
    zero = torch.tensor(0)
    mask = mask_mod(zero, zero, place[:, None], place)
    return shown(mask_mod, lambda *x: torch_attn.sdpa(*x, attn_mask=mask), side * side)


def twenty(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """20 operations of the pair. With few keys, Python and the operator take most of the time."""
    x = score * 0.5 + torch.tanh(score / 3) * 3
    y = (x - 1).square() + x
    z = torch.where(y < x, y * 2, y + 1).exp().log1p()
    return torch.maximum(z * 1.5 - 0.25, z.abs().sqrt() / 7)


def eager_t5(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    place = torch.arange(q.size(2))
    distance = place - place[:, None]
    size = distance.abs()
    far = 8 + (size.float() / 8).clamp(min=1).log().div(torch.tensor(16.0).log()).mul(8).long()
    bucket = torch.where(distance > 0, 16, 0) + torch.where(size < 8, size, far.clamp(max=15))
    scores = q @ k.transpose(-1, -2) + table[bucket].permute(2, 0, 1)
    return scores.float().softmax(-1).type_as(scores) @ v


def eager_deberta(q: Tensor, k: Tensor, v: Tensor, c2p: Tensor, p2c: Tensor) -> Tensor:
    place, radius = torch.arange(q.size(2)), c2p.size(3) // 2
    at = (place[:, None] - place + radius).clamp(0, 2 * radius - 1).expand(1, HEADS, -1, -1)
    scores = q @ (k.transpose(-1, -2) * 192**-0.5)
    scores = scores + c2p.gather(-1, at)
    scores = scores + p2c.gather(-1, at.transpose(-1, -2)).transpose(-1, -2)
    return scores.softmax(-1) @ v


def jobs() -> dict[str, tuple[Callable[[], Job], dict[str, float]]]:
    """Each job by name, and the most that it should take: by dtype and pass, or of all."""
    H, L = HEADS, LENGTH

    def four(a: float, b: float, c: float, d: float) -> dict[str, float]:
        return {"f32 forward": a, "f32 backward": b, "bf16 forward": c, "bf16 backward": d}

    def both(f32: float, bf16: float) -> dict[str, float]:
        return four(f32, f32, bf16, bf16)

    def alibi(slopes: Tensor) -> Any:
        return mods.alibi(slopes)

    def t5(length: int, **more: Any) -> Job:
        return scored(mods.t5, learned(32, H), scale=1.0, shape=(1, H, length, length), **more)

    def deberta(most: int | None, length: int = L) -> Job:
        def make(*own: Tensor) -> Any:
            return mods.deberta(*own, max_distance=most)

        own = (learned(1, H, length, 512), learned(1, H, length, 512))
        return scored(make, *own, scale=192**-0.5, shape=(1, H, length, length))

    def beside(job: Job, eager: Call) -> Job:
        return Job(job.ours, eager, job.captured, job.shape, eager=True)

    decode = (1, H, 1, 4096)
    return {
        "ALiBi": (
            lambda: scored(alibi, torch.rand(H) / 8, flex=alibi),
            four(1.05, 1.03, 1.08, 1.05),
        ),
        "soft cap": (lambda: scored(lambda: mods.softcap(50.0)), four(1.2, 1.1, 1.35, 1.18)),
        "T5": (lambda: t5(L, flex=mods.t5), both(1.06, 1.09) | {"bf16 backward": 1.1}),
        "distances": (
            lambda: scored(mods.distances, learned(H, 2 * L + 1)),
            both(1.06, 1.09) | {"bf16 backward": 1.1},
        ),
        "two axes": (
            lambda: scored(mods.two_axes, learned(1, H, L, 32), learned(1, H, L, 64)),
            both(1.08, 1.15),
        ),
        "DeBERTa": (lambda: deberta(None), four(1.2, 1.25, 1.35, 1.4)),
        "DeBERTa, log buckets": (lambda: deberta(512), four(1.35, 1.5, 1.65, 1.8)),
        "causal": (
            lambda: shown(mods.causal, lambda *x: torch_attn.sdpa(*x, is_causal=True)),
            both(1.01, 1.01),
        ),
        "16 documents": (documents, both(1.15, 1.2)),
        "neighbourhood 13 of 64 x 64": (natten, both(1.02, 1.02)),
        "T5, L = 512, eager": (lambda: beside(t5(512), eager_t5), {"f32": 0.5, "bf16": 0.4}),
        "DeBERTa, L = 512, eager": (
            lambda: beside(deberta(None, 512), eager_deberta),
            {"f32": 0.5, "bf16": 0.4},
        ),
        "T5, L = 128": (lambda: t5(128), {}),
        "20 operations, L = 8": (lambda: scored(lambda: twenty, shape=(1, H, 8, 8)), {}),
        "ALiBi, 12:3 heads": (lambda: scored(alibi, torch.rand(H) / 8, key_heads=3), {}),
        "T5, decoding": (
            lambda: scored(lambda w: mods.t5(w, bidirectional=False), learned(32, H), shape=decode),
            {},
        ),
    }


def timed(call: Call, tensors: list[Tensor], which: str, gradient: Tensor) -> Callable[[], Any]:
    """One forward, one backward, or both ("training")."""
    if which == "forward":

        def forward() -> Tensor:
            with torch.no_grad():
                return call(*tensors)

        return forward
    inputs = [x for x in tensors if x.requires_grad]
    if which == "backward":
        output = call(*tensors)
        return lambda: torch.autograd.grad(output, inputs, gradient, retain_graph=True)
    return lambda: torch.autograd.grad(call(*tensors), inputs, gradient)


def compiled_flex(make: Callable[..., Any], tensors: list[Tensor]) -> Callable[[], Any]:
    from torch.nn.attention.flex_attention import flex_attention

    compiled = torch.compile(flex_attention)
    query, key, value, *own = (x.detach() for x in tensors)
    score_mod = make(*own)
    return lambda: compiled(query, key, value, score_mod)


def bench_flex(
    console: Console, seconds: float, wanted: str, with_flex: bool
) -> list[dict[str, Any]]:
    """A row for each function, pass and dtype, with the columns that options_table() prints."""
    wanted_jobs = [
        (name, which, dtype)
        for name in jobs()
        for which in (("training",) if "eager" in name else ("forward", "backward"))
        for dtype in ("f32", "bf16")
        if wanted in f"flex {name} {which} {dtype}"
        and (name, which) != ("T5, decoding", "backward")
    ]
    rows = []
    for name, which, dtype in track(wanted_jobs, description="functions", console=console):
        torch.manual_seed(0)
        make, at_most = jobs()[name]
        job = make()
        batch, heads, queries, keys = job.shape
        sizes = ((heads, queries), (job.key_heads, keys), (job.key_heads, keys))
        x = [torch.randn(batch, *s, HEAD_DIM, dtype=DTYPES[dtype]) for s in sizes]
        x = [t.requires_grad_() for t in x]
        own = [
            t.to(DTYPES[dtype]).detach().requires_grad_() if job.eager else t for t in job.captured
        ]
        gradient = torch.randn_like(x[0])
        functions = [
            timed(job.ours, x + own, which, gradient),
            timed(job.instead, x + own if job.eager else x, which, gradient),
        ]
        if with_flex and job.flex and which == "forward":
            functions.append(compiled_flex(job.flex, x + own))
        ours, instead, *other = alternate(functions, seconds)
        rows.append(
            {
                "option": name,
                "case": "x".join(map(str, (batch, heads, queries))) + f" S{keys}",
                "pass": which,
                "dtype": dtype,
                "ours_ms": ours.median * 1e3,
                "instead_ms": instead.median * 1e3,
                "of_instead": ours.median / instead.median,
                "at_most": at_most.get(f"{dtype} {which}", at_most.get(dtype)),
                "spread": max(ours.spread, instead.spread),
            }
        )
        if other:
            rows[-1]["flex_ms"] = other[0].median * 1e3
    return rows
