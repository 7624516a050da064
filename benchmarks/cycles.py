"""The processor's own count of cycles, of all threads of this process: Linux's perf_event_open.

A share of the peak in cycles says what the kernel does with the cycles it has, whatever the clock
rate was and whoever else had the cores. Only cycles in user mode count. A thread that waits for
others counts too, while it spins.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import statistics
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

SYSCALL = {"x86_64": 298, "aarch64": 241}  # perf_event_open
CYCLES = (0, 0)  # PERF_TYPE_HARDWARE, PERF_COUNT_HW_CPU_CYCLES
EXCLUDE_KERNEL, EXCLUDE_HYPERVISOR = 1 << 5, 1 << 6
CLOSE_ON_EXEC = 8

PARANOID = Path("/proc/sys/kernel/perf_event_paranoid")


class UnreadableError(Exception):
    """Why the cycles cannot be read here."""


class Counter:
    """Counts in the process's present threads: PyTorch starts its own at a first call."""

    def __init__(self, event: tuple[int, int] = CYCLES) -> None:
        threads = [int(path.name) for path in Path("/proc/self/task").iterdir()]
        self._files = [_open(event, thread) for thread in threads]

    def __enter__(self) -> Counter:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files:
            os.close(file)

    def read(self) -> int:
        return sum(int.from_bytes(os.read(file, 8), sys.byteorder) for file in self._files)


def cycles_of(run: Callable[[], Any], counter: Counter) -> float:
    """Cycles of one call, in the median; short ones are called several times a sample."""

    def cycles(repeat: int) -> int:
        start = counter.read()
        for _ in range(repeat):
            run()
        return counter.read() - start

    repeat = max(1, 10**7 // max(cycles(1), 10**4))
    return statistics.median(cycles(repeat) for _ in range(5)) / repeat


def _open(event: tuple[int, int], thread: int) -> int:
    kind, config = event
    number = SYSCALL.get(platform.machine())
    if sys.platform != "linux" or number is None:
        raise UnreadableError("written for Linux on x86_64 and aarch64")
    size = 64  # struct perf_event_attr, its first version
    flags = EXCLUDE_KERNEL | EXCLUDE_HYPERVISOR
    attributes = struct.pack("=IIQQQQQ16x", kind, size, config, 0, 0, 0, flags)
    any_processor, no_group = -1, -1
    libc = ctypes.CDLL(None, use_errno=True)
    file: int = libc.syscall(number, attributes, thread, any_processor, no_group, CLOSE_ON_EXEC)
    if file >= 0:
        return file
    code = ctypes.get_errno()
    if code in (errno.ENOENT, errno.ENODEV, errno.EOPNOTSUPP):
        raise UnreadableError("the machine, or the virtual one, has no counter of cycles")
    if code in (errno.EACCES, errno.EPERM):
        level = PARANOID.read_text().strip() if PARANOID.exists() else "unknown"
        raise UnreadableError(
            f"not permitted; kernel.perf_event_paranoid is {level}, and 2 would do"
        )
    raise UnreadableError(f"perf_event_open: {os.strerror(code)}")
