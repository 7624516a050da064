"""The CUDA kernels without torch: programs over tests/stand_in, races; nvcc takes them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from _cuda_programs import SOURCES, Compiler, compiler_of, needs_x86, run
from tests.cuda.programs import MEASURING, PROGRAMS, compile_program, find

# Without these barriers the stand-in computes the same, because its shuffles wait for all lanes. A
# search for races finds that one is missing.
BARRIERS = {
    ("cuda/mma/forward.cuh", "    «__syncwarp();»  // the maxima are written\n"): "check_forward",
    (
        "cuda/mma/forward.cuh",
        "    «__syncwarp();»  // all lanes of a row have read",
    ): "check_forward",
    (
        "cuda/mma/decode.cuh",
        "      «__syncwarp();»  // all lanes have read the keys",
    ): "check_decode",
    (
        "cuda/mma/decode.cuh",
        "      «__syncwarp();»  // all lanes have read the values",
    ): "check_decode",
    ("cuda/mma/decode.cuh", "      «__syncwarp();»  // all lanes have written"): "check_decode",
    (
        "cuda/mma/decode.cuh",
        "      «__syncwarp();»  // all lanes have copied the keys",
    ): "check_decode",
    (
        "cuda/mma/decode.cuh",
        "      «__syncwarp();»  // all lanes have copied the values",
    ): "check_decode",
    (
        "cuda/wgmma/grad_key.cuh",
        "    «__syncwarp();»  // all lanes have read the numbers of the rows",
    ): "check_backward_sm90",
    ("cuda/simt/forward.cuh", "      «__syncwarp();»  // all threads of the row"): "check_forward",
    (
        "cuda/simt/tangent.cuh",
        "      «__syncwarp();»  // all threads of the row",
    ): "check_derivatives",
    ("cuda/simt/stats.cuh", "      «__syncwarp();»\n      if (thread.x"): "check_derivatives",
}

# The file of a race that is in another than the barrier.
SHOWN_IN = {"      «__syncwarp();»  // all lanes have written": "cuda/simt/merge.cuh"}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiler:
    errors = [(*place, ";") for place in BARRIERS]
    return compiler_of(tmp_path_factory.mktemp("programs"), errors)


@pytest.mark.slow(*SOURCES)  # compiles kernels
@needs_x86
@pytest.mark.parametrize("name", PROGRAMS)
def test_program(name: str, compiled: Compiler) -> None:
    assert run(compiled(name), seeds=3).endswith("right\n")


# Left out are programs that take minutes: check_backward_sizes has the kernels of check_backward in
# other sizes, check_derivatives has the kernels of check_backward_simt.
LONG = {"check_backward_sizes", "check_backward_simt"}


@pytest.mark.slow(*SOURCES)  # compiles kernels
@needs_x86
@pytest.mark.parametrize("name", sorted({*PROGRAMS} - LONG))
def test_no_race(name: str, compiled: Compiler) -> None:
    program = compiled(name, races=True)
    assert run(program, seeds=1, ATTN_STAND_IN_RACES="1").endswith("right\n")


@pytest.mark.slow(*SOURCES)  # compiles kernels
@needs_x86
@pytest.mark.parametrize("place", BARRIERS, ids=[file for file, _ in BARRIERS])
def test_race_is_found(place: tuple[str, str], compiled: Compiler) -> None:
    number = 1 + [*BARRIERS].index(place)
    assert run(compiled(BARRIERS[place]), seeds=1, mutation=number).endswith("right\n")
    program = compiled(BARRIERS[place], races=True)
    output = run(program, seeds=1, mutation=number, ATTN_STAND_IN_RACES="1")
    assert output.endswith(": a race\n")
    assert f"/{SHOWN_IN.get(place[1], place[0])}:" in output, output
    assert len(re.findall(r"/cuda/\w+/\w+\.cuh:\d+", output)) >= 2, output


@pytest.mark.slow(*SOURCES)  # compiles kernels
@pytest.mark.skipif(not find("nvcc"), reason="not run: nvcc is not there")
@pytest.mark.parametrize("name", [*PROGRAMS, *MEASURING])
def test_program_for_a_gpu(name: str, tmp_path: Path) -> None:
    """nvcc refuses a function of the device on the host; to g++ it is like any other."""
    little_optimized = ("-Xcicc=-O1", "-Xptxas=-O1")  # in a third of the time
    assert compile_program(name, tmp_path, *little_optimized).exists()
