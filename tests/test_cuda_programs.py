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
    ["check_ptx", "check_forward", "check_backward", "check_backward_sizes", "check_backward_fma"],
)
def test_program(name: str, tmp_path: Path) -> None:
    assert set(compile_and_run(name, ROOT / "csrc", tmp_path, (0, 1, 2))) == {"right\n"}


# A line of a kernel, and what to put there instead: each must be found.
MUTATIONS = {
    "K is read before it has arrived": (
        "forward_mma.cuh",
        "      wait_for_copies<0>();\n      __syncthreads();  // the keys",
        "      __syncthreads();  // the keys",
    ),
    "K is read before all threads have copied": (
        "forward_mma.cuh",
        "      __syncthreads();  // the keys are there, and the last values have been read\n",
        "",
    ),
    "V is read before all threads have copied": (
        "forward_mma.cuh",
        "      __syncthreads();  // the values are there, and the keys have been read\n",
        "",
    ),
    "rows of A": ("mma.cuh", "row + lane % 16, 2 * k + lane / 16", "row + lane % 16, 2 * k"),
    "columns of B": ("mma.cuh", "2 * k + lane / 8 % 2", "2 * k + lane / 16"),
    "rows of V": ("mma.cuh", "row + lane % 16, chunk + lane / 16", "row + lane % 8, chunk"),
    "columns of C": ("mma.cuh", "return 8 * n + 2 * place;", "return 8 * n + place;"),
    "weights of the wrong rows": ("forward_mma.cuh", "a[t][1] = pack", "a[t][2] = pack"),
    "maximum of two lanes of four": (
        "forward_mma.cuh",
        "        best = max_number(__shfl_xor_sync(~0u, best, 2), best);\n",
        "",
    ),
    "sums are not corrected": ("forward_mma.cuh", "sum = sum * factor", "sum = sum"),
    "tiles are overwritten while read": (
        "scores_fma.cuh",
        "      __syncthreads();  // what is in shared memory has been read\n",
        "",
    ),
    "tiles are used before they are there": (
        "scores_fma.cuh",
        "      __syncthreads();\n      add_products(x",
        "      add_products(x",
    ),
    "the diagonal is seen from one row up": ("rows.cuh", "max_position + 1", "max_position"),
    "backward: rows are read before they have arrived": (
        "backward_mma.cuh",
        "        wait_for_copies<0>();\n        __syncthreads();  // the rows are there",
        "        __syncthreads();  // the rows are there",
    ),
    "backward: rows are read before all threads have copied": (
        "backward_mma.cuh",
        "        __syncthreads();  // the rows are there, and those before have been read\n",
        "",
    ),
    "backward: rows are copied before it is known where they lie": (
        "backward_mma.cuh",
        "          __syncthreads();  // it is known where the next rows lie\n",
        "",
    ),
    "backward: keys are read before they have arrived": (
        "backward_mma.cuh",
        "      wait_for_copies<0>();\n      __syncthreads();  // the keys are there",
        "      __syncthreads();  // the keys are there",
    ),
    "backward: keys are read before all threads have copied": (
        "backward_mma.cuh",
        "      __syncthreads();  // the keys are there, and those before have been read\n",
        "",
    ),
    "backward: tiles are overwritten by the next group of heads": (
        "backward_mma.cuh",
        "      __syncthreads();  // the last group's tiles have been read\n",
        "",
    ),
    "backward: weights of the wrong rows": (
        "backward_mma.cuh",
        "a[n / 2][2 * (n % 2) + half] = pack",
        "a[n / 2][2 * half + n % 2] = pack",
    ),
    "backward: dropout of the wrong keys": (
        "scores_mma.cuh",
        "        bits >>= thread.group % 4;\n",
        "",
    ),
    "backward: rows that see the first key are skipped": (
        "backward_mma.cuh",
        "row % p.queries + kOther - 1;",
        "row % p.queries;",
    ),
    "backward: delta of other rows": (
        "backward_mma.cuh",
        "[&](float& slope, int i, int, int, int) { slope -= rows.delta[i]; }",
        "[&](float& slope, int, int j, int, int) { slope -= rows.delta[j % 16]; }",
    ),
    "backward without tensor cores: the next rows are chosen while these are read": (
        "backward_fma.cuh",
        "    __syncthreads();  // all have read\n    if (threadIdx.x == 0) shared.task.first_head",
        "    if (threadIdx.x == 0) shared.task.first_head",
    ),
    "backward without tensor cores: tiles on the diagonal are skipped": (
        "backward_fma.cuh",
        "task.max_position >= task.first_key)",
        "task.max_position >= task.last_key)",
    ),
    "backward without tensor cores: dropped weights have no share in the gradient of scores": (
        "backward_fma.cuh",
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
    (csrc / "cuda").mkdir(parents=True)
    shutil.copy(ROOT / "csrc" / "params.h", csrc)
    for path in (ROOT / "csrc" / "cuda").glob("*h"):
        if path.name not in ("ptx.cuh", "device.h"):
            shutil.copy(path, csrc / "cuda")
    source = (csrc / "cuda" / file).read_text()
    assert source.count(right) == 1, f"{file} has changed: {right!r}"
    (csrc / "cuda" / file).write_text(source.replace(right, wrong))
    programs = {"backward": "check_backward", "backward without tensor cores": "check_backward_fma"}
    program = programs.get(mutation.split(":")[0], "check_forward")
    outputs = compile_and_run(program, csrc, tmp_path, (0, 1, 2, 3))
    assert set(outputs) != {"right\n"}
