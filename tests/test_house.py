"""What may be in which folder, by includes and imports; how long a function is; how tests are."""

from __future__ import annotations

import ast
import graphlib
import re
from pathlib import Path

CSRC = Path(__file__).parents[1] / "csrc"
PACKAGE = CSRC.parent / "torch_attn"
TORCH = re.compile(r"torch/|ATen|c10/|operators/|attn/")
# Headers of C, and what a kernel file may ask of its types at compile time.
WITHOUT_CODE = {"stdint.h", "stddef.h", "type_traits", "cuda_runtime.h"}
KERNELS = [
    *(path for part in ("simd", "tiles", "kernels", "isa") for path in CSRC.glob(f"cpu/{part}/*")),
    *(path for path in CSRC.glob("cuda/**/*.*") if path.name not in ("device.cpp", "device.h")),
]


def included(file: Path) -> list[str]:
    return re.findall(r'^ *# *include [<"](.*)[>"]', file.read_text(), re.MULTILINE)


def test_core_knows_no_torch_and_no_stl() -> None:
    for file in CSRC.glob("core/*"):
        for name in included(file):
            assert name in WITHOUT_CODE or name.startswith("core/"), (file, name)
        assert not re.search(r"\b(std|at|c10|torch)::", file.read_text()), file


def test_kernels_know_no_torch() -> None:
    """On the CPU no STL either: inline copies compiled for AVX-512 would crash older machines."""
    assert len(KERNELS) > 50
    for file in KERNELS:
        for name in included(file):
            assert not TORCH.match(name), (file, name)
            assert "/" in name or "cuda" in file.parts or name in WITHOUT_CODE, (file, name)
        assert not re.search(r"\b(at|c10|torch)::", file.read_text()), file


def test_kernels_of_cuda_keep_every_member_where_sizeof_reaches() -> None:
    """nvcc 13.0 puts members of a struct beyond its size if its base has [[no_unique_address]].

    The base's last member, empty, is enough. An H100 then reported an illegal memory access, and
    g++, which compiles the same kernels for the stand-in, places them as it should.
    """
    for file in CSRC.glob("cuda/**/*.cu*"):
        assert "no_unique_address" not in re.sub(r"//.*", "", file.read_text()), file


def test_patterns_of_this_file_match_files() -> None:
    assert len(KERNELS) > 50
    assert any(TORCH.match(name) for name in included(CSRC / "cpu" / "device.cpp"))


def test_the_map_of_the_tests_has_every_file() -> None:
    """A name that ends with … stands for all files that begin so."""
    page = (Path(__file__).parent / "README.md").read_text()
    table = page[page.index("| subject |") : page.index("## Add a test")]
    names = re.findall(r"`(?:test_)?(\w+)`", table)
    begins = re.findall(r"`(?:test_)?(\w+)…`", table)
    files = {path.stem[5:] for path in Path(__file__).parent.glob("test_*.py")}
    assert {name for name in files if not name.startswith(tuple(begins))} <= set(names)
    assert {name for name in names if not name.startswith("_")} <= files
    assert all(any(name.startswith(begin) for name in files) for begin in begins)


def test_no_case_of_a_test_passes_without_testing() -> None:
    """A case for which a test would return before it has done anything is left out of its table."""
    for file in Path(__file__).parent.rglob("test_*.py"):
        for function in ast.walk(ast.parse(file.read_text())):
            if isinstance(function, ast.FunctionDef) and function.name.startswith("test_"):
                docstring = ast.get_docstring(function) is not None
                for line in function.body[docstring:]:
                    if any(isinstance(part, (ast.Assert, ast.Expr)) for part in ast.walk(line)):
                        break
                    returns = isinstance(line, ast.If) and isinstance(line.body[0], ast.Return)
                    assert not returns, f"{file.name}: {function.name}"


def test_the_root_is_a_table_of_contents() -> None:
    assert len([path for path in CSRC.iterdir() if path.is_file()]) <= 12


def test_modules_of_functions_of_the_pair_import_in_one_direction() -> None:
    """Each imports only modules above it in the list of the package's docstring."""
    package = CSRC.parent / "torch_attn" / "_programs"
    order = re.findall(r"^- (\w+):", (package / "__init__.py").read_text(), re.MULTILINE)
    assert sorted(order) == sorted(path.stem for path in package.glob("[!_]*.py"))
    for n, name in enumerate(order):
        text = (package / f"{name}.py").read_text()
        assert set(re.findall(r"torch_attn\._programs\.(\w+) import", text)) <= set(order[:n]), name
        assert "TYPE_CHECKING" not in text


def imported(file: Path, modules: set[str]) -> set[str]:
    """Those of the modules that a file imports, also in functions."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = (f"{node.module}.{name.name}" for name in node.names)
            found |= {name if name in modules else node.module for name in names}
        elif isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
    return found & modules


def test_no_circle_of_imports() -> None:
    names = {
        path: path.relative_to(PACKAGE.parent).with_suffix("") for path in PACKAGE.rglob("*.py")
    }
    files = {".".join(x.parts).removesuffix(".__init__"): path for path, x in names.items()}
    graph = {name: imported(path, {*files} - {name}) for name, path in files.items()}
    assert "torch_attn.functional" in graph["torch_attn.varlen"]
    list(graphlib.TopologicalSorter(graph).static_order())  # a CycleError names those of a circle
    assert len([*PACKAGE.glob("*.py")]) <= 20


def test_functions_of_the_package_are_short() -> None:
    """Docstrings are not counted."""
    for file in PACKAGE.glob("**/*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef):
                lines = range(node.lineno, node.end_lineno or 0)
                docstring: list[ast.stmt] = node.body[:1] if ast.get_docstring(node) else []
                own = sum(len(range(d.lineno, d.end_lineno or 0)) for d in docstring)
                assert len(lines) - own < 75, (file, node.name)


def test_functions_of_the_operators_are_short() -> None:
    """A function, or a member, begins and ends at the same indentation: clang-format sees to it."""
    begin = re.compile(r"( {0,2})(?! |namespace|struct|class|enum|public|private).*(?<!= )\{")
    lengths = {}
    for file in sorted((CSRC / "operators").rglob("*.*")):
        lines = file.read_text().splitlines()
        for i, line in enumerate(lines):
            if found := begin.fullmatch(line):
                end = next(j for j in range(i, len(lines)) if lines[j].startswith(f"{found[1]}}}"))
                lengths[file.name, line] = end - i + 1
    assert len(lengths) > 300
    assert {name: n for name, n in lengths.items() if n > 75} == {}
