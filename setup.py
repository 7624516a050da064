"""Builds torch_attn/libattn.so from the files listed in csrc/sources.txt.

Everything else about the package is in pyproject.toml. The library contains no Python: the package
loads it with ``torch.ops.load_library``.
"""

import json
import os
import subprocess
import sysconfig
from pathlib import Path

import torch
from setuptools import setup
from torch.utils.cpp_extension import (
    CUDA_HOME,
    BuildExtension,
    CppExtension,
    CUDAExtension,
    get_cxx_compiler,
    include_paths,
)

CSRC = Path("csrc")
STAND_INS = Path("tests") / "stand_in"

# For tests, what the machine has not, in software. "amx": the tile instructions of AMX.
# "cuda": the CUDA kernels compiled as C++ for tensors of the CPU, without csrc/cpu.
STAND_IN = os.environ.get("ATTN_STAND_IN", "")
if STAND_IN not in ("", "amx", "cuda"):
    raise SystemExit(f"ATTN_STAND_IN is {STAND_IN!r}; it must be 'amx', 'cuda' or not set")


def with_cuda() -> bool:
    """Whether torch has CUDA and nvcc is there; ATTN_CUDA=0 or 1 decides otherwise."""
    wanted = os.environ.get("ATTN_CUDA", "")
    if wanted not in ("", "0", "1"):
        raise SystemExit(f"ATTN_CUDA is {wanted!r}; it must be 0 or 1")
    missing = {
        "a torch with CUDA (this is a build without)": torch.version.cuda is None,
        "nvcc (set CUDA_HOME to the directory of the CUDA toolkit)": CUDA_HOME is None,
    }
    lacking = " and ".join(what for what, is_missing in missing.items() if is_missing)
    if wanted == "1" and lacking:
        raise SystemExit(f"ATTN_CUDA is 1, which needs {lacking}")
    return wanted != "0" and not lacking and not STAND_IN


CUDA = with_cuda()

# BuildExtension looks for ninja on the PATH only, and a virtual environment need not be activated.
os.environ["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])


def listed_sources() -> list[str]:
    lines = (CSRC / "sources.txt").read_text().splitlines()
    sources = [line for line in lines if line and not line.startswith("#")]
    if STAND_IN == "cuda":
        sources = [line for line in sources if not line.startswith("cpu/")]
        return [*map(as_cpp, sources), *sorted(map(str, STAND_INS.glob("*.cpp")))]
    return [str(CSRC / line) for line in sources if CUDA or not line.startswith("cuda/")]


def as_cpp(source: str) -> str:
    """A C++ file that includes the CUDA file: torch would give a .cu file to nvcc."""
    if not source.endswith(".cu"):
        return str(CSRC / source)
    path = Path("build") / "stand_in" / Path(source).with_suffix(".cpp")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'#include "{source}"\n')
    return str(path)


def compiler_version() -> str:
    compiler = get_cxx_compiler()
    version = subprocess.check_output([compiler, "--version"], text=True)
    return version.splitlines()[0]


class BuildLibrary(BuildExtension):
    """Names the library libattn.so and writes libattn.json beside it: what it was built with."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs, no_python_abi_suffix=True)

    def finalize_options(self):
        given = self.build_temp
        super().finalize_options()
        # One directory of objects per torch, shared by every way to build, so that all of them,
        # also `pip install -e .`, compile only what changed.
        if given is None:
            self.build_temp = str(Path("build") / f"torch-{torch.__version__}")
        # ninja knows what to compile. Of the library, setuptools would look at the date only and
        # keep the one that was built for another torch.
        self.force = True

    def run(self):
        super().run()
        built_with = {"torch": torch.__version__, "compiler": compiler_version(), "cuda": CUDA}
        for extension in self.extensions:
            library = Path(self.get_ext_fullpath(extension.name))
            library.with_suffix(".json").write_text(json.dumps(built_with) + "\n")


library = (CUDAExtension if CUDA else CppExtension)(
    name="torch_attn.libattn",
    sources=listed_sources(),
    # A stand-in's headers come before those of the same name.
    include_dirs=[str(path.resolve()) for path in ([STAND_INS] if STAND_IN else []) + [CSRC]],
    py_limited_api=True,  # leaves libtorch_python out
    extra_compile_args={
        "cxx": [
            "-std=c++20",
            "-O3",
            "-g0",
            "-fvisibility=hidden",
            "-Wall",
            "-Wextra",
            *(["-DATTN_STAND_IN"] if STAND_IN else []),
            *(["-march=native", "-Wno-unknown-pragmas"] if STAND_IN == "cuda" else []),
            # torch's headers as system headers: warnings are about our code only.
            *(f"-isystem{path}" for path in include_paths()),
        ],
        "nvcc": [
            "-std=c++20",
            "-O3",
            "--expt-relaxed-constexpr",
            "-Xcompiler=-fvisibility=hidden",
            # Binaries for A100 and H100, PTX for whatever comes after them.
            "-gencode=arch=compute_80,code=sm_80",
            "-gencode=arch=compute_90,code=[sm_90,compute_90]",
        ],
    },
    libraries=["gomp"],  # torch's OpenMP, whichever compiler it is: see csrc/cpu/parallel.cpp
)

setup(
    ext_modules=[library],
    cmdclass={"build_ext": BuildLibrary},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
