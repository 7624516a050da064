"""What a traced value is: numbers that the user's function computes, and what they depend on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from torch_attn._programs.limits import Limits

# The kind of a value says what the value depends on: head (b, h), row (b, h, q_idx), key (b, h,
# kv_idx), distance (b, h, q_idx - kv_idx), or pair (b, h, q_idx, kv_idx). A value of kind HEAD is
# stored as a row term.
HEAD, ROW, KEY, DISTANCE, PAIR = range(5)
# The whole numbers a, b and c of the form a q_idx + b kv_idx + c. So the difference of two indices
# is known to depend on the distance alone. c may be a tensor of kind HEAD.
Affine = tuple[int, int, Any]


class Value:
    """A number, or a tensor of numbers, that the user's function computes for every pair."""

    make: Callable[[], Tensor] | None = None  # computes `tensor` when it is read
    made: Tensor | None = None
    shape: tuple[int, ...] = ()
    node: int = -1  # its number in the list of operations, if kind is PAIR
    affine: Affine | None = None  # its form, if it has one
    constant: bool = False  # the function made it without captured tensors
    unrounded: Tensor | None = None  # `tensor` before it was rounded to `dtype`, if it was
    limits: Limits | None = None  # if they are known
    lookup: tuple[Tensor, list[Value | None]] | None = None  # a table, and an index per dimension
    number: Any = None  # Python's number for which the value stands, see Values.of_symbol()

    def __init__(self, serial: int, kind: int, dtype: torch.dtype, type_: str) -> None:
        self.serial = serial  # unique
        self.kind = kind
        self.dtype = dtype  # the function sees dtype and shape, which is () for a number
        self.type = type_  # letter(dtype)

    @property
    def tensor(self) -> Tensor:
        """The numbers, `[B|1, H|1, N|1, *shape]`, where the kind says if N is L, S or L + S - 1.

        A Value of kind PAIR has no such tensor.
        """
        if self.made is None:
            assert self.make is not None
            self.made = self.make()
            if self.made.dtype != self.dtype:
                self.unrounded, self.made = self.made, self.made.to(self.dtype)
        return self.made


def letter(dtype: torch.dtype) -> str:
    """Returns the type of a dtype in the list: f (floating), i (whole number) or b (boolean)."""
    return "f" if dtype.is_floating_point else "b" if dtype is torch.bool else "i"


def together(values: Iterable[Value]) -> int:
    """Returns the kind of a value that is computed from these values.

    If all values have the kind HEAD, so has the result. If the remaining values have one kind, the
    result has it, too. If they have different kinds, the result has the kind PAIR.
    """
    kind = HEAD
    for x in values:
        if x.kind != kind and x.kind != HEAD:
            if kind != HEAD:
                return PAIR
            kind = x.kind
    return kind


def as_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype is dtype else x.to(dtype)  # to() takes 3 us even if it changes nothing


_promote = functools.cache(torch.promote_types)


def promoted(*operands: Any) -> torch.dtype:
    """Returns the dtype to which PyTorch promotes these Values and Python's numbers."""
    dtype: Any = None
    number = 0  # 1: there is an int, 2: a float
    for x in operands:
        if type(x) is Value and x.number is None:
            if x.dtype is not dtype:
                dtype = _promote(dtype, x.dtype) if dtype else x.dtype
        elif type(x) is Value:
            number = 2 if number == 2 or x.type == "f" else 1
        elif type(x) is not bool:
            number = 2 if number == 2 or isinstance(x, float | torch.SymFloat) else 1
    if number == 2 and not (dtype and dtype.is_floating_point):
        return torch.get_default_dtype()
    return torch.int64 if number and dtype in (None, torch.bool) else dtype or torch.bool


def numbers_of(x: Any) -> Any:
    """Returns what PyTorch computes with: the numbers of a Value, or x itself."""
    return x if type(x) is not Value else x.tensor if x.number is None else x.number


def unrounded(x: Any) -> Any:
    """Returns `numbers_of(x)` before they were rounded to the dtype that the function sees."""
    numbers = numbers_of(x)
    return numbers if type(x) is not Value or x.unrounded is None else x.unrounded


def combined_form(name: str, values: list[Any]) -> Affine | None:
    """Returns the form (a, b, c) of a sum, difference, negation or product, or None."""
    forms: list[Affine] = []
    for x in values:
        if type(x) is int:
            forms.append((0, 0, x))
        elif type(x) is not Value or x.type != "i":
            return None
        elif x.affine is not None:
            forms.append(x.affine)
        elif x.kind == HEAD:
            forms.append((0, 0, x.tensor.long()))
        else:
            return None
    if not any(a or b for a, b, _ in forms):
        return None
    if name == "neg":
        forms, name = [(0, 0, 0), *forms], "sub"
    (a, b, c), (d, e, f) = forms
    if name == "mul":
        if a or b:
            a, b, c, d, e, f = d, e, f, a, b, c
        return (d * c, e * c, f * c) if not (a or b) and type(c) is int else None
    return (a + d, b + e, c + f) if name == "add" else (a - d, b - e, c - f)


def form_fits(form: Affine, dtype: torch.dtype, lengths: dict[int, int]) -> bool:
    """Returns whether all numbers of the form are within an integer dtype, for certain.

    Args:
        lengths: how many rows and keys there are, by kind.
    """
    a, b, c = form
    if type(c) is not int:
        return dtype == torch.int64
    if dtype == torch.int64 and max(abs(a), abs(b), abs(c)) < 2**31:
        return True  # with fewer than 2^30 queries and keys
    ends = [a * i + b * j for i in (0, lengths[ROW]) for j in (0, lengths[KEY])]
    most = torch.iinfo(dtype).max
    return max(ends) + abs(c) <= most and min(ends) - abs(c) >= -most
