"""The C++ side: programs find the library in the Python package, or where CMake installs it."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_attn
from _cmake import build, build_example, configure, prefixes, run, succeed
from _variants import BUILD, ROOT, newest_clang
from contract.calls import ALL, DENSE, OF_MODULE
from torch_attn._library import IN_PACKAGE

IN_PYTHON = Path(torch_attn.__file__).parent / IN_PACKAGE
PAGE = ROOT / "docs" / "cpp.md"
HEADERS = {"sdpa.h", "varlen.h", "multihead_attention.h"}
TORCH_RELEASE = ".".join(torch.__version__.split(".")[:2])


# The unit tests and the examples, against the Python package. What compiles a program is slow.


@pytest.fixture(scope="module")
def built() -> Path:
    """Where tests/cpp is built; kept, so that only what has changed is compiled again."""
    directory = BUILD / f"cpp-torch-{torch.__version__}"
    build(ROOT / "tests" / "cpp", directory)
    return directory


@pytest.mark.slow  # compiles programs
def test_unit_tests_and_gradcheck(built: Path) -> None:
    output = succeed("ctest", "--test-dir", built, "--output-on-failure")
    assert re.search(r"gradcheck \.+ +Passed", output), output
    if not (built / "unit").exists():
        pytest.skip("not run: no GoogleTest (libgtest-dev) for the unit tests of C++")
    assert re.search(r"unit \.+ +Passed", output), output


@pytest.mark.slow  # compiles programs
def test_no_option_is_lost(built: Path) -> None:
    """A program has a call for each at each door; what is new in the schema has none."""
    doors = {
        **dict.fromkeys(("sdpa", "sdpa_with_logsumexp", "sdpa_with_weights", "sdpa_stats"), DENSE),
        "varlen": ALL,
        **dict.fromkeys(("MultiheadAttention", "MultiheadAttention_with_weights"), OF_MODULE),
    }
    expected = {f"{door} {argument}" for door, takes in doors.items() for argument in takes}
    assert set(succeed(built / "options").splitlines()) == expected


@pytest.mark.slow  # compiles programs
def test_gradcheck_checks_both_orders(built: Path) -> None:
    lines = succeed(built / "examples" / "gradcheck").splitlines()
    assert len(lines) == 6
    for line in lines:
        assert re.fullmatch(r"ok  .*first order \d.*e-\d\d   second order \d.*e-\d\d", line)


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_example("train", tmp_path_factory.mktemp("train"))


@pytest.mark.slow  # compiles a program
def test_train_learns(train: Path) -> None:
    output = succeed(train, ROOT / "README.md", "40")
    steps = re.findall(r"step +(\d+) of 40   loss ([\d.]+)   [\d.]+ steps a second", output)
    assert [int(step) for step, _ in steps] == [1, 20, 40]
    characters = len(set((ROOT / "README.md").read_bytes()))
    assert float(steps[0][1]) == pytest.approx(math.log(characters), abs=0.5)  # knows nothing
    assert float(steps[-1][1]) < 3.2


class Block(nn.Module):
    """examples/cpp/train in Python, with the attention of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)
        self.attention_norm, self.mlp_norm = nn.LayerNorm(64), nn.LayerNorm(64)
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.attention_norm(x)
        later = torch.ones(2 * [x.size(1)], dtype=torch.bool).triu(1)
        h = x + self.attention(normed, normed, normed, attn_mask=later)[0]
        return h + self.down(F.gelu(self.up(self.mlp_norm(h))))


class Model(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, 64), nn.Embedding(64, 64)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm, self.head = nn.LayerNorm(64), nn.Linear(64, vocabulary)

    def loss(self, windows: Tensor) -> Tensor:
        x = self.token(windows[:, :-1]) + self.position(torch.arange(64))
        return F.cross_entropy(self.head(self.norm(self.blocks(x))).mT, windows[:, 1:])


@pytest.mark.slow
def test_train_has_the_gradients_of_python(train: Path, tmp_path: Path) -> None:
    text = torch.tensor(list((ROOT / "README.md").read_bytes()))
    vocabulary, tokens = text.unique(return_inverse=True)
    model = Model(len(vocabulary)).double()
    model.loss(tokens[:130].view(2, 65)).backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}

    state, gradients = tmp_path / "state.pt", tmp_path / "gradients.pt"
    torch.save(dict(model.state_dict()), state)
    succeed(train, ROOT / "README.md", state, gradients)
    torch.testing.assert_close(dict(torch.load(gradients)), expected, rtol=1e-10, atol=1e-12)


