"""nvcc's front end takes the CUDA sources: seconds, where `make check-cuda` takes an hour.

To g++, which compiles them over the stand-in, a function of the device is like any other.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from _variants import ROOT
from tests.cuda.programs import find

NVCC = find("nvcc")
pytestmark = pytest.mark.skipif(not NVCC, reason="not run: nvcc is not there")


def said_of(source: Path, to: Path) -> str:
    """What nvcc's front end, and the compiler that gets its output, say of the host's half."""
    options = ["-std=c++20", "--expt-relaxed-constexpr", "-arch=sm_90a", "-DATTN_SM90A"]
    kept = ["--keep", "--keep-dir", to, "-o", to / "object.o"]
    command = [NVCC, *options, f"-I{ROOT / 'csrc'}", "-c", source, *kept, "--dryrun"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stderr.splitlines()
    steps = [line.removeprefix("#$ ") for line in lines if line.startswith("#$ ")]
    (path,) = (step for step in steps if step.startswith("PATH="))  # where cudafe++ lies
    front_end = [step for step in steps if "cpp4.ii" in step]  # preprocesses, then splits
    (host,) = (step for step in steps if step.endswith(f'-o "{to / "object.o"}" '))
    assert len(front_end) == 2
    # Of the half of the device, which is not compiled, the host's includes its list of kernels.
    (stub,) = re.findall(r'--stub_file_name "(.+?)"', front_end[1])
    (to / stub).touch()
    checks = host.replace(" -c ", f' -fsyntax-only -I"{to}" ', 1)
    script = "\n".join(["set -e", path, *front_end, checks])
    run = subprocess.run(["sh", "-c", script], capture_output=True, text=True, cwd=to)
    return f"{run.stdout}{run.stderr}" if run.returncode else ""


@pytest.mark.parametrize(
    "source", sorted(str(x.relative_to(ROOT)) for x in (ROOT / "csrc").rglob("*.cu"))
)
def test_the_front_end_takes(source: str, tmp_path: Path) -> None:
    assert said_of(ROOT / source, tmp_path) == ""


def test_what_the_front_end_refuses(tmp_path: Path) -> None:
    source = tmp_path / "wrong.cu"
    device = "__device__ inline auto number() { return 1; }\n"
    source.write_text(f"{device}int f() {{ return number(); }}\n")
    assert "calling a __device__ function" in said_of(source, tmp_path)
    source.write_text(f"{device}using Number = decltype(number());\nNumber f() {{ return 1; }}\n")
    assert "number" in said_of(source, tmp_path)
