"""Second derivatives and forward mode take memory O(L + S), and read only their tensors'."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import torch_attn
from _cases import LENGTHS
from _memory import GuardedMemory, resident
from _second_order import (
    directions,
    double_backward,
    make_grad_output,
    over_forward,
    over_reverse,
)
from helpers import (
    DTYPES,
    Inputs,
    cpu_capability_set_to,
    in_fresh_process,
    make_inputs,
)
from test_memory import OPTIONS, make_option

# of PyTorch's, by its own forward mode
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")


def run_guarded(capability: str, at_end: bool) -> int:
    """Second derivatives of many sizes between forbidden pages; the number of calls survived."""
    torch.set_num_threads(1)
    memories = [GuardedMemory(1 << 18, at_end) for _ in range(9)]
    calls = 0
    with cpu_capability_set_to(capability):
        for L, S in zip(LENGTHS, [*LENGTHS[7:], *LENGTHS[:7]], strict=True):
            for dtype in DTYPES:
                for E, Ev in ((1, 3), (7, 17), (33, 20)):
                    x = make_inputs(L, S, E, Ev, batch=(), heads=1, mask=(L, S), dtype=dtype)
                    u, t = make_grad_output(x), directions(x)
                    placed = [m.tensor(a) for m, a in zip(memories, (*x, *t, u), strict=True)]
                    over_reverse(
                        torch_attn.sdpa, Inputs(*placed[:4]), placed[8], Inputs(*placed[4:8])
                    )
                    calls += 1
    return calls


@pytest.mark.parametrize("at_end", [True, False], ids=["after", "before"])
def test_nothing_is_read_beyond(cpu_capability: str, at_end: bool) -> None:
    """A read outside of a tensor ends the process, as tests/test_memory.py shows."""
    calls = in_fresh_process(run_guarded, cpu_capability, at_end)
    assert calls == len(LENGTHS) * len(DTYPES) * 3


# --- memory ---------------------------------------------------------------------------------------


WAYS = {way.__name__: way for way in (double_backward, over_forward, over_reverse)}


def peak_growth(option: str, way: str, lengths: tuple[int, ...]) -> list[int]:
    """How far resident memory rises, at each length."""
    torch.set_num_threads(2)
    growth = []
    for length in (64, *lengths):
        x, options = make_option(option, length, length), OPTIONS[option][1]
        u, t = make_grad_output(x, **options), directions(x)
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        before = resident("VmRSS")
        WAYS[way](torch_attn.sdpa, x, u, t, **options)
        growth.append(resident("VmHWM") - before)
        del x, u, t
    return growth[1:]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("option", ["causal", "all"])
def test_peak_grows_linearly(option: str, way: str) -> None:
    """From L = S = 4096 to 8192; the scores of one head are 256 MiB then."""
    small, large = in_fresh_process(peak_growth, option, way, (4096, 8192))
    assert large <= 2 * small + (24 << 20), (small, large)
    assert large <= 64 << 20, (small, large)
