"""Builds torch_attn/libattn.so from the files listed in csrc/sources.txt.

Everything else about the package is in pyproject.toml. The library contains no Python: the package
loads it with ``torch.ops.load_library``.

With ``ATTN_STAND_IN=amx`` in the environment the tile instructions of AMX are replaced by software
(tests/stand_in), to test on processors without them what uses them.
"""

import json
import os
import subprocess
import sysconfig
from pathlib import Path

import torch
from setuptools import setup
from torch.utils.cpp_extension import (
    BuildExtension,
    CppExtension,
    get_cxx_compiler,
    include_paths,
)

CSRC = Path("csrc")
STAND_IN = os.environ.get("ATTN_STAND_IN", "")
if STAND_IN not in ("", "amx"):
    raise SystemExit(f'ATTN_STAND_IN is "{STAND_IN}"; it must be "amx" or not set')

# BuildExtension looks for ninja on the PATH only, and a virtual environment need not be activated.
os.environ["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])


def listed_sources() -> list[str]:
    lines = (CSRC / "sources.txt").read_text().splitlines()
    return [str(CSRC / line) for line in lines if line and not line.startswith("#")]


def compiler_version() -> str:
    compiler = get_cxx_compiler()
    version = subprocess.check_output([compiler, "--version"], text=True)
    return version.splitlines()[0]


class BuildLibrary(BuildExtension):
    """Names the library libattn.so and writes libattn.json beside it: what it was built with."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs, no_python_abi_suffix=True)

    def finalize_options(self):
        super().finalize_options()
        # One directory of objects per torch, shared by every way to build, so that all of them,
        # also `pip install -e .`, compile only what changed.
        self.build_temp = str(Path("build", f"torch-{torch.__version__}", STAND_IN))

    def run(self):
        super().run()
        built_with = {"torch": torch.__version__, "compiler": compiler_version(), "cuda": False}
        for extension in self.extensions:
            library = Path(self.get_ext_fullpath(extension.name))
            library.with_suffix(".json").write_text(json.dumps(built_with) + "\n")


library = CppExtension(
    name="torch_attn.libattn",
    sources=listed_sources(),
    depends=sorted(str(path) for path in CSRC.rglob("*") if path.suffix in {".h", ".inl", ".txt"}),
    include_dirs=[str(CSRC.resolve())],
    py_limited_api=True,  # leaves libtorch_python out
    extra_compile_args=[
        *(["-DATTN_STAND_IN", f"-I{Path('tests').resolve()}"] if STAND_IN else []),
        "-std=c++20",
        "-O3",
        "-g0",
        "-fopenmp",
        "-fvisibility=hidden",
        "-Wall",
        "-Wextra",
        # torch's headers as system headers: warnings are about our code only.
        *(f"-isystem{path}" for path in include_paths()),
    ],
    extra_link_args=["-fopenmp"],
)

setup(
    ext_modules=[library],
    cmdclass={"build_ext": BuildLibrary},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
