"""The kernels for AMX over tests/stand_in: its tiles, and its vectors of 64 bytes, in software.

Where the processor has AMX, the other files run the kernels as they are, as for every other
instruction set.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from _variants import build_stand_in, run_fuzz, run_python, run_tests
from helpers import CPU_CAPABILITIES

pytestmark = [
    pytest.mark.slow,  # compiles a library
    pytest.mark.skipif(
        "avx2" not in CPU_CAPABILITIES, reason="not run: the software is written with AVX2"
    ),
]

# Tests of other files, with the numbers of them that there are at least.
TESTS = {
    "tests/test_forward.py": 38,
    "tests/test_backward.py": 36,
    "tests/test_nan.py": 45,
    "tests/test_hidden_tiles.py": 20,
    "tests/test_dropout.py": 15,
    "tests/test_precision.py": 6,
    "tests/test_stats.py": 34,
}


@pytest.fixture(scope="module")
def library() -> Path:
    return build_stand_in("amx")


@pytest.mark.parametrize("file", TESTS)
def test_kernels(library: Path, file: str) -> None:
    quick = ["--tiers", "quick", "-k", "[amx"]  # fuzzing covers the product of shapes and options
    run_tests(file, *quick, at_least=TESTS[file], ATTN_LIBRARY=str(library))


# Prints how often a call ran each instruction of tiles, which their stand-in counts.
COUNT = """
import ctypes, json, os, sys, torch, torch_attn
dtype, shape, options, threads = sys.argv[1], *map(json.loads, sys.argv[2:])
library = ctypes.CDLL(os.environ["ATTN_LIBRARY"])
counts = (ctypes.c_uint64 * 5).in_dll(library, "attn_tile_counts")
torch.set_num_threads(threads)
B, H, L, S, D = shape
backward = options.pop("backward", False)
x = [torch.randn(B, H, n, D).to(getattr(torch, dtype)).requires_grad_(backward) for n in (L, S, S)]
out = torch_attn.sdpa(*x, **options)
if backward:
    out.sum().backward()
print(json.dumps(dict(zip(("configured", "zeroed", "loaded", "stored", "multiplied"), counts))))
"""


def counted(
    library: Path, dtype: str, shape: tuple[int, ...], threads: int = 1, **options: object
) -> dict[str, int]:
    arguments = map(json.dumps, (shape, options, threads))
    environment = {"ATTN_LIBRARY": str(library), "ATTN_CPU_CAPABILITY": "amx"}
    counts: dict[str, int] = json.loads(run_python("-c", COUNT, dtype, *arguments, **environment))
    return counts


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("threads", [1, 2])
def test_tiles_are_configured_once_a_thread(library: Path, threads: int, backward: bool) -> None:
    counts = counted(library, "bfloat16", (8, 12, 16, 16, 64), threads, backward=backward)
    assert 1 + backward <= counts["configured"] <= threads * (1 + backward)


# A tile of A and one of B for every product would be two loads; a block of 2 x 2 needs one. Numbers
# of several parts load fewer, as neighbouring products have a part in common: 10 loads for 16
# products, and 14 for 24. O is loaded and stored once for 128 keys.
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize(
    ("dtype", "products", "loads"), [("bfloat16", 1, 4), ("float16", 4, 10), ("float32", 6, 14)]
)
def test_tiles_are_loaded_no_more_than_needed(
    library: Path, dtype: str, products: int, loads: int, D: int
) -> None:
    L, S = 128, 384
    counts = counted(library, dtype, (1, 1, L, S, D))
    blocks = L // 32 * (S // 32)
    steps = 2 * blocks * (D // 32)  # of Q K^T and of P V: 2 x 2 tiles of C, 32 numbers deep
    outputs = L // 32 * (S // 128) * (D // 32) * 4
    first = L // 32 * (D // 32) * 4  # begin as 0
    assert counts["multiplied"] == 4 * products * steps
    assert counts["loaded"] <= loads * steps + outputs - first
    assert counts["stored"] <= 4 * blocks + outputs
    assert counts["zeroed"] <= 4 * blocks + first


def test_what_causality_hides_is_not_multiplied(library: Path) -> None:
    L, D = 256, 64
    counts = counted(library, "bfloat16", (1, 1, L, L, D), is_causal=True)
    blocks = L // 32 * (L // 32 + 1) // 2
    assert counts["multiplied"] == 2 * 4 * blocks * (D // 32)


def test_short_float32_goes_to_no_tiles(library: Path) -> None:
    """`kLongInFloat32` of the stand-in is 8."""
    for L, S in ((7, 64), (64, 7), (8, 8)):
        counts = counted(library, "float32", (1, 1, L, S, 64), backward=True)
        assert (counts["multiplied"] > 0) == (L >= 8 <= S)


def test_random_problems() -> None:
    run_fuzz("amx", 400)
