"""The CPU kernels without torch: on an ARM processor in software, and each of their files alone."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from _variants import ROOT, mutable_sources

CSRC = ROOT / "csrc"
ARM = shutil.which("aarch64-linux-gnu-g++")
EMULATOR = shutil.which("qemu-aarch64")
NATIVE = shutil.which("g++")
X86 = NATIVE if platform.machine() == "x86_64" else None
FLAGS = ["-std=c++20", "-Wall", "-Wextra", "-Werror"]

pytestmark = pytest.mark.slow("csrc/core", "csrc/cpu", "tests/cpu")  # compiles kernels


def compiled(compiler: str, csrc: Path, sets: list[str], to: Path, *options: str) -> Path:
    """The program tests/cpu/check_kernels.cpp over the kernels of these instruction sets."""
    sources = [csrc / "cpu" / "isa" / f"{name}.cpp" for name in sets]
    program = ROOT / "tests" / "cpu" / "check_kernels.cpp"
    command = [compiler, *FLAGS, *options, f"-I{csrc}", program, *sources, "-o", to]
    subprocess.run(command, check=True)
    return to


def run(*command: str | Path, **environment: str) -> str:
    variables = os.environ | environment
    return subprocess.run(command, env=variables, capture_output=True, text=True).stdout


@pytest.mark.skipif(
    not (ARM and EMULATOR), reason="not run: no aarch64-linux-gnu-g++ or no qemu-aarch64"
)
def test_arm(tmp_path: Path) -> None:
    assert ARM
    assert EMULATOR
    sets = ["default", "neon"]
    program = compiled(ARM, ROOT / "csrc", sets, tmp_path / "check", "-O1", "-static")
    oldest = ["-cpu", "cortex-a53"]  # has no instruction of a later architecture than ARMv8.0
    assert run(EMULATOR, *oldest, program, "neon") == "neon: right\n"


# What the program must see.
MUTATIONS = {
    "window": (
        "core/score.h",
        "«larger(0, queries.first + s.first)»",
        "queries.first + s.first + 1",
    ),
    "halves": ("cpu/isa/instructions_portable.inl", "normal = (magnitude - («112u»", "111u"),
    "tangent": (
        "cpu/kernels/tangent.inl",
        "load<T>(at) - «shifted_sum» *",
        "-shifted_sum",
    ),
}


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if NATIVE is None:
        pytest.skip("not run: no g++")
    to = tmp_path_factory.mktemp("program")
    csrc = mutable_sources(to, MUTATIONS.values())
    return compiled(NATIVE, csrc, ["default"], to / "check", "-include", "mutation.h")


@pytest.mark.parametrize("name", MUTATIONS)
def test_errors_are_found(name: str, program: Path) -> None:
    number = 1 + [*MUTATIONS].index(name)
    assert run(program, "default", ATTN_MUTATION=str(number)) != "default: right\n"


# The kernels heed where a sequence's queries stand among its keys: so early that the first ones see
# no key, and so late that causality hides nothing from most, and a window shows the last nothing.
@pytest.mark.parametrize("offset", [-30, 0, 120])
def test_offset_of_queries(offset: int, program: Path) -> None:
    chosen = {"ATTN_MUTATION": "0", "ATTN_OFFSET": str(offset)}
    assert run(program, "default", **chosen) == "default: right\n"


@pytest.mark.parametrize(
    "file", sorted(str(path.relative_to(CSRC)) for path in CSRC.glob("cpu/*/*.inl"))
)
def test_file_alone(file: str) -> None:
    """Every file includes what it uses, so that it can be read and compiled alone."""
    neon = file.endswith("neon.inl")
    compiler = ARM if neon else X86
    if compiler is None:
        pytest.skip("not run: no compiler for the processor")
    processor = [] if neon else ["-march=sapphirerapids"]
    flags = [*FLAGS, *processor, f"-I{CSRC}", "-fsyntax-only", "-x", "c++"]
    # included, and not compiled as a main file, in which `#pragma once` is a warning
    include = f'#include "{file}"\n'
    subprocess.run([compiler, *flags, "-"], input=include, text=True, check=True)


@pytest.mark.parametrize(
    ("compiler", "option"), [(ARM, "-mbig-endian"), (ARM, "-mabi=ilp32"), (X86, "-m32")]
)
def test_other_processors_are_refused(compiler: str | None, option: str) -> None:
    if compiler is None:
        pytest.skip("not run: no compiler for the processor")
    flags = ["-std=c++20", "-ffreestanding", "-fsyntax-only", "-x", "c++", option]
    params = CSRC / "core" / "params.h"
    said = subprocess.run([compiler, *flags, params], capture_output=True, text=True, check=False)
    assert "attn is written for 64-bit processors" in said.stderr
