"""A toolkit that cannot compile the CUDA kernels is refused before anything is compiled."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import cuda_toolkit

ROOT = Path(__file__).parents[1]


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def toolkit(tmp_path: Path) -> Path:
    """A toolkit that seems whole, of CUDA 13.0; its nvcc answers what is asked of it."""
    toolkit = tmp_path / "cuda"
    for name in cuda_toolkit.HEADERS:
        (toolkit / "include" / name).parent.mkdir(parents=True, exist_ok=True)
        (toolkit / "include" / name).touch()
    (toolkit / "lib64").mkdir()
    (toolkit / "lib64" / cuda_toolkit.LIBRARY).touch()
    nvcc(toolkit, "13.0")
    return toolkit


def nvcc(toolkit: Path, release: str) -> None:
    """Prints, as nvcc does, its version and for `--dryrun`, on standard error, where it lies."""
    version = f"Cuda compilation tools, release {release}, V{release}.88"
    dryrun = f"printf '#$ _SPACE_= \\n#$ _HERE_={toolkit}/bin\\n#$ TOP=..\\n' >&2"
    script(
        toolkit / "bin" / "nvcc",
        f'case $1 in --version) echo "{version}";; --dryrun) {dryrun};; esac',
    )


@pytest.fixture(autouse=True)
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hides all toolkits but the test's own."""
    for name in ("CUDA_HOME", "CUDA_PATH", "ATTN_CUDA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path / 'path'}:/usr/bin:/bin")


def test_an_nvcc_that_is_a_script_leads_to_the_toolkit(toolkit: Path, tmp_path: Path) -> None:
    script(tmp_path / "path" / "nvcc", f'exec {toolkit}/bin/nvcc "$@"')
    assert cuda_toolkit.find() == toolkit
    assert cuda_toolkit.choose("13.2") == toolkit


def test_an_nvcc_that_says_nothing_is_where_its_link_leads(toolkit: Path, tmp_path: Path) -> None:
    script(toolkit / "bin" / "nvcc", "exit 1")
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "nvcc").symlink_to(toolkit / "bin" / "nvcc")
    assert cuda_toolkit.find() == toolkit


@pytest.mark.parametrize("name", ["CUDA_HOME", "CUDA_PATH"])
def test_the_environment_decides(
    toolkit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    script(tmp_path / "path" / "nvcc", "exit 1")
    monkeypatch.setenv(name, str(toolkit))
    assert cuda_toolkit.choose("13.0") == toolkit


@pytest.mark.parametrize("missing", [*cuda_toolkit.HEADERS, cuda_toolkit.LIBRARY, "nvcc"])
def test_what_is_missing_is_named(
    toolkit: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    (file,) = toolkit.glob(f"**/{missing}")
    file.unlink()
    monkeypatch.setenv("CUDA_HOME", str(toolkit))
    with pytest.raises(SystemExit, match=rf"{missing}.*ATTN_CUDA=0 to build without"):
        cuda_toolkit.choose("13.0")


def test_another_major_release_is_refused(toolkit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvcc(toolkit, "12.9")
    monkeypatch.setenv("CUDA_HOME", str(toolkit))
    with pytest.raises(SystemExit, match=r"CUDA 12\.9, and torch of CUDA 13\.0.*ATTN_CUDA=0"):
        cuda_toolkit.choose("13.0")


def test_an_nvcc_that_does_not_run_is_refused(
    toolkit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(toolkit / "bin" / "nvcc", "exit 1")
    monkeypatch.setenv("CUDA_HOME", str(toolkit))
    with pytest.raises(SystemExit, match=r"names no release.*ATTN_CUDA=0"):
        cuda_toolkit.choose("13.0")


def test_without_the_kernels_no_toolkit_is_needed(
    toolkit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_HOME", str(toolkit / "not_there"))
    assert cuda_toolkit.choose(None) is None  # torch has no CUDA
    monkeypatch.setenv("ATTN_CUDA", "0")
    assert cuda_toolkit.choose("13.0") is None


def test_what_was_asked_for_must_be_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTN_CUDA", "1")
    with pytest.raises(SystemExit, match="ATTN_CUDA is 1, which needs a torch with CUDA"):
        cuda_toolkit.choose(None)
    monkeypatch.setattr(cuda_toolkit, "find", lambda: None)
    with pytest.raises(SystemExit, match="ATTN_CUDA is 1, which needs nvcc"):
        cuda_toolkit.choose("13.0")
    monkeypatch.setenv("ATTN_CUDA", "yes")
    with pytest.raises(SystemExit, match="'yes'; it must be 0 or 1"):
        cuda_toolkit.choose("13.0")


def test_the_build_asks(toolkit: Path, tmp_path: Path) -> None:
    """setup.py, with a torch that says it has CUDA, ends before it compiles."""
    (toolkit / "include" / "cuda_runtime.h").unlink()
    script(tmp_path / "path" / "nvcc", f'exec {toolkit}/bin/nvcc "$@"')
    program = (
        "import runpy, sys, torch; torch.version.cuda = '13.0'; "
        "sys.argv = ['setup.py', 'build_ext']; runpy.run_path('setup.py')"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=os.environ,
        capture_output=True,
        text=True,
    )
    assert result.returncode != 0
    assert f"the CUDA toolkit in {toolkit} has no cuda_runtime.h" in result.stderr
    assert "running build_ext" not in result.stdout


def gencode(name: str, kind: str = "sm") -> str:
    return f"-gencode=arch=compute_{name},code={kind}_{name}"


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        ("9.0", [gencode("90a")]),
        ("9.0a", [gencode("90a")]),
        ("8.0;9.0", [gencode("80"), gencode("90a")]),
        ("9.0+PTX 8.6", [gencode("86"), gencode("90", "compute"), gencode("90a")]),
        ("Hopper", [gencode("90", "compute"), gencode("90a")]),
        ("8.0", [gencode("80")]),
        ("10.0", [gencode("100")]),
    ],
)
def test_a_list_with_an_h100_has_its_own_architecture(
    toolkit: Path, monkeypatch: pytest.MonkeyPatch, listed: str, expected: list[str]
) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", listed)
    assert cuda_toolkit.architectures(toolkit, listed) == expected
    assert os.environ["TORCH_CUDA_ARCH_LIST"] == listed


@pytest.mark.parametrize("newest", ["90", "120"])
def test_architectures_without_a_list(toolkit: Path, newest: str) -> None:
    known = "compute_75 compute_80 compute_90" + (" compute_100 compute_120" * (newest == "120"))
    script(toolkit / "bin" / "nvcc", f"echo {known}")
    found = cuda_toolkit.architectures(toolkit, "")
    beyond = [gencode("100"), gencode("120")] if newest == "120" else []
    of_ptx = [gencode("80", "compute"), gencode(newest, "compute")]
    assert found == [gencode("80"), *beyond, *of_ptx, gencode("90a")]
