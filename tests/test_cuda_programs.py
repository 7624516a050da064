"""The CUDA kernels without torch: programs over tests/stand_in, and errors put in."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COMPILER = shutil.which("g++") or "g++"
# The fibers switch stacks with a few instructions of x86.
needs_x86 = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="not run: the stand-in is written for x86_64"
)


def compile_and_run(name: str, csrc: Path, to: Path, seeds: tuple[int, ...]) -> list[str]:
    """What a program of tests/cuda, over the kernels in csrc, prints per seed; errors too."""
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
    outputs = []
    for seed in seeds:
        environment = {**os.environ, "ATTN_STAND_IN_SEED": str(seed)}
        run = subprocess.run([program], env=environment, capture_output=True, text=True)
        outputs.append(run.stdout + run.stderr)
        assert (run.returncode == 0) == (run.stdout == "right\n")
    return outputs


@needs_x86
@pytest.mark.parametrize(
    "name",
    ["check_ptx", "check_forward", "check_backward", "check_backward_sizes", "check_backward_simt"],
)
def test_program(name: str, tmp_path: Path) -> None:
    assert set(compile_and_run(name, ROOT / "csrc", tmp_path, (0, 1, 2))) == {"right\n"}


# A line of a kernel, and what to put there instead: each must be found.
MUTATIONS = {
    "K is read before it has arrived": (
        "cuda/forward_mma.cuh",
        "      wait_for_copies<0>();\n      __syncthreads();  // the keys",
        "      __syncthreads();  // the keys",
    ),
    "K is read before all threads have copied": (
        "cuda/forward_mma.cuh",
        "      __syncthreads();  // the keys are there, and the last values have been read\n",
        "",
    ),
    "V is read before all threads have copied": (
        "cuda/forward_mma.cuh",
        "      __syncthreads();  // the values are there, and the keys have been read\n",
        "",
    ),
    "rows of A": ("cuda/mma.cuh", "row + lane % 16, 2 * k + lane / 16", "row + lane % 16, 2 * k"),
    "columns of B": ("cuda/mma.cuh", "2 * k + lane / 8 % 2", "2 * k + lane / 16"),
    "rows of V": ("cuda/mma.cuh", "row + lane % 16, chunk + lane / 16", "row + lane % 8, chunk"),
    "columns of C": ("cuda/mma.cuh", "return 8 * n + 2 * place;", "return 8 * n + place;"),
    "weights of the wrong rows": ("cuda/forward_mma.cuh", "a[t][1] = pack", "a[t][2] = pack"),
    "maximum of two lanes of four": (
        "cuda/forward_mma.cuh",
        "        best = max_number(__shfl_xor_sync(~0u, best, 2), best);\n",
        "",
    ),
    "sums are not corrected": ("cuda/forward_mma.cuh", "sum = sum * factor", "sum = sum"),
    "tiles are overwritten while read": (
        "cuda/scores_simt.cuh",
        "      __syncthreads();  // what is in shared memory has been read\n",
        "",
    ),
    "tiles are used before they are there": (
        "cuda/scores_simt.cuh",
        "      __syncthreads();\n      add_products(x",
        "      add_products(x",
    ),
    "the diagonal is seen from one row up": (
        "score.h",
        "smaller(limit, positions.last)",
        "smaller(limit, positions.last - 1)",
    ),
    "backward: rows are read before they have arrived": (
        "cuda/backward_mma.cuh",
        "        wait_for_copies<0>();\n        __syncthreads();  // the rows are there",
        "        __syncthreads();  // the rows are there",
    ),
    "backward: rows are read before all threads have copied": (
        "cuda/backward_mma.cuh",
        "        __syncthreads();  // the rows are there, and those before have been read\n",
        "",
    ),
    "backward: rows are copied before it is known where they lie": (
        "cuda/backward_mma.cuh",
        "          __syncthreads();  // it is known where the next rows lie\n",
        "",
    ),
    "backward: keys are read before they have arrived": (
        "cuda/backward_mma.cuh",
        "      wait_for_copies<0>();\n      __syncthreads();  // the keys are there",
        "      __syncthreads();  // the keys are there",
    ),
    "backward: keys are read before all threads have copied": (
        "cuda/backward_mma.cuh",
        "      __syncthreads();  // the keys are there, and those before have been read\n",
        "",
    ),
    "backward: tiles are overwritten by the next group of heads": (
        "cuda/backward_mma.cuh",
        "      __syncthreads();  // the last group's tiles have been read\n",
        "",
    ),
    "backward: weights of the wrong rows": (
        "cuda/backward_mma.cuh",
        "a[n / 2][2 * (n % 2) + half] = pack",
        "a[n / 2][2 * half + n % 2] = pack",
    ),
    "backward: dropout of the wrong keys": (
        "cuda/scores_mma.cuh",
        "        bits >>= thread.group % 4;\n",
        "",
    ),
    "backward: rows that see the first key are skipped": (
        "cuda/backward_mma.cuh",
        "last = first + kOther;",
        "last = first + 1;",
    ),
    "backward: delta of other rows": (
        "cuda/backward_mma.cuh",
        "[&](float& slope, int i, int, int, int) { slope -= rows.delta[i]; }",
        "[&](float& slope, int, int j, int, int) { slope -= rows.delta[j % 16]; }",
    ),
    "backward without tensor cores: the next rows are chosen while these are read": (
        "cuda/backward_simt.cuh",
        "    __syncthreads();  // all have read\n    if (threadIdx.x == 0) shared.task.first_head",
        "    if (threadIdx.x == 0) shared.task.first_head",
    ),
    "backward without tensor cores: tiles on the diagonal are skipped": (
        "cuda/backward_simt.cuh",
        "if (any_visible(p, task.positions, {task.first_key, task.last_key})) add_tile",
        "if (all_visible(p, task.positions, {task.first_key, task.last_key})) add_tile",
    ),
    "backward without tensor cores: dropped weights have no share in the gradient of scores": (
        "cuda/backward_simt.cuh",
        "shared.row[row].delta);",
        "shared.row[row].delta) * factor(kept, bit);",
    ),
}


@needs_x86
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mutation_is_found(mutation: str, tmp_path: Path) -> None:
    """An error put into a kernel gives a wrong result or a message, with one order of threads."""
    file, right, wrong = MUTATIONS[mutation]
    csrc = tmp_path / "csrc"
    # the stand-in has its own ones of these
    shutil.copytree(ROOT / "csrc", csrc, ignore=shutil.ignore_patterns("ptx.cuh", "device.h"))
    source = (csrc / file).read_text()
    assert source.count(right) == 1, f"{file} has changed: {right!r}"
    (csrc / file).write_text(source.replace(right, wrong))
    programs = {
        "backward": "check_backward",
        "backward without tensor cores": "check_backward_simt",
    }
    program = programs.get(mutation.split(":")[0], "check_forward")
    outputs = compile_and_run(program, csrc, tmp_path, (0, 1, 2, 3))
    assert set(outputs) != {"right\n"}
