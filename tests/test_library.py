"""Loading the library: an import that cannot work says why and what to do."""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import torch_attn
from _variants import ROOT, run_python
from tests import signatures
from torch_attn import _library


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a first import will look: a file that is not a library, built for this torch."""
    path = tmp_path / _library.IN_PACKAGE
    path.parent.mkdir()
    path.write_text("not a library")
    pretend_built_for(torch.__version__, path)
    monkeypatch.setattr(_library, "LIBRARY", path)
    monkeypatch.setattr(_library, "PACKAGE", tmp_path)
    monkeypatch.delenv("ATTN_LIBRARY", raising=False)
    monkeypatch.setattr(torch._C, "_dispatch_has_kernel", lambda name: False)
    return path


def pretend_built_for(version: str, library: Path) -> None:
    built_with = {"torch": version, "compiler": "c++", "cuda": False}
    library.with_suffix(".json").write_text(json.dumps(built_with))


def test_not_built(library: Path) -> None:
    library.unlink()
    with pytest.raises(ImportError, match=r"libattn\.so is not there.*fits none\..*pip install"):
        _library.load()


def test_a_library_of_the_environment(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library.unlink()
    monkeypatch.setenv("ATTN_LIBRARY", str(library))
    with pytest.raises(ImportError, match=r"not there\. The environment variable ATTN_LIB"):
        _library.load()


@pytest.mark.parametrize("version", ["2.10.1", "2.16.0+cpu", "3.0"])
def test_a_torch_that_is_not_supported(
    version: str, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library.unlink()
    monkeypatch.setattr(torch, "__version__", version)
    said = rf"This is torch {re.escape(version)}; torch 2\.11 to 2\.15 are supported$"
    with pytest.raises(ImportError, match=said):
        _library.load()


def test_a_checkout_that_hides_the_installed_one(tmp_path: Path) -> None:
    """Python puts the current directory first, as at a visitor's `python examples/...`."""
    sources = shutil.ignore_patterns("torch_2_*", "__pycache__")
    shutil.copytree(ROOT / "torch_attn", tmp_path / "checkout" / "torch_attn", ignore=sources)
    (tmp_path / "checkout" / "setup.py").touch()
    installed = tmp_path / "installed" / "torch_attn" / _library.IN_PACKAGE
    installed.parent.mkdir(parents=True)
    installed.touch()
    code = "import sys; sys.path[:0] = ['', sys.argv[1]]; import torch_attn"
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "installed")],
        env={name: value for name, value in os.environ.items() if name != "ATTN_LIBRARY"},
        cwd=tmp_path / "checkout",
        capture_output=True,
        text=True,
    )
    hidden = f"hides the torch_attn that is installed in {tmp_path / 'installed'}: start Python in"
    assert hidden in run.stderr


def test_built_for_other_releases(library: Path) -> None:
    """A wheel may be built for other releases."""
    for release in ("torch_2_97", "torch_2_98"):
        (library.parents[1] / release).mkdir()
        shutil.copy(library, library.parents[1] / release)
    library.unlink()
    message = f"This is torch {torch.__version__}, and what the package has fits torch 2.97, 2.98."
    with pytest.raises(ImportError, match=re.escape(message) + ".*pip install"):
        _library.load()


@pytest.mark.regression
@pytest.mark.parametrize("contents", [None, "", "{}"])
def test_built_otherwise(contents: str | None, library: Path) -> None:
    """As the library that CMake installs is."""
    described = library.with_suffix(".json")
    described.unlink()
    if contents is not None:
        described.write_text(contents)
    with pytest.raises(ImportError, match=r"no library that setup\.py has built.*libattn\.json"):
        _library.load()


def test_built_for_another_torch(library: Path) -> None:
    pretend_built_for("2.9.1", library)
    message = rf"built for torch 2\.9\.1, but this is torch {torch.__version__}.*pip install"
    with pytest.raises(ImportError, match=message.replace("+", r"\+")):
        _library.load()


def test_built_for_another_patch_release_is_tried(library: Path) -> None:
    major, minor = torch.__version__.split(".")[:2]
    pretend_built_for(f"{major}.{minor}.99", library)
    with pytest.raises(ImportError, match=r"libattn\.so does not load.*pip install"):
        _library.load()


def import_after(loaded: Path) -> subprocess.CompletedProcess[str]:
    """Imports the package, and modules that it imports on first use."""
    program = (
        f"import torch; torch.ops.load_library({str(loaded)!r}); import torch_attn; "
        "torch_attn.reference.sdpa; torch_attn.integrations.__name__"
    )
    command = [sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.regression
def test_another_copy_is_loaded(tmp_path: Path) -> None:
    """PyTorch would end the process; also where a program or an extension came with the copy."""
    copy = tmp_path / "libattn.so"
    shutil.copy(_library.LIBRARY, copy)
    process = import_after(copy)
    assert process.returncode == 1
    assert f"by another library than {_library.LIBRARY}" in process.stderr


def test_the_same_library_is_loaded() -> None:
    process = import_after(_library.LIBRARY)
    assert process.returncode == 0, process.stderr


@pytest.mark.regression
def test_empty_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty variable counts as one that is not set."""

    def library() -> object:
        return runpy.run_path(_library.__file__)["LIBRARY"]

    monkeypatch.delenv("ATTN_LIBRARY", raising=False)
    unset = library()
    monkeypatch.setenv("ATTN_LIBRARY", "")
    assert library() == unset


def test_dir_is_what_is_public() -> None:
    """Completion shows it, and each name is there when it is asked for."""
    assert set(torch_attn.__all__) <= set(dir(torch_attn))
    there = [name for name in dir(torch_attn) if name != "plots" or find_spec("matplotlib")]
    assert not [name for name in there if not hasattr(torch_attn, name)]


@pytest.mark.skipif(not find_spec("matplotlib"), reason="not run: no matplotlib, which plots need")
def test_names_order_and_defaults_of_arguments() -> None:
    """A difference is a change of docs/promises.md: see signatures.py."""
    expected = (ROOT / "tests" / "signatures.txt").read_text().splitlines()
    assert [*signatures.lines()] == expected


ONE_TEAM = """
import os, re, torch, torch_attn
x = torch.randn(2, 8, 256, 64, requires_grad=True)
for threads in 1, 2, 4:
    torch.set_num_threads(threads)
    x.exp().sum().backward()
    before = len(os.listdir("/proc/self/task"))
    torch_attn.sdpa(x, x, x).sum().backward()
    assert len(os.listdir("/proc/self/task")) == before, threads
print(*set(re.findall(r"\\S+/lib[gi]?omp[^/\\s]*[.]so", open("/proc/self/maps").read())))
"""


def test_threads_are_torchs() -> None:
    """A second OpenMP in the process would have a team of its own, on the same cores."""
    said = run_python("-W", "ignore", "-c", ONE_TEAM)
    assert len(said.split()) == 1, said
