"""How tests see memory: the largest allocation, what is resident, pages that nobody may read."""

from __future__ import annotations

import ctypes
import mmap
import re
from pathlib import Path

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class LargestAllocation(TorchDispatchMode):
    """The largest number of elements of a storage that any operator gives back."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, Tensor):
                elements = tensor.untyped_storage().nbytes() // tensor.element_size()
                self.elements = max(self.elements, elements)
        return result


def resident(field: str) -> int:
    """Bytes of resident memory, VmRSS now or VmHWM at most."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(rf"{field}:\s+(\d+) kB", status).group(1))


class GuardedMemory:
    """Tensors with a forbidden page right after their last byte, or right before their first."""

    def __init__(self, bytes_each: int, at_end: bool) -> None:
        page = mmap.PAGESIZE
        self.size = (bytes_each + page - 1) // page * page
        self.at_end = at_end
        self.map = mmap.mmap(-1, self.size + 2 * page)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        for forbidden in (self.address, self.address + page + self.size):
            no_access = 0
            assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(forbidden), page, no_access) == 0

    def tensor(self, like: Tensor) -> Tensor:
        count, page = like.numel(), mmap.PAGESIZE
        start = self.size - count * like.element_size() if self.at_end else 0
        flat = torch.frombuffer(self.map, dtype=like.dtype, count=count, offset=page + start)
        return flat.view(like.shape).copy_(like)
