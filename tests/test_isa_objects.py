"""What the object files of the instruction sets hold besides kernels: nothing that runs elsewhere.

Code compiled for AVX-512 that runs when the library is loaded, or that the linker takes for a
function of the rest of the library, ends the program on a processor without AVX-512.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).parent.parent / "csrc"
SOURCES = {path.stem: path for path in sorted((CSRC / "cpu" / "isa").glob("*.cpp"))}
NAMESPACES = {name: "baseline" if name == "default" else name for name in SOURCES}
NOT_CODE = {"DW.ref.__gxx_personality_v0"}  # the address of a function of libstdc++

pytestmark = pytest.mark.skipif(
    not all(map(shutil.which, ("c++", "nm", "objdump"))), reason="no C++ compiler or binutils"
)


def tool(*command: str | Path) -> str:
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    return process.stdout


def compiled(source: Path, directory: Path) -> Path:
    target = directory / "object.o"
    flags = ["-std=c++20", "-fPIC", "-fvisibility=hidden", "-fopenmp", f"-I{CSRC}"]
    tool("c++", "-O0", *flags, "-c", source, "-o", target)
    return target


def of_the_library(name: str) -> Path:
    """The object file that setup.py has linked, at full optimization."""
    target = CSRC.parent / "build" / "objects" / "csrc" / "cpu" / "isa" / f"{name}.o"
    if not target.exists():
        pytest.skip("not run: the library was built elsewhere")
    return target


def runs_at_load(target: Path) -> list[str]:
    """The sections with functions that the loader calls."""
    return re.findall(r"\.(?:init_array|ctors|preinit_array)\b", tool("objdump", "-h", target))


def foreign_symbols(target: Path, namespace: str) -> list[str]:
    """Names that other object files may define too, outside of the file's own namespace."""
    symbols = [line.split(maxsplit=2) for line in tool("nm", "-C", target).splitlines()]
    weak = [parts[2] for parts in symbols if len(parts) == 3 and parts[1] in "uVvWw"]
    # nm leaves some names of lambdas in templates as the compiler writes them.
    own = rf"attn::{namespace}::|^_ZZ?N4attn{len(namespace)}{namespace}\d"
    return [name for name in weak if not re.search(own, name) and name not in NOT_CODE]


@pytest.mark.parametrize("optimized", [pytest.param(False, marks=pytest.mark.slow("csrc")), True])
@pytest.mark.parametrize("name", SOURCES)
def test_nothing_but_kernels(name: str, optimized: bool, tmp_path: Path) -> None:
    target = of_the_library(name) if optimized else compiled(SOURCES[name], tmp_path)
    assert not runs_at_load(target)
    assert not foreign_symbols(target, NAMESPACES[name])


def test_checker_sees_code_at_load_and_weak_symbols(tmp_path: Path) -> None:
    source = tmp_path / "bad.cpp"
    source.write_text(
        "int now();\n"
        "inline int everywhere(int x) { return x ? everywhere(x - 1) : now(); }\n"
        "namespace attn::avx2 {\n"
        "inline int here(int x) { return x ? here(x - 1) : now(); }\n"
        "int (*functions[])(int) = {everywhere, here};\n"
        "int table = now();\n"
        "}\n"
    )
    target = compiled(source, tmp_path)
    assert runs_at_load(target) == [".init_array"]
    assert foreign_symbols(target, "avx2") == ["everywhere(int)"]
