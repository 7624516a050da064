"""Makes one of the errors on purpose, named on the command line: a sanitizer must report it."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable

import torch

import torch_attn
from torch_attn._library import LIBRARY

library = ctypes.CDLL(str(LIBRARY))


def read_past_the_end() -> None:
    library.read_past_the_end(4)


def freed_query() -> None:
    """The kernels read a tensor whose memory was freed behind its back."""
    c = ctypes.CDLL(None)
    c.malloc.restype, c.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    memory = c.malloc(4 * 64 * 64)
    query = torch.frombuffer((ctypes.c_float * 64 * 64).from_address(memory), dtype=torch.float32)
    c.free(memory)
    torch_attn.sdpa(query.view(64, 64), *torch.randn(2, 64, 64))


def signed_overflow() -> None:
    library.signed_overflow(2**31 - 1)


def front_of_empty_vector() -> None:
    library.front_of_empty_vector()


def number_never_written() -> None:
    """The number would often be 0 by chance, which is what most options are."""
    library.number_never_written.restype = ctypes.c_double
    if number := library.number_never_written():
        raise SystemExit(f"nothing has written the number {number}")


def memory_never_written() -> None:
    """These numbers would often be 0 by chance, as where sums begin."""
    if torch.empty(2**20).isnan().all():
        raise SystemExit("nothing has written these numbers")


def race_in_a_region() -> None:
    torch.set_num_threads(2)
    library.race_in_a_region()


def race_of_a_query() -> None:
    """The kernels read a tensor that another thread writes."""
    query, key, value = torch.zeros(3, 64, 64)
    written = ctypes.c_void_p(query.data_ptr())
    writer = threading.Thread(target=library.count, args=(written, ctypes.c_int64(10**9)))
    writer.start()
    # The sanitizer looks at the first read after the thread began, and reports a race if it still
    # knows where the write came from: so the write has to come first.
    while query.view(torch.int64)[0, 0] == 0:
        pass
    torch_attn.sdpa(query, key, value)
    writer.join()


error: Callable[[], None] = globals()[sys.argv[1]]
error()
