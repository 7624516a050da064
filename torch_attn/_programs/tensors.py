"""The tensors of a user's function: those that it captures, and those that it makes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torch_attn._programs.errors import fail, name_of


class Tensors:
    """Tells tensors apart, and says which of them the function made and which the list reads.

    Args:
        device: the device of query.
        dtype: the dtype of the list's floating leaves.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self.seen: list[Tensor] = []
        self.serials: dict[int, int] = {}  # from the id of a tensor to its number in `seen`
        self.made: list[Tensor] = []  # tensors that the functions made
        self.used: list[Tensor] = []  # tensors of `made` that the list reads
        self.converted: dict[int, Tensor] = {}  # by serial_of(), see wide()

    def serial_of(self, x: Tensor) -> int:
        """Returns a number that stands for a tensor, in place of its id.

        torch.compile would compile again for every tensor whose id is read.
        """
        if not torch.compiler.is_compiling():
            serial = self.serials.setdefault(id(x), len(self.seen))
        else:
            serial = next((n for n, y in enumerate(self.seen) if y is x), len(self.seen))
        if serial == len(self.seen):
            self.seen.append(x)
        return serial

    def is_made(self, x: Any) -> bool:
        """Returns whether the function made a tensor, and did not capture it."""
        return any(x is made for made in self.made)  # torch.compile knows no id() of these

    def use(self, x: Tensor) -> None:
        """Notes that the list reads a tensor, which must not change from here on."""
        if self.is_made(x):
            self.used.append(x)

    def is_used(self, x: Any) -> bool:
        """Returns whether the list reads the memory of a tensor that the function made."""
        if torch.compiler.is_compiling():
            return any(x is used for used in self.used)
        return _shares_memory(x, self.used)

    def has_views(self, x: Any) -> bool:
        """Returns whether the function made another tensor in the memory of x; False if unknown."""
        if torch.compiler.is_compiling():
            return False
        return _shares_memory(x, [y for y in self.made if y is not x and isinstance(y, Tensor)])

    def wide(self, x: Tensor) -> Tensor:
        """Converts a tensor of 16 bits to the list's dtype, in which lookups sum its gradient."""
        if x.dtype not in (torch.bfloat16, torch.float16):
            return x
        serial = self.serial_of(x)
        if serial not in self.converted:
            self.converted[serial] = x.to(self.dtype)
        return self.converted[serial]

    def check_captured(self, x: Tensor) -> None:
        """Refuses a tensor that the list cannot read."""
        dense = x.layout == torch.strided and not is_traceable_wrapper_subclass(x)
        if not dense or x.is_complex() or x.is_quantized:
            what = f"{type(x).__name__} of layout {x.layout} and {x.dtype}"
            fail(f"a captured tensor is a {what}", "capture a dense tensor of real numbers")
        if x.device != self.device:
            what = f"{name_of(x)} is on {x.device}, but query is on {self.device}"
            fail(what, "all captured tensors must be on query's device", is_wrong=True)


def _shares_memory(x: Tensor, others: list[Tensor]) -> bool:
    at = x.untyped_storage().data_ptr()
    return any(at == other.untyped_storage().data_ptr() for other in others)
