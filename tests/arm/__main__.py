"""`make test-arm`: the library on a 64-bit ARM that qemu-user emulates, with torch for ARM.

Over it run tests of the suite, the unit tests of C++, the fuzzer, a wheel, and on a Cortex-A53,
which has ARMv8.0 alone, a program that ends with an error where NEON is not what runs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests import check_wheel
from tests._variants import ROOT, build_library

from . import machine
from .machine import HERE, PYTHON, SITE

# What must be there, and Debian's package of it.
NEEDED = {
    "aarch64-linux-gnu-g++": "g++-aarch64-linux-gnu",
    "qemu-aarch64": "qemu-user",
    "apt-get": "apt",
    machine.KEYRING: "debian-archive-keyring",
}
# Takes one test in eight, but none of inductor, which would compile for this
# machine's own processor.
EVERY = 8
SUITE = ["forward", "backward", "derivatives", "autograd", "func", "options", "compile", "replace"]
SUITE += ["flex", "flex_values", "program_rewrites", "mods"]
TESTS = [f"tests/test_{name}.py" for name in SUITE]
SAMPLE = ["--tiers=quick", "-k=not [default and not inductor and not peak"]
PROBLEMS, FUNCTIONS = 150, 40
OBJECTS = HERE / "package" / "objects"
COMPILERS = {"CC": "aarch64-linux-gnu-gcc", "CXX": "aarch64-linux-gnu-g++"}
# The processor of Graviton 2 and Altra; and one that has no instruction of a later architecture.
NEOVERSE, OLDEST = "neoverse-n1", "cortex-a53"


def run(*command: str | Path, **environment: str) -> None:
    """Prints what the command has said when it ends, because another runs beside it."""
    start = time.monotonic()
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    line = " ".join(str(part).replace(f"{ROOT}/", "") for part in command)
    print(f"$ {line}\n{done.stdout}{time.monotonic() - start:.0f} s", flush=True)
    done.check_returncode()


def test_cpp(library: Path) -> None:
    prefixes = library.parent, SITE / "torch" / "share" / "cmake", machine.ROOT / "usr"
    options = [f"-DCMAKE_TOOLCHAIN_FILE={ROOT}/cmake/aarch64-linux-gnu.cmake"]
    options += [f"-DCMAKE_PREFIX_PATH={';'.join(map(str, prefixes))}"]
    options += ["-DCMAKE_CXX_FLAGS_RELEASE=-O1 -DNDEBUG"]
    to = HERE / "cpp"
    run("cmake", "--log-level=WARNING", "-G", "Ninja", "-S", "tests/cpp", "-B", to, *options)
    run("cmake", "--build", to, "--target", "unit", "gradcheck")  # what ctest runs
    beside_torch = {"LD_LIBRARY_PATH": str(SITE / "torch" / "lib")}  # libgomp
    ctest = ["--test-dir", to, "--output-on-failure", "--no-tests=error", "--parallel=2"]
    run("ctest", *ctest, **beside_torch)


def test_python() -> None:
    # On one thread: on several, the BLAS in torch's wheel has instructions of ARMv8.1.
    run(PYTHON, "tests/old_processor.py", "neon", QEMU_CPU=OLDEST, OMP_NUM_THREADS="1")
    pytest = ["-m", "pytest", "-q", "-p", "no:cacheprovider"]
    run(PYTHON, *pytest, "tests/test_library.py::test_threads_are_torchs")
    run(PYTHON, *pytest, "--numprocesses=auto", *SAMPLE, f"--sample=1/{EVERY}", *TESTS)


def fuzz() -> None:
    for kind, problems in (("cpu", PROBLEMS), ("functions", FUNCTIONS)):
        options = ["--only", kind, "--seed", "1", "--seconds", "3600", "--problems", str(problems)]
        run(PYTHON, "-m", "tests.fuzz", *options)


def test_wheel() -> None:
    """Runs what was compiled, far from the checkout: -P leaves the current directory out."""
    there, installed, tag = HERE / "wheel", HERE / "wheel" / "installed", "manylinux_2_28_aarch64"
    shutil.rmtree(there, ignore_errors=True)
    build = ["build", "--build-lib", there / "lib", "build_ext", "--build-temp", OBJECTS]
    pack = ["bdist_wheel", "--skip-build", "--plat-name", tag, "--dist-dir", there / "dist"]
    compilers = {"ATTN_CUDA": "0", "ATTN_OPTIMIZE": "-O1", **COMPILERS}
    run(PYTHON, "-W", "ignore", "setup.py", "-q", *build, *pack, **compilers)
    (wheel,) = (there / "dist").iterdir()
    check_wheel.audit(str(wheel))
    pip = [sys.executable, "-m", "pip", "-q", "install", "--no-deps", "--only-binary=:all:"]
    run(*pip, "--platform", tag, "--target", installed, wheel)
    run(PYTHON, "-P", "-c", check_wheel.PROGRAM, ATTN_LIBRARY="", PYTHONPATH=str(installed))


if __name__ == "__main__":
    missing = [NEEDED[name] for name in NEEDED if not (shutil.which(name) or Path(name).exists())]
    if missing:
        print(f"64-bit ARM: not run, for want of {', '.join(missing)}")
        sys.exit()
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
    os.environ.update(PATH=path, QEMU_CPU=NEOVERSE, QEMU_LD_PREFIX=str(machine.ROOT))
    os.environ.update(OMP_WAIT_POLICY="passive")
    machine.make(sys.argv[1])
    library = build_library(HERE / "package", str(PYTHON), ATTN_CUDA="0", **COMPILERS)
    os.environ["ATTN_LIBRARY"] = str(library)
    # Much of what each does waits for one core.
    with ThreadPoolExecutor() as both:
        others = both.submit(lambda: (test_wheel(), test_cpp(library), fuzz()))
        test_python()
        others.result()
