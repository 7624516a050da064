"""The CUDA kernels without torch: programs over tests/stand_in, and errors put in."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from _variants import ROOT, changed_sources

COMPILER = shutil.which("g++") or "g++"
# The fibers switch stacks with a few instructions of x86.
needs_x86 = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="not run: the stand-in is written for x86_64"
)


def compile_and_run(name: str, csrc: Path, to: Path, seeds: tuple[int, ...]) -> str:
    """What a program of tests/cuda, over the kernels in csrc, prints; errors too.

    With one seed after the other, until something is wrong.
    """
    program = to / name
    subprocess.run(
        [
            *(COMPILER, "-std=c++20", "-O1", "-Wno-unknown-pragmas"),
            *(f"-I{ROOT / 'tests' / 'stand_in'}", f"-I{csrc}", "-x", "c++"),
            ROOT / "tests" / "cuda" / f"{name}.cu",
            ROOT / "tests" / "stand_in" / "fibers.cpp",
            *("-o", program),
        ],
        check=True,
    )
    for seed in seeds:
        environment = {**os.environ, "ATTN_STAND_IN_SEED": str(seed)}
        run = subprocess.run([program], env=environment, capture_output=True, text=True)
        assert (run.returncode == 0) == (run.stdout == "right\n")
        if (output := run.stdout + run.stderr) != "right\n":
            break
    return output


@needs_x86
@pytest.mark.parametrize(
    "name",
    [
        *("check_ptx", "check_forward", "check_delta"),
        *("check_backward", "check_backward_sizes", "check_backward_simt"),
    ],
)
def test_program(name: str, tmp_path: Path) -> None:
    assert compile_and_run(name, ROOT / "csrc", tmp_path, (0, 1, 2)) == "right\n"


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
