"""How many threads a measurement runs on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def threads() -> str:
    """How many threads a call has here, in words."""
    count = torch.get_num_threads()
    return f"{count} thread{'s' * (count != 1)}"


@contextmanager
def one_thread() -> Iterator[None]:
    """Small tensors are not worth two; and on a busy machine two threads wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
