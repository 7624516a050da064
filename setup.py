"""Builds torch_attn/torch_<release>/libattn.so from the files listed in csrc/sources.txt.

Everything else about the package is in pyproject.toml. The library contains no Python: the package
loads it with ``torch.ops.load_library``.
"""

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import setuptools

if int(setuptools.__version__.split(".")[0]) < 77:
    raise SystemExit(
        f"torch_attn needs setuptools 77 or later; this is {setuptools.__version__}. "
        "Type: pip install 'setuptools>=77'"
    )
from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel

if sys.platform != "linux":
    raise SystemExit(f"torch_attn is for Linux; this is {sys.platform}")
try:
    import torch
except ImportError as error:
    raise SystemExit(
        "torch_attn is compiled for the torch that is installed, and here none imports "
        f"({error}). Without --no-build-isolation, pip hides a torch that you have. Install torch "
        "2.11 to 2.15, then type: pip install ninja 'setuptools>=77' && "
        "pip install --no-build-isolation ."
    ) from None

sys.path.insert(0, str(Path(__file__).parent))  # which a build backend does not do
import cuda_toolkit

CSRC = Path("csrc")
STAND_INS = Path("tests") / "stand_in"

# For tests: software in place of hardware that the machine lacks. "amx": the tile instructions of
# AMX. "cuda": the CUDA kernels compiled as C++ for tensors of the CPU, without csrc/cpu.
STAND_IN = os.environ.get("ATTN_STAND_IN", "")
if STAND_IN not in ("", "amx", "cuda"):
    raise SystemExit(f"ATTN_STAND_IN is {STAND_IN!r}; it must be 'amx', 'cuda' or not set")

# With kernels' names, which tests read (ATTN_STAND_IN_LAUNCHES).
STAND_IN_CUDA = ["-march=native", "-Wno-unknown-pragmas", "-DATTN_SM90A", "-fvisibility=default"]

# A GPU reads nothing at an address that is not aligned as the type says; this processor does.
ALIGNED = ["-fsanitize=alignment", "-fno-sanitize-recover=alignment"] if STAND_IN == "cuda" else []

# Tests of what a variant computes, not how fast, ask for less: a kernel file compiles in a tenth of
# the time.
OPTIMIZE = os.environ.get("ATTN_OPTIMIZE", "-O3")

# For tests: the library watched by a sanitizer (`make sanitize`), with errors on purpose in it.
SANITIZERS = {
    "": [],
    "address": [
        "-Og",
        "-g1",
        "-fsanitize=address,undefined",
        "-fno-sanitize=null,vptr",  # a null pointer ends the program anyway; slow to compile
        "-fno-wrapv",  # Python's own flags define what signed overflow does
        # No sanitizer sees that a variable is read before it is written; with these bits it is no
        # 0 by chance, and tests see it.
        "-ftrivial-auto-var-init=pattern",
        "-D_GLIBCXX_ASSERTIONS",
    ],
    # Optimized code has loads of whole vectors, and of those ThreadSanitizer sees 16 bytes at most.
    "thread": ["-O0", "-g1", "-fsanitize=thread"],
}
SANITIZE = os.environ.get("ATTN_SANITIZE", "")
if SANITIZE not in SANITIZERS:
    raise SystemExit(f"ATTN_SANITIZE is {SANITIZE!r}; it must be 'address', 'thread' or not set")

# A source distribution is made without compiling.
SDIST = "sdist" in sys.argv

TOOLKIT = None if STAND_IN or SDIST else cuda_toolkit.choose(torch.version.cuda)
CUDA = TOOLKIT is not None
if CUDA:
    os.environ["CUDA_HOME"] = str(TOOLKIT)

# After CUDA_HOME, which it reads when it is imported.
from torch.utils.cpp_extension import (  # noqa: E402
    BuildExtension,
    CppExtension,
    CUDAExtension,
    get_cxx_compiler,
)

SUPPORTED = "torch>=2.11,<2.16"
RELEASE = ".".join(torch.__version__.split(".")[:2])
# torch keeps its C++ ABI within a minor release. A package has a directory with a library for each
# of these, and depends on their range: `make wheel` builds one after the other.
RELEASES = (os.environ.get("ATTN_RELEASES") or RELEASE).split()
MINORS = [int(release.removeprefix("2.")) for release in RELEASES]
if sorted(MINORS) != [*range(min(MINORS), max(MINORS) + 1)]:
    raise SystemExit(f"ATTN_RELEASES is {' '.join(RELEASES)}: a release among them is left out")
