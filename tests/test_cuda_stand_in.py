"""The CUDA kernels, the sources as they are, on the CPU: over tests/stand_in in place of CUDA."""

from __future__ import annotations

import concurrent.futures
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torch_attn  # noqa: F401, registers the operators

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build" / "stand_in"
LIBRARY = BUILD / "cuda" / "torch_attn" / "libattn.so"
# The fibers switch stacks with a few instructions of x86.
pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="not run: the stand-in is written for x86_64"
)
COMPILER = shutil.which("g++") or "g++"


def environment(seed: int) -> dict[str, str]:
    """Of a process whose calls on the CPU run the CUDA kernels, threads in this random order."""
    return {
        **os.environ,
        "ATTN_LIBRARY": str(LIBRARY),
        "ATTN_STAND_IN_SEED": str(seed),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
    }


@pytest.fixture(scope="module", autouse=True)
def _library() -> None:
    """Builds the variant of the library, what changed of it."""
    directories = ["--build-lib", str(BUILD / "cuda"), "--build-temp", str(BUILD / "objects")]
    subprocess.run(
        [sys.executable, "setup.py", "build_ext", *directories],
        cwd=ROOT,
        env={**os.environ, "ATTN_STAND_IN": "cuda"},
        check=True,
    )


# Tests of other files with the numbers of them that there are at least.
FORWARD = {
    "tests/test_forward.py": 885,
    "tests/test_nan.py -k 'test_query or test_value or test_mask or test_fully or test_many'": 268,
    "tests/test_dropout.py -k 'rate or independent or test_mask_does_not'": 19,
    "tests/test_validate.py -k 'not operator and not gradient'": 439,
}


@pytest.mark.parametrize("tests", FORWARD)
@pytest.mark.parametrize("seed", [1])
def test_forward(tests: str, seed: int) -> None:
    run_tests(tests, FORWARD[tests], seed)


DERIVATIVES = {
    "tests/test_backward.py": 827,
    "tests/test_nan.py -k 'test_key and (200 or 17)'": 80,
    "tests/test_derivatives.py -k 'masked or layouts or subsets or empty or expanded'": 72,
}


@pytest.mark.parametrize("tests", DERIVATIVES)
def test_derivatives(tests: str) -> None:
    run_tests(tests, DERIVATIVES[tests], seed=1)


@pytest.mark.parametrize("seed", [2, 3])
def test_forward_in_another_order_of_threads(seed: int) -> None:
    run_tests("tests/test_forward.py -k 'layouts or expanded or many_dimensions'", 85, seed)


def run_tests(tests: str, at_least: int, seed: int) -> None:
    command = f"{sys.executable} -m pytest -q -p no:cacheprovider {tests}"
    run = subprocess.run(
        command, shell=True, cwd=ROOT, env=environment(seed), capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-4000:]
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed, run.stdout
    assert int(passed[1]) >= at_least, run.stdout[-1000:]


RNG_STATE = (2**63 - 12345, 2**31 + 5, 7)


def weights_kept(dtype: torch.dtype) -> torch.Tensor:
    """What a call with `RNG_STATE` keeps. Scores are 0, so that only dropped weights are."""
    query = torch.zeros(2, 6, 70, 24, dtype=dtype)
    key = torch.zeros(2, 3, 133, 24, dtype=dtype)
    value = torch.eye(133, dtype=dtype).expand(2, 2, 133, 133)
    kept, _, rng_state, _ = torch.ops.attn._sdpa_forward(
        query, key, value, None, 0.4, True, enable_gqa=True, rng_state=torch.tensor(RNG_STATE)
    )
    assert rng_state.tolist() == list(RNG_STATE)
    return kept != 0


SAVE_KEPT = """
import sys, torch, test_cuda_stand_in
assert torch.ops.attn._cpu_capability() == "cuda"
torch.save(test_cuda_stand_in.weights_kept(getattr(torch, sys.argv[1])), sys.argv[2])
"""


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_dropout_is_that_of_the_cpu(dtype: str, tmp_path: Path) -> None:
    """Given the state of a generator, both devices drop the same weights."""
    file = tmp_path / "kept"
    command = [sys.executable, "-c", SAVE_KEPT, dtype, file]
    subprocess.run(command, env=environment(1), check=True)
    expected = weights_kept(getattr(torch, dtype))
    assert 0.55 < expected.sum() / (2 * 6 * 70 * 71 / 2) < 0.65
    assert torch.equal(torch.load(file), expected)


# --- programs without torch -----------------------------------------------------------------------


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
        run = subprocess.run([program], env=environment(seed), capture_output=True, text=True)
        outputs.append(run.stdout + run.stderr)
        assert (run.returncode == 0) == (run.stdout == "right\n")
    return outputs


@pytest.mark.parametrize(
    "name", ["check_ptx", "check_forward", "check_backward", "check_backward_sizes"]
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
    "sums are not corrected": ("forward_mma.cuh", "sum = sum * correction", "sum = sum"),
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
}


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
    program = "check_backward" if mutation.startswith("backward: ") else "check_forward"
    outputs = compile_and_run(program, csrc, tmp_path, (0, 1, 2, 3))
    assert set(outputs) != {"right\n"}


# --- nvcc -----------------------------------------------------------------------------------------

NVCC = shutil.which("nvcc")


@pytest.mark.skipif(NVCC is None, reason="not run: nvcc is not there")
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_nvcc_without_spills(architecture: str, tmp_path: Path) -> None:
    """Every kernel compiles; none keeps in memory what should be in registers.

    But those of float64, whose numbers take two registers each, may a few.
    """
    sources = sorted((ROOT / "csrc" / "cuda").glob("*.cu"))
    options = ["-std=c++20", "-O3", "--expt-relaxed-constexpr", f"-arch={architecture}"]
    options += [f"-I{ROOT / 'csrc'}", "-Xptxas", "-v", "-cubin"]

    def compile_source(source: Path) -> subprocess.CompletedProcess[str]:
        command = [NVCC, *options, source, "-o", tmp_path / f"{source.stem}.cubin"]
        return subprocess.run(command, capture_output=True, text=True)

    kernels = 0
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        runs = list(pool.map(compile_source, sources))
    for run in runs:
        assert run.returncode == 0, run.stderr
        found = re.findall(
            r"Compiling entry function '(\w+)'.*?\n(?:.*\n)*?\s+(\d+) bytes stack frame, (\d+) "
            r"bytes spill stores, (\d+) bytes spill loads",
            run.stderr,
        )
        kernels += len(found)
        for name, *numbers in found:
            allowed = 256 if "_fmaId" in name else 0  # bytes
            assert max(map(int, numbers)) <= allowed, f"{name}: {numbers}"
    assert kernels >= 18
