"""What setup.py makes: the source distribution, the wheel and the installed package."""

from __future__ import annotations

import configparser
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch

import torch_attn
from check_wheel import compute, fresh_environment
from torch_attn import _library

PIP = [sys.executable, "-m", "pip"]
OFFLINE = ["--no-index", "--no-deps", "--no-build-isolation"]
RELEASE = ".".join(torch.__version__.split(".")[:2])
ROOT = Path(__file__).parents[1]


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """What the command printed on standard output."""
    environment = {**os.environ, "ATTN_OPTIMIZE": "-O0"}  # of what it compiles: see setup.py
    result = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def checked_out() -> set[str]:
    """The project's files; without what git ignores and what only a repository needs."""
    if not (ROOT / ".git").exists():
        pytest.skip("not run: this is no git checkout")
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard").splitlines()
    files = {name for name in listed if (ROOT / name).exists()}
    return {name for name in files if name != ".gitignore" and not name.startswith(".ci/")}


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, made from a copy of the checkout in which things were built."""
    tree = tmp_path_factory.mktemp("checkout")
    built = [
        "torch_attn/torch_2_13/libattn.so",
        "torch_attn/torch_2_13/libattn.json",
        "torch_attn/torch_2_13/lib/cmake/attn/attnConfig.cmake",
        "torch_attn/include/attn/sdpa.h",
        "tests/__pycache__/x.cpython.pyc",
    ]
    for name in checked_out():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_bytes((ROOT / name).read_bytes())
    for name in built:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text("built")
    directory = tmp_path_factory.mktemp("dist")
    run(sys.executable, "setup.py", "-q", "sdist", "--dist-dir", directory, cwd=tree)
    (archive,) = directory.iterdir()
    assert archive.name == f"torch_attn-{torch_attn.__version__}.tar.gz"
    return archive


@pytest.fixture(scope="module")
def unpacked(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("unpacked")
    run("tar", "-xf", sdist, "--strip-components=1", cwd=directory)
    return directory


def test_sdist_is_the_checkout(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        files = {m.name.partition("/")[2] for m in archive.getmembers() if m.isfile()}
    generated = {name for name in files if name.startswith("torch_attn.egg-info/")}
    assert files - generated - {"PKG-INFO", "setup.cfg"} == checked_out()


def test_page_of_a_package_index(unpacked: Path) -> None:
    """It is the README without links to files, which are not there."""
    text = (unpacked / "PKG-INFO").read_text()
    assert "text/markdown" in text
    assert re.findall(r"\]\((?!https?:)[^)]*\)", text) == []
    assert "[reference.py]" not in text
    assert "reference.py (`torch_attn/reference.py`)" in text
    assert "[transformers](https://huggingface.co/docs/transformers)" in text


def test_version_of_the_sdist(unpacked: Path) -> None:
    """pip refuses a file whose metadata has another version, such as one with CUDA's tag."""
    config = configparser.ConfigParser()
    config.read(unpacked / "setup.cfg")
    assert config["egg_info"]["tag_build"] == ""
    assert f"\nVersion: {torch_attn.__version__}\n" in (unpacked / "PKG-INFO").read_text()


@pytest.mark.slow
def test_install_from_the_sdist(unpacked: Path, tmp_path: Path) -> None:
    """Uses this environment's pip, into a fresh one, so that the next test compiles nothing."""
    python = fresh_environment(tmp_path)
    run(*PIP, "install", "--prefix", tmp_path, "--ignore-installed", *OFFLINE, unpacked)
    version = torch_attn.__version__
    assert compute(python) == f"torch_attn {version} computes with torch {torch.__version__}\n"


@pytest.mark.slow
def test_type_checkers_see_an_editable_install(unpacked: Path, tmp_path: Path) -> None:
    """Uses the README's command, from another directory."""
    python = fresh_environment(tmp_path)
    run(*PIP, "install", "--prefix", tmp_path, "--ignore-installed", *OFFLINE, "-e", unpacked)
    (tmp_path / "program.py").write_text("import torch_attn\n\nreveal_type(torch_attn.sdpa)\n")
    command = ["-m", "mypy", "--python-executable", python, "program.py"]
    said = run(sys.executable, *command, cwd=tmp_path)
    assert 'Revealed type is "def (query: torch._tensor.Tensor' in said


@pytest.mark.slow
def test_wheel(unpacked: Path, tmp_path: Path) -> None:
    """It is for one release of torch, and its dependencies say so; for every Python."""
    run(*PIP, "wheel", *OFFLINE, "--wheel-dir", tmp_path / "dist", unpacked)
    (wheel,) = (tmp_path / "dist").iterdir()
    version = torch_attn.__version__
    assert wheel.stem.startswith(f"torch_attn-{version}-py3-none-")
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        minor = int(RELEASE.removeprefix("2."))
        requires = f"\nRequires-Dist: torch<2.{minor + 1},>=2.{minor}\n"
        assert requires in archive.read(metadata).decode()
    output = run(sys.executable, ROOT / "tests" / "check_wheel.py", wheel)
    assert output.startswith(f"{wheel.name}: torch_attn {version}")


def test_the_supported_releases_of_torch_are_the_same_everywhere() -> None:
    supported = re.findall(r'"(torch>=[\d.]+,.*?)"', (ROOT / "setup.py").read_text())
    pyproject = (ROOT / "pyproject.toml").read_text()
    assert '"torch' not in pyproject.partition("[project]")[0]  # an isolated build fetches none
    oldest, after_newest = re.findall(r"2\.(\d+)", supported[0])
    assert f"find_package(Torch 2.{oldest} " in (ROOT / "CMakeLists.txt").read_text()
    assert f"2.{oldest} to 2.{int(after_newest) - 1}" in (ROOT / "README.md").read_text()
    compat = (ROOT / "csrc" / "operators" / "compat.h").read_text()
    assert f"(2.{oldest} to 2.{int(after_newest) - 1})" in compat
    listed = re.search(r"^TORCH := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert listed
    minors = range(int(oldest), int(after_newest))
    assert listed.group(1).split() == [f"2.{minor}" for minor in minors]
    newest = 2, int(after_newest) - 1
    assert ((2, int(oldest)), newest) == (_library.OLDEST, _library.NEWEST)


def test_an_old_setuptools_and_an_old_compiler_are_one_sentence(tmp_path: Path) -> None:
    old = "import runpy, setuptools; setuptools.__version__ = '65.5.0'; runpy.run_path('setup.py')"
    run = subprocess.run([sys.executable, "-c", old], cwd=ROOT, capture_output=True, text=True)
    said = "torch_attn needs setuptools 77 or later; this is 65.5.0. Type: pip install 'set"
    assert run.returncode == 1
    assert run.stderr.startswith(said)
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\necho \"error: no option '-std=c++20'\" >&2; exit 1\n")
    compiler.chmod(0o755)
    for path, error in (
        (compiler, "error: no option '-std=c++20'"),
        ("/no/g++", "[Errno 2] No such"),
    ):
        run = subprocess.run(
            [sys.executable, "setup.py", "-q", "build_ext", f"--build-temp={tmp_path}"],
            cwd=ROOT,
            env=os.environ | {"CXX": str(path)},
            capture_output=True,
            text=True,
        )
        last = run.stderr.splitlines()[-1]
        assert last.startswith("torch_attn needs a compiler of C++20, such as GCC 12"), run.stderr
        assert f"{path} says: {error}" in last