REQUIRED = f"torch>=2.{min(MINORS)},<2.{max(MINORS) + 1}"

# BuildExtension looks for ninja on the PATH only, and a virtual environment need not be activated.
os.environ["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])


def listed_sources() -> list[str]:
    lines = (CSRC / "sources.txt").read_text().splitlines()
    sources = [line for line in lines if line and not line.startswith("#")]
    if SDIST:
        return [str(CSRC / line) for line in sources]
    tests = ["tests/sanitize/errors.cpp"] if SANITIZE else []
    if STAND_IN == "cuda":
        sources = [line for line in sources if not line.startswith("cpu/")]
        tests += map(str, STAND_INS.glob("*.cpp"))
    elif not CUDA:
        sources = [line for line in sources if not line.startswith("cuda/")]
    if STAND_IN == "amx":
        sources = [line for line in sources if not line.startswith("cpu/isa/avx512")]
        tests += map(str, STAND_INS.glob("cpu/*.cpp"))
    # Reading torch's headers takes most of the time of a file that includes them: one does.
    alone = [line for line in sources if line.startswith("cpu/isa/") or line.endswith(".cu")]
    together = [line for line in sources if line not in alone]
    return [generated("library.cpp", *together), *map(own_file, alone), *sorted(tests)]


def own_file(source: str) -> str:
    """For a stand-in a C++ file that includes the CUDA file: torch would give a .cu to nvcc."""
    as_cpp = STAND_IN == "cuda" and source.endswith(".cu")
    return generated(Path(source).with_suffix(".cpp"), source) if as_cpp else str(CSRC / source)


def generated(name: str | Path, *included: str) -> str:
    """A file that includes these; with another date it would be compiled again."""
    path = Path("build") / f"torch-{torch.__version__}" / STAND_IN / "csrc" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(f'#include "{source}"\n' for source in included)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)
    return str(path)


def compiler_version() -> str:
    version = subprocess.check_output([get_cxx_compiler(), "--version"], text=True)
    return version.splitlines()[0]


def check_compiler() -> None:
    """Ends with one sentence what would else be a page of ninja's after a minute."""
    program = "#include <bit>\n#include <concepts>\nint n = std::popcount(5u);\n"
    command = [get_cxx_compiler(), "-std=c++20", "-fsyntax-only", "-x", "c++", "-"]
    try:
        done = subprocess.run(command, input=program, capture_output=True, text=True)
        said = [*done.stderr.splitlines(), "an error"][:1] if done.returncode else []
    except OSError as error:
        said = [str(error)]
    if said:
        raise SystemExit(
            "torch_attn needs a compiler of C++20, such as GCC 12 or clang 19 (tested), and "
            f"{command[0]} says: {said[0]}. CXX=/usr/bin/g++-12 pip install ... chooses another"
        )


