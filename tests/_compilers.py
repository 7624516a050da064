"""Compilers of the machine, and variants of the library that they build."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def newest_clang() -> str | None:
    """A clang++ with its version in its name, as Debian's, or else `clang++`."""
    names = [*(f"clang++-{version}" for version in range(40, 13, -1)), "clang++"]
    return next(filter(None, map(shutil.which, names)), None)


def build_library(directory: Path, **environment: str) -> Path:
    """Compiles what changed of a variant of the library, which `environment` chooses."""
    directories = ["--build-lib", str(directory), "--build-temp", str(directory / "objects")]
    subprocess.run(
        [sys.executable, "setup.py", "build_ext", *directories],
        cwd=ROOT,
        env={**os.environ, **environment},
        check=True,
    )
    return directory / "torch_attn" / "libattn.so"
