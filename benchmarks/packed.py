"""Packed sequences and pages, and what invariance costs: ``python benchmarks/packed.py``.

Packed: GFLOP/s over the pairs that a causal call shows, divided by the rate of a dense call with
about as many pairs and texts of length 1024. Also the times of a Python loop over the texts, and of
the built-in over the padded texts, divided by ours. Short: texts of one length packed beside the
same texts as a dense batch, 12 heads without causality; `dense_of_add` divides the dense batch's
time by the time of adding query, key and value into one tensor, which reads and writes the same
bytes. Pages: the rate of decoding from shuffled pages
divided by the rate from keys in a row. Invariance: the time with it divided by the time without.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import DTYPES, about, alternate, write
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

import torch_attn

HEADS, HEAD_DIM, DENSE = 8, 64, 1024
LENGTHS = {
    "32 of 16 ... 2048": [int(16 * 2 ** (7 * (5 * i % 32) / 31)) for i in range(32)],
    "one of 4096, 31 of 64": [4096, *[64] * 31],
    "512 of 16": [16] * 512,
}
SHORT = ((512, 16), (256, 32), (64, 128))  # texts, tokens of each
GROUPS = ((8, 8, 64), (32, 8, 128))  # heads, key heads, head_dim
PAGES = (16, 64, 128)


def step(call: Callable[..., Tensor], tensors: list[Tensor]) -> Callable[[], Any]:
    """The call, and its backward where the tensors require a gradient."""

    def run() -> None:
        output = call(*tensors)
        if output.requires_grad:
            torch.autograd.grad(output, tensors, torch.ones_like(output))

    return run


def packed(
    lengths: list[int], dtype: torch.dtype, seconds: float, training: bool
) -> dict[str, Any]:
    pairs = sum(n * (n + 1) / 2 for n in lengths)
    batch = max(1, round(sum(n * n for n in lengths) / DENSE**2))
    starts = F.pad(torch.tensor(lengths).cumsum(0), (1, 0))
    most, sizes = max(lengths), (HEADS, HEAD_DIM)

    def made(*shape: int) -> list[Tensor]:
        return [torch.randn(*shape, *sizes, dtype=dtype, requires_grad=training) for _ in "qkv"]

    def call(*tensors: Tensor) -> Tensor:
        return torch_attn.varlen_attn(*tensors, starts, starts, most, most, window_size=(-1, 0))

    def loop(*tensors: Tensor) -> Tensor:
        texts = zip(*(t.split(lengths) for t in tensors), strict=True)
        outputs = [torch_attn.sdpa(*(t.transpose(0, 1) for t in x), is_causal=True) for x in texts]
        return torch.cat([o.transpose(0, 1) for o in outputs])

    def padded(*tensors: Tensor) -> Tensor:
        texts = [torch.nn.utils.rnn.pad_sequence(t.split(lengths), True) for t in tensors]
        return F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in texts), is_causal=True)

    def dense(*tensors: Tensor) -> Tensor:
        return torch_attn.sdpa(*(t.transpose(1, 2) for t in tensors), is_causal=True)

    tensors = made(sum(lengths))
    functions = [step(f, tensors) for f in (call, loop, padded)]
    ours, *others, whole = alternate([*functions, step(dense, made(batch, DENSE))], seconds)
    dense_pairs = batch * DENSE * (DENSE + 1) / 2
    loop_time, padded_time = (other.median / ours.median for other in others)
    return {
        "ms": ours.median * 1e3,
        "of_dense": (pairs / ours.median) / (dense_pairs / whole.median),
        "loop": loop_time,
        "builtin_padded": padded_time,
        "spread": max(t.spread for t in (ours, whole, *others)),
    }


def short(texts: int, length: int, dtype: torch.dtype, seconds: float) -> dict[str, Any]:
    query, key, value = torch.randn(3, texts * length, 12, HEAD_DIM).to(dtype).unbind()
    starts, added = torch.arange(texts + 1) * length, torch.empty_like(query)
    batch = [t.unflatten(0, (texts, length)).transpose(1, 2) for t in (query, key, value)]

    def add() -> Tensor:
        return torch.add(torch.add(query, key, out=added), value, out=added)

    def dense() -> Tensor:
        return torch_attn.sdpa(*batch)

    def call() -> Any:
        return torch_attn.varlen_attn(query, key, value, starts, starts, length, length)

    timings = alternate([add, dense, call], seconds)
    of_add, of_dense, ours = (t.median * 1e3 for t in timings)
    return {
        "ms": ours,
        "packed_of_dense": ours / of_dense,
        "dense_of_add": of_dense / of_add,
        "spread": max(t.spread for t in timings),
    }


def decoding(
    heads: int, key_heads: int, head_dim: int, dtype: torch.dtype, seconds: float
) -> dict[str, Any]:
    texts, keys = 16, 2048
    query = torch.randn(texts, heads, head_dim, dtype=dtype)
    key, value = torch.randn(2, texts * keys, key_heads, head_dim, dtype=dtype)
    starts, used = torch.arange(texts + 1), torch.full((texts,), keys)

    def call(key: Tensor, value: Tensor, of_keys: Tensor | None, **pages: Tensor) -> Tensor:
        return torch_attn.varlen_attn(
            *(query, key, value, starts, of_keys, 1, keys), enable_gqa=True, **pages
        )

    def paged(size: int) -> Callable[[], Any]:
        order = torch.randperm(texts * keys // size)
        pools = [t.view(-1, size, key_heads, head_dim)[order].clone() for t in (key, value)]
        table = order.argsort().view(texts, -1).int()
        return lambda: call(*pools, None, seqused_k=used, block_table=table)

    whole = [t.view(texts, keys, key_heads, head_dim).transpose(1, 2) for t in (key, value)]

    def dense() -> Tensor:
        return torch_attn.sdpa(query[:, :, None], *whole, enable_gqa=True)

    row = lambda: call(key, value, starts * keys)  # noqa: E731
    functions = [row, *map(paged, PAGES), dense, torch_attn.invariant()(dense)]
    in_a_row, *rest = alternate(functions, seconds)
    *of_pages, plain, invariant = rest
    return {
        "ms": in_a_row.median * 1e3,
        **{f"page_{n}": in_a_row.median / t.median for n, t in zip(PAGES, of_pages, strict=True)},
        "invariant": invariant.median / plain.median,
        "spread": max(t.spread for t in (in_a_row, *rest)),
    }


def table_of(title: str, rows: list[dict[str, Any]]) -> Table:
    table = Table(title=title)
    for name in rows[0]:
        table.add_column(name, justify="left" if isinstance(rows[0][name], str) else "right")
    for row in rows:
        table.add_row(*(x if isinstance(x, str) else f"{x:.2f}" for x in row.values()))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["f32", "bf16"])
    parser.add_argument("--seconds", type=float, default=1.0, help="for one number, default 1")
    parser.add_argument("--json", type=Path, help="also write the results here")
    arguments = parser.parse_args()
    console = Console()
    console = Console(width=max(console.width, 120))
    about_it = about()
    console.print(", ".join(f"{k} {v}" for k, v in about_it.items()))
    torch.manual_seed(0)
    of_packed, of_short, of_pages = [], [], []
    for dtype in track(arguments.dtype, description="dtypes", console=console):
        given = (DTYPES[dtype], arguments.seconds)
        for name, lengths in LENGTHS.items():
            for training in (False, True):
                label = {"texts": name, "pass": "training" if training else "forward"}
                found = packed(lengths, *given, training)
                of_packed.append({**label, "dtype": dtype, **found})
        for sizes in SHORT:
            label = {"texts": "{} of {}".format(*sizes), "dtype": dtype}
            of_short.append(label | short(*sizes, *given))
        for group in GROUPS:
            label = "{}:{} D{}".format(*group)
            of_pages.append({"heads": label, "dtype": dtype, **decoding(*group, *given)})
    console.print(table_of("Packed, causal, 8 heads, D 64", of_packed))
    console.print(table_of("Short, 12 heads, D 64", of_short))
    console.print(table_of("Decoding 16 texts of 2048 keys", of_pages))
    if arguments.json:
        tables = {"packed": of_packed, "short": of_short, "pages": of_pages}
        write({"machine": about_it, **tables}, arguments.json)
        console.print(f"written: {arguments.json}")


if __name__ == "__main__":
    main()
