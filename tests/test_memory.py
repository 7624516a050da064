"""Memory: nothing of L x S elements is allocated, the peak grows linearly, nothing is over-read."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_attn
from _cases import LENGTHS
from _memory import GuardedMemory, LargestAllocation, resident
from _second_order import directions, over_forward, over_reverse
from helpers import (
    DTYPES,
    Inputs,
    Sdpa,
    cpu_capability_set_to,
    double_backward,
    in_fresh_process,
    make_grad_output,
    make_inputs,
    results,
)

# Every option whose memory is promised to be O(L + S): sizes beside L and S, options.
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "causal": ({}, {"is_causal": True}),
    "mask of keys": ({"mask": (1, "S")}, {}),
    "mask of queries": ({"mask": ("L", 1)}, {"is_causal": True}),
    "one number as mask": ({"mask": (1, 1)}, {}),
    "bool mask of keys": ({"mask": (1, "S"), "kind": "bool"}, {}),
    "dropout": ({}, {"dropout_p": 0.5}),
    "value size": ({"Ev": 24}, {}),
    "grouped heads": ({"heads": (4, 2, 1), "E": 8}, {"enable_gqa": True}),
    "2-D": ({"batch": None}, {}),
    "5-D": ({"batch": (1, 1)}, {"scale": -0.1}),
    "all": (
        {"heads": (2, 1, 1), "Ev": 24, "mask": (1, "S")},
        {"dropout_p": 0.5, "is_causal": True, "enable_gqa": True, "scale": 0.2},
    ),
}  # fmt: skip


def make_option(option: str, L: int, S: int, dtype: torch.dtype = torch.float32) -> Inputs:
    sizes = {"batch": (), "heads": 1, **OPTIONS[option][0]}
    if "mask" in sizes:
        sizes["mask"] = tuple({"L": L, "S": S}.get(n, n) for n in sizes["mask"])
    return make_inputs(L, S, **sizes, dtype=dtype)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_mask_of_all_scores(kind: str) -> None:
    """A mask that is itself L x S is not copied; only its gradient is as large."""
    inputs = make_inputs(512, 512, batch=(), heads=1, mask=(512, 512), kind=kind).require_grad()
    with torch.no_grad(), LargestAllocation() as largest:
        torch_attn.sdpa(*inputs)
    assert largest.elements < 512 * 512 // 2
    gradients = [t for t in inputs[:3] if t is not None]
    with LargestAllocation() as largest:
        torch.autograd.grad(torch_attn.sdpa(*inputs).sum(), gradients)
    assert largest.elements < 512 * 512 // 2


def gradients(sdpa: Sdpa, x: Inputs, u: Tensor, t: Inputs, **options: Any) -> dict[str, Tensor]:
    return results(sdpa, x, u, **options)


def peak_growth(option: str, derive: Callable[..., Any], *lengths: int) -> list[int]:
    """How far resident memory rises where derivatives are computed, at each length."""
    torch.set_num_threads(2)
    growth = []
    for length in (64, *lengths):
        x, options = make_option(option, length, length), OPTIONS[option][1]
        u, t = make_grad_output(x, **options), directions(x)
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        before = resident("VmRSS")
        derive(torch_attn.sdpa, x, u, t, **options)
        growth.append(resident("VmHWM") - before)
        del x, u, t
    return growth[1:]


@pytest.mark.parametrize("option", OPTIONS)
def test_peak_grows_linearly(option: str) -> None:
    """From L = S = 2048 to 16384: the scores would grow 64-fold, to 1 GiB."""
    small, large = in_fresh_process(peak_growth, option, gradients, 2048, 16384)
    assert large <= 16 * small + (16 << 20), (small, large)
    assert large <= 96 << 20, (small, large)


@pytest.mark.long
@pytest.mark.parametrize("derive", [double_backward, over_forward, over_reverse])
@pytest.mark.parametrize("option", ["causal", "all"])
def test_peak_of_second_derivatives_grows_linearly(option: str, derive: Callable[..., Any]) -> None:
    """From L = S = 4096 to 8192; the scores of one head are 256 MiB then."""
    small, large = in_fresh_process(peak_growth, option, derive, 4096, 8192)
    assert large <= 2 * small + (24 << 20), (small, large)
    assert large <= 64 << 20, (small, large)


def decode_growth() -> int:
    """One query in 32 heads, 16384 keys in one: key and value are 4 MiB, for every head 128 MiB."""
    inputs = make_inputs(1, 16384, 64, batch=(), heads=(32, 1, 1)).require_grad()
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    torch_attn.sdpa(*inputs, enable_gqa=True).sum().backward()
    return resident("VmHWM") - before


def test_grouped_keys_are_not_expanded() -> None:
    assert in_fresh_process(decode_growth) < 48 << 20


# --- reads beyond the end -------------------------------------------------------------------------


def guarded(tensors: Inputs, memories: Iterable[GuardedMemory]) -> Inputs:
    pairs = zip(memories, tensors, strict=True)
    return Inputs(*(None if t is None else memory.tensor(t) for memory, t in pairs))


def run_guarded(capability: str, at_end: bool) -> int:
    """Derivatives of many sizes between forbidden pages; the number of calls survived."""
    memories = [GuardedMemory(1 << 19, at_end) for _ in range(9)]
    calls = 0
    with cpu_capability_set_to(capability):
        for n, L in enumerate(LENGTHS):
            S = LENGTHS[(4 * n + 7) % len(LENGTHS)]
            masks = ((1, S), "bool"), ((L, S), "float")
            sizes = (1, 3), (7, 17), (33, 20)
            for dtype, (E, Ev), (mask, kind) in itertools.product(DTYPES, sizes, masks):
                x = make_inputs(L, S, E, Ev, batch=(), heads=1, mask=mask, kind=kind, dtype=dtype)
                u, t = memories[8].tensor(make_grad_output(x)), directions(x)
                x, t = guarded(x, memories[:4]), guarded(t, memories[4:8])
                for options in ({}, {"is_causal": True, "dropout_p": 0.1}):
                    results(torch_attn.sdpa, x, u, **options)
                over_reverse(torch_attn.sdpa, x, u, t)
                calls += 3
    return calls


@pytest.mark.long
@pytest.mark.parametrize("at_end", [True, False], ids=["after", "before"])
def test_nothing_is_read_beyond(cpu_capability: str, at_end: bool) -> None:
    """A read outside of an input, even one whose value is not used, ends the process."""
    calls = in_fresh_process(run_guarded, cpu_capability, at_end)
    assert calls == len(LENGTHS) * len(DTYPES) * 3 * 2 * 3


def read_beyond() -> None:
    torch.frombuffer(GuardedMemory(64, at_end=True).map, dtype=torch.uint8).sum()


@pytest.mark.long
def test_a_read_beyond_would_be_noticed() -> None:
    with pytest.raises(Exception, match="terminated abruptly"):
        in_fresh_process(read_beyond)
