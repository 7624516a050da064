"""Calls functions of PyTorch that are not elementwise, such as a sum or a matrix product."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torch_attn._programs.errors import fail, fail_for_pairs
from torch_attn._programs.functions import IN_PLACE, LIKE, LOOKUPS, RANDOM, READS
from torch_attn._programs.value import PAIR, Value, together, unrounded
from torch_attn._programs.values import Values


def call_general(values: Values, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls any function of values that are not of kind PAIR, by torch.vmap over b, h and n."""
    flat, spec = pytree.tree_flatten((args, kwargs))
    of: dict[int, Value] = {
        n: x._attn for n, x in enumerate(flat) if isinstance(x, Tensor) and hasattr(x, "_attn")
    }
    name = getattr(func, "__name__", str(func))
    if func in RANDOM:
        fail(f"{name} draws random numbers", "draw them outside, and index the tensor")
    if func in READS and of:
        fail(
            f"{name} reads a number that differs between pairs",
            "use torch.where for if, torch.minimum for min(), a tensor for a list",
        )
    target = args[0] if args and func in IN_PLACE else kwargs.get("out")
    given = [x for n, x in enumerate(flat) if isinstance(x, Tensor) and n not in of]
    made = all(map(values.tensors.is_made, given))
    if target is not None and (of or not made):
        fail(f"{name} changes a tensor in place", "compute a new one")
    if target is not None and values.tensors.is_used(target):
        fail(f"{name} changes a tensor that the function has used", "compute a new one")
    if not of or (func in LIKE and list(of) == [0]):
        result = func(*args, **kwargs)
        if made:
            values.tensors.made.append(result)
        return result
    kind = together(of.values())
    if kind == PAIR:
        fail_for_pairs(name, "vector" if any(x.shape for x in of.values()) else "value")
    values.check_gradients(name, of.values())
    numbers = [x.tensor for x in of.values()]
    wide = values.tensors.wide
    dtype = None  # of the results of a lookup in a table of 16 bits
    if func in LOOKUPS and kwargs.get("max_norm") is None:
        tables = [x for x in (*given, *numbers) if wide(x) is not x]
        dtype = tables[0].dtype if tables else None
        numbers = [wide(unrounded(x)) for x in of.values()]
        flat = [wide(x) if isinstance(x, Tensor) else x for x in flat]

    def function(*numbers: Tensor) -> Any:
        leaves = list(flat)
        for n, x in zip(of, numbers, strict=True):
            leaves[n] = x
        arguments, named = pytree.tree_unflatten(leaves, spec)
        return func(*arguments, **named)

    def stand_in(x: Tensor) -> Tensor:
        value = values.list.value(kind, dtype or x.dtype, lambda: x, shape=tuple(x.shape[3:]))
        value.tensor  # noqa: B018 (now, while gradients are on or off as asked)
        return values.stand_in(value)

    return pytree.tree_map_only(Tensor, stand_in, _by_vmap(function, numbers))


def _by_vmap(function: Any, numbers: list[Tensor]) -> Any:
    """Calls a function for every b, h and n of tensors `[B|1, H|1, N|1, *shape]`.

    Returns results of such shapes.
    """
    mapped = function
    present = [a for a in range(3) if any(x.size(a) != 1 for x in numbers)]
    for axis in reversed(present):
        mapped = torch.vmap(mapped, tuple(0 if x.size(axis) != 1 else None for x in numbers))
    ones = [tuple(a for a in range(3) if x.size(a) == 1) for x in numbers]
    result = mapped(*(x.squeeze(a) for x, a in zip(numbers, ones, strict=True)))
    absent = [a for a in range(3) if a not in present]

    def back(x: Tensor) -> Tensor:
        for axis in absent:
            x = x.unsqueeze(axis)
        return x

    return pytree.tree_map_only(Tensor, back, result)