def block(language: str, number: int = 0) -> str:
    blocks = re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return str(blocks[number])


def check_page(directory: Path, *options: str) -> None:
    """The program of the page, built from what stands there, with weights saved as it says."""
    (directory / "CMakeLists.txt").write_text(block("cmake"))
    (directory / "main.cpp").write_text(block("cpp"))
    build(directory, directory / "build", *options)
    names: dict[str, nn.Module] = {}
    exec(block("py").replace('"attention.pt"', repr(str(directory / "attention.pt"))), names)
    x = torch.linspace(-1, 1, 2 * 10 * 64).view(2, 10, 64)
    expected = names["attention"](x, x, x)[0].sum().item()

    lines = succeed(directory / "build" / "program", directory / "attention.pt").splitlines()
    assert lines[0] == "[2, 8, 100, 64] and a gradient of [2, 8, 100, 64]"
    assert lines[1].startswith("as expected: attn::sdpa: key has 2 heads but the others have 8;")
    said, _, computed = lines[2].rpartition(": ")
    assert said == "from Python's weights"
    assert float(computed) == pytest.approx(expected, rel=1e-3, abs=1e-3)


# What find_package says, by a project without a compiler and a torch that is only a version.


def find_attn(directory: Path, torch_version: str, version: str = "") -> tuple[int, str]:
    """The exit code, and what was said."""
    fake = directory / "torch" / "share" / "cmake" / "Torch"
    fake.mkdir(parents=True)
    (fake / "TorchConfig.cmake").write_text("add_library(torch INTERFACE IMPORTED)\n")
    (fake / "TorchConfigVersion.cmake").write_text(f"set(PACKAGE_VERSION {torch_version})\n")
    (directory / "CMakeLists.txt").write_text(
        f"""
        cmake_minimum_required(VERSION 3.18)
        project(find LANGUAGES NONE)
        find_package(attn {version} REQUIRED)
        message(STATUS "attn ${{attn_VERSION}}")
        """
    )
    found = f"{directory / 'torch'};{prefixes().split(';')[0]}"
    options = [f"-DCMAKE_PREFIX_PATH={found}", "-G", "Ninja"]
    done = run("cmake", "-S", directory, "-B", directory / "build", *options)
    return done.returncode, " ".join((done.stdout + done.stderr).split())


def test_another_torch_is_refused(tmp_path: Path) -> None:
    code, output = find_attn(tmp_path, "2.4.1")
    assert code != 0
    assert f"was built for torch {TORCH_RELEASE}, but this is torch 2.4.1 in" in output
    assert str(tmp_path / "torch") in output


@pytest.mark.parametrize(
    ("version", "fits"), [("0.1", True), ("0.1.0 EXACT", True), ("0.0.9", False), ("0.2", False)]
)
def test_versions(tmp_path: Path, version: str, fits: bool) -> None:
    code, output = find_attn(tmp_path, f"{TORCH_RELEASE}.7", version)
    assert (code == 0) == fits, output
    assert ("attn " if fits else "attnConfig.cmake, version: ") + torch_attn.__version__ in output


def test_the_command_prints_both_directories() -> None:
    attn, torchs = map(Path, prefixes().split(";"))
    assert (attn / "lib" / "cmake" / "attn" / "attnConfig.cmake").exists()
    assert (torchs / "Torch" / "TorchConfig.cmake").exists()


def files_below(directory: Path) -> set[str]:
    return {str(file.relative_to(directory)) for file in directory.rglob("*") if file.is_file()}


def test_only_our_headers_are_included() -> None:
    include = Path(prefixes().split(";")[0]).parent / "include"
    assert files_below(include) == {f"attn/{name}" for name in HEADERS}


