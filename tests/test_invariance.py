"""Bits that do not depend on the batch nor, on request, on how many queries a call has."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_attn
from helpers import DTYPES, SEED, bits_promised, in_fresh_process

SIZES = [
    # B, Hq, Hk, L, S
    (3, 4, 4, 1, 2100),
    (33, 4, 1, 1, 1100),
    (9, 1, 1, 7, 1100),
    (5, 8, 2, 64, 1024),
    (3, 2, 2, 300, 1100),
]


class Batch:
    """Texts with, if asked, lengths of their own."""

    def __init__(self, sizes: tuple[int, ...], dtype: torch.dtype, **options: Any) -> None:
        B, Hq, Hk, L, S = sizes
        self.tensors = [torch.randn(B, Hq, L, 64, dtype=dtype)]
        self.tensors += torch.randn(2, B, Hk, S, 64, dtype=dtype)
        self.options = options
        self.lengths = torch.tensor([random.Random(n).randint(1, S) for n in range(B)])

    def solve(self, rows: Any, *, with_lengths: bool) -> list[Tensor]:
        """Output without and with gradients recorded, and the gradients."""
        tensors = [t[rows].requires_grad_() for t in self.tensors]
        options = {"key_lengths": self.lengths[rows]} if with_lengths else {}
        options |= {**self.options, "enable_gqa": True}
        with torch.no_grad():
            plain = torch_attn.sdpa(*tensors, **options)
        output = torch_attn.sdpa(*tensors, **options)
        return [plain, output, *torch.autograd.grad(output.sum(), tensors)]

    def without_padding(self, n: int) -> Tensor:
        query, *keys = (t[n : n + 1] for t in self.tensors)
        keys = [t[:, :, : self.lengths[n]] for t in keys]
        return torch_attn.sdpa(query, *keys, **self.options, enable_gqa=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_entries_of_a_batch(sizes: tuple[int, ...], dtype: torch.dtype, kernels: str) -> None:
    """Alone, in other places and with other lengths beside them; outputs and gradients."""
    with bits_promised(kernels):
        compare_entries(sizes, dtype)


def compare_entries(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    B, *_, L, S = sizes
    causal = {"is_causal": True, "query_offset": S - L}
    for with_lengths, options in ((False, causal), (True, {"window_size": (700, -1)})):
        batch, order = Batch(sizes, dtype, **options), torch.randperm(B)
        whole = batch.solve(slice(None), with_lengths=with_lengths)
        moved = batch.solve(order, with_lengths=with_lengths)
        for n in {0, B - 1}:
            alone = batch.solve(slice(n, n + 1), with_lengths=with_lengths)
            (place,) = (order == n).nonzero()[0].tolist()
            for one, in_batch, elsewhere in zip(alone, whole, moved, strict=True):
                assert torch.equal(one[0], in_batch[n])
                assert torch.equal(one[0], elsewhere[place])
            if with_lengths:
                assert torch.equal(batch.without_padding(n)[0], whole[0][n])


OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"window_size": (70, 0)},
    "window within a tile": {"window_size": (33, 0)},
    "cap, slopes and sinks": {"softcap": 2.0, "alibi_slopes": (4,), "sinks": (4,)},
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPTIONS)
def test_chunks_of_a_text(name: str, dtype: torch.dtype, kernels: str) -> None:
    """A text as a whole, whether gradients are recorded or not; chunks; tokens, from a cache.

    On a GPU, tensor cores compute what is in a row, and need not compute what is in pages.
    """
    near = {"rtol": 2**-6, "atol": 2**-6} if kernels == "cuda" and dtype.itemsize == 2 else None
    T, options = 1200, dict(OPTIONS[name])
    for term in ("alibi_slopes", "sinks"):
        if term in options:
            options[term] = torch.rand(options[term], dtype=dtype)
    for Hk, E in ((4, 64), (1, 24)):
        query = torch.randn(4, T, E, dtype=dtype)
        key, value = torch.randn(2, Hk, T, E, dtype=dtype)

        def rows(first: int, last: int, query=query, key=key, value=value) -> Tensor:
            given = (query[:, first:last], key[:, :last], value[:, :last])
            return torch_attn.sdpa(
                *given, is_causal=True, query_offset=first, enable_gqa=True, **options
            )

        with torch_attn.invariant():
            whole = rows(0, T)
            assert torch.equal(rows(0, T, query.clone().requires_grad_()), whole)
            cuts = [(t, t + 1) for t in (0, 1, 63, 64, 65, 500, 1023, 1024, T - 1)]
            for first, last in (*cuts, (0, 7), (7, 100), (100, 165), (900, T), (3, 70)):
                assert torch.equal(rows(first, last), whole[:, first:last]), (first, last)
            # many chunks of several texts in one call, and over pages
            starts = torch.tensor([0, 1, 8, 208])
            packed = torch.cat([query[:, 700:701], query[:, 20:27], query[:, 1000:]], 1)
            used = torch.tensor([701, 27, T])
            pool = [t.transpose(0, 1).view(T // 16, 16, Hk, E) for t in (key, value)]
            table = torch.arange(T // 16, dtype=torch.int32).expand(3, -1)
            window = (options.get("window_size", (-1, 0))[0], 0)
            output = torch_attn.varlen_attn(
                *(packed.transpose(0, 1), *pool, starts, None, 200, T),
                seqused_k=used,
                block_table=table,
                enable_gqa=True,
                **options | {"window_size": window},
            )
            expected = torch.cat([whole[:, 700:701], whole[:, 20:27], whole[:, 1000:]], 1)
            torch.testing.assert_close(
                output, expected.transpose(0, 1), **near or {"rtol": 0, "atol": 0}
            )


@pytest.mark.usefixtures("device")
def test_it_is_asked_for() -> None:
    """The case in which the bits differ without it, so that the tests above can fail."""
    query, key, value = torch.randn(3, 2, 2000, 64)

    def last() -> Tensor:
        return torch_attn.sdpa(query[:, -1:], key, value)

    with torch_attn.invariant():
        with torch_attn.invariant():
            pass
        whole = torch_attn.sdpa(query, key, value)[:, -1:]
        assert torch.equal(last(), whole)
    assert not torch.equal(last(), whole)
    assert torch.equal(torch_attn.invariant()(last)(), whole)
    compiled = torch.compile(torch_attn.invariant()(last), backend="eager", fullgraph=True)
    with pytest.raises(RuntimeError):
        compiled()


def test_where_a_graph_may_break() -> None:
    """It is on inside of a compiled function, and as it was afterwards."""

    def on() -> Any:
        return torch.ops.attn._invariant(0)

    def blocks(x: Tensor) -> tuple[Tensor, Any]:
        with torch_attn.invariant():
            return x * 2, on()

    before = on()
    for function in (torch_attn.invariant()(on), lambda: blocks(torch.ones(1))[1]):
        assert torch.compile(function, backend="eager")() == before + 1
        assert on() == before


@pytest.mark.parametrize(
    ("value", "expected"), [("1", "1"), ("0", "0"), ("", "0"), ("yes", 'ATTN_INVARIANT is "yes"')]
)
def test_environment(value: str, expected: str) -> None:
    command = [
        sys.executable,
        "-c",
        "import torch_attn, torch; print(torch.ops.attn._invariant(0))",
    ]
    result = subprocess.run(
        command, env={**os.environ, "ATTN_INVARIANT": value}, capture_output=True, text=True
    )
    assert expected in result.stdout + result.stderr


# --- Models ---------------------------------------------------------------------------------------


class RowByRow(nn.Linear):
    """A layer that keeps its bits: a matrix product has others for other numbers of rows."""

    def forward(self, x: Tensor) -> Tensor:
        rows = [F.linear(row, self.weight, self.bias) for row in x.reshape(-1, 1, x.shape[-1])]
        return torch.cat(rows).view(*x.shape[:-1], -1)


class Block(nn.Module):
    """A layer of a GPT or, with `llama`, of a Llama: rotary positions, groups, RMSNorm, SwiGLU."""

    def __init__(self, width: int, heads: int, llama: bool) -> None:
        super().__init__()
        self.heads, self.llama = heads, llama
        self.key_heads = heads // 2 if llama else heads
        dim = width // heads
        norm = nn.RMSNorm if llama else nn.LayerNorm
        self.norms = nn.ModuleList([norm(width), norm(width)])
        self.project = RowByRow(width, (heads + 2 * self.key_heads) * dim, bias=not llama)
        self.out = RowByRow(width, width, bias=not llama)
        self.up = RowByRow(width, 2 * width if llama else 4 * width, bias=not llama)
        self.down = RowByRow(width if llama else 4 * width, width, bias=not llama)

    def rotate(self, x: Tensor, first: int) -> Tensor:
        half = x.shape[-1] // 2
        angles = (first + torch.arange(x.shape[-2]))[:, None] / 100 ** (torch.arange(half) / half)
        a, b = x.chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def forward(self, x: Tensor, cache: list[Tensor], first: int) -> Tensor:
        B, L, width = x.shape
        numbers = self.project(self.norms[0](x)).view(B, L, -1, width // self.heads)
        sizes = (self.heads, self.key_heads, self.key_heads)
        query, key, value = (t.transpose(1, 2) for t in numbers.split(sizes, 2))
        if self.llama:
            query, key = self.rotate(query, first), self.rotate(key, first)
        cache[0], cache[1] = torch.cat([cache[0], key], 2), torch.cat([cache[1], value], 2)
        attended = torch_attn.sdpa(
            query, *cache, is_causal=True, query_offset=first, enable_gqa=True
        )
        x = x + self.out(attended.transpose(1, 2).reshape(B, L, width))
        hidden = self.up(self.norms[1](x))
        if self.llama:
            gate, hidden = hidden.chunk(2, -1)
            return x + self.down(F.silu(gate) * hidden)
        return x + self.down(F.gelu(hidden))


class Model(nn.Module):
    def __init__(self, llama: bool) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        self.embed = nn.Embedding(50, 64)
        self.blocks = nn.ModuleList([Block(64, 4, llama) for _ in range(2)])
        self.head = RowByRow(64, 50)

    def forward(self, tokens: Tensor, chunks: list[int]) -> Tensor:
        """The logits of texts [B, T] that come in chunks of these lengths, [B, T, 50]."""
        B = tokens.shape[0]
        caches = [[torch.zeros(B, b.key_heads, 0, 16) for _ in range(2)] for b in self.blocks]
        logits, first = [], 0
        for length in chunks:
            x = self.embed(tokens[:, first : first + length])
            for block, cache in zip(self.blocks, caches, strict=True):
                x = block(x, cache, first)
            logits.append(self.head(x))
            first += length
        return torch.cat(logits, 1)


@pytest.fixture
def invariant() -> Iterator[None]:
    with torch_attn.invariant():
        yield


@pytest.mark.usefixtures("device", "invariant")
@pytest.mark.parametrize("llama", [False, True], ids=["GPT", "Llama"])
def test_models(llama: bool) -> None:
    """Whole texts, as in training; chunks of any size; token by token; alone or among others."""
    model, tokens = Model(llama), torch.randint(50, (3, 150))
    whole = model(tokens, [150])
    assert whole.requires_grad
    with torch.no_grad():
        for chunks in ([150], [1] * 150, [64, 64, 22], [7, 1, 100, 42], [149, 1]):
            assert torch.equal(model(tokens, chunks), whole), chunks
            assert torch.equal(model(tokens[1:2], chunks), whole[1:2]), chunks


def count_threads() -> int:
    """Entered by one thread, it counts for those that others start."""
    import threading

    found = []
    with torch_attn.invariant():
        thread = threading.Thread(target=lambda: found.append(torch.ops.attn._invariant(0)))
        thread.start()
        thread.join()
    return found[0]


def test_all_threads() -> None:
    assert in_fresh_process(count_threads) == 1
