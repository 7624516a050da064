"""The CUDA kernels without torch: programs over tests/stand_in, errors put in; nvcc takes them."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from _variants import ROOT, changed_sources
from tests.cuda.programs import PROGRAMS, compile_program, find

COMPILER = shutil.which("g++") or "g++"
# The fibers switch stacks with a few instructions of x86.
needs_x86 = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="not run: the stand-in is written for x86_64"
)


def compile_and_run(name: str, csrc: Path, to: Path, seeds: tuple[int, ...]) -> str:
    """What a program of tests/cuda, over the kernels in csrc, prints; errors too.

    With one seed after the other, until something is wrong. With odd ones an array ends at memory
    that cannot be touched, with even ones at numbers that are NaN.
    """
    program = to / name
    subprocess.run(
        [
            *(COMPILER, "-std=c++20", "-O1", "-Wno-unknown-pragmas"),
            *("-fsanitize=alignment", "-fno-sanitize-recover=alignment"),  # see setup.py
            *(f"-I{ROOT / 'tests' / 'stand_in'}", f"-I{csrc}", "-x", "c++"),
            ROOT / "tests" / "cuda" / f"{name}.cu",
            ROOT / "tests" / "stand_in" / "fibers.cpp",
            *("-o", program),
        ],
        check=True,
    )
    for seed in seeds:
        guard = {"ATTN_GUARD_BYTES": "0"} if seed % 2 else {}
        environment = {**os.environ, "ATTN_STAND_IN_SEED": str(seed), **guard}
        run = subprocess.run([program], env=environment, capture_output=True, text=True)
        assert (run.returncode == 0) == (run.stdout == "right\n")
        if (output := run.stdout + run.stderr) != "right\n":
            break
    return output


@pytest.mark.slow  # compiles kernels
@needs_x86
@pytest.mark.parametrize("name", PROGRAMS)
def test_program(name: str, tmp_path: Path) -> None:
    assert compile_and_run(name, ROOT / "csrc", tmp_path, (0, 1, 2)) == "right\n"


@pytest.mark.slow  # compiles kernels
@pytest.mark.skipif(not find("nvcc"), reason="not run: nvcc is not there")
@pytest.mark.parametrize("name", PROGRAMS)
def test_program_for_a_gpu(name: str, tmp_path: Path) -> None:
    """To g++ a function of the device is like any other: nvcc refuses it on the host."""
    little_optimized = ("-Xcicc=-O1", "-Xptxas=-O1")  # in a third of the time
    assert compile_program(name, tmp_path, *little_optimized).exists()


# A line of a kernel, and what to put there instead: each must be found. These depend on the order
# of threads, write past an end, or compute in vain; `make mutants` draws wrong numbers.
MUTATIONS = {
    "K is read before it has arrived": (
        "cuda/mma/forward.cuh",
        "      wait_for_copies<0>();\n      __syncthreads();  // the keys",
        "      __syncthreads();  // the keys",
    ),
    "tiles that the mask hides are computed": (
        "cuda/mma/mask_tile.cuh",
        "if (pair_shows_some(k)) return true;",
        "return true;",
    ),
    "one thread says what the mask hides": (
        "cuda/mma/forward.cuh",
        "__syncthreads_or(keys <= 0 || shows_some<M>(mask))",
        "__syncthreads_or(keys <= 0 || (threadIdx.x == 0 && shows_some<M>(mask)))",
    ),
    "the mask is read before it has arrived": (
        "cuda/mma/forward.cuh",
        "        wait_for_copies<0>();\n        find_shown",
        "        find_shown",
    ),
    "the mask of the next tile is copied over one that is read": (
        "cuda/mma/forward.cuh",
        "      __syncwarp();  // the last one has been read\n",
        "",
    ),
    "delta: rows past the end are written": (
        "cuda/mma/delta.cuh",
        "if (own + k * kRowsAtOnce < rows)",
        "",
    ),
    "delta: rows past the end are read": (
        "cuda/mma/delta.cuh",
        "if (own + i >= own_rows) continue;",
        "if (own_rows == 0) continue;",
    ),
    "what lies behind a mask is read": (
        "cuda/mma/mask_tile.cuh",
        "const int at_most = first + j < keys ? first + j : keys - 1;",
        "const int at_most = first + j;",
    ),
    "what lies behind the last values is read": (
        "cuda/mma/mma.cuh",
        "               i < left);",
        "               true);",
    ),
    "without tensor cores, tiles that the mask hides are computed": (
        "cuda/simt/scores.cuh",
        "return __syncthreads_or(some);",
        "return true;",
    ),
    "K is read before all threads have copied": (
        "cuda/mma/forward.cuh",
        "      __syncthreads();  // the keys are there, and the last values have been read\n",
        "",
    ),
    "V is read before all threads have copied": (
        "cuda/mma/forward.cuh",
        "      __syncthreads();  // the values are there, and the keys have been read\n",
        "",
    ),
    "a row past the end is written": (
        "cuda/mma/mma.cuh",
        "if (there && col < cols)",
        "if (col < cols)",
    ),
    "tiles are overwritten while read": (
        "cuda/simt/scores.cuh",
        "      __syncthreads();  // what is in shared memory has been read\n",
        "",
    ),
    "tiles are used before they are there": (
        "cuda/simt/scores.cuh",
        "      __syncthreads();\n      add_products(x",
        "      add_products(x",
    ),
    "backward: what is known of the next rows is stored while that of these is read": (
        "cuda/mma/backward.cuh",
        "store_row(shared.rows[stage ^ 1], tile.first",
        "store_row(shared.rows[stage], tile.first",
    ),
    "backward: rows are read before they have arrived": (
        "cuda/mma/backward.cuh",
        "        wait_for_copies<0>();\n        tile = first_shown_rows",
        "        tile = first_shown_rows",
    ),
    "backward: keys are read before they have arrived": (
        "cuda/mma/backward.cuh",
        "      wait_for_copies<0>();\n      key = first_shown_key",
        "      key = first_shown_key",
    ),
    "backward: rows and keys are read before all threads have copied": (
        "cuda/mma/backward.cuh",
        "    else\n      __syncthreads();\n    return tile;",
        "    return tile;",
    ),
    "backward: tiles are overwritten by the next group of heads": (
        "cuda/mma/backward.cuh",
        "      __syncthreads();  // the last group's tiles have been read\n",
        "",
    ),
    "backward without tensor cores: the next rows are read before they are chosen": (
        "cuda/simt/backward.cuh",
        "    __syncthreads();  // the next place is there\n",
        "",
    ),
}


@pytest.mark.slow  # compiles kernels
@needs_x86
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mutation_is_found(mutation: str, tmp_path: Path) -> None:
    """An error put into a kernel gives a wrong result or a message, with one order of threads."""
    file, right, wrong = MUTATIONS[mutation]
    # the stand-in has its own ones of these
    csrc = changed_sources(tmp_path, file, {right: wrong}, "ptx.cuh", "device.h")
    programs = {
        "delta": "check_delta",
        "backward": "check_backward",
        "backward without tensor cores": "check_backward_simt",
    }
    program = programs.get(mutation.split(":")[0], "check_forward")
    assert compile_and_run(program, csrc, tmp_path, (0, 1, 2, 3)) != "right\n"
