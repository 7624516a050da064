"""Tiles of scores that a mask hides wholly: of their keys and values nothing is read."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

import torch_attn
from _memory import in_guarded_memory
from _variants import ROOT, mutable_sources
from helpers import (
    CPU_CAPABILITIES,
    DTYPES,
    INF,
    NAN,
    Inputs,
    assert_same_bits,
    bits_promised,
    cpu_capability_set_to,
    in_fresh_process,
    make_inputs,
    randn,
    results,
)

TILE = 64


def as_mask(visible: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    if kind == "bool":
        return visible
    if kind == "bool, keys apart":  # not in the one layout that is read as bits
        return visible.repeat_interleave(2, -1)[..., ::2]
    return torch.randn(visible.shape).to(dtype).masked_fill(~visible, -INF)


KINDS = ("bool", "bool, keys apart", "-inf")


def derivatives(inputs: Inputs, grad_output: Tensor, direction: Inputs) -> dict[str, Tensor]:
    """The output, the gradients, the derivatives of both along a direction."""

    def gradients(*leaves: Tensor) -> tuple[Tensor, ...]:
        output, pullback = torch.func.vjp(
            lambda q, k, v: torch_attn.sdpa(q, k, v, inputs.attn_mask), *leaves
        )
        return (output, *pullback(grad_output))

    point, tangents = torch.func.jvp(gradients, inputs[:3], direction[:3])
    names = ("output", "grad_query", "grad_key", "grad_value")
    return {
        **dict(zip(names, point, strict=True)),
        **{f"d {name}": t for name, t in zip(names, tangents, strict=True)},
    }


@pytest.mark.regression
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("L", "kind", "dtype"),
    [
        (L, KINDS[(i + j) % 3], dtype)
        for i, L in enumerate((1, 5, 70, 300))
        for j, dtype in enumerate(DTYPES)
    ],
)
def test_nothing_of_hidden_tiles_reaches_a_result(L: int, kind: str, dtype: torch.dtype) -> None:
    """The same bits whatever is there; where the cache ends within a tile, its rest is finite."""
    S, used = 5 * TILE, 2 * TILE + 10
    inputs = make_inputs(L, S, 16, dtype=dtype)
    mask = as_mask(torch.arange(S).expand(L, S) < used, kind, dtype)
    inputs = inputs._replace(attn_mask=mask)
    direction = make_inputs(L, S, 16, dtype=dtype)
    grad_output = randn(inputs.query.shape, dtype)
    clean = derivatives(inputs, grad_output, direction)

    def spoilt(x: Inputs) -> Inputs:
        key, value = x.key.clone(), x.value.clone()
        key[..., 3 * TILE :, :] = value[..., 3 * TILE :, :] = NAN
        return x._replace(key=key, value=value)

    dirty = derivatives(spoilt(inputs), grad_output, spoilt(direction))
    assert all(t.isfinite().all() for t in clean.values())
    assert_same_bits(dirty, clean)
    assert (clean["grad_value"][..., used:, :] == 0).all()
    if L <= 8:  # the kernel for decoding
        with torch.no_grad():
            assert_same_bits(
                results(torch_attn.sdpa, spoilt(inputs)), results(torch_attn.sdpa, inputs)
            )


@pytest.mark.regression
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_documents_have_the_bits_that_they_have_alone(
    kernels: str, kind: str, dtype: torch.dtype
) -> None:
    """Several sequences in one, each seen by itself alone: a mask of blocks."""
    lengths = [4 * TILE, 3 * TILE, 5 * TILE]  # shorter ones of float16 go to no tiles of AMX
    document = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    mask = as_mask(document[:, None] == document, kind, dtype)
    inputs = make_inputs(len(document), len(document), 24, dtype=dtype)
    with bits_promised(kernels):
        packed = torch_attn.sdpa(*inputs._replace(attn_mask=mask))
        for d in range(3):
            own = document == d
            alone = inputs.map(lambda t, own=own: t[..., own, :])
            alone = alone._replace(attn_mask=mask[own][:, own])
            assert torch.equal(packed[..., own, :], torch_attn.sdpa(*alone))


def attend_to_guarded_memory(capability: str) -> None:
    """Runs in a process of its own, which a read beyond the keys in use ends."""
    S, used, E = 16 * TILE, 2 * TILE, 64
    visible = torch.arange(S) < used - 3
    torch.manual_seed(0)
    for dtype, kind, L in itertools.product(DTYPES, KINDS, (1, 70)):
        inputs = make_inputs(L, S, E, dtype=dtype)
        direction = make_inputs(L, S, E, dtype=dtype)
        point, along = (
            x._replace(
                key=in_guarded_memory(x.key, (used, used)),
                value=in_guarded_memory(x.value, (used, used)),
                attn_mask=as_mask(visible.expand(L, S), kind, dtype),
            )
            for x in (inputs, direction)
        )
        with cpu_capability_set_to(capability):
            torch_attn.sdpa(*point)
            computed = derivatives(point, randn(inputs.query.shape, dtype), along)
        assert all(t.isfinite().all() for t in computed.values())


@pytest.mark.regression
@pytest.mark.parametrize("cpu_capability", CPU_CAPABILITIES)
def test_keys_that_no_row_sees_are_not_read(cpu_capability: str) -> None:
    in_fresh_process(attend_to_guarded_memory, cpu_capability)


def test_the_guard_ends_a_process_that_reads_there() -> None:
    with pytest.raises(Exception, match="terminated abruptly"):
        in_fresh_process(read_guarded_memory)


def read_guarded_memory() -> float:
    return in_guarded_memory(torch.zeros(2, 1, 128, 64), (64, 63)).sum().item()


# What tests/cpu/count_tiles.cpp must see, beside nothing.
CHANGES = [
    ("core/score.h", "return «!common(visible_keys(s, queries), keys).empty()»;",
     "!keys.empty() || queries.empty() || s.keys < 0"),
    ("core/score.h", "{«larger(0, queries.first + s.first)»,", "0"),
    ("core/score.h", "«smaller(s.keys, queries.last - 1 + s.last)»", "s.keys"),
    ("core/geometry.h", "? kFar : «offset + right + 1»", "offset + right"),
    ("core/geometry.h", "kFar : «offset - left»", "offset - left - 1"),
    ("core/geometry.h", "«length_of(key_lengths, n, p.keys)», offset", "p.keys"),
    ("cpu/tiles/rows.inl", "= «seen.first» + split * p.keys_per_split", "0"),
]  # fmt: skip


@pytest.fixture(scope="module")
def count_tiles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("g++") is None:
        pytest.skip("not run: no g++")
    to = tmp_path_factory.mktemp("count_tiles")
    flags = ["-O1", "-std=c++20", "-Wall", "-Wextra", "-Werror", "-include", "mutation.h"]
    source, include = ROOT / "tests/cpu/count_tiles.cpp", f"-I{mutable_sources(to, CHANGES)}"
    subprocess.run(["g++", *flags, include, source, "-o", to / "program"], check=True)
    return to / "program"


@pytest.mark.parametrize("change", range(len(CHANGES) + 1))
def test_tiles_that_are_visited(change: int, count_tiles: Path) -> None:
    """Counts tiles in which some query sees some key; windows and offsets are of any size."""
    chosen = os.environ | {"ATTN_MUTATION": str(change)}
    printed = subprocess.run([count_tiles], env=chosen, capture_output=True, text=True).stdout
    assert printed.startswith("L " if change else "right\n"), printed


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_and_output_in_one_pass(dtype: torch.dtype) -> None:
    inputs = make_inputs(70, 3 * TILE, dtype=dtype)
    seen = Inputs(inputs.query, inputs.key[..., :TILE, :], inputs.value[..., :TILE, :])
    visible = (torch.arange(3 * TILE) < TILE).expand(70, -1)
    for tensor in (inputs.key, inputs.value):
        tensor[..., TILE:, :] = NAN
    output, weights = torch.ops.attn._sdpa_and_weights(*inputs[:3], visible)
    of_seen = torch.ops.attn._sdpa_and_weights(*seen[:3])
    torch.testing.assert_close(output, of_seen[0])  # by ATen's formula not to the bit
    torch.testing.assert_close(weights[..., :TILE], of_seen[1])
    assert not weights[..., TILE:].any()
