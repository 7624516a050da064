"""Programs in C++: configured and built by CMake against the Python package, and run."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

from _variants import ROOT


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    """What the command does, in the root of the checkout; also if it fails."""
    # cmake and ninja may belong to a virtual environment that is not activated.
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
    # Idle threads sleep, so that programs with many short calls do not wait for cores that others
    # have.
    environment = os.environ | {"PATH": path, "OMP_WAIT_POLICY": "passive"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def succeed(*command: str | Path) -> str:
    """What the command writes to its standard output; it must not fail."""
    done = run(*command)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@functools.cache
def prefixes() -> str:
    """Where CMake finds attn and torch. On first use, because this starts an interpreter."""
    return succeed(sys.executable, "-m", "torch_attn", "--cmake-prefix-path").strip()


def configure(source: Path, build: Path, *options: str, prefix_path: str = "") -> None:
    done = run(
        *("cmake", "-G", "Ninja", "-S", source, "-B", build),
        *(f"-DCMAKE_PREFIX_PATH={prefix_path or prefixes()}", *options),
    )
    output = done.stdout + done.stderr
    if done.returncode and torch.version.cuda and "cannot find the CUDA" in output:
        pytest.skip("not run: find_package(Torch) of a torch with CUDA needs the CUDA toolkit")
    assert done.returncode == 0, output


def build(
    source: Path,
    directory: Path,
    *options: str,
    target: str = "all",
    prefix_path: str = "",
) -> None:
    configure(source, directory, *options, prefix_path=prefix_path)
    succeed("cmake", "--build", directory, "--target", target)


def build_example(program: str, directory: Path) -> Path:
    """A program of examples/cpp, linked with --as-needed as on systems where that is the default.

    Returns:
        Where the program is.
    """
    as_needed = "-DCMAKE_EXE_LINKER_FLAGS=-Wl,--as-needed"
    build(ROOT / "examples" / "cpp", directory, as_needed, target=program)
    return directory / program
