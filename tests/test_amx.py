"""The kernels for AMX over tests/stand_in, its tile instructions in software.

Where the processor has AMX, the other files run the kernels as they are, as for every other
instruction set.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from _variants import build_stand_in, run_fuzz, run_tests
from helpers import CPU_CAPABILITIES

pytestmark = [
    pytest.mark.slow,  # compiles a library
    pytest.mark.skipif(
        "avx512_bf16" not in CPU_CAPABILITIES, reason="not run: the vector code needs AVX-512 BF16"
    ),
]

# Tests of other files, with the numbers of them that there are at least.
TESTS = {
    "tests/test_forward.py": 682,
    "tests/test_backward.py": 631,
    "tests/test_nan.py": 676,
    "tests/test_dropout.py": 62,
    "tests/test_precision.py": 11,
    "tests/test_properties.py": 2,
}


@pytest.fixture(scope="module")
def library() -> Path:
    return build_stand_in("amx")


@pytest.mark.parametrize("file", TESTS)
def test_kernels(library: Path, file: str) -> None:
    run_tests(file, "-k", "[amx", at_least=TESTS[file], ATTN_LIBRARY=str(library))


def test_random_problems() -> None:
    run_fuzz("amx", 150)
