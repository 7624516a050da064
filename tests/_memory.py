"""How tests see memory: the largest allocation, what is resident, pages that cannot be read."""

from __future__ import annotations

import ctypes
import mmap
import re
from collections.abc import Callable
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


def largest_block(function: Callable[[], object]) -> int:
    """The most bytes that the CPU's allocator hands out at once, also inside of an operator."""
    with torch.profiler.profile(profile_memory=True) as profile:
        function()
    events = profile.profiler.kineto_results.events()
    return max(event.nbytes() for event in events if event.name() == "[memory]")


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


def in_guarded_memory(tensor: Tensor, used: tuple[int, int]) -> Tensor:
    """The tensor [2, H, S, E]; the rows from used[b] on are in pages that cannot be read."""
    B, H, S, E = tensor.shape
    size = tensor.element_size()
    pages = -(-S * E * size // mmap.PAGESIZE) * mmap.PAGESIZE  # up to the first such row, and on
    flat = torch.frombuffer(mmap.mmap(-1, B * H * 2 * pages), dtype=tensor.dtype)
    of_head, half = 2 * pages // size, pages // size
    first, second = (b * H * of_head + half - used[b] * E for b in range(B))
    copy = flat.as_strided(tensor.shape, (second - first, of_head, E, 1), first).copy_(tensor)
    libc = ctypes.CDLL(None, use_errno=True)
    for head in range(B * H):
        guarded = ctypes.c_void_p(flat[head * of_head + half :].data_ptr())
        if libc.mprotect(guarded, ctypes.c_size_t(pages), 0) != 0:
            raise OSError(ctypes.get_errno(), "mprotect")
    return copy


def in_sparse_memory(tensor: Tensor) -> Tensor:
    """The tensor [..., heads, rows, columns], whose heads are so far apart that the last one begins
    at more than 2^31 numbers. What is between has addresses, but takes no memory."""
    heads, rows, columns = tensor.shape[-3:]
    far = 2**31 // (heads - 1) + 64
    size = ((heads - 1) * far + rows * columns) * tensor.element_size()
    no_reserve = 0x4000  # Python has a name for it from 3.13 on
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    flat = torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=tensor.dtype)
    strides = (0,) * (tensor.ndim - 3) + (far, columns, 1)
    return flat.as_strided(tensor.shape, strides).copy_(tensor)
