"""examples/cpp/infer: MiniLM compiled by AOTInductor embeds sentences in C++ as in Python."""

from __future__ import annotations

import re
import sys
import zipfile
from pathlib import Path

import pytest

from _cmake import build_example, run, succeed

pytestmark = pytest.mark.slow  # AOTInductor compiles two models


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("exported")
    succeed(sys.executable, "-m", "examples.cpp.infer.export", "--out", directory)
    return directory


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_example("infer", tmp_path_factory.mktemp("build"))


@pytest.mark.parametrize(("package", "calls"), [("attn.pt2", 6), ("builtin.pt2", 0)])
def test_layers_call_the_operator(exported: Path, package: str, calls: int) -> None:
    """A package lists the operators that it calls through the dispatcher in its .json files."""
    with zipfile.ZipFile(exported / package) as archive:
        lists = [archive.read(name) for name in archive.namelist() if name.endswith(".json")]
    assert sum(text.count(b'"attn::sdpa"') for text in lists) == calls


def test_embeddings_are_those_of_python(exported: Path, program: Path) -> None:
    output = succeed(program, exported)
    assert "the embeddings equal Python's within 1e-04" in output
    rows = re.findall(r"^ +(\d+) +\d+  (attn|built-in) .* ([\d.e+-]+)$", output, re.MULTILINE)
    attentions = ("attn", "built-in")
    assert [row[:2] for row in rows] == [(n, a) for n in ("1", "8", "64") for a in attentions]
    assert all(float(difference) < 1e-4 for _, _, difference in rows)


def test_missing_files_are_named(exported: Path, program: Path, tmp_path: Path) -> None:
    assert f"cannot read {tmp_path}/sentences.pt: " in run(program, tmp_path).stderr
    (tmp_path / "sentences.pt").symlink_to(exported / "sentences.pt")
    done = run(program, tmp_path)
    assert done.returncode == 1
    assert f"cannot read {tmp_path}/attn.pt2: " in done.stderr
    assert run(program).stderr.startswith("usage: ")
