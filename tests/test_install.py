"""What setup.py and MANIFEST.in make: the source distribution, the wheel and the installed package."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import torch_attn

ROOT = Path(__file__).parents[1]


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """What the command printed on standard output."""
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
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
    built = ["torch_attn/libattn.so", "torch_attn/libattn.json", "tests/__pycache__/x.cpython.pyc"]
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


def test_sdist_is_the_checkout(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        files = {m.name.partition("/")[2] for m in archive.getmembers() if m.isfile()}
    generated = {name for name in files if name.startswith("torch_attn.egg-info/")}
    assert files - generated - {"PKG-INFO", "setup.cfg"} == checked_out()
