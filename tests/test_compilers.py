"""The library as clang compiles it: right on every instruction set, over torch's own threads."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from _variants import BUILD, build_library, newest_clang, run_tests

# Tests of other files, over every instruction set and dtype.
TESTS = [
    "tests/test_backward.py::test_layouts",
    "tests/test_backward.py::test_large_scores",
    "tests/test_nan.py::test_many_keys",
    "tests/test_precision.py",
    "tests/test_determinism.py::test_repeats_and_threads",
]

CLANG = newest_clang()
pytestmark = [
    pytest.mark.slow("csrc", *(test.partition("::")[0] for test in TESTS)),  # compiles a library
    pytest.mark.skipif(CLANG is None, reason="not run: no clang++ on the PATH"),
]


@pytest.fixture(scope="module")
def library() -> Path:
    assert CLANG is not None
    return build_library(BUILD / "clang", CXX=CLANG)


def test_only_torch_s_threads(library: Path) -> None:
    """A second OpenMP would have threads of its own, which wait on the cores of torch's."""
    needed = subprocess.check_output(["readelf", "--dynamic", library], text=True)
    assert "libgomp" in needed
    assert "libomp" not in needed


def test_core(library: Path) -> None:
    run_tests(*TESTS, at_least=60, ATTN_LIBRARY=str(library))