class BuildLibrary(BuildExtension):
    """Names the library libattn.so and writes what belongs to it.

    Beside it, libattn.json says what it was built with, and lib/cmake/attn is the CMake package,
    with which a C++ program finds it and the headers of the C++ API, torch_attn/include.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs, no_python_abi_suffix=True)

    def finalize_options(self):
        given = self.build_temp
        super().finalize_options()
        # One directory of objects, shared by every way to build, so that all of them, also `pip
        # install -e .`, compile only what changed; the kernels once for every torch.
        if given is None:
            self.build_temp = str(Path("build") / "objects")
        self.include_dirs = []  # Python's
        # ninja knows what to compile. Of the library, setuptools would look at the date only and
        # keep the one that was built for another torch.
        self.force = True

    def run(self):
        check_compiler()
        library = Path(self.get_ext_fullpath(self.extensions[0].name))
        if self.inplace:  # those of other releases would be of older sources
            for other in library.parents[1].glob("torch_*"):
                shutil.rmtree(other)
        objects = Path(self.build_temp)
        for directory in (library.parent, objects):
            directory.mkdir(parents=True, exist_ok=True)
        with open(objects / "lock", "w") as lock:  # one build after another
            fcntl.flock(lock, fcntl.LOCK_EX)
            super().run()
        built_with = {"torch": torch.__version__, "compiler": compiler_version(), "cuda": CUDA}
        library.with_suffix(".json").write_text(json.dumps(built_with) + "\n")
        self.write_cmake_package(library)

    def write_cmake_package(self, library: Path) -> None:
        headers = library.parents[1] / "include" / "attn"
        package = library.parent / "lib" / "cmake" / "attn"
        for directory in (headers, package):
            shutil.rmtree(directory, ignore_errors=True)  # what an earlier build has left
        shutil.copytree(CSRC / "attn", headers)
        package.mkdir(parents=True)
        values = {
            "version": self.distribution.get_version().partition("+")[0],
            "torch_release": RELEASE,
            "library": os.path.relpath(library, package),
            "include": os.path.relpath(headers.parent, package),
        }
        for template in Path("cmake").glob("*.in"):
            text = re.sub(r"@(\w+)@", lambda name: values[name[1]], template.read_text())
            (package / template.stem).write_text(text)


ARCH_LIST = os.environ.get("TORCH_CUDA_ARCH_LIST", "")
ARCHITECTURES = [] if TOOLKIT is None else cuda_toolkit.architectures(TOOLKIT, ARCH_LIST)
# As torch itself: every driver for CUDA 13 reads it, those for CUDA 12 only from 12.4 on.
COMPRESSED = ["--compress-mode=size"] if CUDA and int(torch.version.cuda.split(".")[0]) > 12 else []

# A stand-in's headers come before those of the same name.
includes = [
    str(path.resolve()) for path in ([STAND_INS] if STAND_IN else []) + [CSRC, CSRC / "torch_lacks"]
]
library = (CUDAExtension if CUDA else CppExtension)(
    name=f"torch_attn.torch_{RELEASE.replace('.', '_')}.libattn",
    sources=listed_sources(),
    include_dirs=[*includes],
    py_limited_api=True,  # leaves libtorch_python out
    extra_compile_args={
        "cxx": [
            "-std=c++20",
            *(SANITIZERS[SANITIZE] or [OPTIMIZE, "-g0"]),
            "-fvisibility=hidden",
            "-Wall",
            "-Wextra",
            *(["-DATTN_STAND_IN"] if STAND_IN else []),
            *(STAND_IN_CUDA if STAND_IN == "cuda" else []),
            *ALIGNED,
        ],
        "nvcc": [
            "-std=c++20",
            "-O3",
            "--expt-relaxed-constexpr",
            "-Xcompiler=-fvisibility=hidden",
            # No multiply-adds but those that the sources name, because kernels that share a formula
            # promise the same bits.
            "-fmad=false",
            *ARCHITECTURES,
            *COMPRESSED,
            # The library chooses kernels that are compiled for sm_90a alone, if it has them.
            *(["-DATTN_SM90A"] if cuda_toolkit.SM90A in ARCHITECTURES else []),
        ],
    },
    # With a soname a C++ program and Python, in one process, have one copy of the library.
    extra_link_args=["-Wl,-soname,libattn.so", *SANITIZERS[SANITIZE], *ALIGNED],
    libraries=["gomp"],  # torch's OpenMP, whichever compiler it is: see csrc/cpu/parallel.cpp
)
# torch's headers as system headers: warnings are about our code only. Named in the environment,
# they leave the command that compiles a kernel the same for every torch: it reads none of them.
torchs = [path for path in library.include_dirs if path not in includes]
os.environ["CPLUS_INCLUDE_PATH"] = os.pathsep.join(
    filter(None, [*torchs, os.environ.get("CPLUS_INCLUDE_PATH")])
)
library.include_dirs = includes


class Wheel(bdist_wheel):
    """For every Python: the library has none of it."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


# CUDA kernels are good for one major release of CUDA. A source distribution's setup.cfg empties
# this tag: pip takes only what has the version of the file it comes from.
tag = f"+cu{torch.version.cuda.split('.')[0]}" if CUDA else ""


def description() -> str:
    """The README as package indexes show it, where a link to a file of the checkout leads nowhere.

    ATTN_REPOSITORY=https://... makes such links absolute; without it the name of the file is left.
    """
    repository = os.environ.get("ATTN_REPOSITORY")
    link = rf"[\1]({repository}/\2)" if repository else r"\1 (`\2`)"
    text = re.sub(r"\[([^][]+)\]\((?!https?:)([^()]+)\)", link, Path("README.md").read_text())
    return re.sub(r"(\S+) \(`\1`\)", r"`\1`", text)


setup(
    long_description=description(),
    long_description_content_type="text/markdown",
    ext_modules=[library],
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": Wheel},
    install_requires=[SUPPORTED] if SDIST else [SUPPORTED, REQUIRED],
    options={
        # With nothing in it that was built for another torch.
        "build": {"build_lib": str(Path("build") / f"torch-{torch.__version__}" / "lib")},
        "egg_info": {"tag_build": tag},
    },
)
