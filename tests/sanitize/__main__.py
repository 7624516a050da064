"""`make sanitize`: the library under three sanitizers, the core of the tests over it, no finding.

AddressSanitizer and UndefinedBehaviorSanitizer watch a build by the compiler of every other build
(CXX), ThreadSanitizer one by clang. In the first, numbers that nothing has written are NaN or huge,
on the stack as in memory from malloc. Python and torch are as they are and load the sanitizer first
(LD_PRELOAD). Each build has errors on purpose (errors.cpp), and all of them must be reported.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torch.utils.cpp_extension import get_cxx_compiler

from tests._variants import BUILD, ROOT, build_library, newest_clang

# One in 37 of the tests that run kernels. The number of instruction sets and the number of dtypes
# do not divide 37, so a sample has all of them. Left out: tests of peak memory, because sanitizers
# need memory too, and of inductor, because its code is not instrumented.
KERNELS = ["--kernels", "--tiers=quick,rest", "-k", "not peak and not inductor"]
KERNELS_EVERY = 37
# All doors, without those that are wrong on purpose.
CONTRACT = ["tests/contract", "-k", "not wrong and not memory_is_linear"]

# As many as leave a core to ThreadSanitizer, whose tests run in one process.
PROCESSES = [f"--numprocesses={max(1, (os.cpu_count() or 1) - 1)}"]

# The tests that run on several threads. The one of every node has no sample: there are four.
THREADED = ["tests/test_determinism.py", "tests/test_subsystems.py::test_threads"]
THREADED_EVERY = 37
NODES = ["tests/test_threads.py"]

# Errors of errors.py, and what a report of each says.
ADDRESS_ERRORS = {
    "read_past_the_end": "heap-buffer-overflow.*read_past_the_end",
    "freed_query": "heap-use-after-free.*attn::",
    "signed_overflow": "signed integer overflow",
    "front_of_empty_vector": "Assertion '!this->empty",
    "number_never_written": "nothing has written the number",
    "memory_never_written": "nothing has written these numbers",
}
THREAD_ERRORS = {
    "race_in_a_region": "data race.*race_in_a_region",
    "race_of_a_query": "data race.*attn::",
}


def file_of(compiler: str, *names: str, program: bool = False) -> str | None:
    """The first of these files, or programs, that the compiler has."""
    option = "-print-prog-name" if program else "-print-file-name"
    for name in names:
        path = subprocess.check_output([compiler, f"{option}={name}"], text=True).strip()
        if os.path.isabs(path):
            return os.path.realpath(path)
    return None


def run(library: Path, preload: Sequence[str], *command: str, **options: str) -> tuple[int, str]:
    """Runs Python with the sanitizer; its exit status, and all it has written."""
    environment = {
        **os.environ,
        "ATTN_LIBRARY": str(library),
        "LD_PRELOAD": " ".join(preload),
        "OMP_WAIT_POLICY": "passive",
        **options,
    }
    process = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return process.returncode, process.stdout


def check(
    library: Path,
    preload: Sequence[str],
    options: dict[str, str],
    errors: dict[str, str],
    tests: Sequence[tuple[int, Sequence[str]]],
) -> None:
    """Every error is reported, and nothing in one of n tests: `tests` are pairs (n, names)."""

    def reported(error: str) -> None:
        command = ["-m", "tests.sanitize.errors", error]
        status, text = run(library, preload, *command, **options)
        if status == 0 or not re.search(errors[error], text, re.DOTALL):
            raise SystemExit(f"{text}\n{library}: the error {error} is not reported")

    with ThreadPoolExecutor(os.cpu_count()) as executor:
        list(executor.map(reported, errors))
    print(f"{library.parts[-3]}: reported, as they must be: {', '.join(errors)}", flush=True)

    for every, names in tests:
        command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", f"--sample={number}/{every}"]
        status, text = run(library, preload, *command, *names, **options)
        if status != 0:
            raise SystemExit(f"{text}\n{library}: the tests fail")
        print(f"{library.parts[-3]}: {text.splitlines()[-1]}", flush=True)


def check_addresses() -> None:
    compiler = get_cxx_compiler()
    preload = [
        file_of(compiler, "libasan.so", "libclang_rt.asan-x86_64.so"),
        file_of(compiler, "libstdc++.so.6"),  # AddressSanitizer looks there for what it replaces
    ]
    print(f"==> AddressSanitizer, UndefinedBehaviorSanitizer: {compiler}", flush=True)
    if None in preload:
        raise SystemExit(f"{compiler} has no AddressSanitizer")
    library = build_library(BUILD / "address", ATTN_SANITIZE="address", ATTN_STAND_IN="amx")
    options = {
        # Python leaks on purpose. Memory that nothing has written holds NaN, whichever the type.
        "ASAN_OPTIONS": "detect_leaks=0:malloc_fill_byte=255:max_malloc_fill_size=1073741824",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
    }
    tests = [(KERNELS_EVERY, [*KERNELS, *PROCESSES]), (1, [*CONTRACT, *PROCESSES])]
    check(library, preload, options, ADDRESS_ERRORS, tests)


def check_threads() -> None:
    compiler = newest_clang()
    print(f"==> ThreadSanitizer: {compiler}", flush=True)
    if compiler is None:
        print("not run: no clang++ on the PATH")
        return
    # LLVM's OpenMP in place of torch's: it tells Archer, and so the sanitizer, who waits for whom.
    runtime = file_of(compiler, "libclang_rt.tsan-x86_64.so")
    openmp, archer = file_of(compiler, "libomp.so.5"), file_of(compiler, "libarcher.so")
    # Reports, and what is suppressed of them, go by the names of functions.
    symbolizer = file_of(compiler, "llvm-symbolizer", program=True)
    if None in (runtime, openmp, archer, symbolizer):
        needed = "libclang_rt.tsan-x86_64.so, libomp.so.5, libarcher.so or llvm-symbolizer"
        print(f"not run: {compiler} has no {needed}")
        return
    library = build_library(BUILD / "thread", ATTN_SANITIZE="thread", CXX=compiler)
    suppressions = Path(__file__).with_name("thread.supp")
    options = {
        "OMP_TOOL_LIBRARIES": archer,
        "TSAN_OPTIONS": f"halt_on_error=1:suppressions={suppressions}:"
        f"external_symbolizer_path={symbolizer}",
    }
    # In this process: in those that pytest-xdist starts, Archer is not at work.
    tests = [(THREADED_EVERY, THREADED), (1, NODES)]
    check(library, [runtime, openmp], options, THREAD_ERRORS, tests)


number = sys.argv[1]  # which sample it is: as many runs as KERNELS_EVERY, in a row, have all
started = time.monotonic()
with ThreadPoolExecutor() as both:
    for half in [both.submit(check_addresses), both.submit(check_threads)]:
        half.result()
print(f"No finding ({time.monotonic() - started:.0f} s)")
