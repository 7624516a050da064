"""Builds and runs the programs of examples/cpp with the C++ side of the installed package."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    """What the command does, in the root of the checkout; also if it fails."""
    # cmake and ninja may be those of a virtual environment that is not activated.
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
    # One thread: the threads of several busy processes would wait for each other.
    environment = os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def succeed(*command: str | Path) -> str:
    """What the command writes to its standard output; it must not fail."""
    done = run(*command)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(program: str, directory: Path) -> Path:
    """The program, linked with --as-needed as on systems where that is the default."""
    prefixes = succeed(sys.executable, "-m", "torch_attn", "--cmake-prefix-path").strip()
    configured = run(
        *("cmake", "-G", "Ninja", "-S", ROOT / "examples" / "cpp", "-B", directory),
        f"-DCMAKE_PREFIX_PATH={prefixes}",
        "-DCMAKE_EXE_LINKER_FLAGS=-Wl,--as-needed",
    )
    output = configured.stdout + configured.stderr
    if torch.version.cuda and "cannot find the CUDA" in output:
        pytest.skip("not run: find_package(Torch) of a torch with CUDA needs the CUDA toolkit")
    assert configured.returncode == 0, output
    succeed("cmake", "--build", directory, "--target", program)
    return directory / program
