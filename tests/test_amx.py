"""The kernels for AMX over tests/stand_in: its tiles, and its vectors of 64 bytes, in software.

Where the processor has AMX, the other files run the kernels as they are, as for every other
instruction set.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from _variants import build_stand_in, run_fuzz, run_python, run_tests
from helpers import CPU_CAPABILITIES

# Tests of other files, and the tests in them that take too long in software.
NAMES = "forward backward flex nan hidden_tiles dropout precision weights stats stats_hidden"
TESTS = [f"tests/test_{name}.py" for name in NAMES.split()]
LEFT_OUT = ["keys_that_no_row_sees", "surroundings_are_not_read"]

pytestmark = [
    pytest.mark.slow("csrc/core", "csrc/cpu", "tests/stand_in", "tests/fuzz", *TESTS),
    pytest.mark.skipif(
        "avx2" not in CPU_CAPABILITIES, reason="not run: the software is written with AVX2"
    ),
]


@pytest.fixture(scope="module")
def library() -> Path:
    return build_stand_in("amx")


def test_kernels(library: Path) -> None:
    quick = ["--tiers", "quick", "-k", f"[amx and not {' and not '.join(LEFT_OUT)}"]
    run_tests(*quick, *TESTS, at_least=150, ATTN_LIBRARY=str(library))


class Problem(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    """Batch, heads, L, S, head_dim."""
    threads: int = 1
    causal: bool = False
    backward: bool = False
    window: tuple[int, int] = (-1, -1)
    offset: int = 0
    length: int | None = None


ONCE = [
    Problem("bfloat16", (8, 12, 16, 16, 64), n, backward=b) for n in (1, 2) for b in (False, True)
]
# For each dtype the products, and the loads, for 2 x 2 tiles of C.
PRODUCTS = {"bfloat16": (1, 4), "float16": (4, 10)}
LOADS = [Problem(dtype, (1, 1, 128, 384, D)) for dtype in PRODUCTS for D in (64, 128)]
CAUSAL = Problem("bfloat16", (1, 1, 256, 256, 64), causal=True)
BANDS = [
    Problem("bfloat16", (1, 1, 256, 512, 64), window=w, offset=n, length=length, backward=b)
    for w, n, length in (((100, 0), 37, None), ((40, 70), -90, 512), ((-1, 9), 133, 301))
    for b in (False, True)
]
SHORT = [Problem("float16", (1, 1, L, S, 64), backward=True) for L, S in ((7, 64), (64, 7), (8, 8))]

# Prints how often each call ran each instruction of tiles, which their stand-in counts.
COUNT = """
import ctypes, json, os, sys, torch, torch_attn
library = ctypes.CDLL(os.environ["ATTN_LIBRARY"])
counts = (ctypes.c_uint64 * 5).in_dll(library, "attn_tile_counts")
for problem in json.loads(sys.argv[1]):
    dtype, (B, H, L, S, D), threads, causal, backward, window, offset, length = problem
    before = list(counts)
    torch.set_num_threads(threads)
    x = [torch.randn(B, H, n, D, dtype=getattr(torch, dtype)) for n in (L, S, S)]
    options = {"window_size": window, "query_offset": offset, "key_lengths": length}
    out = torch_attn.sdpa(*(t.requires_grad_(backward) for t in x), is_causal=causal, **options)
    if backward:
        out.sum().backward()
    print(json.dumps([after - first for after, first in zip(counts, before)]))
"""


class Counts(NamedTuple):
    configured: int
    zeroed: int
    loaded: int
    stored: int
    multiplied: int


@pytest.fixture(scope="module")
def counts(library: Path) -> dict[Problem, Counts]:
    problems = [*ONCE, *LOADS, CAUSAL, *BANDS, *SHORT]
    environment = {"ATTN_LIBRARY": str(library), "ATTN_CPU_CAPABILITY": "amx"}
    lines = run_python("-c", COUNT, json.dumps(problems), **environment).splitlines()
    return {p: Counts(*json.loads(line)) for p, line in zip(problems, lines, strict=True)}


@pytest.mark.parametrize("problem", ONCE)
def test_tiles_are_configured_once_a_thread(
    counts: dict[Problem, Counts], problem: Problem
) -> None:
    calls = 1 + problem.backward
    assert calls <= counts[problem].configured <= problem.threads * calls


# A tile of A and one of B for every product would be two loads; a block of 2 x 2 needs one. Numbers
# of two parts load fewer, as neighbouring products have a part in common: 10 loads for 16 products.
# O is loaded and stored once for 64 keys.
@pytest.mark.parametrize("problem", LOADS)
def test_tiles_are_loaded_no_more_than_needed(
    counts: dict[Problem, Counts], problem: Problem
) -> None:
    _, _, L, S, D = problem.shape
    products, loads = PRODUCTS[problem.dtype]
    counted = counts[problem]
    blocks = L // 32 * (S // 32)
    steps = 2 * blocks * (D // 32)  # of Q K^T and of P V: 2 x 2 tiles of C, 32 numbers deep
    outputs = L // 32 * (S // 64) * (D // 32) * 4
    first = L // 32 * (D // 32) * 4  # begin as 0
    assert counted.multiplied == 4 * products * steps
    assert counted.loaded <= loads * steps + outputs - first
    assert counted.stored <= 4 * blocks + outputs
    assert counted.zeroed <= 4 * blocks + first


def test_what_causality_hides_is_not_multiplied(counts: dict[Problem, Counts]) -> None:
    L, D = 256, 64
    blocks = L // 32 * (L // 32 + 1) // 2
    assert counts[CAUSAL].multiplied == 2 * 4 * blocks * (D // 32)


@pytest.mark.parametrize("problem", BANDS)
def test_what_positions_hide_is_not_multiplied(
    counts: dict[Problem, Counts], problem: Problem
) -> None:
    """Multiplies at most tiles of 32 rows by 64 keys in which some query sees some key."""
    _, _, L, S, D = problem.shape
    left, right = problem.window
    at = torch.arange(L)[:, None] + problem.offset
    keys = torch.arange(S)
    visible = (keys <= at + right) & (keys < (S if problem.length is None else problem.length))
    visible &= (keys >= at - left) | (left < 0)
    in_tiles = visible.view(L // 32, 32, S // 64, 64).any(3).any(1).sum().item()
    products = 2 + 5 * problem.backward
    assert 0 < counts[problem].multiplied <= in_tiles * products * 2 * 4 * (D // 32)
    assert in_tiles < 0.8 * (L // 32) * (S // 64)


@pytest.mark.parametrize("problem", SHORT)
def test_short_float16_goes_to_no_tiles(counts: dict[Problem, Counts], problem: Problem) -> None:
    """`kLongInTwoParts` of the stand-in is 8."""
    L, S = problem.shape[2:4]
    assert (counts[problem].multiplied > 0) == (L >= 8 <= S)


def test_random_problems() -> None:
    run_fuzz("amx", 400)
