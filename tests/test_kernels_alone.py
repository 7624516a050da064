"""The CPU kernels without torch: on an ARM processor in software, and each of their files alone."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from _variants import ROOT, changed_sources

CSRC = ROOT / "csrc"
ARM = shutil.which("aarch64-linux-gnu-g++")
EMULATOR = shutil.which("qemu-aarch64")
NATIVE = shutil.which("g++")
FLAGS = ["-std=c++20", "-Wall", "-Wextra", "-Werror"]

pytestmark = pytest.mark.slow  # compiles kernels


def compiled(compiler: str, csrc: Path, sets: list[str], to: Path, *options: str) -> Path:
    """The program tests/cpu/check_kernels.cpp over the kernels of these instruction sets."""
    sources = [csrc / "cpu" / "isa" / f"{name}.cpp" for name in sets]
    program = ROOT / "tests" / "cpu" / "check_kernels.cpp"
    command = [compiler, *FLAGS, "-O2", *options, f"-I{csrc}", program, *sources, "-o", to]
    subprocess.run(command, check=True)
    return to


def run(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


@pytest.mark.skipif(
    not (ARM and EMULATOR), reason="not run: no aarch64-linux-gnu-g++ or no qemu-aarch64"
)
def test_arm(tmp_path: Path) -> None:
    assert ARM
    assert EMULATOR
    sets = ["default", "neon"]
    program = compiled(ARM, ROOT / "csrc", sets, tmp_path / "check", "-static")
    assert run(EMULATOR, program, *sets) == "default: right\nneon: right\n"


# What the program must see: a line of a file, and what to put there instead.
MUTATIONS = {
    "causality": (
        "core/score.h",
        "smaller(limit, positions.last)",
        "smaller(limit, positions.last - 1)",
    ),
    "halves": (
        "cpu/isa/instructions_portable.inl",
        "normal = (magnitude - (112u",
        "normal = (magnitude - (111u",
    ),
    "tangent": (
        "cpu/kernels/tangent.inl",
        "load<T>(at) - shifted_sum *",
        "load<T>(at) + shifted_sum *",
    ),
    "second": (
        "cpu/kernels/backward.inl",
        "tweight * dp + weight * tdp",
        "tweight * dp - weight * tdp",
    ),
}


@pytest.mark.skipif(NATIVE is None, reason="not run: no g++")
@pytest.mark.parametrize("name", ["", *MUTATIONS])
def test_errors_are_found(name: str, tmp_path: Path) -> None:
    assert NATIVE
    csrc = ROOT / "csrc"
    if name:
        file, right, wrong = MUTATIONS[name]
        csrc = changed_sources(tmp_path, file, {right: wrong})
    program = compiled(NATIVE, csrc, ["default"], tmp_path / "check")
    assert (run(program, "default") == "default: right\n") == (not name)


# A rule that also hides the keys before a window: no option has one yet, but all loops heed it.
WINDOW = {
    "return {0, p.causal": "return {larger(0, positions.first + 1 - ATTN_WINDOW), p.causal",
    "smaller(keys.first, limit) : 0, limit}": "smaller(keys.first, limit) : 0, "
    "smaller(limit, keys.last - 1 + ATTN_WINDOW)}",
    "return !p.causal || keys.last <= positions.first + 1;": "return (!p.causal || "
    "keys.last <= positions.first + 1) && positions.last - 1 - keys.first < ATTN_WINDOW;",
}


@pytest.mark.skipif(NATIVE is None, reason="not run: no g++")
@pytest.mark.parametrize("window", [1, 37, 100])
def test_both_ends_of_what_is_visible(window: int, tmp_path: Path) -> None:
    assert NATIVE
    csrc = changed_sources(tmp_path, "core/score.h", WINDOW)
    option = f"-DATTN_WINDOW={window}"
    program = compiled(NATIVE, csrc, ["default"], tmp_path / "check", option)
    assert run(program, "default") == "default: right\n"


@pytest.mark.skipif(NATIVE is None, reason="not run: no g++")
@pytest.mark.parametrize(
    "file", sorted(str(path.relative_to(CSRC)) for path in CSRC.glob("cpu/*/*.inl"))
)
def test_file_alone(file: str) -> None:
    """Every file includes what it uses, so that it can be read and compiled alone."""
    neon = file.endswith("neon.inl")
    compiler = ARM if neon else NATIVE
    if compiler is None:
        pytest.skip("not run: no aarch64-linux-gnu-g++")
    processor = [] if neon else ["-march=sapphirerapids"]
    flags = [*FLAGS, *processor, f"-I{CSRC}", "-fsyntax-only", "-x", "c++"]
    # included, and not compiled as a main file, in which `#pragma once` is a warning
    include = f'#include "{file}"\n'
    subprocess.run([compiler, *flags, "-"], input=include, text=True, check=True)
