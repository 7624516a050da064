"""The C++ side: CMake builds and installs libattn, and a program uses what was installed."""

import os
import re
import subprocess
import sysconfig
from pathlib import Path

import pytest
import torch

import torch_attn

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.slow  # compiles the library with CMake


def run(*command: str | Path) -> str:
    # cmake and ninja may be those of a virtual environment that is not activated.
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
    result = subprocess.run(
        command,
        env=os.environ | {"PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert result.returncode == 0, result.stdout
    return result.stdout


def cmake_build(source: Path, build: Path, *prefixes: Path) -> None:
    prefix_path = ";".join([*map(str, prefixes), torch.utils.cmake_prefix_path])
    run("cmake", "-G", "Ninja", "-S", source, "-B", build, f"-DCMAKE_PREFIX_PATH={prefix_path}")
    run("cmake", "--build", build)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The prefix under which CMake has installed libattn."""
    build = tmp_path_factory.mktemp("build")
    prefix = tmp_path_factory.mktemp("installed")
    try:
        cmake_build(ROOT, build)
    except AssertionError as error:
        if torch.version.cuda and "cannot find the CUDA" in str(error):
            pytest.skip("not run: find_package(Torch) of a torch with CUDA needs the CUDA toolkit")
        raise
    run("cmake", "--install", build, "--prefix", prefix)
    return prefix


def test_no_python_in_the_library(installed: Path) -> None:
    for library in (
        installed / "lib" / "libattn.so",
        Path(torch_attn.__file__).with_name("libattn.so"),
    ):
        needed = re.findall(r"\(NEEDED\) .*\[(.*)\]", run("readelf", "--dynamic", library))
        assert "libtorch_cpu.so" in needed
        assert not [name for name in needed if "python" in name]
        assert not re.search(r" U _?Py", run("nm", "--dynamic", library))


def test_libraries_are_looked_for_beside_it_and_in_torch(installed: Path) -> None:
    """Of the package's library nothing is looked for: Python has loaded torch before it."""
    assert searched(Path(torch_attn.__file__).with_name("libattn.so")) == []
    torch_lib = str(Path(torch.__file__).parent / "lib")
    directories = searched(installed / "lib" / "libattn.so")
    assert directories[:2] == ["$ORIGIN", torch_lib]
    assert len(directories) == (3 if torch.version.cuda else 2)  # the CUDA toolkit's


def searched(library: Path) -> list[str]:
    """The directories in which the dynamic linker looks for what the library needs."""
    paths = re.findall(r"\((?:RUNPATH|RPATH)\) .*\[(.*)\]", run("readelf", "--dynamic", library))
    return [directory for path in paths for directory in path.split(":")]


def test_example(installed: Path, tmp_path: Path) -> None:
    cmake_build(ROOT / "examples" / "cpp", tmp_path, installed)
    output = run(tmp_path / "example")
    assert [line.partition(":")[0] for line in output.splitlines()] == [
        "grad_query",
        "grad_key",
        "grad_value",
        "grad_mask",
        "output",
    ]


def test_program_that_names_no_symbol_keeps_the_library(installed: Path, tmp_path: Path) -> None:
    """Linkers told --as-needed drop such a library, and with it the operators."""
    (tmp_path / "CMakeLists.txt").write_text(
        """
        cmake_minimum_required(VERSION 3.18)
        project(registered LANGUAGES CXX)
        find_package(attn REQUIRED)
        add_executable(registered main.cpp)
        target_link_options(registered PRIVATE -Wl,--as-needed)
        target_link_libraries(registered PRIVATE torch attn::attn)
        """
    )
    (tmp_path / "main.cpp").write_text(
        """
        #include <ATen/core/dispatch/Dispatcher.h>
        int main() {
          return c10::Dispatcher::singleton().findSchema({"attn::sdpa", ""}) ? 0 : 1;
        }
        """
    )
    cmake_build(tmp_path, tmp_path / "build", installed)
    run(tmp_path / "build" / "registered")
