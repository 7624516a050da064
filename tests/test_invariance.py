"""Bits that do not depend on the batch nor, on request, on how many queries a call has."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_attn
from helpers import DTYPES, bits_promised, in_fresh_process

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
@pytest.mark.parametrize("key_heads", [4, 2])
def test_chunks_of_several_texts(key_heads: int) -> None:
    """Whole texts, as in training; chunks of any size; token by token; alone or among others."""
    query = torch.randn(3, 4, 150, 16, requires_grad=True)
    key, value = torch.randn(2, 3, key_heads, 150, 16)

    def attend(texts: slice, first: int, last: int) -> Tensor:
        given = (query[texts, :, first:last], key[texts, :, :last], value[texts, :, :last])
        return torch_attn.sdpa(*given, is_causal=True, query_offset=first, enable_gqa=True)

    with torch_attn.invariant():
        whole = attend(slice(3), 0, 150)
    with torch_attn.invariant(), torch.no_grad():
        for chunks in ([150], [1] * 150, [64, 64, 22], [7, 1, 100, 42], [149, 1]):
            ends = [0, *itertools.accumulate(chunks)]
            for texts in (slice(3), slice(1, 2)):
                parts = [attend(texts, *cut) for cut in itertools.pairwise(ends)]
                assert torch.equal(torch.cat(parts, 2), whole[texts]), chunks


@pytest.mark.usefixtures("device")
def test_bits_differ_without_invariant() -> None:
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
