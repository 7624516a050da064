"""The programs of this directory, which check kernels without torch, compiled for a GPU by nvcc."""

from __future__ import annotations

import concurrent.futures
import functools
import os
import shutil
import site
import subprocess
from pathlib import Path

import cuda_toolkit

HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "csrc"
PROGRAMS = sorted(path.stem for path in HERE.glob("check_*.cu"))
MEASURING = ["variants_sm90", "variants_backward_sm90"]  # which nothing but a GPU runs

HOPPER = ["-gencode=arch=compute_90a,code=sm_90a", "-DATTN_SM90A"]
# A wait that lasts too long goes on, with wrong numbers, and the program ends.
BOUNDED = ["-DATTN_BOUNDED_WAITS"]


def find(tool: str) -> str:
    """The path of a tool of CUDA: of the toolkit, on the PATH, or of a package that has some.

    Empty where there is none.
    """
    toolkit = cuda_toolkit.find()
    of_packages = [
        place
        for pattern in ("nvidia/*/bin", "triton/backends/nvidia/bin")
        for packages in site.getsitepackages()
        for place in Path(packages).glob(pattern)
    ]
    places = [*([toolkit / "bin"] if toolkit else []), None, *of_packages]  # None: PATH
    return next((path for place in places if (path := shutil.which(tool, path=place))), "")


@functools.cache
def compressed(nvcc: str) -> list[str]:
    """Options without which nvcc compresses nothing for one architecture: best since CUDA 12.8."""
    known = subprocess.run([nvcc, "--help"], capture_output=True, text=True).stdout
    return ["--compress-mode=size" if "--compress-mode" in known else "-Xfatbin=-compress-all"]


def compile_program(name: str, to: Path, *options: str) -> Path:
    """Compiles one for an H100 and, as PTX, for GPUs since 8.0; with nvcc's words if it refuses."""
    program = to / name
    nvcc = find("nvcc")
    command = [nvcc, "-std=c++20", "--expt-relaxed-constexpr", "-fmad=false", *compressed(nvcc)]
    command += [*HOPPER, "-gencode=arch=compute_80,code=compute_80", *options]
    run = subprocess.run(
        [*command, f"-I{CSRC}", HERE / f"{name}.cu", "-o", program],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return program


def compile_programs(to: Path) -> list[Path]:
    """All of them, as many at a time as there are cores."""
    to.mkdir(parents=True, exist_ok=True)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as executor:
        names = [*PROGRAMS, *MEASURING]
        return list(executor.map(lambda name: compile_program(name, to, *BOUNDED), names))