# With clang, and against what CMake has installed.


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The prefix under which CMake has installed libattn."""
    directory = tmp_path_factory.mktemp("build")
    prefix = tmp_path_factory.mktemp("installed")
    # What it computes is looked at, not how fast.
    flags = "-DCMAKE_CXX_FLAGS_RELEASE=-O0 -DNDEBUG"
    build(ROOT, directory, flags, prefix_path=torch.utils.cmake_prefix_path)
    succeed("cmake", "--install", directory, "--prefix", prefix)
    return prefix


@pytest.mark.slow
def test_the_same_is_installed(installed: Path) -> None:
    package = Path(prefixes().split(";")[0])
    files = {"lib/cmake/attn/attnConfig.cmake", "lib/cmake/attn/attnConfigVersion.cmake"}
    headers = {f"include/attn/{name}" for name in HEADERS}
    assert files_below(installed) == {"lib/libattn.so"} | files | headers
    for name in headers:
        assert (installed / name).read_text() == (package.parent / name).read_text()
    version = "lib/cmake/attn/attnConfigVersion.cmake"
    assert (installed / version).read_text() == (package / version).read_text()


@pytest.mark.slow
def test_only_our_headers_are_included_by_who_builds_it_with_himself(tmp_path: Path) -> None:
    (tmp_path / "CMakeLists.txt").write_text(
        f"""
        cmake_minimum_required(VERSION 3.18)
        project(program LANGUAGES CXX)
        add_subdirectory({ROOT} attn)
        file(GENERATE OUTPUT included
             CONTENT "$<TARGET_PROPERTY:attn::attn,INTERFACE_INCLUDE_DIRECTORIES>")
        """
    )
    configure(tmp_path, tmp_path / "build", prefix_path=torch.utils.cmake_prefix_path)
    included = (tmp_path / "build" / "included").read_text().split(";")
    torchs = str(Path(torch.__file__).parent)
    (ours,) = [directory for directory in included if not directory.startswith(torchs)]
    assert files_below(Path(ours)) == {f"attn/{name}" for name in HEADERS}


@pytest.mark.slow
def test_no_python_in_the_library(installed: Path) -> None:
    for library in (installed / "lib" / "libattn.so", IN_PYTHON):
        dynamic = succeed("readelf", "--dynamic", library)
        needed = re.findall(r"\(NEEDED\) .*\[(.*)\]", dynamic)
        assert "libtorch_cpu.so" in needed
        assert not [name for name in needed if "python" in name]
        assert not re.search(r" U _?Py", succeed("nm", "--dynamic", library))
        assert re.findall(r"\(SONAME\) .*\[(.*)\]", dynamic) == ["libattn.so"]


@pytest.mark.slow
def test_libraries_are_looked_for_beside_it_and_in_torch(installed: Path) -> None:
    """The package's library looks for nothing, because Python has loaded torch before it."""
    assert searched(IN_PYTHON) == []
    torch_lib = str(Path(torch.__file__).parent / "lib")
    directories = searched(installed / "lib" / "libattn.so")
    assert directories[:2] == ["$ORIGIN", torch_lib]
    assert len(directories) == (3 if torch.version.cuda else 2)  # the CUDA toolkit's


def searched(library: Path) -> list[str]:
    """The directories in which the dynamic linker looks for what the library needs."""
    paths = re.findall(
        r"\((?:RUNPATH|RPATH)\) .*\[(.*)\]", succeed("readelf", "--dynamic", library)
    )
    return [directory for path in paths for directory in path.split(":")]


@pytest.mark.slow
def test_page_by_clang(tmp_path: Path) -> None:
    if (clang := newest_clang()) is None:
        pytest.skip("not run: no clang++ on the PATH")
    check_page(tmp_path, f"-DCMAKE_CXX_COMPILER={clang}")


@pytest.mark.slow
def test_page_on_packed_sequences(tmp_path: Path) -> None:
    (tmp_path / "CMakeLists.txt").write_text(block("cmake"))
    (tmp_path / "main.cpp").write_text(block("cpp", 1))
    build(tmp_path, tmp_path / "build")
    assert re.findall(": (.*)", succeed(tmp_path / "build" / "program")) == ["1", "1", "1"]


class Attend(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.attn.sdpa(x, x, x)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_program_that_names_no_symbol(installed: Path, tmp_path: Path) -> None:
    """Linkers told --as-needed drop such a library, and with it the operators."""
    torch.jit.script(Attend()).save(str(tmp_path / "model.pt"))
    source = ROOT / "tests" / "cpp" / "run_script"
    flags = "-DCMAKE_EXE_LINKER_FLAGS=-Wl,--as-needed"
    prefix_path = f"{installed};{torch.utils.cmake_prefix_path}"
    build(source, tmp_path / "build", flags, prefix_path=prefix_path)
    assert succeed(tmp_path / "build" / "program", tmp_path / "model.pt") == "24\n"
