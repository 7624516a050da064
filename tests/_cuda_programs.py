"""Programs of tests/cuda over the stand-in, without torch, with errors that can be chosen."""

from __future__ import annotations

import functools
import os
import platform
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import pytest

from _variants import ROOT, mutable_sources

# What the programs are compiled from.
SOURCES = ("csrc/core", "csrc/cuda", "tests/cuda", "tests/stand_in")
COMPILER = shutil.which("g++") or "g++"
# The fibers switch stacks with a few instructions of x86.
needs_x86 = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="not run: the stand-in is written for x86_64"
)


class Compiler(Protocol):
    """Compiles a program of tests/cuda, once, with a choice of mutations.

    `races`: so that it can look for races, with a call before each access, which takes 4 times as
    long.
    """

    def __call__(self, name: str, races: bool = False) -> Path: ...


def compiler_of(to: Path, errors: Iterable[tuple[str, str, str]]) -> Compiler:
    """Compiles into `to`; of `errors`, see mutable_sources(), `mutation=N` chooses number N."""
    # the stand-in has its own ones of these
    csrc = mutable_sources(to, errors, "ptx.cuh", "ptx_sm90.cuh", "device.h")
    stand_in = ROOT / "tests" / "stand_in"
    compiler = [COMPILER, "-std=c++20", "-O1", f"-I{stand_in}"]
    subprocess.run([*compiler, "-c", stand_in / "fibers.cpp", "-o", to / "fibers.o"], check=True)

    @functools.cache
    def compile_once(name: str, races: bool = False) -> Path:
        program = to / ("races" if races else "plain") / name
        program.parent.mkdir(exist_ok=True)
        source = ROOT / "tests" / "cuda" / f"{name}.cu"
        flags = [
            *("-g1", "-Wno-unknown-pragmas", f"-I{csrc}", "-include", "mutation.h"),
            *("-fsanitize=alignment", "-fno-sanitize-recover=alignment"),  # see setup.py
            "-fno-threadsafe-statics",
        ]
        if races:  # see races.h; only accesses are of interest
            flags += ["-fsanitize=thread", "--param=tsan-instrument-func-entry-exit=0"]
        compiled = program.with_suffix(".o")
        subprocess.run([*compiler, *flags, "-c", "-x", "c++", source, "-o", compiled], check=True)
        objects = [compiled, to / "fibers.o"]
        subprocess.run([COMPILER, "-fsanitize=alignment", *objects, "-o", program], check=True)
        return program

    return compile_once


def run(program: Path, seeds: int, mutation: int = 0, **environment: str) -> str:
    """What the program prints with one seed after the other, until something is wrong; errors too.

    With odd ones an array ends at memory that cannot be touched, with even ones at numbers that are
    NaN.
    """
    for seed in range(seeds):
        guard = {"ATTN_GUARD_BYTES": "0"} if seed % 2 else {}
        chosen = {"ATTN_STAND_IN_SEED": str(seed), "ATTN_MUTATION": str(mutation)}
        chosen["ATTN_STAND_IN_CAPABILITY"] = "90" if program.name.endswith("sm90") else "80"
        run = subprocess.run(
            [program], env=os.environ | chosen | guard | environment, capture_output=True, text=True
        )
        assert (run.returncode == 0) == run.stdout.endswith("right\n")
        if not (output := run.stdout + run.stderr).endswith("right\n"):
            break
    return output
