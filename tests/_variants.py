"""Variants of the library, by another compiler or over a stand-in, and of its sources."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build"
# What ATTN_STAND_IN replaces by software, so that its kernels run on a machine without it.
STAND_INS = {"cuda": BUILD / "stand_in", "amx": BUILD / "amx"}


def newest_clang() -> str | None:
    """A clang++ with its version in its name, as Debian's, or else `clang++`."""
    names = [*(f"clang++-{version}" for version in range(40, 13, -1)), "clang++"]
    return next(filter(None, map(shutil.which, names)), None)


def mutable_sources(to: Path, mutations: Iterable[tuple[str, str, str]], *left_out: str) -> Path:
    """A copy of csrc in `to`, without the files of these names, in which errors can be chosen.

    The program that is compiled, with `-include mutation.h`, has the error that the number
    ATTN_MUTATION in its environment says; 0 is none. Each is a file, a place in it, which marks an
    expression or a statement by « and », and what is there instead.
    """
    csrc = to / "csrc"
    shutil.copytree(ROOT / "csrc", csrc, ignore=shutil.ignore_patterns(*left_out))
    (csrc / "mutation.h").write_text(
        '#include <cstdlib>\ninline const int mutation = std::atoi(std::getenv("ATTN_MUTATION"));\n'
    )
    for n, (file, place, wrong) in enumerate(mutations, 1):
        before, right, after = re.split("[«»]", place)
        either = f"(mutation == {n} ? {wrong} : {right})"
        if right.endswith(";"):
            either = f"if (mutation == {n}) {{ {wrong} }} else {{ {right} }}"
        text = (csrc / file).read_text()
        assert text.count(before + right + after) == 1, f"{file} has changed: {place!r}"
        (csrc / file).write_text(text.replace(before + right + after, before + either + after))
    return csrc


def build_library(directory: Path, python: str = sys.executable, **environment: str) -> Path:
    """Compiles what changed of the variant that `environment` chooses (see setup.py).

    With little optimization, which takes minutes; `-O1` inlines what intrinsics and templates need.
    """
    directories = ["--build-lib", directory, "--build-temp", directory / "objects"]
    process = subprocess.run(
        [python, "setup.py", "build_ext", *directories],
        cwd=ROOT,
        env={**os.environ, "ATTN_OPTIMIZE": "-O1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if process.returncode != 0:
        raise RuntimeError(f"{directory} could not be built:\n{process.stdout[-8000:]}")
    built = directory.glob("torch_attn/torch_*/libattn.so")
    return max(built, key=lambda library: library.stat().st_mtime)


def build_stand_in(name: str) -> Path:
    return build_library(STAND_INS[name], ATTN_STAND_IN=name)


def run_python(*arguments: str, **environment: str) -> str:
    """What the command `python arguments` prints; fails with it, and with a line to paste."""
    command = [sys.executable, *arguments]
    process = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True
    )
    if process.returncode != 0:
        variables = [f"{name}={shlex.quote(value)}" for name, value in environment.items()]
        line = " ".join(["env", *variables, shlex.join(command)])
        raise AssertionError(f"{process.stdout[-8000:]}{process.stderr[-4000:]}\n$ {line}")
    return process.stdout


def run_tests(*arguments: str, at_least: int, **environment: str) -> None:
    """Runs pytest in a process of its own; that many tests pass, or more, and none fails."""
    output = run_python("-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments, **environment)
    passed = re.search(r"(\d+) passed", output)
    assert passed, output
    assert int(passed[1]) >= at_least, output[-1000:]


def run_fuzz(device: str, problems: int) -> None:
    """`make fuzz` finds nothing in the first problems of the device."""
    command = f"-m tests.fuzz --only {device} --seed 1 --problems {problems}"
    said = " ".join(run_python(*command.split()).split())
    assert f"{device}: {problems} problems, beside them" in said
    assert f"on {device} {problems}" in said
